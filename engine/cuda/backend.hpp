// The CUDA backend as the entry points see it: the sweeps of afflux.hpp over vectors on one device, whole, after all
// checks. Lists and what is returned lie on the host.
#pragma once
#include <string>
#include <vector>

#include "cpu/kernels.hpp"

namespace afflux::cuda {

// Where a call runs. `stream` is a cudaStream_t; null: the default one.
struct Where {
  std::int32_t device;
  void* stream;
};

// What encoded rows get beside their codes: the first kRowHead bytes of each, one after the other, and zeros where they
// are blank.
struct NewHeads {
  std::vector<unsigned char*> rows;
  std::vector<unsigned char> heads;
  Blanks blanks;
};

// Those that return something wait for the stream, the others only put their work on it. An error of CUDA's throws
// std::runtime_error, which names file and line; too little memory throws std::bad_alloc before anything is changed.
struct Backend {
  // Empty if the device can be used.
  std::string (*why_not)(std::int32_t device);
  // `parts` are [first, last), and *last closes them, as for Kernels::ingest.
  IngestSums (*ingest)(const Where& where, const Part* first, const Part* last, const View<void>& slot);
  // sums[i * right_count + j] = <left[i], right[j]>, for symmetric panels where j <= i
  void (*gram)(const Where& where, const GramPanels& panels, double* sums);
  bool (*apply)(const Where& where, const Pass& pass, const RowHeads* heads, const NewHeads& renewed);
  // Without the head.
  void (*encode)(const Where& where, Codec codec, const RowHead& head, const View<const void>& vector,
                 unsigned char* row);
  void (*decode)(const Where& where, Codec codec, const RowHead& head, const unsigned char* row,
                 const View<void>& vector);
  // The first kRowHead bytes of each row.
  std::vector<unsigned char> (*read_heads)(const Where& where, const std::vector<const unsigned char*>& rows);
  void (*write_heads)(const Where& where, const NewHeads& renewed);
};

// Null if the build has no CUDA kernels.
const Backend* backend();

// On this thread's stream (see use_stream in afflux.hpp).
Where on(Device device);

}  // namespace afflux::cuda
