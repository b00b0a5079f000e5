// The host side of a workspace on GPUs, against the stand-in for the driver: two devices of one process.
//
//     cuda_workspace setup            each call of the driver fails once, whatever is made, loaded or reset
//     cuda_workspace calls SECONDS    slow and failing calls, beside threads that watch, ask, end waits and reset
//
// Build with -fsanitize=thread. Exit code 0 and what was done, or 1 and what was wrong.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "all_reduce_cuda.h"
#include "libcuda.h"

namespace {

using namespace jax_twoshot;

constexpr int64_t kId = 7;
constexpr int kDevices = 2;
constexpr int kMessage = 4096;  // bytes

void Expect(bool holds, const std::string& what) {
  if (holds) return;
  std::printf("%s\n", what.c_str());
  std::fflush(stdout);
  std::_Exit(1);
}

std::shared_ptr<CudaWorkspace> MakeWorkspace() {
  std::vector<Cubin> cubins;
  for (const Algorithm algorithm : {Algorithm::kTwoShot, Algorithm::kOneShot}) {
    cubins.push_back({algorithm, kBFloat16.name, "code", "symbol", false});
  }
  std::vector<RankBuffers> ranks;
  for (int rank = 0; rank < kDevices; ++rank) ranks.push_back({rank, rank, 4096, 0, {4096, 8192}});
  return std::make_shared<CudaWorkspace>(kId, "tp", Layout{kDevices, 64}, /*timeout_seconds=*/20.0,
                                         /*one_shot_bytes=*/1024, /*ranks_on_device=*/1, /*sm_count=*/132, cubins,
                                         ranks);
}

// ---- Set-up ------------------------------------------------------------------------------------------------

// The driver's calls that may run out of something, or of a device.
const char* const kMayFail[] = {"cuDeviceGet",        "cuDevicePrimaryCtxRetain",
                                "cuCtxPushCurrent",   "cuMemAlloc",
                                "cuMemsetD32",        "cuMemHostAlloc",
                                "cuStreamCreate",     "cuLibraryLoadData",
                                "cuLibraryGetKernel", "cuKernelGetFunction",
                                "cuFuncSetAttribute", "cuOccupancyMaxActiveBlocksPerMultiprocessor",
                                "cuCtxSynchronize"};

// Lets each call of the driver that `make` does fail in turn: every time the driver's text comes, and as much is held
// as before. Returns how many failed.
int FailEachCall(const std::function<std::shared_ptr<void>()>& make) {
  int failures = 0;
  for (const char* symbol : kMayFail) {
    for (int nth = 1;; ++nth, ++failures) {
      const int64_t before = held();
      fail(symbol, nth);
      std::shared_ptr<void> made;
      std::string text;
      try {
        made = make();
      } catch (const std::runtime_error& error) {
        text = error.what();
      }
      const bool came = failed();
      fail(nullptr, 0);
      if (!came && made != nullptr) break;
      const std::string where = "call " + std::to_string(nth) + " of " + symbol + ": ";
      Expect(text.ends_with(": CUDA_ERROR_OUT_OF_MEMORY: said by the stand-in"), where + "the text is '" + text + "'");
      Expect(held() == before, where + std::to_string(held() - before) + " things are left");
    }
  }
  return failures;
}

void SetUp() {
  fail("cuInit", 1);
  try {
    CudaDriver::Get();
    Expect(false, "cuInit failed, and nothing said so");
  } catch (const std::runtime_error&) {
  }
  const int made = FailEachCall(&MakeWorkspace);
  Expect(held() == 0, std::to_string(held()) + " things are left of the workspaces");

  KernelImage image{"", "symbol", /*threads=*/256, /*ctas_per_sm=*/2, /*shared_memory=*/4096, false};
  const std::shared_ptr<CudaWorkspace> workspace = MakeWorkspace();
  const int loaded = FailEachCall([&] {
    image.code += '.';  // what was loaded stays: each attempt has a kernel of its own
    const KernelOnDevices& kernel = workspace->Load(image);
    Expect(kernel.size() == kDevices, "the kernel is not on both devices");
    return workspace;
  });
  const int64_t before = held();
  Expect(workspace->Load(image).at(1).function != nullptr && held() == before, "a kernel was loaded twice");
  image.code = "greedy";
  image.ctas_per_sm = 9;
  try {
    workspace->Load(image);
    Expect(false, "more CTAs than fit were promised, and nothing said so");
  } catch (const std::runtime_error& error) {
    Expect(std::string(error.what()).starts_with("ctas_per_sm: 8 CTAs"), error.what());
  }
  Expect(held() == before, "a kernel that does not fit is left");

  const int reset = FailEachCall([&] {
    workspace->BeginReset();
    workspace->Clear();
    workspace->EndReset();
    return workspace;
  });
  Expect(!workspace->Failure(), "a reset came through after all, and the workspace still fails");
  std::printf("%d calls failed while a workspace was made, %d while a kernel was loaded, %d in a reset\n", made, loaded,
              reset);
}

// ---- Calls -------------------------------------------------------------------------------------------------

using Clock = std::chrono::steady_clock;

constexpr int kControl = 7, kStatus = 8;  // places of parameters, as ffi/all_reduce_cuda.cc packs them
constexpr int kState = kControlState / kWordBytes, kCalls = kControlCalls / kWordBytes;

// What twoshot.report does.
void Report(uint32_t* control, StatusRecord* status, uint32_t state) {
  if (__atomic_fetch_or(&control[kState], state, __ATOMIC_RELAXED) >= state) return;
  const uint32_t calls = __atomic_load_n(&control[kCalls], __ATOMIC_RELAXED);
  for (uint32_t* word : {&status->phase, &status->missing[0]}) __atomic_store_n(word, 1u, __ATOMIC_RELAXED);
  for (uint32_t* word : {&status->generation, &status->chunk, &status->missing[1]}) {
    __atomic_store_n(word, 0u, __ATOMIC_RELAXED);
  }
  __atomic_store_n(&status->calls, calls, __ATOMIC_RELAXED);
  __atomic_store_n(&status->state, state, __ATOMIC_RELEASE);
}

std::atomic<bool> result_is_nan{false};

// A call that now and then is slow, until the host ends it or for a millisecond, and now and then fails.
void Kernel(void** parameters) {
  auto* control = *static_cast<uint32_t**>(parameters[kControl]);
  auto* status = *static_cast<StatusRecord**>(parameters[kStatus]);
  const auto failed = [&] { return (__atomic_load_n(&control[kState], __ATOMIC_RELAXED) & kFailed) != 0; };
  thread_local std::minstd_rand random;
  if (!failed() && random() % 8 == 0) {
    Report(control, status, kSlow);
    const auto end = Clock::now() + std::chrono::milliseconds(1);
    while (!failed() && Clock::now() < end) std::this_thread::yield();
    if (random() % 8 == 0) Report(control, status, kFailed);
  }
  if ((__atomic_fetch_and(&control[kState], kFailed, __ATOMIC_RELAXED) & kFailed) != 0) result_is_nan = true;
  __atomic_fetch_add(&control[kCalls], 1, __ATOMIC_RELAXED);
}

void Calls(double seconds) {
  set_kernel(&Kernel);
  std::shared_ptr<CudaWorkspace> workspace = MakeWorkspace();
  CUstream streams[kDevices];
  for (int device = 0; device < kDevices; ++device) {
    const DeviceScope scope(device);
    CudaDriver::Get().Check(CudaDriver::Get().cuStreamCreate(&streams[device], CU_STREAM_NON_BLOCKING), "a stream");
  }
  std::vector<unsigned char> message(kMessage);
  std::atomic<bool> over{false};
  std::atomic<int64_t> told{0}, asked{0};
  std::vector<std::thread> others;
  others.emplace_back([&] {  // as the watcher of jax_twoshot/workspace.py, which is not told by Ctrl-C every time
    for (int64_t i = 0; !over; ++i, std::this_thread::yield()) {
      for (const std::string& text : workspace->SlowWaits()) {
        Expect(text.starts_with("jax_twoshot over tp: rank ") && text.find(" waits for rank 0 ") != text.npos, text);
        ++told;
      }
      if (i % 3 == 0) workspace->EndSlowWaits();
    }
  });
  others.emplace_back([&] {  // as Workspace.check() and stats()
    while (!over) {
      const std::optional<std::string> failure = workspace->Failure();
      Expect(!failure || failure->starts_with("jax_twoshot"), failure.value_or(""));
      workspace->RoundsDone();
      ++asked;
    }
  });

  int64_t calls = 0, ended = 0, failures = 0, resets = 0;
  const auto end = Clock::now() + std::chrono::duration<double>(seconds);
  while (Clock::now() < end) {
    for (int device = 0; device < kDevices; ++device, ++calls) {
      const std::optional<std::string> error = workspace->Launch(device, streams[device], std::nullopt, kBFloat16.name,
                                                                 message.data(), message.data(), kMessage, false);
      Expect(!error, error.value_or(""));
    }
    const std::optional<std::string> failure = workspace->Failure();
    Expect(failure || !result_is_nan, "a result is NaN, and nothing says so");
    if (!failure) continue;
    ++(failure->find("interrupted by Ctrl-C") != failure->npos ? ended : failures);
    workspace->BeginReset();
    Expect(workspace->Failure().value_or("").find("is being reset") != std::string::npos,
           "a call may begin in a reset");
    workspace->Clear();
    workspace->EndReset();
    result_is_nan = false;
    const std::optional<std::string> still = workspace->Failure();
    Expect(!still, "after a reset: " + still.value_or(""));
    Expect(workspace->RoundsDone() == 0, "a reset workspace has counted rounds");
    ++resets;
  }
  over = true;
  for (std::thread& other : others) other.join();
  const std::shared_ptr<CallCounts> counts = CallCounts::Of(kId);
  Expect(counts->calls() == calls / kDevices && counts->bytes() == calls / kDevices * kMessage, "calls are miscounted");
  Expect(counts->slow_waits() == told, "slow waits are miscounted");
  workspace.reset();
  for (CUstream stream : streams) CudaDriver::Get().cuStreamDestroy(stream);
  Expect(held() == 0, std::to_string(held()) + " things are left");
  Expect(asked > 0 && told > 0 && ended > 0 && failures > 0, "not all of it came to pass");
  std::printf("%lld calls, %lld slow waits, %lld ended, %lld failures, %lld resets\n", static_cast<long long>(calls),
              static_cast<long long>(told), static_cast<long long>(ended), static_cast<long long>(failures),
              static_cast<long long>(resets));
}

}  // namespace

int main(int argc, char** argv) {
  const std::string part = argc > 1 ? argv[1] : "";
  if (part == "setup" && argc == 2) {
    SetUp();
  } else if (part == "calls" && argc == 3) {
    Calls(std::atof(argv[2]));
  } else {
    std::fprintf(stderr, "usage: %s setup | calls SECONDS\n", argv[0]);
    return 2;
  }
  return 0;
}
