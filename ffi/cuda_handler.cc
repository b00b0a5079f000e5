#include "cuda_handler.h"

#include <atomic>
#include <optional>
#include <string_view>
#include <utility>

#include "typed_state.h"

namespace ffi = xla::ffi;

namespace jax_twoshot {

ffi::TypeId LaunchSite::id = {};

ffi::ErrorOr<std::shared_ptr<CudaWorkspace>> OpenWorkspace(const std::string& what, int64_t id, int64_t tp,
                                                           int64_t slot_chunks) {
  std::shared_ptr<CudaWorkspace> workspace = CudaWorkspace::Find(id);
  if (workspace != nullptr && workspace->layout().tp == tp && workspace->layout().slot_chunks == slot_chunks) {
    return workspace;
  }
  return ffi::Unexpected(ffi::Error(ffi::ErrorCode::kFailedPrecondition,
                                    what + ": this program was compiled for workspace " + std::to_string(id) +
                                        ", which is not open in this process; make the same workspaces in the same "
                                        "order as where it was compiled"));
}

namespace {

std::atomic<int64_t> handler_calls{0};

const char* FormatName(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::BF16:
      return kBFloat16.name;
    case ffi::DataType::F16:
      return kFloat16.name;
    case ffi::DataType::F32:
      return kFloat32.name;
    default:
      return "";
  }
}

constexpr std::string_view kAuto = "auto";

ffi::ErrorOr<std::unique_ptr<LaunchSite>> Instantiate(int64_t workspace_id, int64_t tp, int64_t slot_chunks,
                                                      std::string_view algorithm, std::string_view axes,
                                                      std::string_view) {
  if (algorithm != kAuto && !AlgorithmNamed(algorithm)) {
    return ffi::Unexpected(ffi::Error::InvalidArgument("jax_twoshot.all_reduce over " + std::string(axes) +
                                                       ": unknown algorithm " + std::string(algorithm)));
  }
  ffi::ErrorOr<std::shared_ptr<CudaWorkspace>> workspace =
      OpenWorkspace("jax_twoshot.all_reduce over " + std::string(axes), workspace_id, tp, slot_chunks);
  if (workspace.has_error()) return ffi::Unexpected(workspace.error());
  return std::make_unique<LaunchSite>(LaunchSite{std::move(workspace.value())});
}

ffi::Error Execute(CUstream stream, int32_t ordinal, LaunchSite* site, ffi::AnyBuffer x,
                   ffi::Result<ffi::AnyBuffer> out, int64_t, int64_t, int64_t, std::string_view algorithm,
                   std::string_view axes, std::string_view) {
  CountCudaHandlerCall();
  CudaWorkspace& workspace = *site->workspace;
  if (std::optional<std::string> failure = workspace.Failure()) {
    return ffi::Error(ffi::ErrorCode::kDeadlineExceeded, *failure);
  }
  if (std::optional<std::string> error =
          workspace.Launch(ordinal, stream, AlgorithmNamed(algorithm), FormatName(x.element_type()), x.untyped_data(),
                           out->untyped_data(), static_cast<int64_t>(x.size_bytes()), /*alone=*/false)) {
    return ffi::Error(ffi::ErrorCode::kInternal, "jax_twoshot.all_reduce over " + std::string(axes) + ": " + *error);
  }
  return ffi::Error::Success();
}

}  // namespace

int64_t CudaHandlerCalls() { return handler_calls.load(std::memory_order_relaxed); }
void CountCudaHandlerCall() { handler_calls.fetch_add(1, std::memory_order_relaxed); }

JAX_TWOSHOT_DEFINE_STATEFUL_HANDLER(JaxTwoshotCudaInstantiate, LaunchSite, "jax_twoshot_launch_site", Instantiate,
                                    ffi::Ffi::BindInstantiate()
                                        .Attr<int64_t>("workspace")
                                        .Attr<int64_t>("tp")
                                        .Attr<int64_t>("slot_chunks")
                                        .Attr<std::string_view>("algorithm")
                                        .Attr<std::string_view>("axes")
                                        .Attr<std::string_view>("version"));

// XLA may record the launch into a command buffer and replay it without calling the handler again.
JAX_TWOSHOT_DEFINE_STATEFUL_HANDLER(JaxTwoshotCudaExecute, LaunchSite, "jax_twoshot_launch_site", Execute,
                                    ffi::Ffi::Bind()
                                        .Ctx<ffi::PlatformStream<CUstream>>()
                                        .Ctx<ffi::DeviceOrdinal>()
                                        .Ctx<ffi::State<LaunchSite>>()
                                        .Arg<ffi::AnyBuffer>()
                                        .Ret<ffi::AnyBuffer>()
                                        .Attr<int64_t>("workspace")
                                        .Attr<int64_t>("tp")
                                        .Attr<int64_t>("slot_chunks")
                                        .Attr<std::string_view>("algorithm")
                                        .Attr<std::string_view>("axes")
                                        .Attr<std::string_view>("version"),
                                    {ffi::Traits::kCmdBufferCompatible});

}  // namespace jax_twoshot
