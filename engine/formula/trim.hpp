// The weighted trimmed mean of one coordinate. The M arrivals have integer masses, whose sums are exact, so that a
// value that is cut leaves nothing. They are sorted by value, and those with the same value by mass: ascending, if the
// value is negative descending. So neither the way in which they are sorted nor their order before changes a bit.
#pragma once
#include "afflux/pass.hpp"
#include "formula/fn.hpp"

namespace afflux::formula {

// Returns the mass of an arrival, from 0 to 2^28, by its share of the sum of the weights.
AFFLUX_FN std::int32_t mass_of(double weight, double sum) {
  return static_cast<std::int32_t>(weight / sum * 0x1p28 + 0.5);
}

// The masses that are kept: those between `low` and `high` in the order of the values. A boundary between two arrivals
// is less than M / 2 units of mass away from its exact place, because masses are rounded. So one up to `below`, or from
// `above` on, counts as `low` or `high`.
struct Window {
  std::int32_t low, high, below, above;
};

// Returns the window after a cut of `trim`, from 0 to 0.5, on each side. If nothing is left, it is that of the mean of
// lower and upper median: only a boundary in the middle has mass on both sides.
AFFLUX_FN Window window_of(double trim, std::int32_t total, std::int32_t count) {
  std::int32_t low = static_cast<std::int32_t>(trim * total + 0.5), below = low + count - 1;
  if (total - 2 * low < 2 * count) low = 0, below = (total - count) / 2;
  return {low, total - low, below, total - below};
}

// The updates that have a weight, and the masses that are kept of them.
struct TrimmedSum {
  double weight;  // the sum of the weights
  Window window;
  int count;
  bool equal;  // all have the same mass
};

// Returns the sum, and writes the masses of its updates.
AFFLUX_FN TrimmedSum trimmed_sum(const Combine& stage, double* masses) {
  TrimmedSum sum{0.0, {}, 0, true};
  for (std::int64_t k = 0; k < stage.updates.size; ++k) sum.weight = sum.weight + stage.weights.data[k];
  std::int32_t total = 0;
  for (std::int64_t k = 0; k < stage.updates.size; ++k) {
    if (stage.weights.data[k] == 0.0) continue;
    const std::int32_t mass = mass_of(stage.weights.data[k], sum.weight);
    masses[sum.count++] = mass;
    sum.equal = sum.equal && mass == masses[0];
    total += mass;
  }
  sum.window = window_of(stage.trim, total, sum.count);
  return sum;
}

// Returns the place in the window of the boundary that has this mass before it. The mass that is kept of a value is the
// difference of the places of its two boundaries. T is an integer, or a vector of integers or float64.
template <class T>
AFFLUX_FN T place_in(T before, T low, T high, T below, T above) {
  const T inside = before < above ? before : high;
  return below < inside ? inside : low;
}

// Adds the mean, from the sum of the kept masses times their values: acc + weight * (sum / kept), where `weight` is the
// sum of the weights. A value that all arrivals have is the mean: with masses of at most 2^28 its sum is exact.
template <class T>
AFFLUX_FN T add_trimmed_mean(T acc, T weight, T sum, T kept) {
  return acc + weight * (sum / kept);
}

}  // namespace afflux::formula
