// What the entry points call, after all checks: the kernels of an instruction set, and those of CUDA. A new kernel
// takes a line in both tables here, a file of its name in cpu/ and in cuda/, which cpu/kernels.cpp and
// cuda/operations.hpp list, and the entry point in api/ that calls it.
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

// One part of an update: where it lies, and which element of the slot its first one becomes. One entry more than there
// are parts, so that part[1].begin is always the end of part[0].
struct Part {
  const void* data;
  Type type;
  std::int64_t begin;
};

// What `ingest` does to the parts on their way.
struct PartChange {
  formula::Change change;
  const void* base;  // null where the change reads none
  Type base_type;
  double scale;
};

// The reductions of `ingest` over one superblock.
struct IngestSums {
  double sum_of_squares;
  double min, max;
  std::int64_t first_nonfinite;  // -1: none
};

// Those of the superblocks that follow are added to the right.
AFFLUX_FN void add_to(IngestSums& left, const IngestSums& right) {
  left.sum_of_squares = left.sum_of_squares + right.sum_of_squares;
  left.min = formula::lesser(left.min, right.min);
  left.max = formula::greater(left.max, right.max);
  if (left.first_nonfinite < 0) left.first_nonfinite = right.first_nonfinite;
}

// Two panels of vectors, of any types, whose inner products are computed; the same panel twice gives its Gram matrix.
struct GramPanels {
  const View<const void>* left;
  const View<const void>* right;
  std::int64_t left_count, right_count;
};

// Elements of each vector that `inner` works on at once: whole rows of lanes.
constexpr std::int64_t kInnerTile = 4 * kLanes;
// Doubles of memory for it: tiles of the vectors, of e and of the shift, lanes of every sum, and a cache line to begin
// on.
AFFLUX_FN std::int64_t inner_work(std::int64_t vectors) {
  return (vectors + 1) * kInnerTile + (2 * vectors + 1) * kLanes + 8;
}

// The fields of a row's head besides its codec and size.
struct RowHead {
  std::uint64_t key;
  float low, step;  // affine_vector
};

// Bytes of a row that have no meaning and are 0, beside those of its head: of a short last group.
struct Padding {
  std::int64_t facts_begin, facts_end, codes_begin, codes_end;
};

// Of one arrival.
struct RowHeads {
  RowHead old, renewed;
};

// What a sweep takes from the policy (afflux/policy.hpp).
struct MemoryUse {
  std::int64_t prefetch;  // bytes ahead
  bool streams, fused, direct;
};

// What one instruction set offers: plain functions over a range [begin, end) of elements, which begins on the border of
// a superblock for the reductions (ingest, gram, inner), on that of a block for the rest. Each instruction set compiles
// cpu/kernels.cpp once and exports exactly one symbol, its table.
struct Kernels {
  // `first` is the part that holds element `begin`, `type` that of the slot; `change` is null if there is none.
  IngestSums (*ingest)(const Part* first, const PartChange* change, const MemoryUse& memory, Type type, void* slot,
                       std::int64_t begin, std::int64_t end);
  // sums[i * right_count + j] = <left[i], right[j]> over one superblock
  void (*gram)(const GramPanels& panels, std::int64_t begin, std::int64_t end, double* sums);
  // Over one superblock: sums[k] = <x_k, x_k> and, if there is an e, sums[K] = <e, e>, sums[K + 1 + k] = <x_k, e>.
  // `work` is inner_work(K) doubles.
  void (*inner)(const Inner& inner, const MemoryUse& memory, std::int64_t begin, std::int64_t end, double* work,
                double* sums);
  // `heads`, one for each arrival, if the rows have some; the sweep itself neither reads nor writes those in the rows.
  // Whether all that was written is sound, see afflux::apply; the pass has its outs and its limit.
  bool (*apply)(const Pass& pass, const RowHeads* heads, const MemoryUse& memory, std::int64_t begin, std::int64_t end);
  void (*encode)(Codec codec, const RowHead& head, const void* vector, unsigned char* row, std::int64_t begin,
                 std::int64_t end);
  void (*decode)(Codec codec, const RowHead& head, const unsigned char* row, void* vector, std::int64_t begin,
                 std::int64_t end);
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

// CUDA's sweeps over whole vectors on one device. Lists and results are on the host.

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
  Padding padding;
};

// Those that return something wait for the stream, the others only put their work on it. An error of CUDA's throws
// std::runtime_error, which names file and line; too little memory throws std::bad_alloc before anything is changed.
struct Backend {
  // Empty if the device can be used.
  std::string (*why_not)(std::int32_t device);
  // `parts` are [first, last), and *last closes them, as for Kernels::ingest; so does `change`.
  IngestSums (*ingest)(const Where& where, const Part* first, const Part* last, const PartChange* change,
                       const View<void>& slot);
  // sums[i * right_count + j] = <left[i], right[j]>, for symmetric panels where j <= i
  void (*gram)(const Where& where, const GramPanels& panels, double* sums);
  // sums as of Kernels::inner
  void (*inner)(const Where& where, const Inner& inner, double* sums);
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
