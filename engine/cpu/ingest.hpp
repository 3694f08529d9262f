// ingest, one superblock: copy or convert, and reduce what was written while it is in cache.
#pragma once
#include "afflux/order.hpp"
#include "cpu/kernels.hpp"
#include "cpu/simd.hpp"
#include "formula/reduce.hpp"

namespace afflux::AFFLUX_ISA {
namespace {

AFFLUX_FN void copy_block(const float* __restrict from, float* __restrict to, std::int64_t n) {
  __builtin_memcpy(to, from, static_cast<std::size_t>(n) * sizeof(float));
}

AFFLUX_FN void copy_block(const double* __restrict from, float* __restrict to, std::int64_t n) {
  simd::each(n, [&](auto lanes, std::int64_t i) AFFLUX_INLINE { lanes.store(to + i, lanes.load(from + i)); });
}

AFFLUX_FN double block_sum_of_squares(const float* x, std::int64_t n) {
  constexpr int kGroup = 4;  // native vectors per lane group: independent sums hide the latency of an addition
  constexpr int kGroupLanes = kGroup * simd::kWidth;
  static_assert(kLanes % kGroupLanes == 0, "lane groups must divide the lanes");
  double lanes[kLanes];
  const std::int64_t whole = n - n % kLanes;
  for (int lane = 0; lane < kLanes; lane += kGroupLanes) {
    simd::Doubles sum[kGroup] = {};
    for (std::int64_t i = lane; i < whole; i += kLanes)
      for (int part = 0; part < kGroup; ++part) {
        const simd::Doubles value = simd::Many::load(x + i + part * simd::kWidth);
        sum[part] = simd::dot_term(sum[part], value, value);
      }
    for (int part = 0; part < kGroup; ++part) simd::Many::store(lanes + lane + part * simd::kWidth, sum[part]);
  }
  for (std::int64_t i = whole; i < n; ++i) lanes[i - whole] = formula::dot_term(lanes[i - whole], x[i], x[i]);
  return formula::lane_sum(lanes, kLanes);
}

AFFLUX_FN void lane_extremes(const float* x, std::int64_t n, float* lows, float* highs) {
  const std::int64_t whole = n - n % kLanes;
  for (std::int64_t i = 0; i < whole; i += kLanes)
    for (int lane = 0; lane < kLanes; ++lane) {
      lows[lane] = formula::lesser(lows[lane], x[i + lane]);
      highs[lane] = formula::greater(highs[lane], x[i + lane]);
    }
  for (std::int64_t i = whole; i < n; ++i) {
    lows[i - whole] = formula::lesser(lows[i - whole], x[i]);
    highs[i - whole] = formula::greater(highs[i - whole], x[i]);
  }
}

template <class T>
AFFLUX_FN IngestSums ingest(const T* update, float* slot, std::int64_t begin, std::int64_t end) {
  float lows[kLanes], highs[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) {
    lows[lane] = __builtin_inff();
    highs[lane] = -__builtin_inff();
  }
  IngestSums sums{0.0, 0.0f, 0.0f, -1};
  for (std::int64_t i = begin; i < end; i += kBlock) {
    const std::int64_t n = end - i < kBlock ? end - i : kBlock;
    copy_block(update + i, slot + i, n);
    const double squares = block_sum_of_squares(slot + i, n);
    sums.sum_of_squares = sums.sum_of_squares + squares;
    lane_extremes(slot + i, n, lows, highs);
    // Squares of float32 values cannot overflow float64: a block's sum is finite exactly when its values are.
    if (!formula::finite(squares) && sums.first_nonfinite < 0) {
      std::int64_t bad = i;
      while (formula::finite(static_cast<double>(slot[bad]))) ++bad;
      sums.first_nonfinite = bad;
    }
  }
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int lane = 0; lane < half; ++lane) {
      lows[lane] = formula::lesser(lows[lane], lows[lane + half]);
      highs[lane] = formula::greater(highs[lane], highs[lane + half]);
    }
  sums.min = lows[0];
  sums.max = highs[0];
  return sums;
}

IngestSums ingest_float32(const float* update, float* slot, std::int64_t begin, std::int64_t end) {
  return ingest(update, slot, begin, end);
}

IngestSums ingest_float64(const double* update, float* slot, std::int64_t begin, std::int64_t end) {
  return ingest(update, slot, begin, end);
}

}  // namespace
}  // namespace afflux::AFFLUX_ISA
