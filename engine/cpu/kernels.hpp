// What one instruction set offers: plain functions over a range [begin, end) of elements, which begins on the border of
// a superblock for the reductions (ingest, gram), on that of a block for the rest. Each instruction set compiles
// kernels.cpp once and exports exactly one symbol, its table.
#pragma once
#include <cstdint>

#include "afflux/pass.hpp"
#include "formula/reduce.hpp"

namespace afflux {

// One part of an update: where it lies, and which element of the slot its first one becomes. One entry more than there
// are parts, so that part[1].begin is always the end of part[0].
struct Part {
  const void* data;
  Type type;
  std::int64_t begin;
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

// Two panels of vectors, of any types, whose inner products are wanted; the same panel twice gives its Gram matrix.
struct GramPanels {
  const View<const void>* left;
  const View<const void>* right;
  std::int64_t left_count, right_count;
};

// What the head of a row says beyond its codec and size.
struct RowHead {
  std::uint64_t key;
  float low, step;  // affine_vector
};

// Bytes of a row that have no meaning and are 0, beside those of its head: of a short last group.
struct Blanks {
  std::int64_t facts_begin, facts_end, codes_begin, codes_end;
};

// Of one arrival.
struct RowHeads {
  RowHead old, renewed;
};

struct Kernels {
  // `first` is the part that holds element `begin`, `type` that of the slot.
  IngestSums (*ingest)(const Part* first, Type type, void* slot, std::int64_t begin, std::int64_t end);
  // sums[i * right_count + j] = <left[i], right[j]> over one superblock
  void (*gram)(const GramPanels& panels, std::int64_t begin, std::int64_t end, double* sums);
  // `heads`, one for each arrival, if the rows have some; the sweep itself neither reads nor writes those in the rows.
  // Whether the direction was finite.
  bool (*apply)(const Pass& pass, const RowHeads* heads, std::int64_t begin, std::int64_t end);
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
