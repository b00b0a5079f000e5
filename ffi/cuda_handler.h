// The XLA FFI custom call "jax_twoshot_all_reduce" on CUDA devices.
#ifndef JAX_TWOSHOT_CUDA_HANDLER_H_
#define JAX_TWOSHOT_CUDA_HANDLER_H_

#include <cstdint>
#include <memory>
#include <string>

#include "all_reduce_cuda.h"
#include "xla/ffi/api/ffi.h"

namespace jax_twoshot {

// A custom call of one executable: what keeps its workspace alive.
struct LaunchSite {
  static xla::ffi::TypeId id;
  std::shared_ptr<CudaWorkspace> workspace;
};

// The open workspace that a program was compiled for, or an error that begins with `what`.
xla::ffi::ErrorOr<std::shared_ptr<CudaWorkspace>> OpenWorkspace(const std::string& what, int64_t id, int64_t tp,
                                                                int64_t slot_chunks);

// How often XLA has called a CUDA handler in this process: a launch replayed from a command buffer does not count.
int64_t CudaHandlerCalls();
void CountCudaHandlerCall();

XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxTwoshotCudaInstantiate);
XLA_FFI_DECLARE_HANDLER_SYMBOL(JaxTwoshotCudaExecute);

}  // namespace jax_twoshot

#endif  // JAX_TWOSHOT_CUDA_HANDLER_H_
