// apply with a weighted trimmed mean: each thread takes the values of four elements in ascending order, and searches
// all updates for each next one. So any number of updates needs no memory; their values stay in the caches.
#pragma once
#include <vector>

#include "cuda/direction.hpp"
#include "formula/trim.hpp"

namespace afflux::cuda {

// The updates that have a weight, and their masses, on the device.
struct TrimmedTerms {
  formula::TrimmedSum sum;
  const void* const* vectors;
  const double* masses;
};

template <class Executor>
TrimmedTerms trimmed_terms(Executor& executor, const Combine& stage) {
  std::vector<const void*> vectors;
  std::vector<double> masses(static_cast<std::size_t>(stage.updates.size));
  TrimmedTerms terms{formula::trimmed_sum(stage, masses.data()), nullptr, nullptr};
  for (std::int64_t k = 0; k < stage.updates.size; ++k)
    if (stage.weights.data[k] != 0.0) vectors.push_back(stage.updates.data[k].data);
  Staging staging;
  const std::int64_t at_vectors = staging.add(vectors.data(), terms.sum.count),
                     at_masses = staging.add(masses.data(), terms.sum.count);
  staging.upload(executor);
  terms.vectors = staging.at<const void*>(at_vectors);
  terms.masses = staging.at<const double>(at_masses);
  return terms;
}

// A value in the order of all values of an element.
struct Ranked {
  double value;
  std::int32_t index;

  AFFLUX_DEVICE bool is_before(const Ranked& other, const double* masses) const {
    if (value != other.value) return value < other.value;
    const double mass = masses[index], of_other = masses[other.index];
    if (mass != of_other) return (mass < of_other) != (value < 0.0);
    return index < other.index;
  }
};

// Adds the trimmed mean to v. Returns true if no element of the updates is beyond `most`.
template <class U, class Span>
AFFLUX_DEVICE bool add_trimmed(const TrimmedTerms& terms, const Span& span, double most, Doubles& v) {
  const formula::TrimmedSum& sum = terms.sum;
  const double low = sum.window.low, high = sum.window.high, below = sum.window.below, above = sum.window.above;
  const Ranked first{-kNoLimit, 0}, last{kNoLimit, 0};  // no update has these values
  Ranked taken[kFour] = {first, first, first, first};
  Doubles total{}, before{}, place = FourLanes::fill(low);
  bool sound = true;
  for (int rank = 0; rank < sum.count; ++rank) {
    Ranked next[kFour] = {last, last, last, last};
    for (int k = 0; k < sum.count; ++k) {
      const Doubles values = doubles(span.template load<U>(terms.vectors[k]));
      if (rank == 0 && most != kNoLimit) sound = all_within(values, most) && sound;
      AFFLUX_UNROLL_ON_DEVICE
      for (int j = 0; j < kFour; ++j) {
        const Ranked one{values.at[j], k};
        if (taken[j].is_before(one, terms.masses) && one.is_before(next[j], terms.masses)) next[j] = one;
      }
    }
    AFFLUX_UNROLL_ON_DEVICE
    for (int j = 0; j < kFour; ++j) {
      taken[j] = next[j];
      before.at[j] = before.at[j] + terms.masses[next[j].index];
      const double after = formula::place_in(before.at[j], low, high, below, above);
      total.at[j] = formula::weighted(total.at[j], after - place.at[j], next[j].value);
      place.at[j] = after;
    }
  }
  if (sum.count > 0) v = formula::add_trimmed_mean(v, FourLanes::fill(sum.weight), total, FourLanes::fill(high - low));
  return sound;
}

// P, U: the types of params and of updates.
template <class P, class U>
struct TrimmedBody {
  static constexpr int kThreads = 128, kBlocksTogether = 3;  // up to 168 registers a thread: no kernel spills some
  static constexpr std::int64_t kTile = kThreads * kFour;
  struct Shared {};

  Sweep sweep;
  TrimmedTerms terms;

  // z: of noise, or null.
  template <class Span>
  AFFLUX_DEVICE void elements(const Span& span, const Doubles* z = nullptr) const {
    const Pass& pass = sweep.pass;
    Doubles v = start<P>(pass, span);
    bool sound = add_trimmed<U>(terms, span, pass.combine.most, v);
    if (pass.rule_vectors.next.size > 0) sound = renew<P, U>(pass, sweep.renewal, nullptr, span, v, z) && sound;
    finish<P>(sweep, span, v, sound, z);
  }

  template <class Block>
  AFFLUX_DEVICE void operator()(const Block& block, Shared&) const {
    each_four<TrimmedBody>(block, sweep.pass.params.size, sweep.aligned, [&](const auto& span) { elements(span); });
  }
};

}  // namespace afflux::cuda
