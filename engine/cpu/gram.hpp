// gram, one superblock: all inner products between two panels of vectors, block by block. A tile of 2 x 2 pairs is
// summed lane group by lane group (lanes are independent, so the grouping is free), while the block lies in L1. Types
// are chosen per tile, so that vectors of many types are read from memory once, as those of one type are.
#pragma once
#include "afflux/order.hpp"
#include "cpu/convert.hpp"
#include "cpu/kernels.hpp"
#include "cpu/simd.hpp"
#include "formula/reduce.hpp"

namespace afflux::AFFLUX_ISA {
namespace {

// products[p] = the block's inner product of pair p: (x0,y0), (x0,y1), (x1,y0), (x1,y1)
template <class X, class Y>
AFFLUX_FN void block_products(const X* const x[2], const Y* const y[2], std::int64_t n, double products[4]) {
  constexpr int kGroup = 2;  // native vectors per lane group: 8 independent sums hide the latency of an addition
  constexpr int kGroupLanes = kGroup * simd::kWidth;
  static_assert(kLanes % kGroupLanes == 0, "lane groups must divide the lanes");
  double lanes[4][kLanes];
  const std::int64_t whole = n - n % kLanes;
  for (int lane = 0; lane < kLanes; lane += kGroupLanes) {
    simd::Doubles sum[4][kGroup] = {};
    for (std::int64_t i = lane; i < whole; i += kLanes)
      for (int part = 0; part < kGroup; ++part) {
        const std::int64_t at = i + part * simd::kWidth;
        const simd::Doubles x0 = simd::Many::load(x[0] + at), x1 = simd::Many::load(x[1] + at);
        const simd::Doubles y0 = simd::Many::load(y[0] + at), y1 = simd::Many::load(y[1] + at);
        sum[0][part] = simd::dot_term<X, Y>(sum[0][part], x0, y0);
        sum[1][part] = simd::dot_term<X, Y>(sum[1][part], x0, y1);
        sum[2][part] = simd::dot_term<X, Y>(sum[2][part], x1, y0);
        sum[3][part] = simd::dot_term<X, Y>(sum[3][part], x1, y1);
      }
    for (int pair = 0; pair < 4; ++pair)
      for (int part = 0; part < kGroup; ++part)
        simd::Many::store(lanes[pair] + lane + part * simd::kWidth, sum[pair][part]);
  }
  for (int pair = 0; pair < 4; ++pair) {
    for (std::int64_t i = whole; i < n; ++i) {
      const double left = simd::One::load(x[pair / 2] + i), right = simd::One::load(y[pair % 2] + i);
      lanes[pair][i - whole] = formula::dot_term<X, Y>(lanes[pair][i - whole], left, right);
    }
    products[pair] = formula::lane_sum(lanes[pair], kLanes);
  }
}

// Two neighbours of one type in a panel, or one vector twice where there is no such neighbour.
struct Pair {
  Pair(const View<const void>* panel, std::int64_t count, std::int64_t first)
      : vectors(panel + first),
        count(first + 1 < count && panel[first + 1].type == panel[first].type ? 2 : 1),
        type(panel[first].type) {}
  template <class T>
  AFFLUX_INLINE void blocks(std::int64_t i, const T* out[2]) const {
    out[0] = static_cast<const T*>(vectors[0].data) + i;
    out[1] = static_cast<const T*>(vectors[count - 1].data) + i;
  }

  const View<const void>* vectors;
  std::int64_t count;
  Type type;
};

// The block [i, i + n) of both pairs.
AFFLUX_FN void pair_products(const Pair& left, const Pair& right, std::int64_t i, std::int64_t n, double products[4]) {
  with_type(left.type, [&](auto x_sample) AFFLUX_INLINE {
    with_type(right.type, [&](auto y_sample) AFFLUX_INLINE {
      const decltype(x_sample)* x[2];
      const decltype(y_sample)* y[2];
      left.blocks(i, x);
      right.blocks(i, y);
      block_products(x, y, n, products);
    });
  });
}

void gram(const GramPanels& panels, std::int64_t begin, std::int64_t end, double* sums) {
  const std::int64_t rows = panels.left_count, columns = panels.right_count;
  const bool symmetric = panels.left == panels.right;
  for (std::int64_t k = 0; k < rows * columns; ++k) sums[k] = 0.0;
  for (std::int64_t i = begin; i < end; i += kBlock) {
    const std::int64_t n = end - i < kBlock ? end - i : kBlock;
    for (std::int64_t row = 0; row < rows;) {
      const Pair x(panels.left, rows, row);
      for (std::int64_t column = 0; column < (symmetric ? row + 1 : columns);) {
        const Pair y(panels.right, columns, column);
        double products[4];
        pair_products(x, y, i, n, products);
        double* const cells = sums + row * columns + column;
        for (std::int64_t a = 0; a < x.count; ++a)
          for (std::int64_t b = 0; b < y.count; ++b)
            cells[a * columns + b] = cells[a * columns + b] + products[2 * a + b];
        column += y.count;
      }
      row += x.count;
    }
  }
}

}  // namespace
}  // namespace afflux::AFFLUX_ISA
