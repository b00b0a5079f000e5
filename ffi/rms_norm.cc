#include "rms_norm.h"

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <vector>

#include "clones.h"
#include "protocol.h"

namespace jax_twoshot {
namespace {

JAX_TWOSHOT_CLONES void Square(float* __restrict squares, const float* __restrict x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) squares[i] = x[i] * x[i];
}

JAX_TWOSHOT_CLONES void AddTo(float* __restrict total, const float* __restrict part, int64_t n) {
  for (int64_t i = 0; i < n; ++i) total[i] += part[i];
}

JAX_TWOSHOT_CLONES void AddPairs(float* __restrict halves, const float* __restrict all, int64_t n) {
  for (int64_t i = 0; i < n; ++i) halves[i] = all[2 * i] + all[2 * i + 1];
}

JAX_TWOSHOT_CLONES void Scale(float* __restrict x, float scale, const float* __restrict weight, int64_t n) {
  for (int64_t i = 0; i < n; ++i) x[i] = x[i] * scale * weight[i];
}

int64_t PowerOfTwoFrom(int64_t n) {
  int64_t power = 1;
  while (power < n) power *= 2;
  return power;
}

// Adds the squares of `x` in the order of protocol.py's norm_blocks. `scratch` has room for twice the power of two
// from n on.
float SumOfSquares(const float* x, int64_t n, int64_t block, float* scratch) {
  int64_t left = PowerOfTwoFrom(block);
  float* total = scratch;
  float* other = scratch + left;
  Square(total, x, std::min(block, n));
  std::fill(total + std::min(block, n), total + left, 0.0f);
  for (int64_t start = block; start < n; start += block) {
    const int64_t size = std::min(block, n - start);
    Square(other, x + start, size);
    AddTo(total, other, size);
  }
  for (; left > 1; left /= 2) {
    AddPairs(other, total, left / 2);
    std::swap(total, other);
  }
  return total[0];
}

}  // namespace

void RmsNorm(const Arithmetic& arithmetic, const void* x, const void* weight, void* out, int64_t rows, int64_t width,
             float eps) {
  const SubnormalsKept subnormals_kept;
  const int64_t bytes = width * arithmetic.format.itemsize;
  const int64_t block = NormBlockChunks(bytes / kChunkBytes) * (kChunkBytes / arithmetic.format.itemsize);
  std::vector<float> wide(width), wide_weight(width), scratch(2 * PowerOfTwoFrom(block));
  arithmetic.start(wide_weight.data(), weight, bytes);
  for (int64_t row = 0; row < rows; ++row) {
    arithmetic.start(wide.data(), static_cast<const std::byte*>(x) + row * bytes, bytes);
    const float mean = SumOfSquares(wide.data(), width, block, scratch.data()) / static_cast<float>(width);
    Scale(wide.data(), 1.0f / std::sqrt(mean + eps), wide_weight.data(), width);
    arithmetic.round(wide.data(), static_cast<std::byte*>(out) + row * bytes, bytes);
  }
}

}  // namespace jax_twoshot
