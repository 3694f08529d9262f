// Operations on one element, for formulas that are written over one element and over vectors of lanes alike. The
// vectors of the CPU have the same functions (cpu/simd.hpp).
#pragma once
#include "formula/elementary.hpp"
#include "formula/fn.hpp"
#include "formula/reduce.hpp"

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
  AFFLUX_FN std::uint64_t bits_of(double value) { return formula::bits_of(value); }
  AFFLUX_FN double number_of(std::uint64_t bits) { return double_of(bits); }

  // The operations of codecs, on float32 and 32-bit words.
  // `acc` is not a NaN. On the device the sign of a zero may differ.
  AFFLUX_FN float lesser(float acc, float x) {
#if defined(__CUDA_ARCH__)
    return fminf(acc, x);
#else
    return formula::lesser(acc, x);
#endif
  }
  AFFLUX_FN float greater(float acc, float x) {
#if defined(__CUDA_ARCH__)
    return fmaxf(acc, x);
#else
    return formula::greater(acc, x);
#endif
  }
  // Rounds towards 0; the value must fit.
  AFFLUX_FN std::uint32_t truncated(float value) {
    return static_cast<std::uint32_t>(static_cast<std::int32_t>(value));
  }
  AFFLUX_FN float converted(std::uint32_t word) { return static_cast<float>(static_cast<std::int32_t>(word)); }
  // Returns a * b + c, where a * b must be exact: then one fused instruction and two separate ones give the same bits.
  AFFLUX_FN float exact_product_plus(float a, float b, float c) {
#if defined(__CUDA_ARCH__)
    return __fmaf_rn(a, b, c);
#else
    return a * b + c;
#endif
  }
};

}  // namespace afflux::formula
