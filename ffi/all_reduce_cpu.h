// The two-shot Lamport all-reduce between threads of one process: the protocol of jax_twoshot/protocol.py over
// host memory. Nothing here knows of XLA; cpu_handler.cc makes it a custom call.
#ifndef JAX_TWOSHOT_ALL_REDUCE_CPU_H_
#define JAX_TWOSHOT_ALL_REDUCE_CPU_H_

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "arithmetic.h"
#include "faults.h"
#include "protocol.h"

namespace jax_twoshot {

// The buffers of every rank of one group, armed, and each rank's epoch.
class Mailbox {
 public:
  Mailbox(Layout layout, uint32_t sentinel);

  const Layout& layout() const { return layout_; }
  uint32_t sentinel() const { return sentinel_; }
  size_t bytes() const { return layout_.bytes() * layout_.tp; }

  std::byte* recv(int rank, int generation, int slot, int64_t chunk) {
    return at(rank, layout_.recv_offset(generation, slot, chunk));
  }
  std::byte* gather(int rank, int generation, int64_t chunk) {
    return at(rank, layout_.gather_offset(generation, chunk));
  }
  // The generation of `rank`'s next round (R6); only its own thread touches it.
  int& epoch(int rank) { return epochs_[rank].generation; }

  // Set when a rank gave up: the others stop waiting, and nobody may use the buffers again.
  std::atomic<bool> abandoned{false};
  // Which meeting of this process it is lent to, counted from 1: for messages.
  int64_t meeting = 0;

 private:
  struct alignas(64) Epoch {
    int generation = 0;
  };
  struct Free {
    void operator()(std::byte* memory) const { ::operator delete(memory, std::align_val_t(64)); }
  };

  std::byte* at(int rank, int64_t offset) { return memory_.get() + rank * layout_.bytes() + offset; }

  Layout layout_;
  uint32_t sentinel_;
  std::unique_ptr<std::byte, Free> memory_;
  std::vector<Epoch> epochs_;
};

// A wait that is taking long, or took too long.
struct Wait {
  Phase phase;
  int generation;
  int64_t chunk;     // of the message: the first one of the block that has not come
  uint64_t missing;  // bit r: rank r is waited for
  double seconds;    // waited so far
  bool abandoned;    // ended because another rank gave up first
  bool interrupted;  // ended by Ctrl-C
};

struct WaitPolicy {
  double timeout_seconds;                    // 0: for ever
  std::function<void(const Wait&)> on_slow;  // called once a call, at a tenth of the timeout
  std::function<void(const Wait&)> on_failure;
};

enum class Progress {
  kDone,
  kBlocked,  // a peer has not come yet
  kFailed,   // a peer did not come in time, or gave up; `on_failure` was called
};

// What one rank puts in and gets: `bytes` bytes each. An `addend`, whole chunks that all ranks have alike, is added to
// the sum of the ranks before it is rounded; nullptr for none.
struct Message {
  const void* x;
  const void* addend;
  void* out;
  int64_t bytes;
};

// The call of one rank: sums a message over the ranks of `mailbox`, in as many rounds as it takes.
class Call {
 public:
  Call(Mailbox& mailbox, int rank, const Arithmetic& arithmetic, const Message& message, WaitPolicy policy);

  // Goes on from where it stopped, on whatever thread, and waits for peers up to `patience_seconds` at a stretch.
  Progress Advance(double patience_seconds);

 private:
  using Clock = std::chrono::steady_clock;

  int tp() const { return mailbox_.layout().tp; }
  uint32_t sentinel() const { return mailbox_.sentinel(); }
  int64_t round_bytes() const;
  int64_t chunks() const { return CeilDiv(round_bytes(), kChunkBytes); }
  // Chunks [first_owned, end_owned) of the round are `owner`'s.
  int64_t first_owned(int owner) const;
  int64_t end_owned(int owner) const { return first_owned(owner + 1); }

  void Push(const Fault* fault);
  Progress Reduce();
  Progress Collect();

  bool Goes(const Fault& fault, Phase phase);
  Progress Await(const std::byte* from, int64_t chunk, int64_t chunks, std::byte* block);
  Progress Blocked(int64_t chunk, int64_t chunks);
  uint64_t MissingRanks(int64_t chunk, int64_t chunks) const;

  Mailbox& mailbox_;
  const int rank_;
  const Arithmetic& arithmetic_;
  const std::byte* const x_;
  const std::byte* const addend_;
  std::byte* const out_;
  const int64_t bytes_;
  const WaitPolicy policy_;

  // Where the call is: byte `round_` of the message begins the round; `chunk_` is the phase's next chunk in it.
  int64_t round_ = 0;
  int generation_ = 0;
  Phase phase_ = Phase::kPush;
  int64_t chunk_ = 0;

  double patience_seconds_ = 0;
  Clock::time_point blocked_since_;  // the wait for the present block, over all calls of Advance
  uint64_t blocked_at_interrupt_ = 0;
  bool blocked_ = false;
  bool warned_ = false;
};

}  // namespace jax_twoshot

#endif  // JAX_TWOSHOT_ALL_REDUCE_CPU_H_
