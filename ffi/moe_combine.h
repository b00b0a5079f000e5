// A rank's part of the sum of a mixture-of-experts layer, with every rounding fixed (R11): the bits of
// jax_twoshot/reference.py and of the CUDA kernel.
#ifndef JAX_TWOSHOT_MOE_COMBINE_H_
#define JAX_TWOSHOT_MOE_COMBINE_H_

#include <cstdint>

#include "arithmetic.h"

namespace jax_twoshot {

// Which of `slots` rows of the experts a token gets, and their weights: `top_k` a row. A number that is no slot is an
// expert of another rank.
struct Routing {
  const int32_t* index;
  const float* scale;
  int64_t slots;
  int64_t top_k;
};

// Adds each row's experts and its part of the shared one into `out`: `rows` rows of `width` elements.
void MoeCombine(const Arithmetic& arithmetic, const void* experts, const Routing& routing, const void* shared,
                void* out, int64_t rows, int64_t width);

}  // namespace jax_twoshot

#endif  // JAX_TWOSHOT_MOE_COMBINE_H_
