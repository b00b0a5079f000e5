#include "all_reduce_cpu.h"

#include <sched.h>

#include <algorithm>
#include <chrono>
#include <cstring>
#include <new>
#include <thread>

#include "shared_words.h"

namespace jax_twoshot {
namespace {

struct alignas(64) Block {
  std::byte bytes[kBlockBytes];
};

// Makes everything this thread has loaded happen before everything it stores from here on. The data is its own
// flag, so within a phase nothing needs order; between "I have read it" and "you may overwrite it" this does (R2).
// Free on x86.
void OrderPhases() { std::atomic_thread_fence(std::memory_order_acq_rel); }

// One rank's part in one round.
struct Round {
  Mailbox& mailbox;
  const Arithmetic& arithmetic;
  const WaitPolicy& policy;
  int rank;
  int generation;
  const std::byte* x;
  std::byte* out;
  int64_t bytes;
  int64_t first_chunk;  // of the message
  bool* warned;

  int tp() const { return mailbox.layout().tp; }
  int64_t chunks() const { return CeilDiv(bytes, kChunkBytes); }
  int64_t owned() const { return OwnedChunks(chunks(), tp()); }
  // Chunks [first_owned, end_owned) of the round are `owner`'s.
  int64_t first_owned(int owner) const { return std::min(owner * owned(), chunks()); }
  int64_t end_owned(int owner) const { return first_owned(owner + 1); }
};

// Calls body(first chunk, chunks) for the blocks of [begin, end), until one returns false.
template <class Body>
bool ForEachBlock(int64_t begin, int64_t end, Body body) {
  for (int64_t chunk = begin; chunk < end; chunk += kBlockChunks) {
    if (!body(chunk, std::min(kBlockChunks, end - chunk))) return false;
  }
  return true;
}

uint64_t MissingRanks(const Round& round, Phase phase, int64_t chunk, int64_t chunks) {
  uint64_t missing = 0;
  Block block;
  Mailbox& mailbox = round.mailbox;
  for (int peer = 0; peer < round.tp(); ++peer) {
    if (phase == Phase::kReduce) {
      const std::byte* slot =
          mailbox.recv(round.rank, round.generation, peer, chunk - round.first_owned(round.rank));
      if (!LoadShared(slot, block.bytes, mailbox.sentinel(), chunks * kChunkBytes)) missing |= uint64_t{1} << peer;
    } else {
      const int64_t begin = std::max(chunk, round.first_owned(peer));
      const int64_t end = std::min(chunk + chunks, round.end_owned(peer));
      if (begin >= end) continue;
      const std::byte* sums = mailbox.gather(round.rank, round.generation, begin);
      if (!LoadShared(sums, block.bytes, mailbox.sentinel(), (end - begin) * kChunkBytes)) {
        missing |= uint64_t{1} << peer;
      }
    }
  }
  return missing;
}

// Loads `chunks` chunks at `from` into `block`, yielding until they have arrived; `chunk` is the first one's index
// in the round. False when the deadline passed or another rank gave up (R9). Holds no lock.
bool Await(const Round& round, Phase phase, const std::byte* from, int64_t chunk, int64_t chunks, Block& block) {
  using Clock = std::chrono::steady_clock;
  constexpr int kPollsPerCheck = 64;  // the clock is read, and peers' failures seen, once in so many
  constexpr int kPollsBeforeSleep = 1 << 14;
  Clock::time_point start;
  for (int64_t poll = 0;; ++poll) {
    if (LoadShared(from, block.bytes, round.mailbox.sentinel(), chunks * kChunkBytes)) return true;
    if (poll == 0) start = Clock::now();
    if (poll % kPollsPerCheck == kPollsPerCheck - 1) {
      const double seconds = std::chrono::duration<double>(Clock::now() - start).count();
      const double timeout = round.policy.timeout_seconds;
      const bool abandoned = round.mailbox.abandoned.load(std::memory_order_acquire);
      const bool late = timeout > 0 && seconds > timeout;
      const bool slow = timeout > 0 && seconds > timeout / 10 && !*round.warned;
      if (abandoned || late || slow) {
        const Wait wait{phase, round.generation, round.first_chunk + chunk,
                        MissingRanks(round, phase, chunk, chunks), seconds, abandoned};
        if (abandoned || late) {
          round.policy.on_failure(wait);
          return false;
        }
        *round.warned = true;
        round.policy.on_slow(wait);
      }
    }
    // A peer that takes this long is compiling or asleep: stop taking its processor.
    if (poll < kPollsBeforeSleep) {
      sched_yield();
    } else {
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  }
}

// R2: only the reader re-arms, exactly what it has read.
void Rearm(std::byte* slot, int64_t chunks, uint32_t sentinel) {
  FillShared(slot, sentinel, chunks * kChunkBytes);
}

// Stores each chunk into slot `rank` of its owner's recv. Waits for nothing (R5).
void Push(const Round& round) {
  OrderPhases();  // the re-arms of the round before, before this round's pushes (the generation argument)
  for (int owner = 0; owner < round.tp(); ++owner) {
    const int64_t first = round.first_owned(owner);
    ForEachBlock(first, round.end_owned(owner), [&](int64_t chunk, int64_t chunks) {
      Block block;
      const int64_t bytes = std::min(chunks * kChunkBytes, round.bytes - chunk * kChunkBytes);
      std::memcpy(block.bytes, round.x + chunk * kChunkBytes, bytes);
      std::memset(block.bytes + bytes, 0, chunks * kChunkBytes - bytes);
      round.arithmetic.make_publishable(block.bytes, chunks * kChunkBytes);
      StoreShared(round.mailbox.recv(owner, round.generation, round.rank, chunk - first), block.bytes,
                  chunks * kChunkBytes);
      return true;
    });
  }
}

// Sums the owned chunks as they come, in rank order, into every rank's gather (R3). Waits for pushes only (R5).
bool Reduce(const Round& round) {
  const int64_t first = round.first_owned(round.rank);
  return ForEachBlock(first, round.end_owned(round.rank), [&](int64_t chunk, int64_t chunks) {
    Mailbox& mailbox = round.mailbox;
    const int64_t bytes = chunks * kChunkBytes;
    Block block;
    alignas(64) float sum[kBlockElements];
    for (int slot = 0; slot < round.tp(); ++slot) {
      const std::byte* from = mailbox.recv(round.rank, round.generation, slot, chunk - first);
      if (!Await(round, Phase::kReduce, from, chunk, chunks, block)) return false;
      (slot == 0 ? round.arithmetic.start : round.arithmetic.add)(sum, block.bytes, bytes);
    }
    round.arithmetic.round(sum, block.bytes, bytes);
    OrderPhases();
    for (int peer = 0; peer < round.tp(); ++peer) {
      StoreShared(mailbox.gather(peer, round.generation, chunk), block.bytes, bytes);
    }
    for (int slot = 0; slot < round.tp(); ++slot) {
      Rearm(mailbox.recv(round.rank, round.generation, slot, chunk - first), chunks, mailbox.sentinel());
    }
    return true;
  });
}

// Hands on the sums as they come. Waits for reduces only (R5), and with them for every rank (R4).
bool Collect(const Round& round) {
  return ForEachBlock(0, round.chunks(), [&](int64_t chunk, int64_t chunks) {
    Mailbox& mailbox = round.mailbox;
    std::byte* from = mailbox.gather(round.rank, round.generation, chunk);
    Block block;
    if (!Await(round, Phase::kCollect, from, chunk, chunks, block)) return false;
    OrderPhases();
    const int64_t bytes = std::min(chunks * kChunkBytes, round.bytes - chunk * kChunkBytes);
    std::memcpy(round.out + chunk * kChunkBytes, block.bytes, bytes);
    Rearm(from, chunks, mailbox.sentinel());
    return true;
  });
}

}  // namespace

Mailbox::Mailbox(Layout layout, uint32_t sentinel)
    : layout_(layout),
      sentinel_(sentinel),
      memory_(static_cast<std::byte*>(::operator new(bytes(), std::align_val_t(64)))),
      epochs_(layout.tp) {
  for (int rank = 0; rank < layout.tp; ++rank) Rearm(at(rank, 0), layout.bytes() / kChunkBytes, sentinel);  // R7
}

bool AllReduce(Mailbox& mailbox, int rank, const Arithmetic& arithmetic, const void* x, void* out, int64_t bytes,
               const WaitPolicy& policy) {
  const SubnormalsKept subnormals_kept;
  const Layout& layout = mailbox.layout();
  const int64_t round_bytes = layout.capacity_chunks() * kChunkBytes;
  bool warned = false;
  for (int64_t start = 0; start < bytes; start += round_bytes) {
    uint64_t& epoch = mailbox.epoch(rank);
    const Round round{mailbox,
                      arithmetic,
                      policy,
                      rank,
                      static_cast<int>(epoch % layout.generations),
                      static_cast<const std::byte*>(x) + start,
                      static_cast<std::byte*>(out) + start,
                      std::min(round_bytes, bytes - start),
                      start / kChunkBytes,
                      &warned};
    Push(round);
    if (!Reduce(round) || !Collect(round)) return false;
    ++epoch;
  }
  return true;
}

}  // namespace jax_twoshot
