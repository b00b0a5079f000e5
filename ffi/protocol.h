// The C++ mirror of jax_twoshot/protocol.py, where the words and the rules are explained. Importing the extension
// checks that the two agree (jax_twoshot/_ffi.py), and tests/test_protocol.py compares every offset.
#ifndef JAX_TWOSHOT_PROTOCOL_H_
#define JAX_TWOSHOT_PROTOCOL_H_

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <string_view>

namespace jax_twoshot {

inline constexpr int kChunkBytes = 16;
inline constexpr int kWordBytes = 4;
inline constexpr int kMinRanks = 2;
inline constexpr int kMaxRanks = 64;
inline constexpr int kGenerations = 2;
inline constexpr int kThreads = 128;
inline constexpr int kCtasPerSm = 6;
inline constexpr int kChunksAtOnce = 2;
inline constexpr int kGridsInFlight = 2;
inline constexpr std::array<int, 2> kOwnGpuShare{2, 3};

// How the protocol treats one element type (R1, R3).
struct Format {
  const char* name;
  int itemsize;
  uint32_t sentinel;
  uint32_t negative_zero;
  uint32_t nan;
};

inline constexpr Format kBFloat16{"bfloat16", 2, 0x80008000u, 0x8000u, 0x7FFFu};
inline constexpr Format kFloat16{"float16", 2, 0x80008000u, 0x8000u, 0x7FFFu};
inline constexpr Format kFloat32{"float32", 4, 0x80000000u, 0x80000000u, 0x7FFFFFFFu};

inline constexpr int64_t CeilDiv(int64_t a, int64_t b) { return (a + b - 1) / b; }

// Where everything is in a rank's buffers; offsets are in bytes.
struct Layout {
  int tp;
  int64_t slot_chunks;
  int generations = kGenerations;

  constexpr int64_t capacity_chunks() const { return tp * slot_chunks; }
  constexpr int64_t recv_bytes() const { return generations * capacity_chunks() * kChunkBytes; }
  constexpr int64_t bytes() const { return 2 * recv_bytes(); }

  // Of `chunk` (counted from the first one that the receiver sums) in `slot`.
  constexpr int64_t recv_offset(int generation, int slot, int64_t chunk) const {
    return ((static_cast<int64_t>(generation) * tp + slot) * slot_chunks + chunk) * kChunkBytes;
  }
  // Of the sum of `chunk` of the round, whoever owns it.
  constexpr int64_t gather_offset(int generation, int64_t chunk) const {
    return recv_bytes() + (generation * capacity_chunks() + chunk) * kChunkBytes;
  }
};

// Chunks that each rank owns of a round of `chunks`; the last owners may have fewer, or none.
inline constexpr int64_t OwnedChunks(int64_t chunks, int tp) { return CeilDiv(chunks, tp); }

inline constexpr int kNormThreads = 512;
inline constexpr int kNormMaxBlocks = 4;

// Chunks of each of the blocks into which a row is cut for its sum of squares.
inline constexpr int64_t NormBlockChunks(int64_t row_chunks) {
  return CeilDiv(row_chunks, CeilDiv(row_chunks, kNormThreads));
}

enum class Algorithm { kTwoShot, kOneShot };
inline constexpr std::array<const char*, 2> kAlgorithms{"two_shot", "one_shot"};

inline constexpr std::optional<Algorithm> AlgorithmNamed(std::string_view name) {
  if (name == kAlgorithms[0]) return Algorithm::kTwoShot;
  if (name == kAlgorithms[1]) return Algorithm::kOneShot;
  return std::nullopt;
}

struct RoundPlan {
  Algorithm algorithm;
  int64_t chunks;
};

// The next round of a message of which `left` chunks are left; `asked` is nothing where the choice is ours: one shot
// for what is left if that is at most `one_shot_bytes`.
inline constexpr RoundPlan NextRound(const Layout& layout, int64_t left, std::optional<Algorithm> asked,
                                     int64_t one_shot_bytes) {
  const bool fast = left <= layout.slot_chunks && left * kChunkBytes <= one_shot_bytes;
  const Algorithm algorithm = asked.value_or(fast ? Algorithm::kOneShot : Algorithm::kTwoShot);
  return {algorithm, std::min(left, algorithm == Algorithm::kOneShot ? layout.slot_chunks : layout.capacity_chunks())};
}

// Most CTAs of one launch that are sure to be resident with all others in flight (R5); `alone` if the ranks that share
// a GPU run nothing else on it.
inline constexpr int64_t MostCtas(int ranks_on_device, int sm_count, int ctas_per_sm, bool alone = false) {
  const int64_t resident = static_cast<int64_t>(sm_count) * ctas_per_sm;
  if (ranks_on_device == 1) return resident * kOwnGpuShare[0] / kOwnGpuShare[1];
  return alone ? resident / (kGridsInFlight * ranks_on_device) : (sm_count - 1) / ranks_on_device;
}

// CTAs of one launch of the all-reduce: as many batches for every thread.
inline constexpr int64_t Grid(int64_t chunks, int ranks_on_device, int sm_count, bool alone) {
  const int64_t most = std::max<int64_t>(1, MostCtas(ranks_on_device, sm_count, kCtasPerSm, alone));
  int64_t each = std::max<int64_t>(1, CeilDiv(chunks, most * kThreads));
  if (each > 1) each = CeilDiv(each, kChunksAtOnce) * kChunksAtOnce;
  return std::max<int64_t>(1, CeilDiv(chunks, each * kThreads));
}

}  // namespace jax_twoshot

#endif  // JAX_TWOSHOT_PROTOCOL_H_
