#include "cuda_driver.h"

#include <dlfcn.h>

namespace jax_twoshot {
namespace {

template <class Function>
void Find(void* library, const char* symbol, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, symbol));
  if (function == nullptr) {
    throw std::runtime_error(std::string("libcuda.so.1 has no ") + symbol +
                             ": install an NVIDIA driver of CUDA 12.4 or newer");
  }
}

CudaDriver Open() {
  void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
  if (library == nullptr) {
    throw std::runtime_error(std::string("no CUDA driver: ") + dlerror());
  }
  CudaDriver driver;
  Find(library, "cuInit", driver.cuInit);
  Find(library, "cuGetErrorName", driver.cuGetErrorName);
  Find(library, "cuGetErrorString", driver.cuGetErrorString);
  Find(library, "cuDeviceGet", driver.cuDeviceGet);
  Find(library, "cuDevicePrimaryCtxRetain", driver.cuDevicePrimaryCtxRetain);
  Find(library, "cuDevicePrimaryCtxRelease_v2", driver.cuDevicePrimaryCtxRelease);
  Find(library, "cuCtxPushCurrent_v2", driver.cuCtxPushCurrent);
  Find(library, "cuCtxPopCurrent_v2", driver.cuCtxPopCurrent);
  Find(library, "cuCtxSynchronize", driver.cuCtxSynchronize);
  Find(library, "cuMemAlloc_v2", driver.cuMemAlloc);
  Find(library, "cuMemFree_v2", driver.cuMemFree);
  Find(library, "cuMemHostAlloc", driver.cuMemHostAlloc);
  Find(library, "cuMemFreeHost", driver.cuMemFreeHost);
  Find(library, "cuMemcpyDtoHAsync_v2", driver.cuMemcpyDtoHAsync);
  Find(library, "cuMemcpyHtoDAsync_v2", driver.cuMemcpyHtoDAsync);
  Find(library, "cuStreamCreate", driver.cuStreamCreate);
  Find(library, "cuStreamSynchronize", driver.cuStreamSynchronize);
  Find(library, "cuStreamDestroy_v2", driver.cuStreamDestroy);
  Find(library, "cuMemsetD32_v2", driver.cuMemsetD32);
  Find(library, "cuLibraryLoadData", driver.cuLibraryLoadData);
  Find(library, "cuLibraryUnload", driver.cuLibraryUnload);
  Find(library, "cuLibraryGetKernel", driver.cuLibraryGetKernel);
  Find(library, "cuKernelGetFunction", driver.cuKernelGetFunction);
  Find(library, "cuFuncSetAttribute", driver.cuFuncSetAttribute);
  Find(library, "cuOccupancyMaxActiveBlocksPerMultiprocessor", driver.cuOccupancyMaxActiveBlocksPerMultiprocessor);
  Find(library, "cuLaunchKernelEx", driver.cuLaunchKernelEx);
  driver.Check(driver.cuInit(0), "cuInit");
  return driver;
}

}  // namespace

const CudaDriver& CudaDriver::Get() {
  static const CudaDriver driver = Open();  // a failed attempt is made again by the next caller
  return driver;
}

std::string CudaDriver::ErrorText(CUresult error) const {
  const char* name = nullptr;
  const char* text = nullptr;
  if (cuGetErrorName(error, &name) != 0 || name == nullptr) return "CUDA error " + std::to_string(error);
  if (cuGetErrorString(error, &text) != 0 || text == nullptr) return name;
  return std::string(name) + ": " + text;
}

DeviceScope::DeviceScope(int ordinal) {
  const CudaDriver& driver = CudaDriver::Get();
  const std::string device = "device " + std::to_string(ordinal);
  driver.Check(driver.cuDeviceGet(&device_, ordinal), device);
  CUcontext context;
  driver.Check(driver.cuDevicePrimaryCtxRetain(&context, device_), "primary context of " + device);
  const CUresult pushed = driver.cuCtxPushCurrent(context);
  if (pushed != 0) {
    driver.cuDevicePrimaryCtxRelease(device_);
    driver.Check(pushed, "primary context of " + device);
  }
}

DeviceScope::~DeviceScope() {
  const CudaDriver& driver = CudaDriver::Get();
  CUcontext context;
  driver.cuCtxPopCurrent(&context);
  driver.cuDevicePrimaryCtxRelease(device_);
}

}  // namespace jax_twoshot
