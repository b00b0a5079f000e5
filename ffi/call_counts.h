// What the calls of one workspace have done in this process so far.
#ifndef JAX_TWOSHOT_CALL_COUNTS_H_
#define JAX_TWOSHOT_CALL_COUNTS_H_

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>

#include "protocol.h"

namespace jax_twoshot {

// All ranks make the same calls, so one rank of the process counts them; whoever waits or fails says so.
class CallCounts {
 public:
  // Those of the workspace with this id; they live as long as anybody holds them.
  static std::shared_ptr<CallCounts> Of(int64_t workspace);

  void AddCall(int64_t bytes) {
    calls_.fetch_add(1, std::memory_order_relaxed);
    bytes_.fetch_add(bytes, std::memory_order_relaxed);
  }
  void AddRounds(Algorithm algorithm, int64_t rounds) { at(algorithm).fetch_add(rounds, std::memory_order_relaxed); }
  void AddSlowWait() { slow_waits_.fetch_add(1, std::memory_order_relaxed); }
  void SetFailure(std::string text);

  int64_t calls() const { return calls_; }
  int64_t bytes() const { return bytes_; }
  int64_t rounds(Algorithm algorithm) { return at(algorithm); }
  int64_t slow_waits() const { return slow_waits_; }
  // The last failure; empty if there was none.
  std::string failure();

 private:
  std::atomic<int64_t>& at(Algorithm algorithm) { return rounds_[static_cast<size_t>(algorithm)]; }

  std::atomic<int64_t> calls_{0}, bytes_{0}, slow_waits_{0};
  std::array<std::atomic<int64_t>, kAlgorithms.size()> rounds_{};
  std::mutex mutex_;
  std::string failure_;
};

}  // namespace jax_twoshot

#endif  // JAX_TWOSHOT_CALL_COUNTS_H_
