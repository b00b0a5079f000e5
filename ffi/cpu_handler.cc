#include "cpu_handler.h"

#include <atomic>
#include <cstdio>
#include <limits>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <string_view>
#include <utility>

#include "all_reduce_cpu.h"
#include "mailbox_registry.h"
#include "timeout.h"
#include "typed_state.h"
#include "wait_text.h"
#include "waiting_threads.h"

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

ffi::ErrorOr<std::unique_ptr<CallSite>> Instantiate(int64_t, int64_t, int64_t workspace, double, std::string_view,
                                                    std::string_view) {
  static std::atomic<int64_t> next{0};
  return std::make_unique<CallSite>(CallSite{next.fetch_add(1), workspace >= 0 ? CallCounts::Of(workspace) : nullptr});
}

// One rank's call, with all it needs to go on after the handler has returned.
class PendingCall {
 public:
  PendingCall(const Meeting& meeting, Caller caller, std::shared_ptr<Mailbox> mailbox, const Arithmetic& arithmetic,
              const void* x, void* out, int64_t bytes, const Deadline& deadline, std::shared_ptr<CallCounts> counts)
      : meeting_(meeting),
        caller_(std::move(caller)),
        mailbox_(std::move(mailbox)),
        counts_(std::move(counts)),
        call_(*mailbox_, caller_.rank, arithmetic, x, out, bytes, Policy(deadline)) {}
  ~PendingCall() { MailboxRegistry::Get().Leave(meeting_); }

  Progress Advance(double patience_seconds) { return call_.Advance(patience_seconds); }
  ffi::Error Failure() const { return ffi::Error(ffi::ErrorCode::kDeadlineExceeded, failure_); }

 private:
  WaitPolicy Policy(const Deadline& deadline) {
    return {deadline.seconds,
            [this](const Wait& wait) {
              std::fprintf(stderr, "jax_twoshot: warning: %s\n", Describe(caller_, *mailbox_, wait).c_str());
              if (counts_ != nullptr) counts_->AddSlowWait();
            },
            [this, deadline](const Wait& wait) {
              failure_ = MailboxRegistry::Get().Abandon(
                  meeting_, Describe(caller_, *mailbox_, wait) + "; " + DeadlineAdvice(deadline) + kStarvation);
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

ffi::Future Execute(ffi::RunId run, CallSite* call_site, ffi::AnyBuffer x, ffi::BufferR0<ffi::S32> rank_buffer,
                    ffi::BufferR0<ffi::S32> group_buffer, ffi::Result<ffi::AnyBuffer> out, int64_t tp,
                    int64_t slot_chunks, int64_t workspace, double timeout, std::string_view axes, std::string_view) {
  ffi::Promise promise;
  const Arithmetic* arithmetic = ArithmeticOf(x.element_type());
  const int rank = *rank_buffer.typed_data();
  const int32_t group = *group_buffer.typed_data();
  if (arithmetic == nullptr || tp < kMinRanks || tp > kMaxRanks || rank < 0 || rank >= tp || slot_chunks < 1) {
    promise.SetError(ffi::Error::InvalidArgument("jax_twoshot.all_reduce: malformed custom call"));
    return ffi::Future(promise);
  }
  const Meeting meeting{run.run_id, call_site->number, group};
  const Layout layout{static_cast<int>(tp), slot_chunks, kGenerations};
  std::string failure;
  std::shared_ptr<Mailbox> mailbox =
      MailboxRegistry::Get().Enter(meeting, layout, arithmetic->format.sentinel, &failure);
  if (mailbox == nullptr) {
    promise.SetError(ffi::Error(ffi::ErrorCode::kAborted, "a peer gave up before this rank came: " + failure));
    return ffi::Future(promise);
  }
  const int64_t bytes = static_cast<int64_t>(x.size_bytes());
  if (call_site->counts != nullptr && rank == 0 && group == 0) {
    call_site->counts->AddCall(bytes);
    call_site->counts->AddRounds(Algorithm::kTwoShot, CeilDiv(CeilDiv(bytes, kChunkBytes), layout.capacity_chunks()));
  }
  auto call = std::make_shared<PendingCall>(
      meeting, Caller{std::string(axes), rank, layout.tp, group, run.run_id, workspace}, std::move(mailbox),
      *arithmetic, x.untyped_data(), out->untyped_data(), bytes, DeadlineOf(timeout), call_site->counts);
  const Progress progress = call->Advance(kPatienceSeconds);
  if (progress != Progress::kBlocked) {
    Finish(std::move(call), progress, promise);
  } else {
    WaitingThreads::Get().Run([call = std::move(call), promise]() mutable {
      const Progress last = call->Advance(std::numeric_limits<double>::infinity());
      Finish(std::move(call), last, promise);
    });
  }
  return ffi::Future(promise);
}

}  // namespace

JAX_TWOSHOT_DEFINE_STATEFUL_HANDLER(JaxTwoshotCpuInstantiate, CallSite, "jax_twoshot_call_site", Instantiate,
                                    ffi::Ffi::BindInstantiate()
                                        .Attr<int64_t>("tp")
                                        .Attr<int64_t>("slot_chunks")
                                        .Attr<int64_t>("workspace")
                                        .Attr<double>("timeout")
                                        .Attr<std::string_view>("axes")
                                        .Attr<std::string_view>("version"));

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
                                        .Attr<int64_t>("workspace")
                                        .Attr<double>("timeout")
                                        .Attr<std::string_view>("axes")
                                        .Attr<std::string_view>("version"));

}  // namespace jax_twoshot
