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
  AFFLUX_INLINE explicit Soundness(double most) : most_(magnitude(most)) {}
  AFFLUX_INLINE void check(simd::Doubles values) {
    beyond_ |= most_ - ((Longs)values & kMagnitude);  // neither is negative: no overflow
  }
  AFFLUX_INLINE void check(const simd::Pack& values) {
    check(values.a);
    check(values.b);
    check(values.c);
    check(values.d);
  }
  AFFLUX_INLINE void check(double value) { single_ |= most_ - magnitude(value); }
  AFFLUX_INLINE bool everywhere() const {
    std::int64_t all = single_;
    for (int lane = 0; lane < simd::kWidth; ++lane) all |= beyond_[lane];
    return all >= 0;
  }

 private:
  typedef std::int64_t Longs __attribute__((vector_size(simd::kWidth * 8)));
  static constexpr std::int64_t kMagnitude = INT64_MAX;

  AFFLUX_FN std::int64_t magnitude(double value) {
    std::int64_t bits;
    __builtin_memcpy(&bits, &value, sizeof bits);
    return bits & kMagnitude;
  }

  std::int64_t most_, single_ = 0;
  Longs beyond_{};
};

}  // namespace
}  // namespace afflux::AFFLUX_ISA
