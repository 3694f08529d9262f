// Common rounds in registers: {no rows, plain rows} x {every step} x {float32, bfloat16 updates}, and one rule vector
// with plain gradient descent, with float32 params, composed of the functions that the tiles call (apply.hpp). An
// element's direction never reaches memory, so that the rounds keep up with memory that is about as fast as L1. Same
// bits as the tiles.
#pragma once
#include "cpu/calibrate.hpp"
#include "cpu/codec.hpp"
#include "cpu/combine.hpp"
#include "cpu/rule_vectors.hpp"
#include "cpu/soundness.hpp"
#include "formula/step.hpp"

namespace afflux::AFFLUX_ISA {
namespace {

// Streams that are read side by side; of more, tiles are faster (bench/NOTES.md).
constexpr int kMostFused = 32;

// Whether the rule vectors are none, or one that a step without states goes with: read, renewed or both.
AFFLUX_FN bool can_fuse(const RuleVectors& held, const Pass& pass) {
  if (held.vectors.size == 0) return true;
  if (held.vectors.size > 1 || pass.calibrate.kind != Calibration::none || pass.step.kind != StepKind::sgd)
    return false;
  return held.next.size == 0 || !stays(held.next.data, 0, 1 + pass.combine.updates.size);
}

AFFLUX_FN bool can_fuse(const Pass& pass, Type updates) {
  if (pass.params.type != Type::float32 || (updates != Type::float32 && updates != Type::bfloat16)) return false;
  if (!can_fuse(pass.rule_vectors, pass)) return false;
  if (pass.calibrate.kind != Calibration::none && plain_bytes(pass.calibrate.codec) == 0) return false;
  std::int64_t count = 0;
  const bool holds = pass.rule_vectors.vectors.size > 0;  // then any update may be read for it
  for (std::int64_t k = 0; k < pass.combine.updates.size; ++k) count += holds || has_work(pass, k) ? 1 : 0;
  return count <= (pass.calibrate.kind == Calibration::none ? kMostFused : kMostFused / 2);
}

// The direction's part of params.
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

// The direction without rows, of U's: updates of one type.
template <class U>
class CombinedUpdates {
 public:
  AFFLUX_INLINE CombinedUpdates(const Pass& pass, const MemoryUse& memory) : params_(pass), ahead_(memory.prefetch) {
    for (std::int64_t k = 0; k < pass.combine.updates.size; ++k) {
      if (!has_work(pass, k)) continue;
      updates_[count_] = static_cast<const U*>(pass.combine.updates.data[k].data);
      weights_[count_++] = pass.combine.weights.data[k];
    }
  }
  AFFLUX_INLINE simd::Pack direction(std::int64_t i) const {
    const simd::VectorPack lanes;
    simd::Pack sum = params_.direction(i);
    for (int k = 0; k < count_; ++k) {
      lanes.prefetch(updates_[k] + i, ahead_);
      sum = formula::weighted(sum, lanes.fill(weights_[k]), lanes.load(updates_[k] + i));
    }
    return sum;
  }
  AFFLUX_INLINE bool sound() const { return true; }  // it writes nothing

 private:
  WeightedParams params_;
  std::int64_t ahead_;
  const U* updates_[kMostFused];
  double weights_[kMostFused];
  int count_ = 0;
};

// Where new values go. kStreams: past the caches, if that is not where the old ones lie.
template <bool kStreams>
struct Target {
  float* values = nullptr;
  bool streams = false;

  Target() = default;
  AFFLUX_INLINE Target(const void* old, void* place)
      : values(static_cast<float*>(place)),
        streams(kStreams && place != old && reinterpret_cast<std::uintptr_t>(place) % simd::kStreamed == 0) {}

  AFFLUX_INLINE void put(std::int64_t i, simd::Doubles value) const {
    if (kStreams && streams)
      simd::Vector::stream(values + i, value);
    else
      simd::Vector::store(values + i, value);
  }
};

// The direction without rows and with one rule vector, which is renewed on the way, or only read.
template <class U, bool kStreams>
class RenewingUpdates {
 public:
  AFFLUX_INLINE RenewingUpdates(const Pass& pass, const MemoryUse& memory)
      : params_(pass), ahead_(memory.prefetch), renews_(pass.rule_vectors.next.size > 0), sound_(pass.most) {
    const RuleVectors& held = pass.rule_vectors;
    const double* const next = held.next.data;
    vector_ = static_cast<const float*>(held.vectors.data[0].data);
    weight_ = held.weights.data[0];
    next_weight_ = renews_ ? next[0] : 0.0;
    if (renews_) out_ = {vector_, held.outs.data[0].data};
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
      add(lanes.load(update.values + i), update.weight, update.other, sum, renewed);
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
  AFFLUX_INLINE bool sound() const { return sound_.everywhere(); }

 private:
  struct Update {
    const U* values;
    double weight, other;  // in the direction, and in the rule vector
  };

  // Of what may not be finite nothing is added where its weight is 0.
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
  Soundness sound_;
};

// The direction with plain rows, which are replaced on the way, as is their sum. kWeighted: CA2FL's, else AFA-CS's.
template <bool kWeighted, class U>
class CalibratedUpdates {
 public:
  AFFLUX_INLINE CalibratedUpdates(const Pass& pass, const MemoryUse& memory)
      : params_(pass),
        ahead_(memory.prefetch),
        inverse_(formula::inverse_of(pass.calibrate.num_clients)),
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
    if (kWeighted) direction = formula::add_cached_mean(direction, sum, lanes.fill(inverse_));
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
                                     lanes.fill(arrival.weight), replaced, direction, sum);
      if (replaced) lanes.copy(arrival.update + i, arrival.renewed + i);
    }
    lanes.store(sum_out_ + i, sum);
    if (!kWeighted) direction = formula::add_cached_mean(direction, sum, lanes.fill(inverse_));
    return direction;
  }
  AFFLUX_INLINE bool sound() const { return true; }  // rows and their sum are not looked at, here as in the tiles

 private:
  WeightedParams params_;
  std::int64_t ahead_;
  double inverse_;
  const double* sum_;
  double* sum_out_;
  Arrival<U> arrivals_[kMostFused / 2];  // a row of null is zeros
  int count_ = 0;
};

// The step, from params and states to where the new ones go.
template <StepKind kKind, int kStates, bool kStreams>
class StepTargets {
 public:
  AFFLUX_INLINE StepTargets(const Pass& pass, const MemoryUse& memory)
      : step_(pass.step),
        ahead_(memory.prefetch),
        params_(static_cast<const float*>(pass.params.data)),
        out_(pass.params.data, pass.out.data),
        sound_(pass.most) {
    for (int k = 0; k < kStates; ++k) {
      states_[k] = static_cast<const float*>(pass.step.states.data[k].data);
      outs_[k] = {states_[k], pass.step.outs.data[k].data};
    }
  }
  AFFLUX_INLINE void move(std::int64_t i, const simd::Pack& direction) {
    const simd::VectorPack lanes;
    lanes.prefetch(params_ + i, ahead_);
    AFFLUX_UNROLL
    for (int k = 0; k < kStates; ++k) lanes.prefetch(states_[k] + i, ahead_);
    move(i, direction.a);
    move(i + simd::kWidth, direction.b);
    move(i + 2 * simd::kWidth, direction.c);
    move(i + 3 * simd::kWidth, direction.d);
  }
  AFFLUX_INLINE bool sound() const { return sound_.everywhere(); }

 private:
  AFFLUX_INLINE void move(std::int64_t i, simd::Doubles direction) {
    const simd::Vector lanes;
    simd::Doubles values[kSize];
    AFFLUX_UNROLL
    for (int k = 0; k < kStates; ++k) values[k] = lanes.load(states_[k] + i);
    const simd::Doubles moved = formula::step(kKind, lanes, step_, lanes.load(params_ + i), direction, values);
    AFFLUX_UNROLL
    for (int k = 0; k < kStates; ++k) {
      sound_.check(values[k]);
      outs_[k].put(i, values[k]);
    }
    sound_.check(moved);
    out_.put(i, moved);
  }

  static constexpr int kSize = kStates > 0 ? kStates : 1;
  const Step step_;
  std::int64_t ahead_;
  const float* params_;
  Target<kStreams> out_;
  const float* states_[kSize];
  Target<kStreams> outs_[kSize];
  Soundness sound_;
};

// Not inlined: each has the registers to itself.
template <class Updates, class Targets, bool kStreams>
__attribute__((noinline)) bool fuse(const Pass& pass, const MemoryUse& memory, std::int64_t begin, std::int64_t end) {
  Updates from(pass, memory);
  Targets to(pass, memory);
  const bool limited = pass.combine.most != kNoLimit;
  Soundness within(pass.combine.most);
  for (std::int64_t i = begin; i < end; i += simd::kWide) {
    const simd::Pack direction = from.direction(i);
    if (limited) within.check(direction);
    to.move(i, direction);
  }
  if (kStreams) simd::stored_streams();
  return from.sound() && to.sound() && within.everywhere();
}

template <class Updates, bool kStreams>
AFFLUX_FN bool fuse_step(const Pass& pass, const MemoryUse& memory, std::int64_t begin, std::int64_t end) {
  switch (pass.step.kind) {
#define AFFLUX_KIND(kind, states) \
  case StepKind::kind:            \
    return fuse<Updates, StepTargets<StepKind::kind, states, kStreams>, kStreams>(pass, memory, begin, end);
    AFFLUX_STEP_KINDS(AFFLUX_KIND)
#undef AFFLUX_KIND
  }
  return false;
}

template <class U, bool kStreams>
AFFLUX_FN bool fuse_updates(const Pass& pass, const MemoryUse& memory, std::int64_t begin, std::int64_t end) {
  if (pass.rule_vectors.vectors.size == 0) return fuse_step<CombinedUpdates<U>, kStreams>(pass, memory, begin, end);
  using Targets = StepTargets<StepKind::sgd, 0, kStreams>;
  return fuse<RenewingUpdates<U, kStreams>, Targets, kStreams>(pass, memory, begin, end);
}

// Beside rows that are written where they lie, stores past the caches are slower than others (bench/NOTES.md).
template <class U>
AFFLUX_FN bool fuse_rows(const Pass& pass, const MemoryUse& memory, std::int64_t begin, std::int64_t end) {
  switch (pass.calibrate.kind) {
    case Calibration::none:
      if constexpr (simd::kCanStream)
        if (memory.streams) return fuse_updates<U, true>(pass, memory, begin, end);
      return fuse_updates<U, false>(pass, memory, begin, end);
    case Calibration::cached_difference:
      return fuse_step<CalibratedUpdates<true, U>, false>(pass, memory, begin, end);
    case Calibration::cached_mean:
      return fuse_step<CalibratedUpdates<false, U>, false>(pass, memory, begin, end);
  }
  return false;
}

// Elements [begin, end), whole packs, of a round that can be fused. Returns whether all that is written is sound.
AFFLUX_FN bool apply_fused(const Pass& pass, Type updates, const MemoryUse& memory, std::int64_t begin,
                           std::int64_t end) {
  return updates == Type::float32 ? fuse_rows<float>(pass, memory, begin, end)
                                  : fuse_rows<Bfloat16>(pass, memory, begin, end);
}

}  // namespace
}  // namespace afflux::AFFLUX_ISA
