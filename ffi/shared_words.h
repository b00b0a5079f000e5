// Moves between memory that several threads read and write at once, and a thread's own.
//
// The protocol asks for one thing only: no 32-bit word may tear (R1). x86-64 and aarch64 give that to aligned vectors,
// in pieces of at least 8 bytes, so these are volatile vector accesses: with 8-byte atomics, the widest that C++ has,
// an all-reduce of 16 x 7168 BF16 by 8 threads on one core took 1.4 to 1.9 times as long (two runs). They order
// nothing, like relaxed atomics, and relaxed atomics is what ThreadSanitizer is shown. Sizes are whole chunks,
// addresses chunk-aligned.
#ifndef JAX_TWOSHOT_SHARED_WORDS_H_
#define JAX_TWOSHOT_SHARED_WORDS_H_

#include <cstdint>

namespace jax_twoshot {

// Copies `bytes` bytes to shared memory.
void StoreShared(void* to, const void* from, int64_t bytes);

// Sets every word of shared memory to `word`.
void FillShared(void* to, uint32_t word, int64_t bytes);

// Copies `bytes` bytes from shared memory; whether none of the words was `sentinel`.
bool LoadShared(const void* from, void* to, uint32_t sentinel, int64_t bytes);

}  // namespace jax_twoshot

#endif  // JAX_TWOSHOT_SHARED_WORDS_H_
