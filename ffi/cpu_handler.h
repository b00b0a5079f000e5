// The XLA FFI custom calls "jax_twoshot_all_reduce", "jax_twoshot_all_reduce_rms_norm" and "jax_twoshot_moe_combine" on
// the host platform.
#ifndef JAX_TWOSHOT_CPU_HANDLER_H_
#define JAX_TWOSHOT_CPU_HANDLER_H_

#include <atomic>
#include <cstdint>
#include <memory>

#include "call_counts.h"
#include "xla/ffi/api/ffi.h"

namespace jax_twoshot {

// One custom call of one executable, shared by its devices; made when the executable is loaded. It is what tells
// two calls of one run apart: equal calls inlined from one function have equal attributes, but not one state.
struct CallSite {
  static xla::ffi::TypeId id;
  int64_t number;
  std::shared_ptr<CallCounts> counts;  // null where the call is of no workspace
};

XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxTwoshotCpuInstantiate);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxTwoshotCpuExecute);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxTwoshotCpuRmsNormInstantiate);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxTwoshotCpuRmsNormExecute);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxTwoshotCpuMoeCombine);

}  // namespace jax_twoshot

#endif  // JAX_TWOSHOT_CPU_HANDLER_H_
