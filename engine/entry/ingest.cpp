#include <algorithm>
#include <limits>

#include "afflux/afflux.hpp"
#include "cpu/dispatch.hpp"
#include "entry/check.hpp"
#include "entry/overlap.hpp"
#include "entry/tree.hpp"
#include "formula/reduce.hpp"

namespace afflux {
namespace {

template <class T, class Kernel>
Statistics ingest_any(View<const T> update, View<float> slot, int num_threads, Kernel kernel) {
  check::view("ingest", "update", update, update.size);
  check::view("ingest", "slot", slot, update.size);
  check::threads("ingest", num_threads);
  check::Overlaps overlaps;
  overlaps.read("update", -1, update);
  overlaps.write("slot", -1, slot);
  overlaps.refuse("ingest");

  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const auto leaf = [&](std::int64_t superblock, IngestSums& out) {
    const std::int64_t begin = superblock * kSuperblock;
    const std::int64_t end = std::min(begin + kSuperblock, update.size);
    out = kernel(update.data, slot.data, begin, end);
  };
  const auto join = [](IngestSums& left, const IngestSums& right) {
    left.sum_of_squares = left.sum_of_squares + right.sum_of_squares;
    left.min = formula::lesser(left.min, right.min);
    left.max = formula::greater(left.max, right.max);
    if (left.first_nonfinite < 0) left.first_nonfinite = right.first_nonfinite;
  };
  const IngestSums sums = tree(update.size, num_threads, IngestSums{0.0, kInfinity, -kInfinity, -1}, leaf, join);
  return {sums.sum_of_squares, sums.min, sums.max, sums.first_nonfinite};
}

}  // namespace

Statistics ingest(View<const float> update, View<float> slot, int num_threads) {
  return ingest_any(update, slot, num_threads, kernels().ingest_float32);
}

Statistics ingest(View<const double> update, View<float> slot, int num_threads) {
  return ingest_any(update, slot, num_threads, kernels().ingest_float64);
}

}  // namespace afflux
