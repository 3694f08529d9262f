// Common rounds in registers: {no rows, plain rows} x {every step} x {float32, bfloat16 updates}; and one rule vector,
// without rows and with the step sgd; updates are checked without rows; all with float32 params. They are composed of
// the functions that the tiles call (apply.cpp), and give the same bits. The direction is never stored to memory, so
// that the rounds are not slower than memory, even where memory is about as fast as L1.
#include "cpu/fused.hpp"

#include "cpu/codec.hpp"
#include "cpu/fused_directions.hpp"
#include "formula/noise.hpp"
#include "formula/step.hpp"

namespace afflux::AFFLUX_ISA {
namespace {

// Returns true if the rule vectors can be fused: there is none; or there is one, without rows and with the step sgd,
// that is read, replaced or both.
AFFLUX_FN bool can_fuse(const RuleVectors& held, const Pass& pass) {
  if (held.vectors.size == 0) return true;
  if (held.vectors.size > 1 || pass.calibrate.kind != Calibration::none || pass.step.kind != StepKind::sgd)
    return false;
  return held.next.size == 0 || !stays(held.next.data, 0, 1 + pass.combine.updates.size);
}

// The step of a pack of elements, from params and states to their outs.
template <StepKind kKind, int kStates, bool kStreams>
class StepTargets {
 public:
  AFFLUX_INLINE StepTargets(const Pass& pass, const MemoryUse& memory, std::int64_t begin)
      : step_(pass.step),
        ahead_(memory.prefetch),
        params_(static_cast<const float*>(pass.params.data)),
        out_(pass.params.data, pass.out.data, begin),
        sound_(pass.most) {
    for (int k = 0; k < kStates; ++k) {
      states_[k] = static_cast<const float*>(pass.step.states.data[k].data);
      outs_[k] = {states_[k], pass.step.outs.data[k].data, begin};
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

// Computes elements [begin, end). Returns true if all written values are valid. The function is not inlined, so that
// each instance has all registers.
template <class Updates, class Targets, bool kStreams>
__attribute__((noinline)) bool fuse(const Pass& pass, const MemoryUse& memory, std::int64_t begin, std::int64_t end) {
  Updates from(pass, memory, begin);
  Targets to(pass, memory, begin);
  for (std::int64_t i = begin; i < end; i += simd::kWide) to.move(i, from.direction(i));
  if (kStreams) simd::stored_streams();
  return from.sound() && to.sound();
}

template <class Updates, bool kStreams>
AFFLUX_FN bool fuse_step(const Pass& pass, const MemoryUse& memory, std::int64_t begin, std::int64_t end) {
  switch (pass.step.kind) {
#define AFFLUX_KIND(kind, states, ...) \
  case StepKind::kind:                 \
    return fuse<Updates, StepTargets<StepKind::kind, states, kStreams>, kStreams>(pass, memory, begin, end);
    AFFLUX_STEP_KINDS(AFFLUX_KIND)
#undef AFFLUX_KIND
  }
  return false;
}

template <class U, bool kStreams>
AFFLUX_FN bool fuse_updates(const Pass& pass, const MemoryUse& memory, std::int64_t begin, std::int64_t end) {
  using Targets = StepTargets<StepKind::sgd, 0, kStreams>;
  const bool checks = pass.combine.most != kNoLimit;
  if (pass.rule_vectors.vectors.size == 0)
    return checks ? fuse_step<CombinedUpdates<U, true>, kStreams>(pass, memory, begin, end)
                  : fuse_step<CombinedUpdates<U, false>, kStreams>(pass, memory, begin, end);
  return checks ? fuse<RenewingUpdates<U, kStreams, true>, Targets, kStreams>(pass, memory, begin, end)
                : fuse<RenewingUpdates<U, kStreams, false>, Targets, kStreams>(pass, memory, begin, end);
}

// Chooses the directions. Only rounds without rows store past the caches: beside rows that are written in place, such
// stores are slower (bench/NOTES.md).
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

}  // namespace

bool can_fuse(const Pass& pass, Type updates) {
  if (pass.params.type != Type::float32 || (updates != Type::float32 && updates != Type::bfloat16)) return false;
  if (pass.combine.trim > 0.0 || formula::draws(pass.combine.noise) || !can_fuse(pass.rule_vectors, pass)) return false;
  if (pass.combine.most != kNoLimit && pass.calibrate.kind != Calibration::none) return false;
  if (pass.calibrate.kind != Calibration::none && plain_bytes(pass.calibrate.codec) == 0) return false;
  if (pass.calibrate.factor != 1.0) return false;
  std::int64_t count = 0;
  const bool holds = pass.rule_vectors.vectors.size > 0;  // then any update may be read for the rule vector
  for (std::int64_t k = 0; k < pass.combine.updates.size; ++k) count += holds || has_work(pass, k) ? 1 : 0;
  return count <= (pass.calibrate.kind == Calibration::none ? kMostFused : kMostFused / 2);
}

bool apply_fused(const Pass& pass, Type updates, const MemoryUse& memory, std::int64_t begin, std::int64_t end) {
  return updates == Type::float32 ? fuse_rows<float>(pass, memory, begin, end)
                                  : fuse_rows<Bfloat16>(pass, memory, begin, end);
}

}  // namespace afflux::AFFLUX_ISA
