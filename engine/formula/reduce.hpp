// The terms of the reductions over d, and their order within a block (see afflux/order.hpp).
#pragma once
#include "formula/fn.hpp"

namespace afflux::formula {

// Returns acc + x * y, where x was stored as X and y as Y. If both types are narrower than float64, the product is
// exact in float64: a fused multiply-add gives the same bits, and is used if the hardware has one. Else it is not used.
template <class X, class Y = X>
AFFLUX_FN double dot_term(double acc, double x, double y) {
  if constexpr (sizeof(X) == sizeof(double) || sizeof(Y) == sizeof(double)) return acc + x * y;
#if defined(__CUDA_ARCH__)
  return __fma_rn(x, y, acc);
#elif defined(__FMA__) || defined(__ARM_FEATURE_FMA)
  return __builtin_fma(x, y, acc);
#else
  return acc + x * y;
#endif
}

// Return the smaller or the larger value, and never a NaN from x. The min and max instructions of x86 give the same
// result.
template <class T>
AFFLUX_FN T lesser(T acc, T x) {
  return x < acc ? x : acc;
}
template <class T>
AFFLUX_FN T greater(T acc, T x) {
  return acc < x ? x : acc;
}

AFFLUX_FN bool finite(double x) { return x - x == 0.0; }

// Returns `sound` if |x| <= most, else 0; a NaN gives 0.
template <class T>
AFFLUX_FN T within(T sound, T x, T most) {
  const T zero{};
  sound = x <= most ? sound : zero;
  return -most <= x ? sound : zero;
}

// Returns the sum of lanes[0, count), added by halves; count is a power of two. The lanes are overwritten.
AFFLUX_FN double lane_sum(double* lanes, int count) {
  for (int half = count / 2; half > 0; half /= 2)
    for (int lane = 0; lane < half; ++lane) lanes[lane] = lanes[lane] + lanes[lane + half];
  return lanes[0];
}

}  // namespace afflux::formula
