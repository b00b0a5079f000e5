// Faults on purpose, for tests/test_faults.py: while one is planted, a rank of every call on CPU misbehaves. With none,
// this costs a phase one load and one branch, and nothing inside its loops.
#ifndef JAX_TWOSHOT_FAULTS_H_
#define JAX_TWOSHOT_FAULTS_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>

namespace jax_twoshot {

enum class Phase { kPush, kReduce, kCollect };

struct Fault {
  enum class Kind {
    kDelay,  // sleeps for `seconds` before `phase`
    kStop,   // never begins `phase`; fails when a peer has given up, or after two deadlines
    kDrop,   // what it pushes to `owner` does not arrive
    kTear,   // of each block that it pushes to `owner`, one word does not
    kFlip,   // the lowest bit of each such block arrives flipped
  };

  Kind kind;
  int rank;
  Phase phase = Phase::kPush;
  double seconds = 0;
  int owner = 0;

  // What becomes of a block that the rank pushes to `to`. A word that does not arrive leaves the sentinel.
  void Spoil(int from, int to, uint32_t sentinel, std::byte* block, int64_t bytes) const {
    if (from != rank || to != owner) return;
    const int64_t lost = kind == Kind::kDrop ? bytes : kind == Kind::kTear ? int64_t{sizeof sentinel} : 0;
    for (int64_t at = 0; at < lost; at += sizeof sentinel) std::memcpy(block + at, &sentinel, sizeof sentinel);
    if (kind == Kind::kFlip) block[0] ^= std::byte{1};
  }
};

// Never freed: a call may look at one that is no longer planted.
inline std::atomic<const Fault*> planted_fault{nullptr};

}  // namespace jax_twoshot

#endif  // JAX_TWOSHOT_FAULTS_H_
