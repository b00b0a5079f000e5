// The Python extension: handlers and constants, nothing else. jax_twoshot/_ffi.py registers the former and checks the
// latter against protocol.py.
#include <nanobind/nanobind.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <map>
#include <stdexcept>
#include <string>
#include <utility>

#include "all_reduce_cuda.h"
#include "call_counts.h"
#include "cpu_handler.h"
#include "cuda_handler.h"
#include "cute_call.h"
#include "faults.h"
#include "interrupts.h"
#include "mailbox_registry.h"
#include "protocol.h"
#include "timeout.h"

namespace nb = nanobind;

namespace {

nb::dict FormatDict(const jax_twoshot::Format& format) {
  nb::dict fields;
  fields["itemsize"] = format.itemsize;
  fields["sentinel"] = format.sentinel;
  fields["negative_zero"] = format.negative_zero;
  fields["nan"] = format.nan;
  return fields;
}

nb::dict ProtocolConstants() {
  nb::dict constants;
  constants["CHUNK_BYTES"] = jax_twoshot::kChunkBytes;
  constants["WORD_BYTES"] = jax_twoshot::kWordBytes;
  constants["MIN_RANKS"] = jax_twoshot::kMinRanks;
  constants["MAX_RANKS"] = jax_twoshot::kMaxRanks;
  constants["GENERATIONS"] = jax_twoshot::kGenerations;
  constants["THREADS"] = jax_twoshot::kThreads;
  constants["CTAS_PER_SM"] = jax_twoshot::kCtasPerSm;
  constants["CHUNKS_AT_ONCE"] = jax_twoshot::kChunksAtOnce;
  constants["GRIDS_IN_FLIGHT"] = jax_twoshot::kGridsInFlight;
  constants["OWN_GPU_SHARE"] = nb::make_tuple(jax_twoshot::kOwnGpuShare[0], jax_twoshot::kOwnGpuShare[1]);
  constants["NORM_THREADS"] = jax_twoshot::kNormThreads;
  constants["NORM_MAX_BLOCKS"] = jax_twoshot::kNormMaxBlocks;
  constants["ALGORITHMS"] = nb::make_tuple(jax_twoshot::kAlgorithms[0], jax_twoshot::kAlgorithms[1]);
  nb::dict formats;
  for (const auto& format : {jax_twoshot::kBFloat16, jax_twoshot::kFloat16, jax_twoshot::kFloat32}) {
    formats[format.name] = FormatDict(format);
  }
  constants["FORMATS"] = formats;
  return constants;
}

nb::dict Stages(XLA_FFI_Handler* instantiate, XLA_FFI_Handler* execute) {
  nb::dict stages;
  stages["instantiate"] = nb::capsule(reinterpret_cast<void*>(instantiate));
  stages["execute"] = nb::capsule(reinterpret_cast<void*>(execute));
  return stages;
}

// Kind by name; "none" takes the fault back.
void PlantFault(const std::string& kind, int rank, const std::string& phase, double seconds, int owner) {
  using Kind = jax_twoshot::Fault::Kind;
  static const std::map<std::string, Kind> kinds{{"delay", Kind::kDelay},
                                                 {"stop", Kind::kStop},
                                                 {"drop", Kind::kDrop},
                                                 {"tear", Kind::kTear},
                                                 {"flip", Kind::kFlip}};
  static const std::map<std::string, jax_twoshot::Phase> phases{{"push", jax_twoshot::Phase::kPush},
                                                                {"reduce", jax_twoshot::Phase::kReduce},
                                                                {"collect", jax_twoshot::Phase::kCollect}};
  jax_twoshot::planted_fault =
      kind == "none" ? nullptr : new jax_twoshot::Fault{kinds.at(kind), rank, phases.at(phase), seconds, owner};
}

}  // namespace

NB_MODULE(_extension, module) {
  // A workspace may live as long as the process: that is no leak to report on a user's terminal.
  nb::set_leak_warnings(false);
  module.attr("built_with_jaxlib") = JAX_TWOSHOT_JAXLIB_VERSION;
  module.def("protocol_constants", &ProtocolConstants);
  module.def("layout_offsets",
             [](int tp, int64_t slot_chunks, int generations, int generation, int slot, int64_t chunk) {
               const jax_twoshot::Layout layout{tp, slot_chunks, generations};
               return std::pair(layout.recv_offset(generation, slot, chunk),
                                layout.gather_offset(generation, slot * slot_chunks + chunk));
             });
  module.def("set_timeout", [](double seconds) { jax_twoshot::timeout_seconds = seconds; });
  module.def("count_interrupts", &jax_twoshot::CountInterrupts);
  module.def("interrupts", [] { return jax_twoshot::interrupts.load(); });
  // For tests/test_faults.py alone.
  module.def("plant_fault", &PlantFault, nb::arg("kind"), nb::arg("rank") = 0, nb::arg("phase") = "push",
             nb::arg("seconds") = 0.0, nb::arg("owner") = 0);
  module.def("launch_grid", &jax_twoshot::Grid);
  module.def("next_round",
             [](int tp, int64_t slot_chunks, int64_t left, const std::string& asked, int64_t one_shot_bytes) {
               const jax_twoshot::Layout layout{tp, slot_chunks};
               const auto [algorithm, chunks] =
                   jax_twoshot::NextRound(layout, left, jax_twoshot::AlgorithmNamed(asked), one_shot_bytes);
               return std::pair(chunks, jax_twoshot::kAlgorithms[static_cast<int>(algorithm)]);
             });
  module.def("cpu_handlers",
             [] { return Stages(jax_twoshot::JaxTwoshotCpuInstantiate, jax_twoshot::JaxTwoshotCpuExecute); });
  module.def("cpu_rms_norm_handlers", [] {
    return Stages(jax_twoshot::JaxTwoshotCpuRmsNormInstantiate, jax_twoshot::JaxTwoshotCpuRmsNormExecute);
  });
  module.def("cpu_moe_combine_handler",
             [] { return nb::capsule(reinterpret_cast<void*>(jax_twoshot::JaxTwoshotCpuMoeCombine)); });
  module.def("cuda_handlers",
             [] { return Stages(jax_twoshot::JaxTwoshotCudaInstantiate, jax_twoshot::JaxTwoshotCudaExecute); });
  module.def("cute_handlers",
             [] { return Stages(jax_twoshot::JaxTwoshotCuteInstantiate, jax_twoshot::JaxTwoshotCuteExecute); });

  nb::class_<jax_twoshot::CallCounts>(module, "CallCounts")
      .def_prop_ro("calls", &jax_twoshot::CallCounts::calls)
      .def_prop_ro("bytes", &jax_twoshot::CallCounts::bytes)
      .def_prop_ro("slow_waits", &jax_twoshot::CallCounts::slow_waits)
      .def_prop_ro("failure", &jax_twoshot::CallCounts::failure)
      .def("rounds", [](jax_twoshot::CallCounts& counts, const std::string& algorithm) {
        return counts.rounds(jax_twoshot::AlgorithmNamed(algorithm).value());
      });
  module.def("call_counts", &jax_twoshot::CallCounts::Of);

  // Open, looked at and closed by jax_twoshot/workspace.py.
  nb::class_<jax_twoshot::CudaWorkspace>(module, "CudaWorkspace")
      .def("failure", &jax_twoshot::CudaWorkspace::Failure)
      .def("slow_waits", &jax_twoshot::CudaWorkspace::SlowWaits, nb::call_guard<nb::gil_scoped_release>())
      .def("rounds_done", &jax_twoshot::CudaWorkspace::RoundsDone, nb::call_guard<nb::gil_scoped_release>())
      .def("begin_reset", &jax_twoshot::CudaWorkspace::BeginReset, nb::call_guard<nb::gil_scoped_release>())
      .def("clear", &jax_twoshot::CudaWorkspace::Clear, nb::call_guard<nb::gil_scoped_release>())
      .def("end_reset", &jax_twoshot::CudaWorkspace::EndReset, nb::call_guard<nb::gil_scoped_release>())
      .def("end_slow_waits", &jax_twoshot::CudaWorkspace::EndSlowWaits, nb::call_guard<nb::gil_scoped_release>())
      .def("control", &jax_twoshot::CudaWorkspace::Control)
      // For bench.py: the kernels alone, on a stream of the caller's own.
      .def(
          "launch",
          [](jax_twoshot::CudaWorkspace& workspace, int ordinal, uint64_t stream, const std::string& format, uint64_t x,
             uint64_t out, int64_t bytes, const std::string& algorithm, bool alone) {
            const auto error = workspace.Launch(
                ordinal, reinterpret_cast<jax_twoshot::CUstream>(stream), jax_twoshot::AlgorithmNamed(algorithm),
                format, reinterpret_cast<const void*>(x), reinterpret_cast<void*>(out), bytes, alone);
            if (error) throw std::runtime_error(*error);
          },
          nb::arg("ordinal"), nb::arg("stream"), nb::arg("format"), nb::arg("x"), nb::arg("out"), nb::arg("bytes"),
          nb::arg("algorithm") = "auto", nb::arg("alone") = false)
      .def(
          "launch_kernel",
          [](jax_twoshot::CudaWorkspace& workspace, int ordinal, uint64_t stream, const nb::bytes& image,
             const std::string& symbol, bool pdl, int64_t grid, int threads, int ctas_per_sm, int shared_memory,
             std::vector<uint64_t> addresses, std::vector<int32_t> scalars) {
            const jax_twoshot::KernelOnDevices& kernel = workspace.Load(
                {std::string(image.c_str(), image.size()), symbol, threads, ctas_per_sm, shared_memory, pdl});
            std::vector<void*> parameters;
            for (uint64_t& address : addresses) parameters.push_back(&address);
            for (int32_t& scalar : scalars) parameters.push_back(&scalar);
            const auto error = workspace.Launch(ordinal, reinterpret_cast<jax_twoshot::CUstream>(stream), kernel, grid,
                                                threads, shared_memory, std::move(parameters));
            if (error) throw std::runtime_error(*error);
          },
          nb::arg("ordinal"), nb::arg("stream"), nb::kw_only(), nb::arg("image"), nb::arg("symbol"), nb::arg("pdl"),
          nb::arg("grid"), nb::arg("threads"), nb::arg("ctas_per_sm"), nb::arg("shared_memory"), nb::arg("addresses"),
          nb::arg("scalars"));
  using Cubin = std::tuple<std::string, std::string, nb::bytes, std::string, bool>;
  using Rank = std::tuple<int, int, uint64_t, uint64_t, std::vector<uint64_t>>;
  module.def("open_cuda_workspace", [](int64_t id, std::string axes, int tp, int64_t slot_chunks, int generations,
                                       double timeout, int64_t one_shot_bytes, int ranks_on_device, int sm_count,
                                       const std::vector<Cubin>& cubins, const std::vector<Rank>& ranks) {
    std::vector<jax_twoshot::Cubin> code;
    for (const auto& [algorithm, format, bytes, symbol, pdl] : cubins) {
      code.push_back({jax_twoshot::AlgorithmNamed(algorithm).value(), format, std::string(bytes.c_str(), bytes.size()),
                      symbol, pdl});
    }
    std::vector<jax_twoshot::RankBuffers> buffers;
    for (const auto& [ordinal, rank, address, multicast, peers] : ranks) {
      buffers.push_back({ordinal, rank, address, multicast, peers});
    }
    const jax_twoshot::Layout layout{tp, slot_chunks, generations};
    const nb::gil_scoped_release release;  // the driver waits for kernels, which may wait for what Python starts
    auto workspace = std::make_shared<jax_twoshot::CudaWorkspace>(id, std::move(axes), layout, timeout, one_shot_bytes,
                                                                  ranks_on_device, sm_count, code, buffers);
    jax_twoshot::CudaWorkspace::Open(workspace);
    return workspace;
  });
  // Meetings of CPU calls that are not over: for tests, which count what failed ones leave.
  module.def("cpu_meetings", [] { return jax_twoshot::MailboxRegistry::Get().meetings(); });
  module.def("cuda_handler_calls", &jax_twoshot::CudaHandlerCalls);
  module.def("close_cuda_workspace", &jax_twoshot::CudaWorkspace::Close, nb::call_guard<nb::gil_scoped_release>());
  module.def("cuda_workspace_in_use", &jax_twoshot::CudaWorkspace::InUse);
}
