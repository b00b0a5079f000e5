// The deadline of every wait (R9).
#ifndef JAX_TWOSHOT_TIMEOUT_H_
#define JAX_TWOSHOT_TIMEOUT_H_

#include <atomic>

namespace jax_twoshot {

// JAX_TWOSHOT_TIMEOUT, handed over by jax_twoshot/_ffi.py: seconds; 0: for ever.
inline std::atomic<double> timeout_seconds{300.0};

// A collect waits so much longer than a reduce: a rank that owns a chunk then names the rank that is missing, before
// others name the owners that wait for it.
inline constexpr double kCollectPatience = 1.125;

struct Deadline {
  double seconds;       // 0: for ever
  const char* setting;  // what a message calls it
};

// Of a workspace: its own seconds, or, below 0, the process's.
inline Deadline DeadlineOf(double workspace_seconds) {
  if (workspace_seconds >= 0) return {workspace_seconds, "Workspace(timeout=...)"};
  return {timeout_seconds.load(std::memory_order_relaxed), "JAX_TWOSHOT_TIMEOUT"};
}

}  // namespace jax_twoshot

#endif  // JAX_TWOSHOT_TIMEOUT_H_
