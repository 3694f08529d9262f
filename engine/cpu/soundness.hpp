// Whether values are sound: finite, and within a limit.
#pragma once
#include "cpu/simd.hpp"

namespace afflux::AFFLUX_ISA {
namespace {

// |x| <= most as integers: without their sign, float64 have the order of their bits, and a NaN is beyond all numbers.
// What becomes negative in any lane says so. Comparisons of float64 would wait for each other: compilers join them into
// one mask.
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
