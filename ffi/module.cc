// The Python extension: handlers and constants, nothing else. jax_twoshot/_ffi.py registers the former and checks the
// latter against protocol.py.
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>

#include "cpu_handler.h"
#include "protocol.h"
#include "timeout.h"

namespace nb = nanobind;

namespace {

template <class T>
nb::capsule Capsule(T* pointer) {
  return nb::capsule(reinterpret_cast<void*>(pointer));
}

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
  nb::dict formats;
  for (const auto& format : {jax_twoshot::kBFloat16, jax_twoshot::kFloat16, jax_twoshot::kFloat32}) {
    formats[format.name] = FormatDict(format);
  }
  constants["FORMATS"] = formats;
  return constants;
}

}  // namespace

NB_MODULE(_extension, module) {
  module.def("protocol_constants", &ProtocolConstants);
  module.def("layout_offsets",
             [](int tp, int64_t slot_chunks, int generations, int generation, int slot, int64_t chunk) {
               const jax_twoshot::Layout layout{tp, slot_chunks, generations};
               return std::pair(layout.recv_offset(generation, slot, chunk),
                                layout.gather_offset(generation, slot * slot_chunks + chunk));
             });
  module.def("set_timeout", [](double seconds) { jax_twoshot::timeout_seconds = seconds; });
  module.def("cpu_handlers", [] {
    nb::dict stages;
    stages["instantiate"] = Capsule(jax_twoshot::JaxTwoshotCpuInstantiate);
    stages["execute"] = Capsule(jax_twoshot::JaxTwoshotCpuExecute);
    return stages;
  });
}
