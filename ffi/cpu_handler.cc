#include "cpu_handler.h"

#include <atomic>
#include <cstdio>
#include <memory>
#include <sstream>
#include <string>
#include <string_view>

#include "all_reduce_cpu.h"
#include "mailbox_registry.h"
#include "timeout.h"
#include "typed_state.h"
#include "wait_text.h"

namespace ffi = xla::ffi;

namespace jax_twoshot {

ffi::TypeId CallSite::id = {};

namespace {

const Arithmetic* ArithmeticOf(ffi::DataType type) {
  switch (type) {
    case ffi::DataType::BF16:
      return &kBFloat16Arithmetic;
    case ffi::DataType::F16:
      return &kFloat16Arithmetic;
    case ffi::DataType::F32:
      return &kFloat32Arithmetic;
    default:
      return nullptr;
  }
}

// What a message about a wait needs to know of the call.
struct Caller {
  std::string_view axes;
  int rank;
  int tp;
  int32_t group;
  int64_t run;
};

std::string Describe(const Caller& caller, const Wait& wait) {
  std::ostringstream text;
  text.precision(3);
  text << DescribeWait({caller.axes, caller.rank, caller.tp, wait.missing, wait.phase == Phase::kReduce,
                        static_cast<uint64_t>(wait.generation), wait.chunk})
       << ", group " << caller.group << ", for " << wait.seconds << " s so far";
  const int others = MailboxRegistry::Get().OtherRuns(caller.run);
  if (others > 0) {
    text << "; " << others << " other run" << (others > 1 ? "s are" : " is")
         << " waiting too: XLA:CPU has one thread a device and holds it for the whole run, so independent runs in "
            "flight can starve each other; call jax.block_until_ready on one result before starting the next run";
  }
  return text.str();
}

ffi::ErrorOr<std::unique_ptr<CallSite>> Instantiate(int64_t, int64_t, std::string_view) {
  static std::atomic<int64_t> next{0};
  return std::make_unique<CallSite>(CallSite{next.fetch_add(1)});
}

ffi::Error Execute(ffi::RunId run, CallSite* call_site, ffi::AnyBuffer x, ffi::BufferR0<ffi::S32> rank_buffer,
                   ffi::BufferR0<ffi::S32> group_buffer, ffi::Result<ffi::AnyBuffer> out, int64_t tp,
                   int64_t slot_chunks, std::string_view axes) {
  const Arithmetic* arithmetic = ArithmeticOf(x.element_type());
  const int rank = *rank_buffer.typed_data();
  const int32_t group = *group_buffer.typed_data();
  if (arithmetic == nullptr || tp < kMinRanks || tp > kMaxRanks || rank < 0 || rank >= tp || slot_chunks < 1) {
    return ffi::Error::InvalidArgument("jax_twoshot.all_reduce: malformed custom call");
  }
  const Meeting meeting{run.run_id, call_site->number, group};
  const Layout layout{static_cast<int>(tp), slot_chunks, kGenerations};
  const Caller caller{axes, rank, layout.tp, group, run.run_id};
  MailboxRegistry& registry = MailboxRegistry::Get();

  std::string failure;
  const std::shared_ptr<Mailbox> mailbox =
      registry.Enter(meeting, layout, arithmetic->format.sentinel, &failure);
  if (mailbox == nullptr) {
    return ffi::Error(ffi::ErrorCode::kAborted, "a peer gave up before this rank came: " + failure);
  }
  WaitPolicy policy;
  policy.timeout_seconds = timeout_seconds.load(std::memory_order_relaxed);
  policy.on_slow = [&](const Wait& wait) {
    std::fprintf(stderr, "jax_twoshot: warning: %s\n", Describe(caller, wait).c_str());
  };
  policy.on_failure = [&](const Wait& wait) {
    failure = registry.Abandon(meeting, Describe(caller, wait) + "; " + DeadlineAdvice(policy.timeout_seconds));
    if (wait.abandoned) failure = "a peer gave up first: " + failure;
  };
  const bool done = AllReduce(*mailbox, rank, *arithmetic, x.untyped_data(), out->untyped_data(), x.size_bytes(),
                              policy);
  registry.Leave(meeting);
  if (done) return ffi::Error::Success();
  return ffi::Error(ffi::ErrorCode::kDeadlineExceeded, failure);
}

}  // namespace

JAX_TWOSHOT_DEFINE_STATEFUL_HANDLER(JaxTwoshotCpuInstantiate, CallSite, "jax_twoshot_call_site", Instantiate,
                                    ffi::Ffi::BindInstantiate()
                                        .Attr<int64_t>("tp")
                                        .Attr<int64_t>("slot_chunks")
                                        .Attr<std::string_view>("axes"));

JAX_TWOSHOT_DEFINE_STATEFUL_HANDLER(JaxTwoshotCpuExecute, CallSite, "jax_twoshot_call_site", Execute,
                                    ffi::Ffi::Bind()
                                        .Ctx<ffi::RunId>()
                                        .Ctx<ffi::State<CallSite>>()
                                        .Arg<ffi::AnyBuffer>()
                                        .Arg<ffi::BufferR0<ffi::S32>>()
                                        .Arg<ffi::BufferR0<ffi::S32>>()
                                        .Ret<ffi::AnyBuffer>()
                                        .Attr<int64_t>("tp")
                                        .Attr<int64_t>("slot_chunks")
                                        .Attr<std::string_view>("axes"));

}  // namespace jax_twoshot
