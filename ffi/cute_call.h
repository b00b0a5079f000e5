// The XLA FFI custom call "jax_twoshot_cute_call": a kernel that comes with the call is launched on a workspace.
#ifndef JAX_TWOSHOT_CUTE_CALL_H_
#define JAX_TWOSHOT_CUTE_CALL_H_

#include <cstdint>
#include <memory>
#include <vector>

#include "all_reduce_cuda.h"
#include "xla/ffi/api/ffi.h"

namespace jax_twoshot {

// A custom call of one executable: all of its launch but the buffers, and what keeps the kernel loaded.
struct CuteSite {
  static xla::ffi::TypeId id;
  std::shared_ptr<CudaWorkspace> workspace;
  const KernelOnDevices* kernel;
  std::string what;  // for messages
  int64_t grid;
  int threads;
  int shared_memory;
  std::vector<int32_t> scalars;
};

XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxTwoshotCuteInstantiate);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxTwoshotCuteExecute);

}  // namespace jax_twoshot

#endif  // JAX_TWOSHOT_CUTE_CALL_H_
