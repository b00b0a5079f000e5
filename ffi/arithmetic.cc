#include "arithmetic.h"

#include <cstring>

#include "clones.h"

#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#define INLINE inline __attribute__((always_inline))

namespace jax_twoshot {
namespace {

INLINE float AsFloat(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

INLINE uint32_t AsBits(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}

constexpr uint32_t kMagnitude = 0x7FFFFFFFu;
constexpr uint32_t kInfinity = 0x7F800000u;

struct BFloat16 {
  using Bits = uint16_t;
  static constexpr Format kFormat = kBFloat16;
  static INLINE float Widen(Bits bits) { return AsFloat(static_cast<uint32_t>(bits) << 16); }
  static INLINE uint32_t Narrow(float value) {
    const uint32_t bits = AsBits(value);
    return (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  }
};

struct Float16 {
  using Bits = uint16_t;
  static constexpr Format kFormat = kFloat16;
  static INLINE float Widen(Bits bits) {
    const uint32_t sign = (bits & 0x8000u) << 16;
    const uint32_t magnitude = bits & 0x7FFFu;
    const uint32_t normal = (magnitude << 13) + ((127u - 15u) << 23);
    const uint32_t special = (magnitude << 13) | kInfinity;
    const uint32_t subnormal = AsBits(static_cast<float>(static_cast<int32_t>(magnitude)) * 0x1p-24f);
    const uint32_t finite = magnitude < 0x400u ? subnormal : normal;
    return AsFloat(sign | (magnitude < 0x7C00u ? finite : special));
  }
  static INLINE uint32_t Narrow(float value) {
    const uint32_t bits = AsBits(value);
    const uint32_t sign = (bits >> 16) & 0x8000u;
    const uint32_t magnitude = bits & kMagnitude;
    // Rounding 65520 and above carries into the exponent of infinity, which is right; beyond it, clamp.
    const uint32_t normal = (magnitude + 0xFFFu + ((magnitude >> 13) & 1u) - ((127u - 15u) << 23)) >> 13;
    // Adding 0.5, whose last bit weighs 2^-24, rounds to a multiple of the least FP16 subnormal.
    const uint32_t subnormal = AsBits(AsFloat(magnitude) + 0.5f) - AsBits(0.5f);
    const uint32_t finite = magnitude < 0x38800000u ? subnormal : normal;
    return sign | (magnitude < 0x47800000u ? finite : 0x7C00u);
  }
};

struct Float32 {
  using Bits = uint32_t;
  static constexpr Format kFormat = kFloat32;
  static INLINE float Widen(Bits bits) { return AsFloat(bits); }
  static INLINE uint32_t Narrow(float value) { return AsBits(value); }
};

template <class F>
INLINE void MakePublishable(void* block, int64_t bytes) {
  using Bits = typename F::Bits;
  Bits* values = static_cast<Bits*>(block);
  const int64_t n = bytes / sizeof(Bits);
  for (int64_t i = 0; i < n; ++i) {
    values[i] = values[i] == static_cast<Bits>(F::kFormat.negative_zero) ? Bits{0} : values[i];
  }
}

template <class F>
INLINE void Start(float* __restrict acc, const void* __restrict block, int64_t bytes) {
  using Bits = typename F::Bits;
  const Bits* values = static_cast<const Bits*>(block);
  const int64_t n = bytes / sizeof(Bits);
  for (int64_t i = 0; i < n; ++i) acc[i] = F::Widen(values[i]);
}

template <class F>
INLINE void Add(float* __restrict acc, const void* __restrict block, int64_t bytes) {
  using Bits = typename F::Bits;
  const Bits* values = static_cast<const Bits*>(block);
  const int64_t n = bytes / sizeof(Bits);
  for (int64_t i = 0; i < n; ++i) acc[i] += F::Widen(values[i]);
}

template <class F>
INLINE void Round(const float* __restrict acc, void* __restrict block, int64_t bytes) {
  using Bits = typename F::Bits;
  Bits* values = static_cast<Bits*>(block);
  const int64_t n = bytes / sizeof(Bits);
  for (int64_t i = 0; i < n; ++i) {
    const bool is_nan = (AsBits(acc[i]) & kMagnitude) > kInfinity;
    const uint32_t rounded = is_nan ? F::kFormat.nan : F::Narrow(acc[i]);
    values[i] = static_cast<Bits>(rounded == F::kFormat.negative_zero ? 0u : rounded);
  }
}

}  // namespace

// A function's clones cannot be template instances, so each format gets its four by name.
#define DEFINE_ARITHMETIC(F)                                                                                          \
  JAX_TWOSHOT_CLONES static void F##MakePublishable(void* block, int64_t bytes) { MakePublishable<F>(block, bytes); } \
  JAX_TWOSHOT_CLONES static void F##Start(float* acc, const void* block, int64_t bytes) {                             \
    Start<F>(acc, block, bytes);                                                                                      \
  }                                                                                                                   \
  JAX_TWOSHOT_CLONES static void F##Add(float* acc, const void* block, int64_t bytes) { Add<F>(acc, block, bytes); }  \
  JAX_TWOSHOT_CLONES static void F##Round(const float* acc, void* block, int64_t bytes) {                             \
    Round<F>(acc, block, bytes);                                                                                      \
  }                                                                                                                   \
  const Arithmetic k##F##Arithmetic{F::kFormat, F##MakePublishable, F##Start, F##Add, F##Round};

DEFINE_ARITHMETIC(BFloat16)
DEFINE_ARITHMETIC(Float16)
DEFINE_ARITHMETIC(Float32)

#if defined(__x86_64__)
SubnormalsKept::SubnormalsKept() : mode_(_mm_getcsr()) {
  constexpr unsigned kFlushToZero = 0x8000, kDenormalsAreZero = 0x0040;
  _mm_setcsr(static_cast<unsigned>(mode_) & ~(kFlushToZero | kDenormalsAreZero));
}
SubnormalsKept::~SubnormalsKept() { _mm_setcsr(static_cast<unsigned>(mode_)); }
#elif defined(__aarch64__)
SubnormalsKept::SubnormalsKept() {
  constexpr uint64_t kFlushToZero = (uint64_t{1} << 24) | (uint64_t{1} << 19);
  asm volatile("mrs %0, fpcr" : "=r"(mode_));
  asm volatile("msr fpcr, %0" : : "r"(mode_ & ~kFlushToZero));
}
SubnormalsKept::~SubnormalsKept() { asm volatile("msr fpcr, %0" : : "r"(mode_)); }
#else
#error "jax_twoshot: add the floating-point mode register of this processor to SubnormalsKept"
#endif

}  // namespace jax_twoshot
