// Drives the CPU protocol by one thread a rank, as fast as the ranks let each other, and checks every sum.
//
//     cpu_protocol SECONDS ROUNDS [GENERATIONS]     ends after whichever comes first; both 0: runs for ever
//
// Each round is a call of another size and type: sizes walk through empty, partial chunks, and several turns of the
// buffers; types take turns. A rank's data is its round number, so old data in a new round is seen. Some elements are
// -0.0, alone and in whole words, and some the subnormal next to it; half of the threads flush subnormals to zero, as
// XLA:CPU's do.
//
// Ranks meet twice in each round: on mailboxes that live as long as the driver (the bare protocol), and through the
// registry, on a mailbox out of its pool (as the custom call does).
//
// Build with -fsanitize=thread. Exit code 0 and "N rounds right", or 1 and the first wrong element.
#include <algorithm>
#include <atomic>
#include <chrono>
#include <cinttypes>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#if defined(__SSE__)
#include <xmmintrin.h>
#endif

#include "all_reduce_cpu.h"
#include "arithmetic.h"
#include "mailbox_registry.h"
#include "protocol.h"

namespace {

using namespace jax_twoshot;

constexpr int kRanks = 8;
constexpr int64_t kSlotChunks = 5;       // slots begin at every multiple of 16 bytes
constexpr int64_t kMostElements = 1500;  // up to 10 turns of the buffers
constexpr int64_t kPeriod = 31;          // of the data: eight times as much is exact in BF16
constexpr double kTimeoutSeconds = 20;

const Arithmetic* const kTypes[] = {&kBFloat16Arithmetic, &kFloat16Arithmetic, &kFloat32Arithmetic};

// The bits of a small whole number in `format`.
uint32_t Encode(const Format& format, int value) {
  if (value == 0) return 0;
  const float number = static_cast<float>(value);
  uint32_t bits;
  std::memcpy(&bits, &number, sizeof bits);
  if (format.itemsize == 4) return bits;
  if (format.name == std::string("bfloat16")) return bits >> 16;
  return (((bits >> 23) - 127 + 15) << 10) | ((bits >> 13) & 0x3FF);
}

// Every owner has some of both.
bool IsSubnormal(int64_t i) { return i % 16 == 5; }
bool IsMinusZero(int64_t i) { return i % 16 == 1 || i % 16 == 8 || i % 16 == 9; }

uint32_t Input(const Format& format, int64_t round, int64_t i) {
  if (IsSubnormal(i)) return format.negative_zero + 1;
  if (IsMinusZero(i)) return format.negative_zero;
  return Encode(format, static_cast<int>((round + i) % kPeriod));
}

uint32_t Expected(const Format& format, int64_t round, int64_t i) {
  if (IsSubnormal(i)) return format.negative_zero + kRanks;
  if (IsMinusZero(i)) return 0;
  return Encode(format, static_cast<int>((round + i) % kPeriod) * kRanks);
}

int64_t Elements(int64_t round) { return round % 11 == 0 ? 0 : round * 7919 % (round % 5 == 0 ? kMostElements : 200); }

uint32_t Get(const std::vector<unsigned char>& array, int itemsize, int64_t i) {
  uint32_t bits = 0;
  std::memcpy(&bits, &array[i * itemsize], itemsize);
  return bits;
}

void FlushSubnormals() {
#if defined(__SSE__)
  _mm_setcsr(_mm_getcsr() | 0x8040);  // flush to zero, denormals are zero
#endif
}

class Driver {
 public:
  explicit Driver(int generations) {
    for (const Arithmetic* type : kTypes) {
      mailboxes_.push_back(std::make_unique<Mailbox>(Layout{kRanks, kSlotChunks, generations}, type->format.sentinel));
    }
  }

  // Returns the number of rounds that every rank did, all of them right; ends the process otherwise.
  int64_t Run(double seconds, int64_t rounds) {
    const auto start = Clock::now();
    if (rounds > 0) end_ = rounds;
    std::vector<std::thread> ranks;
    for (int rank = 0; rank < kRanks; ++rank) ranks.emplace_back([=] { RunRank(rank, start, seconds); });
    for (std::thread& rank : ranks) rank.join();
    return end_;
  }

 private:
  using Clock = std::chrono::steady_clock;

  void RunRank(int rank, Clock::time_point start, double seconds) {
    if (rank % 2 == 1) FlushSubnormals();
    std::vector<unsigned char> x, out;
    for (int64_t round = 0; round < end_; ++round) {
      // All ranks have to end after the same round. Nobody finishes a round without rank 0 but an empty one, and no
      // three rounds in a row are empty.
      const bool late = seconds > 0 && Clock::now() - start > std::chrono::duration<double>(seconds);
      if (rank == 0 && late) end_ = std::min<int64_t>(end_, round + 3);
      const Arithmetic& type = *kTypes[round % 3];
      const int64_t elements = Elements(round);
      x.resize(elements * type.format.itemsize);
      for (int64_t i = 0; i < elements; ++i) {
        const uint32_t bits = Input(type.format, round, i);
        std::memcpy(&x[i * type.format.itemsize], &bits, type.format.itemsize);
      }

      out.assign(x.size(), 0xFF);
      AllReduce(*mailboxes_[round % 3], rank, type, x, out, round);
      Check("mailbox", type.format, rank, round, elements, out);

      out.assign(x.size(), 0xFF);
      const Meeting meeting{round, 0, 0};
      const Layout layout{kRanks, kSlotChunks + round % 2, kGenerations};
      std::string failure;
      const std::shared_ptr<Mailbox> mailbox =
          MailboxRegistry::Get().Enter(meeting, layout, type.format.sentinel, &failure);
      if (mailbox == nullptr) Fail();
      AllReduce(*mailbox, rank, type, x, out, round);
      MailboxRegistry::Get().Leave(meeting);
      Check("registry", type.format, rank, round, elements, out);
    }
  }

  // In one go, or, in some rounds, broken off at each wait, as the custom call does when it changes threads.
  static void AllReduce(Mailbox& mailbox, int rank, const Arithmetic& type, const std::vector<unsigned char>& x,
                        std::vector<unsigned char>& out, int64_t round) {
    Call call(mailbox, rank, type, Message{x.data(), nullptr, out.data(), x.size()}, Policy(rank));
    Progress progress;
    do {
      progress = call.Advance(round % 4 == 1 ? 0 : kTimeoutSeconds * 2);
      if (progress == Progress::kBlocked) std::this_thread::yield();
    } while (progress == Progress::kBlocked);
    if (progress == Progress::kFailed) Fail();
  }

  static WaitPolicy Policy(int rank) {
    return {kTimeoutSeconds, [](const Wait&) {},
            [rank](const Wait& wait) {
              std::printf("rank %d waits for ranks %#" PRIx64 " (%s, chunk %" PRId64 ")\n", rank, wait.missing,
                          wait.phase == Phase::kReduce ? "reduce" : "collect", wait.chunk);
            }};
  }

  static void Check(const char* where, const Format& format, int rank, int64_t round, int64_t elements,
                    const std::vector<unsigned char>& out) {
    for (int64_t i = 0; i < elements; ++i) {
      const uint32_t got = Get(out, format.itemsize, i);
      const uint32_t expected = Expected(format, round, i);
      if (got == expected) continue;
      std::printf("%s: rank %d, round %" PRId64 ", %s[%" PRId64 " of %" PRId64 "] is %#x instead of %#x\n", where, rank,
                  round, format.name, i, elements, got, expected);
      Fail();
    }
  }

  [[noreturn]] static void Fail() {
    std::fflush(stdout);
    std::_Exit(1);
  }

  std::vector<std::unique_ptr<Mailbox>> mailboxes_;
  std::atomic<int64_t> end_{INT64_MAX};
};

}  // namespace

int main(int argc, char** argv) {
  if (argc < 3) {
    std::fprintf(stderr, "usage: %s SECONDS ROUNDS [GENERATIONS]\n", argv[0]);
    return 2;
  }
  Driver driver(argc > 3 ? std::atoi(argv[3]) : kGenerations);
  const int64_t rounds = driver.Run(std::atof(argv[1]), std::atoll(argv[2]));
  std::printf("%" PRId64 " rounds right\n", rounds);
  return rounds > 0 ? 0 : 1;
}
