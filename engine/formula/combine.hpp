// The weighted sum over arrivals: acc + w * u, two roundings (no fused multiply-add: w * u is not exact).
// Formulas are written over T, a float64 or a vector of float64 lanes; values from float32 arrive widened.
#pragma once
#include "formula/fn.hpp"

namespace afflux::formula {

template <class T>
AFFLUX_FN T weighted(T acc, T weight, T value) {
  return acc + weight * value;
}

}  // namespace afflux::formula
