#include "cpu_handler.h"

#include <atomic>
#include <cstdio>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include "all_reduce_cpu.h"
#include "mailbox_registry.h"
#include "moe_combine.h"
#include "rms_norm.h"
#include "timeout.h"
#include "typed_state.h"
#include "wait_text.h"
#include "waiting_threads.h"

namespace ffi = xla::ffi;

namespace jax_twoshot {

ffi::TypeId CallSite::id = {};

// The attributes of the calls, as jax_twoshot/_api.py gives them.
struct SumAttributes {
  int64_t tp;
  int64_t slot_chunks;
  int64_t workspace;  // -1: none
  double timeout;     // DeadlineOf's
  std::string_view axes;
  std::string_view version;
};

struct RmsNormAttributes {
  int64_t tp;
  int64_t slot_chunks;
  int64_t workspace;
  double timeout;
  std::string_view axes;
  std::string_view version;
  float eps;

  SumAttributes sum() const { return {tp, slot_chunks, workspace, timeout, axes, version}; }
};

}  // namespace jax_twoshot

XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jax_twoshot::SumAttributes, StructMember<int64_t>("tp"),
                                      StructMember<int64_t>("slot_chunks"), StructMember<int64_t>("workspace"),
                                      StructMember<double>("timeout"), StructMember<std::string_view>("axes"),
                                      StructMember<std::string_view>("version"));
XLA_FFI_REGISTER_STRUCT_ATTR_DECODING(jax_twoshot::RmsNormAttributes, StructMember<int64_t>("tp"),
                                      StructMember<int64_t>("slot_chunks"), StructMember<int64_t>("workspace"),
                                      StructMember<double>("timeout"), StructMember<std::string_view>("axes"),
                                      StructMember<std::string_view>("version"), StructMember<float>("eps"));

namespace jax_twoshot {
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
  std::string axes;
  int rank;
  int tp;
  int32_t group;
  int64_t run;
  int64_t workspace;  // -1: none
};

std::string Describe(const Caller& caller, const Mailbox& mailbox, const Wait& wait) {
  std::ostringstream call;
  call << "call " << mailbox.meeting << " of this process";
  if (caller.workspace >= 0) call << " on workspace " << caller.workspace;
  call << ", group " << caller.group;
  std::ostringstream text;
  text << DescribeWait({caller.axes, caller.rank, caller.tp, wait.missing, wait.phase == Phase::kReduce,
                        static_cast<uint64_t>(wait.generation), wait.chunk, wait.seconds, call.str()});
  const int others = MailboxRegistry::Get().OtherRuns(caller.run);
  if (others > 0) text << ", while " << others << " other run" << (others > 1 ? "s wait" : " waits") << " too";
  return text.str();
}

constexpr char kStarvation[] =
    ". Many runs in flight can also starve each other: XLA:CPU holds one thread a device for the whole of a run; call "
    "jax.block_until_ready on one result before starting the next run";

std::unique_ptr<CallSite> NewCallSite(int64_t workspace) {
  static std::atomic<int64_t> next{0};
  return std::make_unique<CallSite>(CallSite{next.fetch_add(1), workspace >= 0 ? CallCounts::Of(workspace) : nullptr});
}

ffi::ErrorOr<std::unique_ptr<CallSite>> Instantiate(SumAttributes attributes) {
  return NewCallSite(attributes.workspace);
}

ffi::ErrorOr<std::unique_ptr<CallSite>> InstantiateRmsNorm(RmsNormAttributes attributes) {
  return NewCallSite(attributes.workspace);
}

// What a call does with the sum when it has all of it.
using Then = std::function<void()>;

// One rank's call, with all it needs to go on after the handler has returned.
class PendingCall {
 public:
  PendingCall(const Meeting& meeting, Caller caller, std::shared_ptr<Mailbox> mailbox, const Arithmetic& arithmetic,
              const Message& message, const Deadline& deadline, std::shared_ptr<CallCounts> counts, Then then)
      : meeting_(meeting),
        caller_(std::move(caller)),
        mailbox_(std::move(mailbox)),
        counts_(std::move(counts)),
        call_(*mailbox_, caller_.rank, arithmetic, message, Policy(deadline)),
        then_(std::move(then)) {}
  ~PendingCall() { MailboxRegistry::Get().Leave(meeting_); }

  Progress Advance(double patience_seconds) {
    const Progress progress = call_.Advance(patience_seconds);
    if (progress == Progress::kDone && then_) then_();
    return progress;
  }
  // Ends the call for every rank where it could not go on; the next Failure() says why.
  void GiveUp(const std::string& reason) {
    failure_ = MailboxRegistry::Get().Abandon(
        meeting_, "jax_twoshot over " + caller_.axes + ": rank " + std::to_string(caller_.rank) + " " + reason);
    if (counts_ != nullptr) counts_->SetFailure(failure_);
  }
  ffi::Error Failure() const { return ffi::Error(ffi::ErrorCode::kDeadlineExceeded, failure_); }

 private:
  WaitPolicy Policy(const Deadline& deadline) {
    return {deadline.seconds,
            [this](const Wait& wait) {
              std::fprintf(stderr, "jax_twoshot: warning: %s\n", Describe(caller_, *mailbox_, wait).c_str());
              if (counts_ != nullptr) counts_->AddSlowWait();
            },
            [this, deadline](const Wait& wait) {
              const std::string cause =
                  wait.interrupted ? "interrupted by Ctrl-C (SIGINT)" : DeadlineAdvice(deadline) + kStarvation;
              failure_ = MailboxRegistry::Get().Abandon(meeting_, Describe(caller_, *mailbox_, wait) + "; " + cause);
              if (counts_ != nullptr) counts_->SetFailure(failure_);
              if (wait.abandoned) failure_ = "a peer gave up first: " + failure_;
            }};
  }

  const Meeting meeting_;
  const Caller caller_;
  const std::shared_ptr<Mailbox> mailbox_;
  const std::shared_ptr<CallCounts> counts_;
  std::string failure_;
  Call call_;
  const Then then_;
};

void Finish(std::shared_ptr<PendingCall> call, Progress progress, ffi::Promise promise) {
  std::optional<ffi::Error> error;
  if (progress == Progress::kFailed) error = call->Failure();
  call.reset();  // leaves the mailbox before XLA can end the run
  if (error) {
    promise.SetError(*std::move(error));
  } else {
    promise.SetAvailable();
  }
}

// XLA runs the calls of one program that do not depend on each other on one pool of threads, in any order: were they
// all to wait there, the call that the peers of one of them need could find no thread. So a call that has waited this
// long goes on, on a thread of its own. (A call in a chain waits less, as a rule.)
constexpr double kPatienceSeconds = 1e-3;

ffi::Future Malformed() {
  ffi::Promise promise;
  promise.SetError(ffi::Error::InvalidArgument("jax_twoshot: malformed custom call"));
  return ffi::Future(promise);
}

ffi::Future Sum(ffi::RunId run, const CallSite& call_site, const Arithmetic* arithmetic, const Message& message,
                int rank, int32_t group, const SumAttributes& attributes, Then then) {
  const int64_t tp = attributes.tp;
  if (arithmetic == nullptr || tp < kMinRanks || tp > kMaxRanks || rank < 0 || rank >= tp ||
      attributes.slot_chunks < 1) {
    return Malformed();
  }
  ffi::Promise promise;
  const Meeting meeting{run.run_id, call_site.number, group};
  const Layout layout{static_cast<int>(tp), attributes.slot_chunks, kGenerations};
  std::string failure;
  std::shared_ptr<Mailbox> mailbox =
      MailboxRegistry::Get().Enter(meeting, layout, arithmetic->format.sentinel, &failure);
  if (mailbox == nullptr) {
    promise.SetError(ffi::Error(ffi::ErrorCode::kAborted, "a peer gave up before this rank came: " + failure));
    return ffi::Future(promise);
  }
  if (call_site.counts != nullptr && rank == 0 && group == 0) {
    call_site.counts->AddCall(message.bytes);
    call_site.counts->AddRounds(Algorithm::kTwoShot,
                                CeilDiv(CeilDiv(message.bytes, kChunkBytes), layout.capacity_chunks()));
  }
  Caller caller{std::string(attributes.axes), rank, layout.tp, group, run.run_id, attributes.workspace};
  auto call = std::make_shared<PendingCall>(meeting, std::move(caller), std::move(mailbox), *arithmetic, message,
                                            DeadlineOf(attributes.timeout), call_site.counts, std::move(then));
  const Progress progress = call->Advance(kPatienceSeconds);
  if (progress != Progress::kBlocked) {
    Finish(std::move(call), progress, promise);
  } else {
    try {
      WaitingThreads::Get().Run([call, promise]() mutable {
        const Progress last = call->Advance(std::numeric_limits<double>::infinity());
        Finish(std::move(call), last, promise);
      });
    } catch (const std::system_error& error) {
      call->GiveUp(std::string("could not wait on a thread of its own: ") + error.what());
      Finish(std::move(call), Progress::kFailed, promise);
    }
  }
  return ffi::Future(promise);
}

ffi::Future Execute(ffi::RunId run, CallSite* call_site, ffi::AnyBuffer x, ffi::BufferR0<ffi::S32> rank,
                    ffi::BufferR0<ffi::S32> group, ffi::Result<ffi::AnyBuffer> out, SumAttributes attributes) {
  const Message message{x.untyped_data(), nullptr, out->untyped_data(), static_cast<int64_t>(x.size_bytes())};
  return Sum(run, *call_site, ArithmeticOf(x.element_type()), message, *rank.typed_data(), *group.typed_data(),
             attributes, nullptr);
}

ffi::Future ExecuteRmsNorm(ffi::RunId run, CallSite* call_site, ffi::AnyBuffer x, ffi::AnyBuffer residual,
                           ffi::AnyBuffer weight, ffi::BufferR0<ffi::S32> rank, ffi::BufferR0<ffi::S32> group,
                           ffi::Result<ffi::AnyBuffer> normalised, ffi::Result<ffi::AnyBuffer> new_residual,
                           RmsNormAttributes attributes) {
  const Arithmetic* arithmetic = ArithmeticOf(x.element_type());
  const int64_t width = static_cast<int64_t>(weight.element_count()), elements = x.element_count();
  if (arithmetic == nullptr || width == 0 || elements % width != 0 || weight.size_bytes() % kChunkBytes != 0 ||
      residual.size_bytes() != x.size_bytes()) {
    return Malformed();
  }
  const Message message{x.untyped_data(), residual.untyped_data(), new_residual->untyped_data(),
                        static_cast<int64_t>(x.size_bytes())};
  Then norm = [=, weight = weight.untyped_data(), out = normalised->untyped_data()] {
    RmsNorm(*arithmetic, message.out, weight, out, elements / width, width, attributes.eps);
  };
  return Sum(run, *call_site, arithmetic, message, *rank.typed_data(), *group.typed_data(), attributes.sum(),
             std::move(norm));
}

// Waits for nobody: the sum that follows is a call of its own.
ffi::Error ExecuteMoeCombine(ffi::AnyBuffer experts, ffi::Buffer<ffi::S32> index, ffi::Buffer<ffi::F32> scale,
                             ffi::AnyBuffer shared, ffi::Result<ffi::AnyBuffer> part, std::string_view) {
  const Arithmetic* arithmetic = ArithmeticOf(experts.element_type());
  if (arithmetic == nullptr || experts.dimensions().size() != 2 || index.dimensions().size() == 0 ||
      scale.element_count() != index.element_count() || shared.size_bytes() != part->size_bytes()) {
    return ffi::Error::InvalidArgument("jax_twoshot: malformed custom call");
  }
  const int64_t slots = experts.dimensions()[0], width = experts.dimensions()[1], top_k = index.dimensions().back();
  const int64_t rows = width == 0 ? 0 : static_cast<int64_t>(shared.element_count()) / width;
  if (static_cast<int64_t>(index.element_count()) != rows * top_k) {
    return ffi::Error::InvalidArgument("jax_twoshot: malformed custom call");
  }
  const Routing routing{index.typed_data(), scale.typed_data(), slots, top_k};
  MoeCombine(*arithmetic, experts.untyped_data(), routing, shared.untyped_data(), part->untyped_data(), rows, width);
  return ffi::Error::Success();
}

}  // namespace

JAX_TWOSHOT_DEFINE_STATEFUL_HANDLER(JaxTwoshotCpuInstantiate, CallSite, "jax_twoshot_call_site", Instantiate,
                                    ffi::Ffi::BindInstantiate().Attrs<SumAttributes>());

JAX_TWOSHOT_DEFINE_STATEFUL_HANDLER(JaxTwoshotCpuExecute, CallSite, "jax_twoshot_call_site", Execute,
                                    ffi::Ffi::Bind()
                                        .Ctx<ffi::RunId>()
                                        .Ctx<ffi::State<CallSite>>()
                                        .Arg<ffi::AnyBuffer>()
                                        .Arg<ffi::BufferR0<ffi::S32>>()
                                        .Arg<ffi::BufferR0<ffi::S32>>()
                                        .Ret<ffi::AnyBuffer>()
                                        .Attrs<SumAttributes>());

JAX_TWOSHOT_DEFINE_STATEFUL_HANDLER(JaxTwoshotCpuRmsNormInstantiate, CallSite, "jax_twoshot_call_site",
                                    InstantiateRmsNorm, ffi::Ffi::BindInstantiate().Attrs<RmsNormAttributes>());

JAX_TWOSHOT_DEFINE_STATEFUL_HANDLER(JaxTwoshotCpuRmsNormExecute, CallSite, "jax_twoshot_call_site", ExecuteRmsNorm,
                                    ffi::Ffi::Bind()
                                        .Ctx<ffi::RunId>()
                                        .Ctx<ffi::State<CallSite>>()
                                        .Arg<ffi::AnyBuffer>()
                                        .Arg<ffi::AnyBuffer>()
                                        .Arg<ffi::AnyBuffer>()
                                        .Arg<ffi::BufferR0<ffi::S32>>()
                                        .Arg<ffi::BufferR0<ffi::S32>>()
                                        .Ret<ffi::AnyBuffer>()
                                        .Ret<ffi::AnyBuffer>()
                                        .Attrs<RmsNormAttributes>());

XLA_FFI_DEFINE_HANDLER_SYMBOL(JaxTwoshotCpuMoeCombine, ExecuteMoeCombine,
                              ffi::Ffi::Bind()
                                  .Arg<ffi::AnyBuffer>()
                                  .Arg<ffi::Buffer<ffi::S32>>()
                                  .Arg<ffi::Buffer<ffi::F32>>()
                                  .Arg<ffi::AnyBuffer>()
                                  .Ret<ffi::AnyBuffer>()
                                  .Attr<std::string_view>("version"));

}  // namespace jax_twoshot
