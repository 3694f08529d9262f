// The kernels of an instruction set, and those of CUDA, which the entry points call after all checks. A new kernel
// needs a line in both tables here (Kernels and cuda::Backend), a file of its name in cpu/ and in cuda/, its name in
// cpu/kernels.hpp, cpu/kernels.cpp and cuda/operations.hpp, and an entry point in api/ that calls it. `unflatten` is
// for the CPU alone.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "afflux/inner.hpp"
#include "afflux/order.hpp"
#include "afflux/pass.hpp"
#include "formula/conversion.hpp"
#include "formula/reduce.hpp"

namespace afflux {

// One part of an update: its memory, and the index in the slot of its first element. Arrays of parts have one entry
// more than there are parts, so that part[1].begin is always the end of part[0].
struct Part {
  const void* data;
  Type type;
  std::int64_t begin;
};

// The conversion that `ingest` applies to the parts.
struct PartChange {
  formula::Change change;
  const void* base;  // null if the change reads no base
  Type base_type;
  double scale;
};

// The reductions of `ingest` over one superblock.
struct IngestSums {
  double sum_of_squares;
  double min, max;
  std::int64_t first_nonfinite;  // -1: none
};

// Adds the reductions of the superblocks `right`, which follow those of `left`.
AFFLUX_FN void add_to(IngestSums& left, const IngestSums& right) {
  left.sum_of_squares = left.sum_of_squares + right.sum_of_squares;
  left.min = formula::lesser(left.min, right.min);
  left.max = formula::greater(left.max, right.max);
  if (left.first_nonfinite < 0) left.first_nonfinite = right.first_nonfinite;
}

// Two panels of vectors of any types, whose inner products are computed. The same panel twice gives its Gram matrix.
struct GramPanels {
  const View<const void>* left;
  const View<const void>* right;
  std::int64_t left_count, right_count;
};

// The number of elements of each vector that `inner` processes at once: whole rows of lanes.
constexpr std::int64_t kInnerTile = 4 * kLanes;
// Returns the size of the scratch memory of `inner` in float64: a tile of each vector and of e, the lanes of every sum,
// and up to a cache line for the alignment.
AFFLUX_FN std::int64_t inner_work(std::int64_t vectors) {
  return (vectors + 1) * kInnerTile + (2 * vectors + 1) * kLanes + 8;
}

// The number of elements of each update that are sorted at once for a trimmed mean (cpu/trim.hpp): two cache lines.
constexpr int kTrimRun = 32;
// Returns the size of the scratch memory of a trimmed mean in float64: two runs of each update, its mass and an
// address, and up to a cache line for the alignment.
AFFLUX_FN std::int64_t trim_work(std::int64_t updates) { return updates * (2 * kTrimRun + 2) + 8; }

// The fields of a row's head besides its codec and size.
struct RowHead {
  std::uint64_t key;
  float low, step;  // affine_vector
};

// The ranges of bytes of a row that have no meaning and are 0, apart from those in its head: the unused part of a short
// last group.
struct Padding {
  std::int64_t facts_begin, facts_end, codes_begin, codes_end;
};

// The heads of an arrival's old row and of its new row.
struct RowHeads {
  RowHead old, renewed;
};

// The settings of a sweep, from the policy (afflux/policy.hpp).
struct MemoryUse {
  std::int64_t prefetch;  // distance in bytes
  bool streams, fused, direct;
};

// The functions of one instruction set, each over a range [begin, end) of elements. The range begins at the beginning
// of a block, and does not end in another superblock; `apply` without encoded rows takes any range. cpu/kernels.cpp has
// the table; it and the units of the functions are compiled once for each instruction set.
struct Kernels {
  // `first` is the part that holds element `begin`; `type` is the slot's; `change` is null if there is no conversion.
  IngestSums (*ingest)(const Part* first, const PartChange* change, const MemoryUse& memory, Type type, void* slot,
                       std::int64_t begin, std::int64_t end);
  // Adds the blocks of the range, in order: sums[i * right_count + j] += <left[i], right[j]>. The block after the range
  // is prefetched unless it ends beyond the size of left[0].
  void (*gram)(const GramPanels& panels, std::int64_t begin, std::int64_t end, double* sums);
  // Adds the blocks of the range, in order: sums[k] += <x_k, x_k> and, if there is an e, sums[K] += <e, e>,
  // sums[K + 1 + k] += <x_k, e>. `work` is inner_work(K) doubles.
  void (*inner)(const Inner& inner, const MemoryUse& memory, std::int64_t begin, std::int64_t end, double* work,
                double* sums);
  // Returns true if all written values are valid (see afflux::apply). `heads` has one item for each arrival if rows
  // have heads; the sweep neither reads nor writes the heads in the rows. All outs and the limit of the pass are set.
  // `work` is trim_work(M) doubles, finite ones, if updates are trimmed.
  bool (*apply)(const Pass& pass, const RowHeads* heads, const MemoryUse& memory, std::int64_t begin, std::int64_t end,
                double* work);
  void (*encode)(Codec codec, const RowHead& head, const void* vector, unsigned char* row, std::int64_t begin,
                 std::int64_t end);
  void (*decode)(Codec codec, const RowHead& head, const unsigned char* row, void* vector, std::int64_t begin,
                 std::int64_t end);
  // Sets to[0, n) to from[0, n), rounded if the type is narrower.
  void (*unflatten)(Type from_type, const void* from, Type to_type, void* to, std::int64_t n);
};

#if defined(__aarch64__)
namespace neon {
extern const Kernels kernels;
}
#else
namespace baseline {
extern const Kernels kernels;
}
namespace avx2 {
extern const Kernels kernels;
}
namespace avx512 {
extern const Kernels kernels;
}
#endif

}  // namespace afflux

namespace afflux::cuda {

// The sweeps of CUDA, over whole vectors on one device. Lists and results are on the host.

// The device and the stream of a call. `stream` is a cudaStream_t; null: the default stream.
struct Where {
  std::int32_t device;
  void* stream;
};

// The bytes of encoded rows beside their codes: the heads, kRowHead bytes each, one after the other, and the padding,
// which is set to 0.
struct NewHeads {
  std::vector<unsigned char*> rows;
  std::vector<unsigned char> heads;
  Padding padding;
};

// The functions of CUDA. A function that returns a result or fills host memory waits for the stream; the others only
// put their work on the stream. An error of CUDA throws std::runtime_error, which names file and line. A lack of memory
// throws std::bad_alloc, before anything is changed.
struct Backend {
  // Returns an empty text if the device can be used, else the reason.
  std::string (*why_not)(std::int32_t device);
  // The parts are [first, last); *last has the end of the last part. `change` is as for Kernels::ingest.
  IngestSums (*ingest)(const Where& where, const Part* first, const Part* last, const PartChange* change,
                       const View<void>& slot);
  // The same for parts in the memory of the host, which up to `num_threads` threads copy. The base is on the device.
  IngestSums (*ingest_from_host)(const Where& where, const Part* first, const Part* last, const PartChange* change,
                                 const View<void>& slot, int num_threads);
  // sums[i * right_count + j] = <left[i], right[j]>; for symmetric panels only where j <= i
  void (*gram)(const Where& where, const GramPanels& panels, double* sums);
  // The sums are those of Kernels::inner.
  void (*inner)(const Where& where, const Inner& inner, double* sums);
  bool (*apply)(const Where& where, const Pass& pass, const RowHeads* heads, const NewHeads& renewed);
  // Encodes all of the row except its head.
  void (*encode)(const Where& where, Codec codec, const RowHead& head, const View<const void>& vector,
                 unsigned char* row);
  void (*decode)(const Where& where, Codec codec, const RowHead& head, const unsigned char* row,
                 const View<void>& vector);
  // Returns the first kRowHead bytes of each row.
  std::vector<unsigned char> (*read_heads)(const Where& where, const std::vector<const unsigned char*>& rows);
  void (*write_heads)(const Where& where, const NewHeads& renewed);
};

// Returns the functions of CUDA, or null if the build has no CUDA kernels.
const Backend* backend();

// Returns the device with this thread's stream (see use_stream in afflux.hpp).
Where on(Device device);

}  // namespace afflux::cuda
