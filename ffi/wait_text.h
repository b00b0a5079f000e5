// What the CPU and the CUDA backend say about a wait, in the same words.
#ifndef JAX_TWOSHOT_WAIT_TEXT_H_
#define JAX_TWOSHOT_WAIT_TEXT_H_

#include <cstdint>
#include <string>
#include <string_view>

#include "timeout.h"

namespace jax_twoshot {

struct WaitText {
  std::string_view axes;
  int rank;
  int tp;
  uint64_t missing;  // bit r: rank r is waited for
  bool reduce;       // else collect
  uint64_t generation;
  int64_t chunk;
  double seconds;         // waited so far
  std::string_view call;  // which call of which workspace
};

// "jax_twoshot over AXES: rank R of TP waits for ranks ... (for ... s; phase ..., generation ..., chunk ...,
// CALL)".
std::string DescribeWait(const WaitText& wait);

// What to look at once a deadline has passed.
std::string DeadlineAdvice(const Deadline& deadline);

}  // namespace jax_twoshot

#endif  // JAX_TWOSHOT_WAIT_TEXT_H_
