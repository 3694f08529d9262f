// A check that values are valid: finite, and within a limit.
#pragma once
#include "cpu/simd.hpp"

namespace afflux::AFFLUX_ISA {
namespace {

// Checks |x| <= most for many values, with integers: without the sign, the bits of float64 numbers have the same order
// as the numbers, and those of a NaN are larger. A lane becomes negative if one of its values is larger than `most`.
// Comparisons of float64 are slower: compilers join their results into one mask, so each depends on the one before it.
class Soundness {
 public:
  AFFLUX_INLINE explicit Soundness(double most) : most_(magnitude(most)), most_of_floats_(floats_below(most)) {}
  AFFLUX_INLINE void check(simd::Doubles values) {
    beyond_ |= most_ - ((Longs)values & kMagnitude);  // neither is negative: no overflow
  }
  AFFLUX_INLINE void check(const simd::Pack& values) {
    check(values.a);
    check(values.b);
    check(values.c);
    check(values.d);
  }
  // Check kWide elements that are in memory, and in registers as `values`. The bits of float32 are half as many.
  AFFLUX_INLINE void check(const float* elements, const simd::Pack&) {
    for (int half = 0; half < 2; ++half) {
      Ints bits;
      __builtin_memcpy(&bits, elements + half * 2 * simd::kWidth, sizeof bits);
      beyond_of_floats_ |= most_of_floats_ - (bits & INT32_MAX);
    }
  }
  AFFLUX_INLINE void check(const Bfloat16*, const simd::Pack& values) { check(values); }
  AFFLUX_INLINE void check(double value) { single_ |= most_ - magnitude(value); }
  AFFLUX_INLINE bool everywhere() const {
    std::int64_t all = single_;
    for (int lane = 0; lane < simd::kWidth; ++lane) all |= beyond_[lane];
    for (int lane = 0; lane < 2 * simd::kWidth; ++lane) all |= std::int64_t{beyond_of_floats_[lane]};
    return all >= 0;
  }

 private:
  typedef std::int64_t Longs __attribute__((vector_size(simd::kWidth * 8)));
  typedef std::int32_t Ints __attribute__((vector_size(simd::kWidth * 8)));
  static constexpr std::int64_t kMagnitude = INT64_MAX;

  AFFLUX_FN std::int64_t magnitude(double value) {
    std::int64_t bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    return bits & kMagnitude;
  }

  // Returns the bits of the largest finite float32 that is at most `most`.
  AFFLUX_FN std::int32_t floats_below(double most) {
    if (most >= 0x1.fffffep127) return 0x7f7fffff;
    const float nearest = static_cast<float>(most);
    std::int32_t bits;
    __builtin_memcpy(&bits, &nearest, sizeof bits);
    return static_cast<double>(nearest) > most ? bits - 1 : bits;
  }

  std::int64_t most_, single_ = 0;
  std::int32_t most_of_floats_;
  Longs beyond_{};
  Ints beyond_of_floats_{};
};

}  // namespace
}  // namespace afflux::AFFLUX_ISA
