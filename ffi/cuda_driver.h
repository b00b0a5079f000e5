// The part of the CUDA driver API that the library uses, opened when it is first needed: neither building nor importing
// jax_twoshot takes CUDA. The declarations are those of the driver's stable C ABI.
#ifndef JAX_TWOSHOT_CUDA_DRIVER_H_
#define JAX_TWOSHOT_CUDA_DRIVER_H_

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>

namespace jax_twoshot {

using CUresult = int;
using CUdevice = int;
using CUdeviceptr = unsigned long long;
using CUcontext = struct CUctx_st*;
using CUstream = struct CUstream_st*;
using CUlibrary = struct CUlib_st*;
using CUkernel = struct CUkern_st*;
using CUfunction = struct CUfunc_st*;

inline constexpr unsigned CU_STREAM_NON_BLOCKING = 0x01;
inline constexpr unsigned CU_MEMHOSTALLOC_PORTABLE = 0x01;
inline constexpr unsigned CU_MEMHOSTALLOC_DEVICEMAP = 0x02;
inline constexpr int CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES = 8;
inline constexpr int CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT = 9;
inline constexpr int CU_SHAREDMEM_CARVEOUT_MAX_SHARED = 100;
inline constexpr int CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION = 6;

struct CUlaunchAttribute {
  int id;
  char pad[4];
  union {
    char pad[64];
    int programmaticStreamSerializationAllowed;
  } value;
};

struct CUlaunchConfig {
  unsigned gridDimX, gridDimY, gridDimZ;
  unsigned blockDimX, blockDimY, blockDimZ;
  unsigned sharedMemBytes;
  CUstream hStream;
  CUlaunchAttribute* attrs;
  unsigned numAttrs;
};

struct CudaDriver {
  CUresult (*cuInit)(unsigned flags);
  CUresult (*cuGetErrorName)(CUresult error, const char** name);
  CUresult (*cuGetErrorString)(CUresult error, const char** text);
  CUresult (*cuDeviceGet)(CUdevice* device, int ordinal);
  CUresult (*cuDevicePrimaryCtxRetain)(CUcontext* context, CUdevice device);
  CUresult (*cuDevicePrimaryCtxRelease)(CUdevice device);
  CUresult (*cuCtxPushCurrent)(CUcontext context);
  CUresult (*cuCtxPopCurrent)(CUcontext* context);
  CUresult (*cuCtxSynchronize)();
  CUresult (*cuMemAlloc)(CUdeviceptr* address, size_t bytes);
  CUresult (*cuMemFree)(CUdeviceptr address);
  CUresult (*cuMemHostAlloc)(void** address, size_t bytes, unsigned flags);
  CUresult (*cuMemFreeHost)(void* address);
  CUresult (*cuMemcpyDtoHAsync)(void* to, CUdeviceptr from, size_t bytes, CUstream stream);
  CUresult (*cuMemcpyHtoDAsync)(CUdeviceptr to, const void* from, size_t bytes, CUstream stream);
  CUresult (*cuStreamCreate)(CUstream* stream, unsigned flags);
  CUresult (*cuStreamSynchronize)(CUstream stream);
  CUresult (*cuStreamDestroy)(CUstream stream);
  CUresult (*cuMemsetD32)(CUdeviceptr address, unsigned word, size_t words);
  CUresult (*cuLibraryLoadData)(CUlibrary* library, const void* code, void* jit_options, void* jit_values,
                                unsigned jit_count, void* options, void* values, unsigned count);
  CUresult (*cuLibraryUnload)(CUlibrary library);
  CUresult (*cuLibraryGetKernel)(CUkernel* kernel, CUlibrary library, const char* name);
  CUresult (*cuKernelGetFunction)(CUfunction* function, CUkernel kernel);
  CUresult (*cuFuncSetAttribute)(CUfunction function, int attribute, int value);
  CUresult (*cuOccupancyMaxActiveBlocksPerMultiprocessor)(int* blocks, CUfunction function, int threads,
                                                          size_t shared_memory);
  CUresult (*cuLaunchKernelEx)(const CUlaunchConfig* config, CUfunction function, void** parameters, void** extra);

  // The driver, opened and initialised; throws std::runtime_error that says what is missing.
  static const CudaDriver& Get();

  // "CUDA_ERROR_...: text" of the driver.
  std::string ErrorText(CUresult error) const;

  // Throws std::runtime_error, "`what`: `error text`", unless the call succeeded.
  void Check(CUresult result, const std::string& what) const {
    if (result != 0) throw std::runtime_error(what + ": " + ErrorText(result));
  }
};

// Makes a device's primary context, the one that XLA and torch use, current in this scope.
class DeviceScope {
 public:
  explicit DeviceScope(int ordinal);
  ~DeviceScope();
  DeviceScope(const DeviceScope&) = delete;
  DeviceScope& operator=(const DeviceScope&) = delete;

 private:
  CUdevice device_;
};

}  // namespace jax_twoshot

#endif  // JAX_TWOSHOT_CUDA_DRIVER_H_
