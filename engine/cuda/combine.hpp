// Weighted sums of vectors, four elements of each.
#pragma once
#include "afflux/pass.hpp"
#include "cuda/vector4.hpp"
#include "formula/combine.hpp"

namespace afflux::cuda {

AFFLUX_DEVICE void add_weighted(Doubles& sum, double weight, const Doubles& values) {
  sum = formula::weighted(sum, FourLanes::fill(weight), values);
}

// The same, but adds nothing if the weight is 0.
AFFLUX_DEVICE void add_term(Doubles& sum, double weight, const Doubles& values) {
  if (weight != 0.0) add_weighted(sum, weight, values);
}

// Calls load(k), then use(k, loaded), for k = 0, 1, ... count - 1 if wanted(k). Several loads are in progress at once.
template <class T, class Wanted, class Load, class Use>
AFFLUX_DEVICE void in_batches(std::int64_t count, const Wanted& wanted, const Load& load, const Use& use) {
  constexpr int kBatch = 4;
  for (std::int64_t k = 0; k < count; k += kBatch) {
    T loaded[kBatch];
    bool has[kBatch];
    AFFLUX_UNROLL_ON_DEVICE
    for (int b = 0; b < kBatch; ++b) {
      has[b] = k + b < count && wanted(k + b);
      if (has[b]) loaded[b] = load(k + b);
    }
    AFFLUX_UNROLL_ON_DEVICE
    for (int b = 0; b < kBatch; ++b)
      if (has[b]) use(k + b, loaded[b]);
  }
}

// Adds sum_k weights[k] * list[k] to `sum`; a vector whose weight is 0 is not read. Returns true if no element of the
// others is beyond `most`.
template <class T, class Vector, class Span>
AFFLUX_DEVICE bool combine(const List<Vector>& list, const double* weights, const Span& span, Doubles& sum,
                           double most = kNoLimit) {
  bool sound = true;
  in_batches<Vector4<T>>(
      list.size, [&](std::int64_t k) { return weights[k] != 0.0; },
      [&](std::int64_t k) { return span.template load<T>(list.data[k].data); },
      [&](std::int64_t k, const Vector4<T>& read) {
        const Doubles values = doubles(read);
        if (most != kNoLimit) sound = all_within(values, most) && sound;
        add_weighted(sum, weights[k], values);
      });
  return sound;
}

}  // namespace afflux::cuda
