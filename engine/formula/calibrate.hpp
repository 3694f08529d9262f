// Calibration by cached rows, one element. S is the sum of the rows of all N clients; h_i is the row of arrival i, and
// q_i its new row. The difference of two float32 values is taken in float64. S is float64, because float32 would lose
// its precision within 10,000 rounds.
#pragma once
#include "afflux/pass.hpp"
#include "formula/combine.hpp"

namespace afflux::formula {

// Returns true for the stage of CA2FL (Wang et al. 2024, Algorithm 1): v = S / N + sum_i w_i (u_i - h_i), with S before
// the round. Returns false for the stage of AFA-CS: v = S / N, with S after the round and without weights.
AFFLUX_FN bool weighs_differences(Calibration kind) { return kind == Calibration::cached_difference; }

// Returns 1 / N, rounded once: a division for each element would cost more than the sweep.
AFFLUX_FN double inverse_of(std::int64_t num_clients) { return 1.0 / static_cast<double>(num_clients); }

template <class T>
AFFLUX_FN T add_cached_mean(T acc, T sum, T inverse_num_clients) {
  return acc + sum * inverse_num_clients;
}

// Adds one arrival: v += w (u - h) if `in_direction`, and S += q - h if `replaced`.
template <class T>
AFFLUX_FN void accumulate_difference(T update, T row, T new_row, bool in_direction, T weight, bool replaced,
                                     T& direction, T& sum) {
  if (in_direction) direction = weighted(direction, weight, update - row);
  if (replaced) sum = sum + (new_row - row);
}

}  // namespace afflux::formula
