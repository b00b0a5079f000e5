#include "all_reduce_cuda.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <string_view>

#include "timeout.h"
#include "typed_state.h"
#include "wait_text.h"

namespace ffi = xla::ffi;

namespace jax_twoshot {

ffi::TypeId LaunchSite::id = {};

namespace {

// Mirrors kernels/all_reduce.py: the control block is four words, all zero in a new workspace.
constexpr size_t kControlCalls = 12;
constexpr size_t kControlBytes = 16;
constexpr uint32_t kSlow = 1;
constexpr uint32_t kFailed = 2;
constexpr uint32_t kReduce = 1;

std::atomic<int64_t> handler_calls{0};

struct Registry {
  std::mutex mutex;
  std::map<int64_t, std::weak_ptr<CudaWorkspace>> known;
  std::map<int64_t, std::shared_ptr<CudaWorkspace>> open;
};

Registry& GetRegistry() {
  // Never destroyed: XLA's threads may outlive static destructors.
  static auto* registry = new Registry;
  return *registry;
}

// The record as it is now: the GPU writes it while the host reads.
StatusRecord Read(const StatusRecord& status) {
  StatusRecord copy;
  copy.state = __atomic_load_n(&status.state, __ATOMIC_ACQUIRE);
  copy.phase = __atomic_load_n(&status.phase, __ATOMIC_RELAXED);
  copy.generation = __atomic_load_n(&status.generation, __ATOMIC_RELAXED);
  copy.chunk = __atomic_load_n(&status.chunk, __ATOMIC_RELAXED);
  copy.missing[0] = __atomic_load_n(&status.missing[0], __ATOMIC_RELAXED);
  copy.missing[1] = __atomic_load_n(&status.missing[1], __ATOMIC_RELAXED);
  copy.calls = __atomic_load_n(&status.calls, __ATOMIC_RELAXED);
  return copy;
}

}  // namespace

CudaWorkspace::CudaWorkspace(int64_t id, std::string axes, Layout layout, double timeout_seconds, int ranks_on_device,
                             int sm_count, const std::vector<Cubin>& cubins, const std::vector<RankBuffers>& ranks)
    : id_(id),
      axes_(std::move(axes)),
      layout_(layout),
      timeout_seconds_(timeout_seconds),
      ranks_on_device_(ranks_on_device),
      sm_count_(sm_count),
      counts_(CallCounts::Of(id)) {
  try {
    for (const RankBuffers& buffers : ranks) {
      Device& device = devices_[buffers.ordinal];
      device.buffers = buffers;
      Prepare(device, cubins);
    }
  } catch (...) {
    for (auto& [ordinal, device] : devices_) Release(device);
    throw;
  }
}

CudaWorkspace::~CudaWorkspace() {
  for (auto& [ordinal, device] : devices_) Release(device);
}

void CudaWorkspace::Prepare(Device& device, const std::vector<Cubin>& cubins) {
  const CudaDriver& driver = CudaDriver::Get();
  const DeviceScope scope(device.buffers.ordinal);
  driver.Check(driver.cuMemAlloc(&device.control, kControlBytes), "allocating the control block");
  driver.Check(driver.cuMemsetD32(device.control, 0, kControlBytes / kWordBytes), "clearing the control block");
  void* status = nullptr;
  driver.Check(
      driver.cuMemHostAlloc(&status, sizeof(StatusRecord), CU_MEMHOSTALLOC_PORTABLE | CU_MEMHOSTALLOC_DEVICEMAP),
      "allocating the status record");
  device.status = static_cast<StatusRecord*>(status);
  std::memset(device.status, 0, sizeof(StatusRecord));
  driver.Check(driver.cuStreamCreate(&device.side, CU_STREAM_NON_BLOCKING), "making a stream");
  for (const Cubin& cubin : cubins) {
    Kernel& kernel = device.kernels[{cubin.algorithm, cubin.format}];
    kernel.pdl = cubin.pdl;
    const std::string what = "loading kernel " + cubin.symbol;
    driver.Check(driver.cuLibraryLoadData(&kernel.library, cubin.code.data(), nullptr, nullptr, 0, nullptr, nullptr, 0),
                 what);
    CUkernel handle;
    driver.Check(driver.cuLibraryGetKernel(&handle, kernel.library, cubin.symbol.c_str()), what);
    // Brings the code onto the device now: while another rank's kernel spins here, it could not be.
    driver.Check(driver.cuKernelGetFunction(&kernel.function, handle), what);
    // The kernel needs no shared memory, but its SMs must keep some to give: an SM changes its split of L1 and shared
    // memory only when it is idle, so a peer's kernel that needs some could not start on an SM where this one waits for
    // that peer. (Seen: 135 waiting CTAs on 132 SMs, and a peer's reduction in front of its call.)
    driver.Check(driver.cuFuncSetAttribute(kernel.function, CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT,
                                           CU_SHAREDMEM_CARVEOUT_MAX_SHARED),
                 what);
  }
  driver.Check(driver.cuCtxSynchronize(), "setting up the workspace");
}

void CudaWorkspace::Release(Device& device) {
  // Errors have nobody to go to: at exit the driver may be gone already.
  try {
    const CudaDriver& driver = CudaDriver::Get();
    const DeviceScope scope(device.buffers.ordinal);
    for (auto& [name, kernel] : device.kernels) {
      if (kernel.library != nullptr) driver.cuLibraryUnload(kernel.library);
    }
    if (device.control != 0) driver.cuMemFree(device.control);
    if (device.side != nullptr) driver.cuStreamDestroy(device.side);
    if (device.status != nullptr) driver.cuMemFreeHost(device.status);
  } catch (const std::runtime_error&) {
  }
  device = Device{};
}

std::string CudaWorkspace::Describe(const Device& device, const StatusRecord& status, double seconds) const {
  const std::string call = "round " + std::to_string(status.calls) + " of workspace " + std::to_string(id_);
  return DescribeWait({axes_, device.buffers.rank, layout_.tp, uint64_t{status.missing[1]} << 32 | status.missing[0],
                       status.phase == kReduce, status.generation, status.chunk, seconds, call});
}

std::optional<std::string> CudaWorkspace::Failure() const {
  if (resetting_) {
    return "jax_twoshot.all_reduce over " + axes_ + ": workspace " + std::to_string(id_) +
           " is being reset, or was not reset on every process: call reset() on all of them, and make no call before "
           "it returns";
  }
  const Deadline deadline = DeadlineOf(timeout_seconds_);
  for (const auto& [ordinal, device] : devices_) {
    const StatusRecord status = Read(*device.status);
    if (status.state == kFailed) {
      const double waited = deadline.seconds * (status.phase == kReduce ? 1 : kCollectPatience);
      return Describe(device, status, waited) + "; " + DeadlineAdvice(deadline) +
             ". The results since then are NaN, until Workspace.reset() is called on every process";
    }
  }
  return std::nullopt;
}

void CudaWorkspace::Clear() {
  const CudaDriver& driver = CudaDriver::Get();
  for (auto& [ordinal, device] : devices_) {
    const DeviceScope scope(ordinal);
    driver.Check(driver.cuMemsetD32(device.control, 0, kControlBytes / kWordBytes), "clearing the control block");
    driver.Check(driver.cuCtxSynchronize(), "clearing the control block");
  }
}

void CudaWorkspace::EndReset() {
  for (auto& [ordinal, device] : devices_) std::memset(device.status, 0, sizeof(StatusRecord));
  resetting_ = false;
}

std::vector<std::string> CudaWorkspace::SlowWaits() {
  std::vector<std::string> texts;
  for (auto& [ordinal, device] : devices_) {
    const StatusRecord status = Read(*device.status);
    uint32_t slow = kSlow;
    if (status.state == kSlow &&
        __atomic_compare_exchange_n(&device.status->state, &slow, 0u, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
      texts.push_back(Describe(device, status, DeadlineOf(timeout_seconds_).seconds / 10));
      counts_->AddSlowWait();
    }
  }
  return texts;
}

int64_t CudaWorkspace::RoundsDone() {
  const std::lock_guard<std::mutex> lock(counting_);
  auto& [ordinal, device] = *devices_.begin();
  const CudaDriver& driver = CudaDriver::Get();
  const DeviceScope scope(ordinal);
  const std::string what = "reading the control block";
  driver.Check(
      driver.cuMemcpyDtoHAsync(&device.status->counted, device.control + kControlCalls, kWordBytes, device.side), what);
  driver.Check(driver.cuStreamSynchronize(device.side), what);
  return device.status->counted;
}

std::optional<std::string> CudaWorkspace::Launch(int ordinal, CUstream stream, std::optional<Algorithm> asked,
                                                 const std::string& format, const void* x, void* out, int64_t bytes,
                                                 bool alone) {
  const auto found = devices_.find(ordinal);
  if (found == devices_.end()) {
    return "device " + std::to_string(ordinal) +
           " is not one of the workspace's: the shard_map runs on another mesh than the Workspace was made for";
  }
  Device& device = found->second;
  const int64_t itemsize = format == kFloat32.name ? kFloat32.itemsize : kBFloat16.itemsize;
  const double timeout_seconds = DeadlineOf(timeout_seconds_).seconds;
  const bool counts = found == devices_.begin();
  if (counts) counts_->AddCall(bytes);

  for (int64_t start = 0, size = 0; start < bytes; start += size) {
    const RoundPlan round =
        NextRound(layout_, CeilDiv(bytes - start, kChunkBytes), asked, ranks_on_device_, device.buffers.multicast != 0);
    const auto kernel = device.kernels.find({round.algorithm, format});
    if (kernel == device.kernels.end()) return "the workspace has no kernel for " + format;
    size = std::min(round.chunks * kChunkBytes, bytes - start);
    uint64_t x_address = reinterpret_cast<uint64_t>(x) + start;
    uint64_t out_address = reinterpret_cast<uint64_t>(out) + start;
    int32_t elements = static_cast<int32_t>(size / itemsize);
    int32_t slot_chunks = static_cast<int32_t>(layout_.slot_chunks);
    int32_t rank = device.buffers.rank;
    uint64_t base = device.buffers.address;
    uint64_t multicast = device.buffers.multicast;
    uint64_t control = device.control;
    uint64_t status = reinterpret_cast<uint64_t>(device.status);
    int64_t timeout_ns = static_cast<int64_t>(timeout_seconds * 1e9);
    int32_t generations = layout_.generations;
    std::vector<void*> parameters{&x_address, &out_address, &elements, &slot_chunks, &rank,       &base,
                                  &multicast, &control,     &status,   &timeout_ns,  &generations};
    for (uint64_t& peer : device.buffers.peers) parameters.push_back(&peer);
    CUlaunchAttribute attribute{};
    attribute.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
    attribute.value.programmaticStreamSerializationAllowed = 1;
    CUlaunchConfig config{};
    config.gridDimX = static_cast<unsigned>(Grid(round.chunks, ranks_on_device_, sm_count_, alone));
    config.gridDimY = config.gridDimZ = 1;
    config.blockDimX = kThreads;
    config.blockDimY = config.blockDimZ = 1;
    config.hStream = stream;
    config.attrs = &attribute;
    config.numAttrs = kernel->second.pdl ? 1 : 0;
    const CudaDriver& driver = CudaDriver::Get();
    const CUresult launched = driver.cuLaunchKernelEx(&config, kernel->second.function, parameters.data(), nullptr);
    if (launched != 0) return "launching the kernel: " + driver.ErrorText(launched);
    if (counts) counts_->AddRounds(round.algorithm, 1);
  }
  return std::nullopt;
}

void CudaWorkspace::Open(std::shared_ptr<CudaWorkspace> workspace) {
  Registry& registry = GetRegistry();
  const std::lock_guard<std::mutex> lock(registry.mutex);
  registry.known[workspace->id()] = workspace;
  registry.open[workspace->id()] = std::move(workspace);
}

void CudaWorkspace::Close(int64_t id) {
  Registry& registry = GetRegistry();
  std::shared_ptr<CudaWorkspace> last;  // released outside the lock
  const std::lock_guard<std::mutex> lock(registry.mutex);
  const auto found = registry.open.find(id);
  if (found == registry.open.end()) return;
  last = std::move(found->second);
  registry.open.erase(found);
}

std::shared_ptr<CudaWorkspace> CudaWorkspace::Find(int64_t id) {
  Registry& registry = GetRegistry();
  const std::lock_guard<std::mutex> lock(registry.mutex);
  const auto found = registry.open.find(id);
  return found == registry.open.end() ? nullptr : found->second;
}

bool CudaWorkspace::InUse(int64_t id) {
  Registry& registry = GetRegistry();
  const std::lock_guard<std::mutex> lock(registry.mutex);
  const auto found = registry.known.find(id);
  return found != registry.known.end() && !found->second.expired();
}

int64_t CudaHandlerCalls() { return handler_calls.load(std::memory_order_relaxed); }

namespace {

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
  std::shared_ptr<CudaWorkspace> workspace = CudaWorkspace::Find(workspace_id);
  if (workspace == nullptr || workspace->layout().tp != tp || workspace->layout().slot_chunks != slot_chunks) {
    return ffi::Unexpected(ffi::Error(ffi::ErrorCode::kFailedPrecondition,
                                      "jax_twoshot.all_reduce over " + std::string(axes) +
                                          ": this program was compiled for workspace " + std::to_string(workspace_id) +
                                          ", which is not open in this process; make the same workspaces in the same "
                                          "order as where it was compiled"));
  }
  return std::make_unique<LaunchSite>(LaunchSite{std::move(workspace)});
}

ffi::Error Execute(CUstream stream, int32_t ordinal, LaunchSite* site, ffi::AnyBuffer x,
                   ffi::Result<ffi::AnyBuffer> out, int64_t, int64_t, int64_t, std::string_view algorithm,
                   std::string_view axes, std::string_view) {
  handler_calls.fetch_add(1, std::memory_order_relaxed);
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
