// What the CPU and the CUDA backend say about a wait, in the same words.
#ifndef JAX_TWOSHOT_WAIT_TEXT_H_
#define JAX_TWOSHOT_WAIT_TEXT_H_

#include <cstdint>
#include <string>
#include <string_view>

namespace jax_twoshot {

struct WaitText {
  std::string_view axes;
  int rank;
  int tp;
  uint64_t missing;  // bit r: rank r is waited for
  bool reduce;       // else collect
  uint64_t generation;
  int64_t chunk;
};

// "jax_twoshot over AXES: rank R of TP waits for ranks ... (phase ..., generation ..., chunk ...)".
std::string DescribeWait(const WaitText& wait);

// What to look at once a deadline has passed.
std::string DeadlineAdvice(double timeout_seconds);

}  // namespace jax_twoshot

#endif  // JAX_TWOSHOT_WAIT_TEXT_H_
