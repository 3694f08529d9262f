// The weighted sum over arrivals: acc + w * u in float64, two roundings (no fused multiply-add: w * u is not exact).
#pragma once
#include "formula/fn.hpp"

namespace afflux::formula {

AFFLUX_FN double weighted(double acc, double weight, float value) { return acc + weight * static_cast<double>(value); }

}  // namespace afflux::formula
