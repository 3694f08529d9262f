// Whether values are sound: finite, and within a limit.
#pragma once
#include "cpu/simd.hpp"
#include "formula/reduce.hpp"

namespace afflux::AFFLUX_ISA {
namespace {

class Soundness {
 public:
  AFFLUX_INLINE explicit Soundness(double most) : most_(most) {}
  AFFLUX_INLINE void check(simd::Doubles values) {
    lanes_ = formula::within(lanes_, values, simd::Vector::fill(most_));
  }
  AFFLUX_INLINE void check(double value) { single_ = formula::within(single_, value, most_); }
  AFFLUX_INLINE bool everywhere() const {
    double all = single_;
    for (int lane = 0; lane < simd::kWidth; ++lane) all = all * lanes_[lane];
    return all == 1.0;
  }

 private:
  double most_, single_ = 1.0;
  simd::Doubles lanes_ = simd::Vector::fill(1.0);
};

}  // namespace
}  // namespace afflux::AFFLUX_ISA
