// The cached difference of CA2FL (Wang et al. 2024, Algorithm 2): v = h + sum_i w_i (u_i - h_i), S += u_i - h_i.
// The difference of two float32 values is taken in float64; S is float64 because float32 loses it within 10,000 rounds.
#pragma once
#include "formula/fn.hpp"

namespace afflux::formula {

AFFLUX_FN double difference(float update, float row) { return static_cast<double>(update) - static_cast<double>(row); }

// h = S / N, with 1/N rounded once on the host: a division per element would cost more than the sweep.
AFFLUX_FN double cached_mean(double sum, double inverse_num_clients) { return sum * inverse_num_clients; }

AFFLUX_FN double add_cached_mean(double acc, double sum, double inverse_num_clients) {
  return acc + cached_mean(sum, inverse_num_clients);
}

AFFLUX_FN double weighted_difference(double acc, double weight, double diff) { return acc + weight * diff; }

}  // namespace afflux::formula
