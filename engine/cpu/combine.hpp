// Weighted sums of vectors, tile by tile. Tiles are elementwise, so their size changes no bit.
#pragma once
#include "afflux/pass.hpp"
#include "cpu/simd.hpp"
#include "formula/combine.hpp"

namespace afflux::AFFLUX_ISA {
namespace {

// A tile of every stream should stay in L2; of a thousand streams it cannot, and longer runs of each are a little
// faster.
constexpr std::int64_t kTile = 1024, kLongTile = 4096, kManyUpdates = 64;
constexpr int kTogether = 16;  // streams that are read side by side
// Of bfloat16 fewer are faster: it has more to compute for each line of memory.
template <class T>
constexpr int kSideBySide = sizeof(T) == 2 ? 4 : kTogether;

struct Tile {
  std::int64_t begin, size;
  std::int64_t ahead;  // bytes that are prefetched ahead
};

template <class T>
AFFLUX_FN const T* tile_of(const View<const void>& vector, Tile tile) {
  return static_cast<const T*>(vector.data) + tile.begin;
}

template <class T>
AFFLUX_FN T* tile_of(const View<void>& vector, Tile tile) {
  return static_cast<T*>(vector.data) + tile.begin;
}

// v += w[0] a[0] + ... + w[count - 1] a[count - 1], in this order; the sums stay in registers.
template <class T>
AFFLUX_FN void add_weighted(const T* const* vectors, const double* weights, int count, Tile tile,
                            double* __restrict v) {
  simd::each_wide(tile.size, [&](auto lanes, std::int64_t i) AFFLUX_INLINE {
    auto sum = lanes.load(v + i);
    for (int k = 0; k < count; ++k) {
      lanes.prefetch(vectors[k] + i, tile.ahead);
      sum = formula::weighted(sum, lanes.fill(weights[k]), lanes.load(vectors[k] + i));
    }
    lanes.store(v + i, sum);
  });
}

// Two such sums, v by `weights` and w by `others`, of vectors that are read once.
template <class T>
AFFLUX_FN void add_weighted(const T* const* vectors, const double* weights, const double* others, int count, Tile tile,
                            double* __restrict v, double* __restrict w) {
  simd::each_wide(tile.size, [&](auto lanes, std::int64_t i) AFFLUX_INLINE {
    auto sum = lanes.load(v + i), other = lanes.load(w + i);
    for (int k = 0; k < count; ++k) {
      lanes.prefetch(vectors[k] + i, tile.ahead);
      const auto value = lanes.load(vectors[k] + i);
      sum = formula::weighted(sum, lanes.fill(weights[k]), value);
      other = formula::weighted(other, lanes.fill(others[k]), value);
    }
    lanes.store(v + i, sum);
    lanes.store(w + i, other);
  });
}

// v += sum_k weights[k] * list[k]; a vector whose weight is 0 is not read.
template <class T, class Vector>
AFFLUX_FN void combine(const List<Vector>& list, const double* all_weights, Tile tile, double* __restrict v) {
  const T* vectors[kTogether];
  double weights[kTogether];
  int count = 0;
  for (std::int64_t k = 0; k < list.size; ++k) {
    if (all_weights[k] == 0.0) continue;
    vectors[count] = tile_of<T>(list.data[k], tile);
    weights[count++] = all_weights[k];
    if (count < kSideBySide<T>) continue;
    add_weighted(vectors, weights, count, tile, v);
    count = 0;
  }
  if (count > 0) add_weighted(vectors, weights, count, tile, v);
}

// Both v += sum_k weights[k] * list[k] and w += sum_k others[k] * list[k], as if one were made after the other.
template <class T, class Vector>
AFFLUX_FN void combine(const List<Vector>& list, const double* weights, const double* others, Tile tile,
                       double* __restrict v, double* __restrict w) {
  const auto in_both = [&](std::int64_t k) AFFLUX_INLINE { return weights[k] != 0.0 && others[k] != 0.0; };
  const T* vectors[kTogether];
  for (std::int64_t k = 0; k < list.size;) {
    const std::int64_t first = k;
    const bool both = in_both(k);
    for (; k < list.size && k - first < kSideBySide<T> && in_both(k) == both; ++k)
      vectors[k - first] = tile_of<T>(list.data[k], tile);
    if (both) {
      add_weighted(vectors, weights + first, others + first, static_cast<int>(k - first), tile, v, w);
    } else {
      const List<Vector> run{list.data + first, k - first};
      combine<T>(run, weights + first, tile, v);
      combine<T>(run, others + first, tile, w);
    }
  }
}

}  // namespace
}  // namespace afflux::AFFLUX_ISA
