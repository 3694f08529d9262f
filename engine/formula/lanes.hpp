// One element in the place of a vector of lanes, for formulas that are written over both. The CPU's vectors have the
// same functions (cpu/simd.hpp).
#pragma once
#include "formula/fn.hpp"

namespace afflux::formula {

struct OneLane {
  AFFLUX_FN double fill(double value) { return value; }
  AFFLUX_FN double root(double value) {
#if defined(__CUDA_ARCH__)
    return __dsqrt_rn(value);
#else
    return __builtin_sqrt(value);
#endif
  }
};

}  // namespace afflux::formula
