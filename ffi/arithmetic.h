// R1 and R3 on a block of elements: what may be published, and the FP32 sum in rank order, rounded once.
//
// Every loop is branch-free on purpose, so that the compiler vectorises it; arithmetic.cc compiles each for several
// instruction sets and the loader picks one.
#ifndef JAX_TWOSHOT_ARITHMETIC_H_
#define JAX_TWOSHOT_ARITHMETIC_H_

#include <cstdint>

#include "protocol.h"

namespace jax_twoshot {

// Elements of the blocks that these functions work on: a multiple of every format's chunk, small enough that the
// sum of a block stays in the first cache.
inline constexpr int64_t kBlockChunks = 64;
inline constexpr int64_t kBlockBytes = kBlockChunks * kChunkBytes;
inline constexpr int64_t kBlockElements = kBlockBytes / 2;

struct Arithmetic {
  Format format;
  // Rewrites -0.0 to +0.0, on the bits, in `bytes` bytes (R1).
  void (*make_publishable)(void* block, int64_t bytes);
  // acc = block, then acc += block: `bytes` bytes of elements, widened to FP32 (R3).
  void (*start)(float* acc, const void* block, int64_t bytes);
  void (*add)(float* acc, const void* block, int64_t bytes);
  // Rounds acc to nearest even, gives NaN its one form, rewrites -0.0 (R3, R1).
  void (*round)(const float* acc, void* block, int64_t bytes);
};

extern const Arithmetic kBFloat16Arithmetic;
extern const Arithmetic kFloat16Arithmetic;
extern const Arithmetic kFloat32Arithmetic;

// Subnormal numbers are numbers: XLA:CPU runs its threads with flush-to-zero, under which a sum of BF16 subnormals
// would be lost. Restores the thread's mode on destruction.
class SubnormalsKept {
 public:
  SubnormalsKept();
  ~SubnormalsKept();
  SubnormalsKept(const SubnormalsKept&) = delete;
  SubnormalsKept& operator=(const SubnormalsKept&) = delete;

 private:
  uint64_t mode_;
};

}  // namespace jax_twoshot

#endif  // JAX_TWOSHOT_ARITHMETIC_H_
