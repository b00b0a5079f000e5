// The deadline of every wait (R9): JAX_TWOSHOT_TIMEOUT, handed over by jax_twoshot/_ffi.py.
#ifndef JAX_TWOSHOT_TIMEOUT_H_
#define JAX_TWOSHOT_TIMEOUT_H_

#include <atomic>

namespace jax_twoshot {

// Seconds; 0: for ever.
inline std::atomic<double> timeout_seconds{300.0};

}  // namespace jax_twoshot

#endif  // JAX_TWOSHOT_TIMEOUT_H_
