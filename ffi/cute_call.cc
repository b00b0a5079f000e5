#include "cute_call.h"

#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>

#include "cuda_handler.h"
#include "typed_state.h"

namespace ffi = xla::ffi;

namespace jax_twoshot {

ffi::TypeId CuteSite::id = {};

// The attributes of the call, as jax_twoshot/_cute_call.py gives them.
struct CuteAttributes {
  std::string_view what;
  int64_t workspace;
  int64_t tp;
  int64_t slot_chunks;
  int64_t generations;
  std::string_view image;
  std::string_view symbol;
  bool pdl;
  int64_t grid;
  int64_t threads;
  int64_t ctas_per_sm;
  int64_t shared_memory;
  ffi::Span<const int32_t> scalars;
  std::string_view version;
};

}  // namespace jax_twoshot

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jax_twoshot::CuteAttributes, StructMember<std::string_view>("what"),
                                      StructMember<int64_t>("workspace"), StructMember<int64_t>("tp"),
                                      StructMember<int64_t>("slot_chunks"), StructMember<int64_t>("generations"),
                                      StructMember<std::string_view>("image"), StructMember<std::string_view>("symbol"),
                                      StructMember<bool>("pdl"), StructMember<int64_t>("grid"),
                                      StructMember<int64_t>("threads"), StructMember<int64_t>("ctas_per_sm"),
                                      StructMember<int64_t>("shared_memory"),
                                      StructMember<ffi::Span<const int32_t>>("scalars"),
                                      StructMember<std::string_view>("version"));

namespace jax_twoshot {
namespace {

ffi::Error Refused(std::string_view what, const std::string& why) {
  return ffi::Error(ffi::ErrorCode::kInvalidArgument, std::string(what) + ": " + why);
}

// Loads the kernel here and not in Execute: beside a peer's kernel that waits for this rank, it might never be.
ffi::ErrorOr<std::unique_ptr<CuteSite>> Instantiate(CuteAttributes call) {
  ffi::ErrorOr<std::shared_ptr<CudaWorkspace>> workspace =
      OpenWorkspace(std::string(call.what), call.workspace, call.tp, call.slot_chunks);
  if (workspace.has_error()) return ffi::Unexpected(workspace.error());
  CudaWorkspace& open = *workspace.value();
  if (open.layout().generations != call.generations) {
    return ffi::Unexpected(Refused(call.what, "compiled for a workspace of " + std::to_string(call.generations) +
                                                  " generations, this one has " +
                                                  std::to_string(open.layout().generations)));
  }
  const int threads = static_cast<int>(call.threads), ctas_per_sm = static_cast<int>(call.ctas_per_sm),
            shared_memory = static_cast<int>(call.shared_memory);
  if (const int64_t most = open.MostCtas(ctas_per_sm); call.grid > most) {
    return ffi::Unexpected(Refused(call.what, "grid: at most " + std::to_string(most) +
                                                  " CTAs are sure to be resident together here, got " +
                                                  std::to_string(call.grid)));
  }
  try {
    const KernelOnDevices& kernel =
        open.Load({std::string(call.image), std::string(call.symbol), threads, ctas_per_sm, shared_memory, call.pdl});
    return std::make_unique<CuteSite>(CuteSite{std::move(workspace.value()),
                                               &kernel,
                                               std::string(call.what),
                                               call.grid,
                                               threads,
                                               shared_memory,
                                               {call.scalars.begin(), call.scalars.end()}});
  } catch (const std::runtime_error& error) {
    return ffi::Unexpected(Refused(call.what, error.what()));
  }
}

ffi::Error Execute(CUstream stream, int32_t ordinal, CuteSite* site, ffi::RemainingArgs operands,
                   ffi::RemainingRets results) {
  CountCudaHandlerCall();
  if (std::optional<std::string> failure = site->workspace->Failure()) {
    return ffi::Error(ffi::ErrorCode::kDeadlineExceeded, *failure);
  }
  std::vector<void*> addresses;
  for (size_t i = 0; i < operands.size(); ++i) addresses.push_back(operands.get<ffi::AnyBuffer>(i)->untyped_data());
  for (size_t i = 0; i < results.size(); ++i) {
    addresses.push_back((*results.get<ffi::AnyBuffer>(i))->untyped_data());
  }
  std::vector<void*> parameters;
  for (void*& address : addresses) parameters.push_back(&address);
  for (int32_t& scalar : site->scalars) parameters.push_back(&scalar);
  if (std::optional<std::string> error = site->workspace->Launch(
          ordinal, stream, *site->kernel, site->grid, site->threads, site->shared_memory, std::move(parameters))) {
    return ffi::Error(ffi::ErrorCode::kInternal, site->what + ": " + *error);
  }
  return ffi::Error::Success();
}

}  // namespace

JAX_TWOSHOT_DEFINE_STATEFUL_HANDLER(JaxTwoshotCuteInstantiate, CuteSite, "jax_twoshot_cute_site", Instantiate,
                                    ffi::Ffi::BindInstantiate().Attrs<CuteAttributes>());

// XLA may record the launch into a command buffer and replay it without calling the handler again.
JAX_TWOSHOT_DEFINE_STATEFUL_HANDLER(JaxTwoshotCuteExecute, CuteSite, "jax_twoshot_cute_site", Execute,
                                    ffi::Ffi::Bind()
                                        .Ctx<ffi::PlatformStream<CUstream>>()
                                        .Ctx<ffi::DeviceOrdinal>()
                                        .Ctx<ffi::State<CuteSite>>()
                                        .RemainingArgs()
                                        .RemainingRets(),
                                    {ffi::Traits::kCmdBufferCompatible});

}  // namespace jax_twoshot
