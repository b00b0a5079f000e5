// Registers the type of a handler's state with the XLA instance that is about to use it.
//
// jax.ffi.register_ffi_type cannot do it before a backend exists: JAX then queues types behind handlers, and XLA
// refuses a handler whose state type it does not know (seen on JAX 0.10.2 and 0.12.0). XLA's first call of a handler,
// for its metadata, comes early enough and brings the API to register with.
#ifndef JAX_TWOSHOT_TYPED_STATE_H_
#define JAX_TWOSHOT_TYPED_STATE_H_

#include <mutex>
#include <string_view>

#include "xla/ffi/api/ffi.h"

namespace jax_twoshot {

template <class State>
XLA_FFI_Error* RegisterStateType(const XLA_FFI_Api* api, std::string_view name) {
  static const xla::ffi::TypeInfo info = xla::ffi::MakeTypeInfo<State>();
  static std::mutex mutex;
  const std::lock_guard<std::mutex> lock(mutex);
  if (State::id.type_id != 0) return nullptr;
  return xla::ffi::Ffi::RegisterTypeId(api, name, &State::id, &info);
}

}  // namespace jax_twoshot

// Defines the C symbol `fn` of a handler that makes or uses a `State`.
#define JAX_TWOSHOT_DEFINE_STATEFUL_HANDLER(fn, State, name, impl, ...)                                      \
  extern "C" XLA_FFI_Error* fn(XLA_FFI_CallFrame* call_frame) {                                              \
    if (XLA_FFI_Error* error = ::jax_twoshot::RegisterStateType<State>(call_frame->api, name)) return error; \
    XLA_FFI_DEFINE_HANDLER(handler, impl, __VA_ARGS__);                                                      \
    return (*handler)(call_frame);                                                                           \
  }

#endif  // JAX_TWOSHOT_TYPED_STATE_H_
