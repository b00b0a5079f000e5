#include "shared_words.h"

#include "clones.h"
#include "protocol.h"

namespace jax_twoshot {

#if defined(__SANITIZE_THREAD__)

void StoreShared(void* to, const void* from, int64_t bytes) {
  auto* shared = static_cast<uint32_t*>(to);
  const auto* own = static_cast<const uint32_t*>(from);
  for (int64_t i = 0; i < bytes / kWordBytes; ++i) __atomic_store_n(&shared[i], own[i], __ATOMIC_RELAXED);
}

void FillShared(void* to, uint32_t word, int64_t bytes) {
  auto* shared = static_cast<uint32_t*>(to);
  for (int64_t i = 0; i < bytes / kWordBytes; ++i) __atomic_store_n(&shared[i], word, __ATOMIC_RELAXED);
}

bool LoadShared(const void* from, void* to, uint32_t sentinel, int64_t bytes) {
  const auto* shared = static_cast<const uint32_t*>(from);
  auto* own = static_cast<uint32_t*>(to);
  bool found = false;
  for (int64_t i = 0; i < bytes / kWordBytes; ++i) {
    own[i] = __atomic_load_n(&shared[i], __ATOMIC_RELAXED);
    found |= own[i] == sentinel;
  }
  return !found;
}

#else

namespace {

constexpr int64_t kLineBytes = 64;
typedef uint32_t Line __attribute__((vector_size(kLineBytes), aligned(kChunkBytes), may_alias));
typedef uint32_t Chunk __attribute__((vector_size(kChunkBytes), may_alias));

template <class Vector>
inline __attribute__((always_inline)) Vector& At(void* base, int64_t offset) {
  return *reinterpret_cast<Vector*>(static_cast<char*>(base) + offset);
}
template <class Vector>
inline __attribute__((always_inline)) const Vector& At(const void* base, int64_t offset) {
  return *reinterpret_cast<const Vector*>(static_cast<const char*>(base) + offset);
}

}  // namespace

JAX_TWOSHOT_CLONES void StoreShared(void* to, const void* from, int64_t bytes) {
  int64_t i = 0;
  for (; i + kLineBytes <= bytes; i += kLineBytes) At<volatile Line>(to, i) = At<Line>(from, i);
  for (; i < bytes; i += kChunkBytes) At<volatile Chunk>(to, i) = At<Chunk>(from, i);
}

JAX_TWOSHOT_CLONES void FillShared(void* to, uint32_t word, int64_t bytes) {
  const Line line = Line{} + word;
  const Chunk chunk = Chunk{} + word;
  int64_t i = 0;
  for (; i + kLineBytes <= bytes; i += kLineBytes) At<volatile Line>(to, i) = line;
  for (; i < bytes; i += kChunkBytes) At<volatile Chunk>(to, i) = chunk;
}

JAX_TWOSHOT_CLONES bool LoadShared(const void* from, void* to, uint32_t sentinel, int64_t bytes) {
  const Line armed_line = Line{} + sentinel;
  const Chunk armed_chunk = Chunk{} + sentinel;
  Line found_line{};
  Chunk found_chunk{};
  int64_t i = 0;
  for (; i + kLineBytes <= bytes; i += kLineBytes) {
    const Line line = At<volatile Line>(from, i);
    found_line |= reinterpret_cast<Line>(line == armed_line);
    At<Line>(to, i) = line;
  }
  for (; i < bytes; i += kChunkBytes) {
    const Chunk chunk = At<volatile Chunk>(from, i);
    found_chunk |= reinterpret_cast<Chunk>(chunk == armed_chunk);
    At<Chunk>(to, i) = chunk;
  }
  uint32_t found = 0;
  for (int64_t word = 0; word < kLineBytes / kWordBytes; ++word) found |= found_line[word];
  for (int64_t word = 0; word < kChunkBytes / kWordBytes; ++word) found |= found_chunk[word];
  return found == 0;
}

#endif

}  // namespace jax_twoshot
