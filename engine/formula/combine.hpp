// The weighted sum over arrivals: acc + w * u with two roundings (no fused multiply-add: w * u is not exact). T is
// float64 or a vector of float64 lanes; float32 values are widened before.
#pragma once
#include "formula/fn.hpp"

namespace afflux::formula {

template <class T>
AFFLUX_FN T weighted(T acc, T weight, T value) {
  return acc + weight * value;
}

}  // namespace afflux::formula
