// The cached difference of CA2FL (Wang et al. 2024, Algorithm 2): v = h + sum_i w_i (u_i - h_i), S += u_i - h_i.
// The difference of two float32 values is taken in float64; S is float64 because float32 loses it within 10,000 rounds.
#pragma once
#include "formula/fn.hpp"

namespace afflux::formula {

template <class T>
AFFLUX_FN T difference(T update, T row) {
  return update - row;
}

// h = S / N, with 1/N rounded once on the host: a division per element would cost more than the sweep.
template <class T>
AFFLUX_FN T add_cached_mean(T acc, T sum, T inverse_num_clients) {
  return acc + sum * inverse_num_clients;
}

template <class T>
AFFLUX_FN T add_to_sum(T sum, T difference) {
  return sum + difference;
}

}  // namespace afflux::formula
