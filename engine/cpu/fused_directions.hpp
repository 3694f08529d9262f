// The directions of fused rounds (fused.hpp): of a pack of elements, in registers.
#pragma once
#include "api/kernels.hpp"
#include "cpu/calibrate.hpp"
#include "cpu/combine.hpp"
#include "cpu/soundness.hpp"

namespace afflux::AFFLUX_ISA {
namespace {

// The largest number of streams of a fused round; with more streams, tiles are faster (bench/NOTES.md).
constexpr int kMostFused = 32;

// The memory for new values. kStreams: they are stored past the caches, unless they replace the old values in place.
template <bool kStreams>
struct Target {
  float* values = nullptr;
  bool streams = false;

  Target() = default;
  // `begin` is the first element that is stored.
  AFFLUX_INLINE Target(const void* old, void* place, std::int64_t begin)
      : values(static_cast<float*>(place)),
        streams(kStreams && place != old && reinterpret_cast<std::uintptr_t>(values + begin) % simd::kStreamed == 0) {}

  AFFLUX_INLINE void put(std::int64_t i, simd::Doubles value) const {
    if (kStreams && streams)
      simd::Vector::stream(values + i, value);
    else
      simd::Vector::store(values + i, value);
  }
};

// The params' part of the direction.
class WeightedParams {
 public:
  AFFLUX_INLINE explicit WeightedParams(const Pass& pass)
      : params_(static_cast<const float*>(pass.params.data)), weight_(pass.combine.params_weight) {}
  AFFLUX_INLINE simd::Pack direction(std::int64_t i) const {
    const simd::VectorPack lanes;
    const simd::Pack nothing = lanes.fill(0.0);
    return weight_ == 0.0 ? nothing : formula::weighted(nothing, lanes.fill(weight_), lanes.load(params_ + i));
  }

 private:
  const float* params_;
  double weight_;
};

// The direction without rows and without rule vectors, from updates of type U. kChecks: their elements are compared
// with combine.most.
template <class U, bool kChecks>
class CombinedUpdates {
 public:
  AFFLUX_INLINE CombinedUpdates(const Pass& pass, const MemoryUse& memory, std::int64_t)
      : params_(pass), ahead_(memory.prefetch), sound_(pass.combine.most) {
    for (std::int64_t k = 0; k < pass.combine.updates.size; ++k) {
      if (!has_work(pass, k)) continue;
      updates_[count_] = static_cast<const U*>(pass.combine.updates.data[k].data);
      weights_[count_++] = pass.combine.weights.data[k];
    }
  }
  AFFLUX_INLINE simd::Pack direction(std::int64_t i) {
    const simd::VectorPack lanes;
    simd::Pack sum = params_.direction(i);
    for (int k = 0; k < count_; ++k) {
      lanes.prefetch(updates_[k] + i, ahead_);
      const simd::Pack values = lanes.load(updates_[k] + i);
      if (kChecks) sound_.check(updates_[k] + i, values);
      sum = formula::weighted(sum, lanes.fill(weights_[k]), values);
    }
    return sum;
  }
  AFFLUX_INLINE bool sound() const { return !kChecks || sound_.everywhere(); }

 private:
  WeightedParams params_;
  std::int64_t ahead_;
  const U* updates_[kMostFused];
  double weights_[kMostFused];
  int count_ = 0;
  Soundness sound_;
};

// The direction without rows and with one rule vector, which is replaced in the same sweep, or only read. kChecks: the
// elements of the updates are compared with combine.most.
template <class U, bool kStreams, bool kChecks>
class RenewingUpdates {
 public:
  AFFLUX_INLINE RenewingUpdates(const Pass& pass, const MemoryUse& memory, std::int64_t begin)
      : params_(pass),
        ahead_(memory.prefetch),
        renews_(pass.rule_vectors.next.size > 0),
        sound_(pass.most),
        valid_(pass.combine.most) {
    const RuleVectors& held = pass.rule_vectors;
    const double* const next = held.next.data;
    vector_ = static_cast<const float*>(held.vectors.data[0].data);
    weight_ = held.weights.data[0];
    next_weight_ = renews_ ? next[0] : 0.0;
    if (renews_) out_ = {vector_, held.outs.data[0].data, begin};
    for (std::int64_t k = 0; k < pass.combine.updates.size; ++k) {
      const double weight = pass.combine.weights.data[k], other = renews_ ? next[1 + k] : 0.0;
      if (weight == 0.0 && other == 0.0) continue;
      updates_[count_++] = {static_cast<const U*>(pass.combine.updates.data[k].data), weight, other};
    }
  }
  AFFLUX_INLINE simd::Pack direction(std::int64_t i) {
    const simd::VectorPack lanes;
    simd::Pack sum = params_.direction(i), renewed = lanes.fill(0.0);
    if (weight_ != 0.0 || next_weight_ != 0.0) {
      lanes.prefetch(vector_ + i, ahead_);
      add(lanes.load(vector_ + i), weight_, next_weight_, sum, renewed);
    }
    for (int k = 0; k < count_; ++k) {
      const Update& update = updates_[k];
      lanes.prefetch(update.values + i, ahead_);
      const simd::Pack values = lanes.load(update.values + i);
      if (kChecks) valid_.check(update.values + i, values);
      add(values, update.weight, update.other, sum, renewed);
    }
    if (renews_) {
      sound_.check(renewed);
      out_.put(i, renewed.a);
      out_.put(i + simd::kWidth, renewed.b);
      out_.put(i + 2 * simd::kWidth, renewed.c);
      out_.put(i + 3 * simd::kWidth, renewed.d);
    }
    return sum;
  }
  AFFLUX_INLINE bool sound() const { return sound_.everywhere() && (!kChecks || valid_.everywhere()); }

 private:
  struct Update {
    const U* values;
    double weight, other;  // in the direction, and in the rule vector
  };

  // Adds the values to both sums. A weight of 0 adds nothing, even if values are not finite.
  static AFFLUX_INLINE void add(const simd::Pack& values, double weight, double other, simd::Pack& sum,
                                simd::Pack& renewed) {
    const simd::VectorPack lanes;
    if (weight != 0.0) sum = formula::weighted(sum, lanes.fill(weight), values);
    if (other != 0.0) renewed = formula::weighted(renewed, lanes.fill(other), values);
  }

  WeightedParams params_;
  std::int64_t ahead_;
  bool renews_;
  const float* vector_;
  double weight_, next_weight_;
  Target<kStreams> out_;
  Update updates_[kMostFused];
  int count_ = 0;
  Soundness sound_, valid_;
};

// The direction with plain rows, whose factor is 1. The rows and their sum are replaced in the same sweep. kWeighted:
// CA2FL, else AFA-CS.
template <bool kWeighted, class U>
class CalibratedUpdates {
 public:
  AFFLUX_INLINE CalibratedUpdates(const Pass& pass, const MemoryUse& memory, std::int64_t)
      : params_(pass),
        ahead_(memory.prefetch),
        share_(formula::share_of_sum(pass.calibrate)),
        sum_(pass.calibrate.sum.data),
        sum_out_(pass.calibrate.sum_out.data) {
    for (std::int64_t k = 0; k < pass.combine.updates.size; ++k) {
      if (!has_work(pass, k)) continue;
      arrivals_[count_++] = {static_cast<const U*>(pass.combine.updates.data[k].data),
                             reinterpret_cast<const Row<U>*>(pass.calibrate.rows.data[k].data),
                             reinterpret_cast<Row<U>*>(pass.calibrate.new_rows.data[k].data),
                             kWeighted ? pass.combine.weights.data[k] : 0.0};
    }
  }
  AFFLUX_INLINE simd::Pack direction(std::int64_t i) const {
    const simd::VectorPack lanes;
    lanes.prefetch(sum_ + i, ahead_);
    simd::Pack direction = params_.direction(i), sum = lanes.load(sum_ + i);
    if (kWeighted) direction = formula::add_cached_mean(direction, sum, lanes.fill(share_));
    for (int k = 0; k < count_; ++k) {
      const Arrival<U>& arrival = arrivals_[k];
      lanes.prefetch(arrival.update + i, ahead_);
      const simd::Pack update = lanes.load(arrival.update + i);
      simd::Pack old = lanes.fill(0.0);
      if (arrival.old != nullptr) {
        lanes.prefetch(arrival.old + i, ahead_);
        old = lanes.load(arrival.old + i);
      }
      const bool replaced = arrival.renewed != nullptr;
      formula::accumulate_difference(update, old, update, kWeighted && arrival.weight != 0.0,
                                     lanes.fill(arrival.weight), formula::One(), replaced, direction, sum);
      if (replaced) lanes.copy(arrival.update + i, arrival.renewed + i);
    }
    lanes.store(sum_out_ + i, sum);
    if (!kWeighted) direction = formula::add_cached_mean(direction, sum, lanes.fill(share_));
    return direction;
  }
  AFFLUX_INLINE bool sound() const { return true; }  // rows and their sum are not checked, as in the tiles

 private:
  WeightedParams params_;
  std::int64_t ahead_;
  double share_;
  const double* sum_;
  double* sum_out_;
  Arrival<U> arrivals_[kMostFused / 2];  // an `old` of null means zeros
  int count_ = 0;
};

}  // namespace
}  // namespace afflux::AFFLUX_ISA
