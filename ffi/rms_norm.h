// RMSNorm of rows with every rounding fixed (R10): the bits of jax_twoshot/reference.py and of the CUDA kernel.
#ifndef JAX_TWOSHOT_RMS_NORM_H_
#define JAX_TWOSHOT_RMS_NORM_H_

#include <cstdint>

#include "arithmetic.h"

namespace jax_twoshot {

// Norms `rows` rows of `width` elements, whole chunks each, from `x` into `out`; `weight` is one row.
void RmsNorm(const Arithmetic& arithmetic, const void* x, const void* weight, void* out, int64_t rows, int64_t width,
             float eps);

}  // namespace jax_twoshot

#endif  // JAX_TWOSHOT_RMS_NORM_H_
