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
typedef uint32_t Line __attribute__((vector_size(kLineBytes)));
typedef uint32_t Chunk __attribute__((vector_size(kChunkBytes)));

// A vector in memory that is aligned to a chunk only. (A typedef would not do: the attribute of a template argument is
// dropped.)
template <class Vector>
struct __attribute__((packed, aligned(kChunkBytes), may_alias)) InMemory {
  Vector value;
};

template <class Vector>
inline __attribute__((always_inline)) volatile InMemory<Vector>& Shared(void* base, int64_t offset) {
  return *reinterpret_cast<volatile InMemory<Vector>*>(static_cast<char*>(base) + offset);
}
template <class Vector>
inline __attribute__((always_inline)) const volatile InMemory<Vector>& Shared(const void* base, int64_t offset) {
  return *reinterpret_cast<const volatile InMemory<Vector>*>(static_cast<const char*>(base) + offset);
}
template <class Vector>
inline __attribute__((always_inline)) InMemory<Vector>& Own(void* base, int64_t offset) {
  return *reinterpret_cast<InMemory<Vector>*>(static_cast<char*>(base) + offset);
}
template <class Vector>
inline __attribute__((always_inline)) const InMemory<Vector>& Own(const void* base, int64_t offset) {
  return *reinterpret_cast<const InMemory<Vector>*>(static_cast<const char*>(base) + offset);
}

}  // namespace

JAX_TWOSHOT_CLONES void StoreShared(void* to, const void* from, int64_t bytes) {
  int64_t i = 0;
  for (; i + kLineBytes <= bytes; i += kLineBytes) Shared<Line>(to, i).value = Own<Line>(from, i).value;
  for (; i < bytes; i += kChunkBytes) Shared<Chunk>(to, i).value = Own<Chunk>(from, i).value;
}

JAX_TWOSHOT_CLONES void FillShared(void* to, uint32_t word, int64_t bytes) {
  const Line line = Line{} + word;
  const Chunk chunk = Chunk{} + word;
  int64_t i = 0;
  for (; i + kLineBytes <= bytes; i += kLineBytes) Shared<Line>(to, i).value = line;
  for (; i < bytes; i += kChunkBytes) Shared<Chunk>(to, i).value = chunk;
}

JAX_TWOSHOT_CLONES bool LoadShared(const void* from, void* to, uint32_t sentinel, int64_t bytes) {
  const Line armed_line = Line{} + sentinel;
  const Chunk armed_chunk = Chunk{} + sentinel;
  Line found_line{};
  Chunk found_chunk{};
  int64_t i = 0;
  for (; i + kLineBytes <= bytes; i += kLineBytes) {
    const Line line = Shared<Line>(from, i).value;
    found_line |= reinterpret_cast<Line>(line == armed_line);
    Own<Line>(to, i).value = line;
  }
  for (; i < bytes; i += kChunkBytes) {
    const Chunk chunk = Shared<Chunk>(from, i).value;
    found_chunk |= reinterpret_cast<Chunk>(chunk == armed_chunk);
    Own<Chunk>(to, i).value = chunk;
  }
  uint32_t found = 0;
  for (int64_t word = 0; word < kLineBytes / kWordBytes; ++word) found |= found_line[word];
  for (int64_t word = 0; word < kChunkBytes / kWordBytes; ++word) found |= found_chunk[word];
  return found == 0;
}

#endif

}  // namespace jax_twoshot
