// The sum of a block's lanes in the fixed order (see afflux/order.hpp).
#pragma once
#include "afflux/order.hpp"
#include "cpu/simd.hpp"
#include "formula/reduce.hpp"

namespace afflux::AFFLUX_ISA {
namespace {

// Returns the sum of kLanes lanes, which are overwritten. The first halvings add whole native vectors.
AFFLUX_FN double lane_sum(double* lanes) {
  constexpr int kVectors = kLanes / simd::kWidth;
  simd::Doubles sum[kVectors];
  AFFLUX_UNROLL
  for (int k = 0; k < kVectors; ++k) sum[k] = simd::Vector::load(lanes + k * simd::kWidth);
  AFFLUX_UNROLL
  for (int half = kVectors / 2; half > 0; half /= 2) AFFLUX_UNROLL
  for (int k = 0; k < half; ++k) sum[k] = sum[k] + sum[k + half];
  simd::Vector::store(lanes, sum[0]);
  return formula::lane_sum(lanes, simd::kWidth);
}

}  // namespace
}  // namespace afflux::AFFLUX_ISA
