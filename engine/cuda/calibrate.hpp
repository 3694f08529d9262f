// The stages with cached rows that are vectors as they are, four elements of each: S is their sum, h_i the row of
// arrival i. Rows have the type that an update widens to.
#pragma once
#include "cuda/combine.hpp"
#include "formula/calibrate.hpp"

namespace afflux::cuda {

// v += S / N
AFFLUX_DEVICE void add_mean(const Doubles& sum, std::int64_t num_clients, Doubles& v) {
  const double inverse = 1.0 / static_cast<double>(num_clients);
  AFFLUX_UNROLLED
  for (int j = 0; j < kFour; ++j) v.at[j] = formula::add_cached_mean(v.at[j], sum.at[j], inverse);
}

AFFLUX_DEVICE Doubles difference(const Doubles& a, const Doubles& b) {
  Doubles result;
  AFFLUX_UNROLLED
  for (int j = 0; j < kFour; ++j) result.at[j] = formula::difference(a.at[j], b.at[j]);
  return result;
}

AFFLUX_DEVICE void add_to_sum(Doubles& sum, const Doubles& difference) {
  AFFLUX_UNROLLED
  for (int j = 0; j < kFour; ++j) sum.at[j] = formula::add_to_sum(sum.at[j], difference.at[j]);
}

// What arrival k adds to the direction's differences: its weight, or 0 where the direction has none.
AFFLUX_DEVICE double direction_weight(const Pass& pass, std::int64_t k) {
  return pass.calibrate.kind == Calibration::cached_difference ? pass.combine.weights.data[k] : 0.0;
}

// v += w (u - h);  S += u - h and h <- u where the row is replaced. A weight of 0 adds nothing.
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
        const Doubles diff = difference(doubles(read.update), doubles(read.old));
        const double weight = direction_weight(pass, k);
        if (weight != 0.0) add_weighted(v, weight, diff);
        void* const new_row = stage.new_rows.data[k].data;
        if (new_row == nullptr) return;
        add_to_sum(sum, diff);
        span.store(new_row, converted<Row>(read.update));
      });
}

}  // namespace afflux::cuda
