// Calibration by cached rows, one element. S is the sum of the rows of all N clients; h_i is the row of arrival i, and
// q_i its new row. The difference of two float32 values is taken in float64. S is float64, because float32 would lose
// its precision within 10,000 rounds.
#pragma once
#include "afflux/pass.hpp"
#include "formula/combine.hpp"

namespace afflux::formula {

// Returns true for the stage of CA2FL (Wang et al. 2024, Algorithm 1): v = f S / N + sum_i w_i (u_i - f h_i), with S
// before the round, and a factor f that is 1 (another one: FedStale). Returns false for the stage of AFA-CS: v = S / N,
// with S after the round and without weights.
AFFLUX_FN bool weighs_differences(Calibration kind) { return kind == Calibration::cached_difference; }

// Returns factor / N: a division for each element would cost more than the sweep. 1 / N is rounded, and then the
// product.
AFFLUX_FN double share_of_sum(const Calibrate& stage) {
  return stage.factor * (1.0 / static_cast<double>(stage.num_clients));
}

// The factor of rows where it is 1 always: the product, which would change no bit, takes no instruction.
struct One {};
template <class T>
AFFLUX_FN T operator*(One, T row) {
  return row;
}

template <class T>
AFFLUX_FN T add_cached_mean(T acc, T sum, T share) {
  return acc + sum * share;
}

// Adds one arrival: v += w (u - factor h) if `in_direction`, and S += q - h if `replaced`. The sum is first, so that
// the product may take the row's registers.
template <class T, class Factor>
AFFLUX_FN void accumulate_difference(T update, T row, T new_row, bool in_direction, T weight, Factor factor,
                                     bool replaced, T& direction, T& sum) {
  if (replaced) sum = sum + (new_row - row);
  if (in_direction) direction = weighted(direction, weight, update - factor * row);
}

}  // namespace afflux::formula
