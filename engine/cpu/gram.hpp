// gram, one superblock: all inner products between two panels of vectors. A tile of 2 x 2 pairs is summed lane group by
// lane group (lanes are independent, so the grouping is free), while the block lies in L1.
#pragma once
#include "afflux/order.hpp"
#include "cpu/convert.hpp"
#include "cpu/kernels.hpp"
#include "cpu/simd.hpp"
#include "formula/reduce.hpp"

namespace afflux::AFFLUX_ISA {
namespace {

// products[p] = the block's inner product of pair p: (x0,y0), (x0,y1), (x1,y0), (x1,y1)
template <class T>
AFFLUX_FN void block_products(const T* const x[2], const T* const y[2], std::int64_t n, double products[4]) {
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
        sum[0][part] = simd::dot_term<T>(sum[0][part], x0, y0);
        sum[1][part] = simd::dot_term<T>(sum[1][part], x0, y1);
        sum[2][part] = simd::dot_term<T>(sum[2][part], x1, y0);
        sum[3][part] = simd::dot_term<T>(sum[3][part], x1, y1);
      }
    for (int pair = 0; pair < 4; ++pair)
      for (int part = 0; part < kGroup; ++part)
        simd::Many::store(lanes[pair] + lane + part * simd::kWidth, sum[pair][part]);
  }
  for (int pair = 0; pair < 4; ++pair) {
    for (std::int64_t i = whole; i < n; ++i) {
      const double left = simd::One::load(x[pair / 2] + i), right = simd::One::load(y[pair % 2] + i);
      lanes[pair][i - whole] = formula::dot_term<T>(lanes[pair][i - whole], left, right);
    }
    products[pair] = formula::lane_sum(lanes[pair], kLanes);
  }
}

template <class T>
AFFLUX_FN const T* at(const void* vector, std::int64_t i) {
  return static_cast<const T*>(vector) + i;
}

template <class T>
AFFLUX_FN void panel_products(const GramPanels& panels, std::int64_t begin, std::int64_t end, double* sums) {
  const std::int64_t rows = panels.left_count, columns = panels.right_count;
  const bool symmetric = panels.left == panels.right;
  for (std::int64_t k = 0; k < rows * columns; ++k) sums[k] = 0.0;
  for (std::int64_t i = begin; i < end; i += kBlock) {
    const std::int64_t n = end - i < kBlock ? end - i : kBlock;
    for (std::int64_t row = 0; row < rows; row += 2) {
      const std::int64_t next_row = row + 1 < rows ? row + 1 : row;  // an odd panel repeats its last vector
      const T* const x[2] = {at<T>(panels.left[row], i), at<T>(panels.left[next_row], i)};
      for (std::int64_t column = 0; column < (symmetric ? row + 1 : columns); column += 2) {
        const std::int64_t next_column = column + 1 < columns ? column + 1 : column;
        const T* const y[2] = {at<T>(panels.right[column], i), at<T>(panels.right[next_column], i)};
        double products[4];
        block_products(x, y, n, products);
        double* const cell = sums + row * columns + column;
        cell[0] = cell[0] + products[0];
        if (next_column != column) cell[1] = cell[1] + products[1];
        if (next_row != row) cell[columns] = cell[columns] + products[2];
        if (next_row != row && next_column != column) cell[columns + 1] = cell[columns + 1] + products[3];
      }
    }
  }
}

void gram(const GramPanels& panels, std::int64_t begin, std::int64_t end, double* sums) {
  with_type(panels.type,
            [&](auto sample) AFFLUX_INLINE { panel_products<decltype(sample)>(panels, begin, end, sums); });
}

}  // namespace
}  // namespace afflux::AFFLUX_ISA
