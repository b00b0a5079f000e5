// The all-reduce on CUDA devices: what a workspace holds in this process, and how it launches the kernels of
// jax_twoshot/kernels/all_reduce.py.
#ifndef JAX_TWOSHOT_ALL_REDUCE_CUDA_H_
#define JAX_TWOSHOT_ALL_REDUCE_CUDA_H_

#include <atomic>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "call_counts.h"
#include "cuda_driver.h"
#include "protocol.h"

namespace jax_twoshot {

// A compiled kernel, as jax_twoshot/cubin.py found it.
struct Cubin {
  Algorithm algorithm;
  std::string format;
  std::string code;
  std::string symbol;
  bool pdl;
};

// One rank's symmetric allocation, as jax_twoshot/symmetric.py made it: addresses on device `ordinal`.
struct RankBuffers {
  int ordinal;
  int rank;
  uint64_t address;
  uint64_t multicast;  // 0: store to each peer
  std::vector<uint64_t> peers;
};

// Mirrors kernels/launch.py: the control block is eight words, all zero in a new workspace; byte offsets of those that
// the host reads or writes, and states.
inline constexpr size_t kControlBytes = 32;
inline constexpr size_t kControlState = 8;
inline constexpr size_t kControlCalls = 12;
inline constexpr uint32_t kSlow = 1;
inline constexpr uint32_t kFailed = 2;

// The record that a kernel writes to pinned host memory when a wait is slow or has failed.
struct StatusRecord {
  uint32_t state;  // 0, kSlow, kFailed; written last
  uint32_t phase;  // 1 reduce, 2 collect; 3 no wait, but a message of `chunk` chunks that does not fit
  uint32_t generation;
  uint32_t chunk;  // of the round
  uint32_t missing[2];
  uint32_t calls;   // rounds before this one, modulo 2^32
  uint32_t copied;  // not the kernel's: what the host copies to or from the control block
};

// A compiled kernel that is no all-reduce, and what it takes of an SM.
struct KernelImage {
  std::string code;
  std::string symbol;
  int threads;
  int ctas_per_sm;  // that it was compiled for
  int shared_memory;
  bool pdl;
};

// A kernel on one device.
struct Kernel {
  CUlibrary library = nullptr;
  CUfunction function = nullptr;
  bool pdl = false;
};
using KernelOnDevices = std::map<int, Kernel>;  // by ordinal

// Everything of a workspace that is not symmetric memory: kernels, and each local device's small buffers. It lives as
// long as the Python Workspace or a compiled program needs it.
class CudaWorkspace {
 public:
  // Loads the kernels and allocates; throws std::runtime_error with the driver's text, nothing then left allocated.
  CudaWorkspace(int64_t id, std::string axes, Layout layout, double timeout_seconds, int64_t one_shot_bytes,
                int ranks_on_device, int sm_count, const std::vector<Cubin>& cubins,
                const std::vector<RankBuffers>& ranks);
  ~CudaWorkspace();

  int64_t id() const { return id_; }
  const Layout& layout() const { return layout_; }

  // Why no further call can succeed, or nothing. Reads host memory only.
  std::optional<std::string> Failure() const;
  // A reset, in which every process of the mesh does the same: from BeginReset to EndReset each call fails at once;
  // Clear makes the control blocks those of a new workspace, and returns when that is done.
  void BeginReset();
  void Clear();
  void EndReset();
  // Ends the waits that SlowWaits has told of and that still last: as if their deadline had passed.
  void EndSlowWaits();
  // Address of a device's control block: for tests, which make it say what only many calls would.
  uint64_t Control(int ordinal) const { return devices_.at(ordinal).control; }
  // What every rank of this process that waits for long waits for; each wait is told of once.
  std::vector<std::string> SlowWaits();

  // Rounds that the first device of this process has finished since the workspace was made or reset, modulo 2^32, also
  // those that XLA replayed without calling the handler. Waits for no call; throws with the driver's text.
  int64_t RoundsDone();

  // One launch a round of the message, on `stream` of device `ordinal`. An error text, or nothing. `asked` is nothing
  // where each round is to take the algorithm that is faster for it; `alone` is Grid's, and lets launches overlap (R5).
  std::optional<std::string> Launch(int ordinal, CUstream stream, std::optional<Algorithm> asked,
                                    const std::string& format, const void* x, void* out, int64_t bytes, bool alone);

  // Brings another kernel onto every local device, or finds that it is there; it stays as long as the workspace. Throws
  // std::runtime_error with the driver's text, or if fewer than `ctas_per_sm` CTAs fit an SM.
  const KernelOnDevices& Load(const KernelImage& image);
  // Most CTAs of a kernel that are sure to be resident together (R5).
  int64_t MostCtas(int ctas_per_sm) const { return jax_twoshot::MostCtas(ranks_on_device_, sm_count_, ctas_per_sm); }
  // Launches it; its parameters are `first`, one pointer each, and what every kernel of a workspace gets. An error
  // text, or nothing.
  std::optional<std::string> Launch(int ordinal, CUstream stream, const KernelOnDevices& kernel, int64_t grid,
                                    int threads, int shared_memory, std::vector<void*> first);

  // The workspaces that Python has open, by id.
  static void Open(std::shared_ptr<CudaWorkspace> workspace);
  static void Close(int64_t id);
  static std::shared_ptr<CudaWorkspace> Find(int64_t id);
  // Whether a compiled program still holds the workspace that had this id.
  static bool InUse(int64_t id);

 private:
  struct Device {
    RankBuffers buffers;
    CUdeviceptr control = 0;
    StatusRecord* status = nullptr;
    CUstream side = nullptr;  // for what must not wait for the calls in flight
    StatusRecord slow{};      // the last slow wait that SlowWaits told of
    std::map<std::pair<Algorithm, std::string>, Kernel> kernels;
  };

  uint32_t FinishedRounds(Device& device);
  void Prepare(Device& device, const std::vector<Cubin>& cubins);
  void Release(Device& device);
  // One launch on `device`: `parameters` and, after them, those that every kernel of a workspace gets.
  CUresult Launch(Device& device, CUstream stream, const Kernel& kernel, int64_t grid, int threads, int shared_memory,
                  std::vector<void*> parameters, bool alone = false) const;
  std::string Describe(const Device& device, const StatusRecord& status, double seconds) const;
  std::string DescribeOversize(const Device& device, const StatusRecord& status) const;

  int64_t id_;
  std::string axes_;
  Layout layout_;
  double timeout_seconds_;  // DeadlineOf's
  int64_t one_shot_bytes_;
  int ranks_on_device_;
  int sm_count_;
  std::atomic<bool> resetting_{false};
  mutable std::mutex interruption_mutex_;
  std::string interruption_;  // why no further call can succeed, once interrupted_ is set
  std::atomic<bool> interrupted_{false};
  const std::shared_ptr<CallCounts> counts_;
  std::mutex counting_;  // of what goes through `side`, and of `slow`
  std::map<int, Device> devices_;
  std::mutex loading_;
  std::map<std::pair<std::string, int>, KernelOnDevices> loaded_;  // by code and shared memory
};

}  // namespace jax_twoshot

#endif  // JAX_TWOSHOT_ALL_REDUCE_CUDA_H_
