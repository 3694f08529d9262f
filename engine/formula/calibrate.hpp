// Calibration by cached rows, one element: S is their sum over all N clients, h_i the row of arrival i, which becomes
// q_i. The difference of two float32 values is taken in float64; S is float64 because float32 loses it within 10,000
// rounds.
#pragma once
#include "afflux/pass.hpp"
#include "formula/combine.hpp"

namespace afflux::formula {

// Whether the stage is CA2FL's (Wang et al. 2024, Algorithm 2), v = S / N + sum_i w_i (u_i - h_i) with the S of before
// the round; else it is that of AFA-CS, v = S / N with the S of after it, where weights play no role.
AFFLUX_FN bool weighs_differences(Calibration kind) { return kind == Calibration::cached_difference; }

// 1 / N, rounded once: a division per element would cost more than the sweep.
AFFLUX_FN double inverse_of(std::int64_t num_clients) { return 1.0 / static_cast<double>(num_clients); }

template <class T>
AFFLUX_FN T add_cached_mean(T acc, T sum, T inverse_num_clients) {
  return acc + sum * inverse_num_clients;
}

// One arrival's part: v += w (u - h) if it is in the direction, and S += q - h if its row is replaced.
template <class T>
AFFLUX_FN void accumulate_difference(T update, T row, T new_row, bool in_direction, T weight, bool replaced,
                                     T& direction, T& sum) {
  if (in_direction) direction = weighted(direction, weight, update - row);
  if (replaced) sum = sum + (new_row - row);
}

}  // namespace afflux::formula
