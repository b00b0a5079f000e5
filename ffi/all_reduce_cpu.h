// The two-shot Lamport all-reduce between threads of one process: the protocol of jax_twoshot/protocol.py over
// host memory. Nothing here knows of XLA; cpu_handler.cc makes it a custom call.
#ifndef JAX_TWOSHOT_ALL_REDUCE_CPU_H_
#define JAX_TWOSHOT_ALL_REDUCE_CPU_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "arithmetic.h"
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
  // Rounds that `rank` has finished; only its own thread touches it.
  uint64_t& epoch(int rank) { return epochs_[rank].rounds; }

  // Set when a rank gave up: the others stop waiting, and nobody may use the buffers again.
  std::atomic<bool> abandoned{false};

 private:
  struct alignas(64) Epoch {
    uint64_t rounds = 0;
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

enum class Phase { kReduce, kCollect };

// A wait that is taking long, or took too long.
struct Wait {
  Phase phase;
  int generation;
  int64_t chunk;      // of the message: the first one of the block that has not come
  uint64_t missing;   // bit r: rank r is waited for
  double seconds;     // waited so far
  bool abandoned;     // ended because another rank gave up first
};

struct WaitPolicy {
  double timeout_seconds;                     // 0: for ever
  std::function<void(const Wait&)> on_slow;   // called once a call, at a tenth of the timeout
  std::function<void(const Wait&)> on_failure;
};

// Sums `bytes` bytes at `x` over the ranks of `mailbox` into `out`: the call of one rank, in as many rounds as it
// takes. Returns false, after `on_failure`, when a peer did not come in time; `out` is then incomplete.
bool AllReduce(Mailbox& mailbox, int rank, const Arithmetic& arithmetic, const void* x, void* out, int64_t bytes,
               const WaitPolicy& policy);

}  // namespace jax_twoshot

#endif  // JAX_TWOSHOT_ALL_REDUCE_CPU_H_
