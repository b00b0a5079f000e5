#include "moe_combine.h"

#include <algorithm>
#include <cstddef>
#include <vector>

#include "clones.h"

namespace jax_twoshot {
namespace {

JAX_TWOSHOT_CLONES void AddScaled(float* __restrict total, float scale, const float* __restrict x, int64_t n) {
  for (int64_t i = 0; i < n; ++i) total[i] += scale * x[i];
}

}  // namespace

void MoeCombine(const Arithmetic& arithmetic, const void* experts, const Routing& routing, const void* shared,
                void* out, int64_t rows, int64_t width) {
  const SubnormalsKept subnormals_kept;
  const int64_t bytes = width * arithmetic.format.itemsize;
  std::vector<float> total(width), expert(width);
  for (int64_t row = 0; row < rows; ++row) {
    std::fill(total.begin(), total.end(), 0.0f);
    for (int64_t choice = row * routing.top_k; choice < (row + 1) * routing.top_k; ++choice) {
      const int64_t slot = routing.index[choice];
      if (slot < 0 || slot >= routing.slots) continue;
      arithmetic.start(expert.data(), static_cast<const std::byte*>(experts) + slot * bytes, bytes);
      AddScaled(total.data(), routing.scale[choice], expert.data(), width);
    }
    arithmetic.add(total.data(), static_cast<const std::byte*>(shared) + row * bytes, bytes);
    arithmetic.round(total.data(), static_cast<std::byte*>(out) + row * bytes, bytes);
  }
}

}  // namespace jax_twoshot
