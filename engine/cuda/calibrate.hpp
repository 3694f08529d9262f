// The stages with plain cached rows, four elements of each: S is their sum, h_i the row of arrival i. Rows have the
// type to which an update widens (float32 or float64).
#pragma once
#include "cuda/combine.hpp"
#include "formula/calibrate.hpp"

namespace afflux::cuda {

// Adds S / N, times the factor, to v.
AFFLUX_DEVICE void add_mean(const Doubles& sum, const Calibrate& stage, Doubles& v) {
  v = formula::add_cached_mean(v, sum, FourLanes::fill(formula::share_of_sum(stage)));
}

// Returns the weight of arrival k in the direction's differences, or 0 if the direction has no differences.
AFFLUX_DEVICE double direction_weight(const Pass& pass, std::int64_t k) {
  return formula::weighs_differences(pass.calibrate.kind) ? pass.combine.weights.data[k] : 0.0;
}

// Adds the differences of all arrivals to v and to the sum; the new row is the update itself.
template <class U, class Span>
AFFLUX_DEVICE void add_differences(const Pass& pass, const Span& span, Doubles& v, Doubles& sum) {
  using Row = decltype(formula::widened(U{}));
  struct Read {
    Vector4<U> update;
    Vector4<Row> old;
  };
  const Calibrate& stage = pass.calibrate;
  in_batches<Read>(
      pass.combine.updates.size,
      [&](std::int64_t k) { return direction_weight(pass, k) != 0.0 || stage.new_rows.data[k].data != nullptr; },
      [&](std::int64_t k) {
        const void* const row = stage.rows.data[k].data;
        return Read{span.template load<U>(pass.combine.updates.data[k].data),
                    row == nullptr ? Vector4<Row>{} : span.template load<Row>(row)};
      },
      [&](std::int64_t k, const Read& read) {
        const Doubles update = doubles(read.update);
        void* const new_row = stage.new_rows.data[k].data;
        const double weight = direction_weight(pass, k);
        const Doubles old = doubles(read.old);
        AFFLUX_UNROLL_ON_DEVICE
        for (int j = 0; j < kFour; ++j)
          formula::accumulate_difference(update.at[j], old.at[j], update.at[j], weight != 0.0, weight, stage.factor,
                                         new_row != nullptr, v.at[j], sum.at[j]);
        if (new_row != nullptr) span.store(new_row, converted<Row>(read.update));
      });
}

}  // namespace afflux::cuda
