// Weighted sums of vectors, tile by tile. The sums are elementwise, so the size of a tile changes no bit.
#pragma once
#include "afflux/pass.hpp"
#include "cpu/simd.hpp"
#include "formula/combine.hpp"

namespace afflux::AFFLUX_ISA {
namespace {

// Elements of a tile. A tile of every stream should stay in L2. With kManyUpdates streams or more, long tiles are a
// little faster.
constexpr std::int64_t kTile = 1024, kLongTile = 4096, kManyUpdates = 64;
constexpr int kTogether = 16;  // streams that are read side by side
// Streams of type T that are read side by side: fewer of bfloat16, which has more computation for each line of memory.
template <class T>
constexpr int kSideBySide = sizeof(T) == 2 ? 4 : kTogether;

struct Tile {
  std::int64_t begin, size;
  std::int64_t ahead;  // prefetch distance in bytes
};

template <class T>
AFFLUX_FN const T* tile_of(const View<const void>& vector, Tile tile) {
  return static_cast<const T*>(vector.data) + tile.begin;
}

template <class T>
AFFLUX_FN T* tile_of(const View<void>& vector, Tile tile) {
  return static_cast<T*>(vector.data) + tile.begin;
}

// Returns true if rule vector s keeps its value: its row of `next`, of `count` coefficients, is 1 at s and 0 elsewhere.
AFFLUX_FN bool stays(const double* row, std::int64_t s, std::int64_t count) {
  for (std::int64_t k = 0; k < count; ++k)
    if (row[k] != (k == s ? 1.0 : 0.0)) return false;
  return true;
}

// Adds w[0] a[0] + ... + w[count - 1] a[count - 1] to v, in this order; the sums stay in registers.
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

// Adds two such sums, with `weights` to v and with `others` to w; each vector is read once for both.
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

// Adds sum_k weights[k] * list[k] to v; a vector whose weight is 0 is not read.
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

// Adds sum_k weights[k] * list[k] to v and sum_k others[k] * list[k] to w, with the same bits as one after the other.
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
