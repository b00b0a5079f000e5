#include "all_reduce_cuda.h"

#include <algorithm>
#include <cstring>
#include <mutex>

#include "timeout.h"
#include "wait_text.h"

namespace jax_twoshot {

namespace {

constexpr uint32_t kReduce = 1;
constexpr uint32_t kOversize = 3;  // kernels/launch.py
constexpr char kUntilReset[] = ". The results since then are NaN, until Workspace.reset() is called on every process";

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

std::string NotThisDevice(int ordinal) {
  return "device " + std::to_string(ordinal) +
         " is not one of the workspace's: the shard_map runs on another mesh than the Workspace was made for";
}

// Loads a kernel into the current context; throws with the driver's text, and leaves what it has made in `kernel`.
void LoadKernel(const std::string& code, const std::string& symbol, Kernel& kernel) {
  const CudaDriver& driver = CudaDriver::Get();
  const std::string what = "loading kernel " + symbol;
  driver.Check(driver.cuLibraryLoadData(&kernel.library, code.data(), nullptr, nullptr, 0, nullptr, nullptr, 0), what);
  CUkernel handle;
  driver.Check(driver.cuLibraryGetKernel(&handle, kernel.library, symbol.c_str()), what);
  // Brings the code onto the device now: while another rank's kernel spins here, it could not be.
  driver.Check(driver.cuKernelGetFunction(&kernel.function, handle), what);
  // The all-reduce needs no shared memory, but its SMs must keep some to give: an SM changes its split of L1 and shared
  // memory only when it is idle, so a peer's kernel that needs some could not start on an SM where this one waits for
  // that peer. (Seen: 135 waiting CTAs on 132 SMs, and a peer's reduction in front of its call.)
  driver.Check(driver.cuFuncSetAttribute(kernel.function, CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT,
                                         CU_SHAREDMEM_CARVEOUT_MAX_SHARED),
               what);
}

// In the context that it was loaded into. An error has nobody to go to.
void UnloadKernel(const Kernel& kernel) {
  if (kernel.library != nullptr) CudaDriver::Get().cuLibraryUnload(kernel.library);
}

}  // namespace

CudaWorkspace::CudaWorkspace(int64_t id, std::string axes, Layout layout, double timeout_seconds,
                             int64_t one_shot_bytes, int ranks_on_device, int sm_count,
                             const std::vector<Cubin>& cubins, const std::vector<RankBuffers>& ranks)
    : id_(id),
      axes_(std::move(axes)),
      layout_(layout),
      timeout_seconds_(timeout_seconds),
      one_shot_bytes_(one_shot_bytes),
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
    LoadKernel(cubin.code, cubin.symbol, kernel);
  }
  driver.Check(driver.cuCtxSynchronize(), "setting up the workspace");
}

void CudaWorkspace::Release(Device& device) {
  // Errors have nobody to go to: at exit the driver may be gone already.
  try {
    const CudaDriver& driver = CudaDriver::Get();
    const DeviceScope scope(device.buffers.ordinal);
    for (auto& [name, kernel] : device.kernels) UnloadKernel(kernel);
    for (auto& [image, kernel] : loaded_) UnloadKernel(kernel[device.buffers.ordinal]);
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

std::string CudaWorkspace::DescribeOversize(const Device& device, const StatusRecord& status) const {
  return "jax_twoshot over " + axes_ + ": a kernel gave rank " + std::to_string(device.buffers.rank) +
         " a message of " + std::to_string(status.chunk) + " chunks of " + std::to_string(kChunkBytes) +
         " bytes, which workspace " + std::to_string(id_) + " cannot hold: make it with more rows";
}

std::optional<std::string> CudaWorkspace::Failure() const {
  if (resetting_) {
    return "jax_twoshot.all_reduce over " + axes_ + ": workspace " + std::to_string(id_) +
           " is being reset, or was not reset on every process: call reset() on all of them, and make no call before "
           "it returns";
  }
  if (interrupted_) {
    const std::lock_guard<std::mutex> lock(interruption_mutex_);
    return interruption_;
  }
  const Deadline deadline = DeadlineOf(timeout_seconds_);
  for (const auto& [ordinal, device] : devices_) {
    const StatusRecord status = Read(*device.status);
    if (status.state == kFailed) {
      if (status.phase == kOversize) return DescribeOversize(device, status) + kUntilReset;
      const double waited = deadline.seconds * (status.phase == kReduce ? 1 : kCollectPatience);
      return Describe(device, status, waited) + "; " + DeadlineAdvice(deadline) + kUntilReset;
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

void CudaWorkspace::BeginReset() {
  const std::lock_guard<std::mutex> lock(counting_);  // no EndSlowWaits writes to what Clear clears
  resetting_ = true;
}

void CudaWorkspace::EndReset() {
  const std::lock_guard<std::mutex> lock(counting_);
  for (auto& [ordinal, device] : devices_) {
    // Only this word, and at once: others may ask for the Failure meanwhile. The next report writes all of them.
    __atomic_store_n(&device.status->state, 0u, __ATOMIC_RELAXED);
    device.slow = {};
  }
  interrupted_ = false;
  resetting_ = false;
}

std::vector<std::string> CudaWorkspace::SlowWaits() {
  const std::lock_guard<std::mutex> lock(counting_);
  std::vector<std::string> texts;
  for (auto& [ordinal, device] : devices_) {
    const StatusRecord status = Read(*device.status);
    uint32_t slow = kSlow;
    if (status.state == kSlow &&
        __atomic_compare_exchange_n(&device.status->state, &slow, 0u, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
      device.slow = status;
      texts.push_back(Describe(device, status, DeadlineOf(timeout_seconds_).seconds / 10));
      counts_->AddSlowWait();
    }
  }
  return texts;
}

int64_t CudaWorkspace::RoundsDone() {
  const std::lock_guard<std::mutex> lock(counting_);
  return FinishedRounds(devices_.begin()->second);
}

uint32_t CudaWorkspace::FinishedRounds(Device& device) {
  const CudaDriver& driver = CudaDriver::Get();
  const DeviceScope scope(device.buffers.ordinal);
  const std::string what = "reading the control block";
  driver.Check(
      driver.cuMemcpyDtoHAsync(&device.status->copied, device.control + kControlCalls, kWordBytes, device.side), what);
  driver.Check(driver.cuStreamSynchronize(device.side), what);
  return device.status->copied;
}

void CudaWorkspace::EndSlowWaits() {
  const std::lock_guard<std::mutex> lock(counting_);
  if (resetting_) return;  // its calls have ended
  const CudaDriver& driver = CudaDriver::Get();
  for (auto& [ordinal, device] : devices_) {
    // The count goes on when a round is over: while it stands, the round that was slow still is.
    if (device.slow.state != kSlow || FinishedRounds(device) != device.slow.calls) continue;
    if (!interrupted_) {
      const std::lock_guard<std::mutex> interruption_lock(interruption_mutex_);
      interruption_ = Describe(device, device.slow, DeadlineOf(timeout_seconds_).seconds / 10) +
                      "; interrupted by Ctrl-C (SIGINT)" + kUntilReset;
      interrupted_ = true;
    }
    const DeviceScope scope(ordinal);
    const std::string what = "ending a wait";
    device.status->copied = kFailed;
    driver.Check(
        driver.cuMemcpyHtoDAsync(device.control + kControlState, &device.status->copied, kWordBytes, device.side),
        what);
    driver.Check(driver.cuStreamSynchronize(device.side), what);
  }
}

std::optional<std::string> CudaWorkspace::Launch(int ordinal, CUstream stream, std::optional<Algorithm> asked,
                                                 const std::string& format, const void* x, void* out, int64_t bytes,
                                                 bool alone) {
  const auto found = devices_.find(ordinal);
  if (found == devices_.end()) return NotThisDevice(ordinal);
  Device& device = found->second;
  const int64_t itemsize = format == kFloat32.name ? kFloat32.itemsize : kBFloat16.itemsize;
  const bool counts = found == devices_.begin();
  if (counts) counts_->AddCall(bytes);

  for (int64_t start = 0, size = 0; start < bytes; start += size) {
    const RoundPlan round = NextRound(layout_, CeilDiv(bytes - start, kChunkBytes), asked, one_shot_bytes_);
    const auto kernel = device.kernels.find({round.algorithm, format});
    if (kernel == device.kernels.end()) return "the workspace has no kernel for " + format;
    size = std::min(round.chunks * kChunkBytes, bytes - start);
    uint64_t x_address = reinterpret_cast<uint64_t>(x) + start;
    uint64_t out_address = reinterpret_cast<uint64_t>(out) + start;
    int32_t elements = static_cast<int32_t>(size / itemsize);
    const CUresult launched =
        Launch(device, stream, kernel->second, Grid(round.chunks, ranks_on_device_, sm_count_, alone), kThreads, 0,
               {&x_address, &out_address, &elements}, alone);
    if (launched != 0) return "launching the kernel: " + CudaDriver::Get().ErrorText(launched);
    if (counts) counts_->AddRounds(round.algorithm, 1);
  }
  return std::nullopt;
}

CUresult CudaWorkspace::Launch(Device& device, CUstream stream, const Kernel& kernel, int64_t grid, int threads,
                               int shared_memory, std::vector<void*> parameters, bool alone) const {
  int32_t slot_chunks = static_cast<int32_t>(layout_.slot_chunks);
  int32_t rank = device.buffers.rank;
  uint64_t base = device.buffers.address;
  uint64_t multicast = device.buffers.multicast;
  uint64_t control = device.control;
  uint64_t status = reinterpret_cast<uint64_t>(device.status);
  int64_t timeout_ns = static_cast<int64_t>(DeadlineOf(timeout_seconds_).seconds * 1e9);
  int32_t generations = layout_.generations;
  int32_t overlap = alone || ranks_on_device_ == 1;
  const std::initializer_list<void*> trailing{&slot_chunks, &rank,       &base,        &multicast, &control,
                                              &status,      &timeout_ns, &generations, &overlap};
  parameters.insert(parameters.end(), trailing);
  for (uint64_t& peer : device.buffers.peers) parameters.push_back(&peer);
  CUlaunchAttribute attribute{};
  attribute.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
  attribute.value.programmaticStreamSerializationAllowed = 1;
  CUlaunchConfig config{};
  config.gridDimX = static_cast<unsigned>(grid);
  config.gridDimY = config.gridDimZ = 1;
  config.blockDimX = static_cast<unsigned>(threads);
  config.blockDimY = config.blockDimZ = 1;
  config.sharedMemBytes = static_cast<unsigned>(shared_memory);
  config.hStream = stream;
  config.attrs = &attribute;
  config.numAttrs = kernel.pdl ? 1 : 0;
  return CudaDriver::Get().cuLaunchKernelEx(&config, kernel.function, parameters.data(), nullptr);
}

const KernelOnDevices& CudaWorkspace::Load(const KernelImage& image) {
  const std::lock_guard<std::mutex> lock(loading_);
  const auto [entry, made] = loaded_.try_emplace({image.code, image.shared_memory});
  if (!made) return entry->second;
  const CudaDriver& driver = CudaDriver::Get();
  try {
    for (auto& [ordinal, device] : devices_) {
      const DeviceScope scope(ordinal);
      Kernel& kernel = entry->second[ordinal];
      kernel.pdl = image.pdl;
      LoadKernel(image.code, image.symbol, kernel);
      const std::string what = "preparing kernel " + image.symbol;
      driver.Check(driver.cuFuncSetAttribute(kernel.function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                                             image.shared_memory),
                   what);
      int fit = 0;
      driver.Check(driver.cuOccupancyMaxActiveBlocksPerMultiprocessor(&fit, kernel.function, image.threads,
                                                                      static_cast<size_t>(image.shared_memory)),
                   what);
      if (fit < image.ctas_per_sm) {
        throw std::runtime_error("ctas_per_sm: " + std::to_string(fit) + " CTAs of " + std::to_string(image.threads) +
                                 " threads and " + std::to_string(image.shared_memory) +
                                 " bytes of shared memory fit an SM of this GPU, " + std::to_string(image.ctas_per_sm) +
                                 " were promised; ask for fewer");
      }
    }
  } catch (...) {
    auto broken = loaded_.extract(entry);  // the next attempt begins anew, whatever becomes of this one's parts
    for (auto& [ordinal, kernel] : broken.mapped()) {
      try {
        const DeviceScope scope(ordinal);
        UnloadKernel(kernel);
      } catch (const std::runtime_error&) {  // the first error is the one to tell of
      }
    }
    throw;
  }
  return entry->second;
}

std::optional<std::string> CudaWorkspace::Launch(int ordinal, CUstream stream, const KernelOnDevices& kernel,
                                                 int64_t grid, int threads, int shared_memory,
                                                 std::vector<void*> first) {
  const auto found = devices_.find(ordinal);
  if (found == devices_.end()) return NotThisDevice(ordinal);
  if (found == devices_.begin()) counts_->AddCall(0);  // its messages are the kernel's own affair
  const CUresult launched =
      Launch(found->second, stream, kernel.at(ordinal), grid, threads, shared_memory, std::move(first));
  if (launched != 0) return "launching the kernel: " + CudaDriver::Get().ErrorText(launched);
  return std::nullopt;
}

void CudaWorkspace::Open(std::shared_ptr<CudaWorkspace> workspace) {
  Registry& registry = GetRegistry();
  const std::lock_guard<std::mutex> lock(registry.mutex);
  std::erase_if(registry.known, [](const auto& entry) { return entry.second.expired(); });
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

}  // namespace jax_twoshot
