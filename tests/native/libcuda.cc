#include "libcuda.h"

#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <set>
#include <string>
#include <vector>

#include "cuda_driver.h"

using namespace jax_twoshot;

namespace {

constexpr int kDevices = 2;
constexpr CUresult kInvalidValue = 1;
constexpr CUresult kOutOfMemory = 2;
constexpr CUresult kInvalidDevice = 101;
constexpr CUresult kInvalidContext = 201;
constexpr CUresult kInvalidHandle = 400;

struct Driver {
  std::mutex mutex;
  std::condition_variable change;
  int retained[kDevices] = {};
  int current = 0;       // contexts on the stacks of all threads
  std::set<void*> made;  // allocations, streams, libraries
  std::string failing, holding;
  int calls_to_failure = 0, waiting = 0;
  bool failed = false;
  void (*kernel)(void**) = nullptr;
};

Driver& Get() {
  static auto* driver = new Driver;  // never destroyed, as little as the driver is
  return *driver;
}

thread_local std::vector<int> context_stack;

CUcontext ContextOf(int device) { return reinterpret_cast<CUcontext>(static_cast<intptr_t>(device) + 1); }
int DeviceOf(CUcontext context) { return static_cast<int>(reinterpret_cast<intptr_t>(context)) - 1; }

// What each call does first.
CUresult Enter(const char* symbol) {
  Driver& driver = Get();
  std::unique_lock<std::mutex> lock(driver.mutex);
  if (driver.holding == symbol) {
    ++driver.waiting;
    driver.change.wait(lock, [&] { return driver.holding != symbol; });
    --driver.waiting;
  }
  if (driver.failing != symbol || --driver.calls_to_failure > 0) return 0;
  driver.failing.clear();
  driver.failed = true;
  return kOutOfMemory;
}

CUresult EnterInContext(const char* symbol) {
  if (const CUresult error = Enter(symbol)) return error;
  return context_stack.empty() ? kInvalidContext : 0;
}

void* Make(size_t bytes) {
  Driver& driver = Get();
  const std::lock_guard<std::mutex> lock(driver.mutex);
  return *driver.made.insert(std::calloc(1, bytes)).first;
}

CUresult Destroy(void* object, CUresult unknown) {
  Driver& driver = Get();
  const std::lock_guard<std::mutex> lock(driver.mutex);
  if (driver.made.erase(object) == 0) return unknown;
  std::free(object);
  return 0;
}

bool Exists(const void* object) {
  Driver& driver = Get();
  const std::lock_guard<std::mutex> lock(driver.mutex);
  return driver.made.contains(const_cast<void*>(object));
}

// By words: a GPU's memory may be written and read at once.
void CopyWords(void* to, const void* from, size_t bytes) {
  for (size_t i = 0; i < bytes / sizeof(uint32_t); ++i) {
    const uint32_t word = __atomic_load_n(static_cast<const uint32_t*>(from) + i, __ATOMIC_RELAXED);
    __atomic_store_n(static_cast<uint32_t*>(to) + i, word, __ATOMIC_RELAXED);
  }
}

void* Pointer(CUdeviceptr address) { return reinterpret_cast<void*>(address); }

}  // namespace

extern "C" {

int64_t held() {
  Driver& driver = Get();
  const std::lock_guard<std::mutex> lock(driver.mutex);
  int64_t count = driver.current + static_cast<int64_t>(driver.made.size());
  for (const int retained : driver.retained) count += retained;
  return count;
}

void fail(const char* symbol, int nth) {
  Driver& driver = Get();
  const std::lock_guard<std::mutex> lock(driver.mutex);
  driver.failing = symbol == nullptr ? "" : symbol;
  driver.calls_to_failure = nth;
  driver.failed = false;
}

bool failed() {
  Driver& driver = Get();
  const std::lock_guard<std::mutex> lock(driver.mutex);
  return driver.failed;
}

void hold(const char* symbol) {
  Driver& driver = Get();
  const std::lock_guard<std::mutex> lock(driver.mutex);
  driver.holding = symbol == nullptr ? "" : symbol;
  driver.change.notify_all();
}

int waiting() {
  Driver& driver = Get();
  const std::lock_guard<std::mutex> lock(driver.mutex);
  return driver.waiting;
}

void set_kernel(void (*kernel)(void**)) { Get().kernel = kernel; }

CUresult cuInit(unsigned) { return Enter("cuInit"); }

CUresult cuGetErrorName(CUresult error, const char** name) {
  *name = error == kOutOfMemory ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_OF_THE_STAND_IN";
  return 0;
}

CUresult cuGetErrorString(CUresult, const char** text) {
  *text = "said by the stand-in";
  return 0;
}

CUresult cuDeviceGet(CUdevice* device, int ordinal) {
  if (const CUresult error = Enter("cuDeviceGet")) return error;
  if (ordinal < 0 || ordinal >= kDevices) return kInvalidDevice;
  *device = ordinal;
  return 0;
}

CUresult cuDevicePrimaryCtxRetain(CUcontext* context, CUdevice device) {
  if (const CUresult error = Enter("cuDevicePrimaryCtxRetain")) return error;
  Driver& driver = Get();
  const std::lock_guard<std::mutex> lock(driver.mutex);
  ++driver.retained[device];
  *context = ContextOf(device);
  return 0;
}

CUresult cuDevicePrimaryCtxRelease_v2(CUdevice device) {
  Driver& driver = Get();
  const std::lock_guard<std::mutex> lock(driver.mutex);
  if (driver.retained[device] == 0) return kInvalidContext;
  --driver.retained[device];
  return 0;
}

CUresult cuCtxPushCurrent_v2(CUcontext context) {
  if (const CUresult error = Enter("cuCtxPushCurrent")) return error;
  Driver& driver = Get();
  const std::lock_guard<std::mutex> lock(driver.mutex);
  if (driver.retained[DeviceOf(context)] == 0) return kInvalidContext;
  context_stack.push_back(DeviceOf(context));
  ++driver.current;
  return 0;
}

CUresult cuCtxPopCurrent_v2(CUcontext* context) {
  Driver& driver = Get();
  const std::lock_guard<std::mutex> lock(driver.mutex);
  if (context_stack.empty()) return kInvalidContext;
  *context = ContextOf(context_stack.back());
  context_stack.pop_back();
  --driver.current;
  return 0;
}

CUresult cuCtxSynchronize() { return EnterInContext("cuCtxSynchronize"); }

CUresult cuMemAlloc_v2(CUdeviceptr* address, size_t bytes) {
  if (const CUresult error = EnterInContext("cuMemAlloc")) return error;
  *address = reinterpret_cast<CUdeviceptr>(Make(bytes));
  return 0;
}

CUresult cuMemFree_v2(CUdeviceptr address) {
  if (const CUresult error = EnterInContext("cuMemFree")) return error;
  return Destroy(Pointer(address), kInvalidValue);
}

CUresult cuMemHostAlloc(void** address, size_t bytes, unsigned) {
  if (const CUresult error = EnterInContext("cuMemHostAlloc")) return error;
  *address = Make(bytes);
  return 0;
}

CUresult cuMemFreeHost(void* address) {
  if (const CUresult error = EnterInContext("cuMemFreeHost")) return error;
  return Destroy(address, kInvalidValue);
}

CUresult cuMemcpyDtoHAsync_v2(void* to, CUdeviceptr from, size_t bytes, CUstream stream) {
  if (const CUresult error = EnterInContext("cuMemcpyDtoHAsync")) return error;
  if (!Exists(stream)) return kInvalidHandle;
  CopyWords(to, Pointer(from), bytes);
  return 0;
}

CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr to, const void* from, size_t bytes, CUstream stream) {
  if (const CUresult error = EnterInContext("cuMemcpyHtoDAsync")) return error;
  if (!Exists(stream)) return kInvalidHandle;
  CopyWords(Pointer(to), from, bytes);
  return 0;
}

CUresult cuStreamCreate(CUstream* stream, unsigned) {
  if (const CUresult error = EnterInContext("cuStreamCreate")) return error;
  *stream = static_cast<CUstream>(Make(1));
  return 0;
}

CUresult cuStreamSynchronize(CUstream stream) {
  if (const CUresult error = Enter("cuStreamSynchronize")) return error;
  return Exists(stream) ? 0 : kInvalidHandle;
}

CUresult cuStreamDestroy_v2(CUstream stream) {
  if (const CUresult error = Enter("cuStreamDestroy")) return error;
  return Destroy(stream, kInvalidHandle);
}

CUresult cuMemsetD32_v2(CUdeviceptr address, unsigned word, size_t words) {
  if (const CUresult error = EnterInContext("cuMemsetD32")) return error;
  const std::vector<unsigned> values(words, word);
  CopyWords(Pointer(address), values.data(), words * sizeof word);
  return 0;
}

CUresult cuLibraryLoadData(CUlibrary* library, const void*, void*, void*, unsigned, void*, void*, unsigned) {
  if (const CUresult error = EnterInContext("cuLibraryLoadData")) return error;
  *library = static_cast<CUlibrary>(Make(1));
  return 0;
}

CUresult cuLibraryUnload(CUlibrary library) {
  if (const CUresult error = Enter("cuLibraryUnload")) return error;
  return Destroy(library, kInvalidHandle);
}

CUresult cuLibraryGetKernel(CUkernel* kernel, CUlibrary library, const char*) {
  if (const CUresult error = Enter("cuLibraryGetKernel")) return error;
  if (!Exists(library)) return kInvalidHandle;
  *kernel = reinterpret_cast<CUkernel>(library);
  return 0;
}

CUresult cuKernelGetFunction(CUfunction* function, CUkernel kernel) {
  if (const CUresult error = EnterInContext("cuKernelGetFunction")) return error;
  if (!Exists(kernel)) return kInvalidHandle;
  *function = reinterpret_cast<CUfunction>(kernel);
  return 0;
}

CUresult cuFuncSetAttribute(CUfunction function, int, int) {
  if (const CUresult error = Enter("cuFuncSetAttribute")) return error;
  return Exists(function) ? 0 : kInvalidHandle;
}

CUresult cuOccupancyMaxActiveBlocksPerMultiprocessor(int* blocks, CUfunction, int threads, size_t) {
  if (const CUresult error = Enter("cuOccupancyMaxActiveBlocksPerMultiprocessor")) return error;
  *blocks = 2048 / threads;
  return 0;
}

CUresult cuLaunchKernelEx(const CUlaunchConfig* config, CUfunction function, void** parameters, void**) {
  if (const CUresult error = Enter("cuLaunchKernelEx")) return error;
  if (!Exists(function) || !Exists(config->hStream)) return kInvalidHandle;
  Get().kernel(parameters);
  return 0;
}

}  // extern "C"
