// apply without cached rows, with at most one rule vector. The lists of vectors and weights are arguments of the
// kernel, so that no address waits for a load. The host leaves out vectors whose weights are 0, so that no thread looks
// for them.
#pragma once
#include <algorithm>
#include <optional>

#include "cuda/combine.hpp"
#include "cuda/step.hpp"
#include "formula/noise.hpp"

namespace afflux::cuda {

// The updates of a round that have a weight, in the direction or in the new rule vector.
struct Terms {
  static constexpr int kMost = 64;
  std::int32_t count;
  const void* vectors[kMost];
  double weights[kMost], next[kMost];
};

// A rule vector: its weights in the direction and in its own new value.
struct RuleVector {
  const void* vector;  // null: there is none
  void* out;           // null: it is not written
  double weight, next;
  bool stays;  // its new value is the old one
};

// A sum, as arguments of its kernel.
struct Sum {
  Terms terms;
  RuleVector held;
};

// Returns nothing if another kernel is needed: for cached rows, noise, more rule vectors, one and a step with states,
// or too many updates.
inline std::optional<Sum> sum_of(const Pass& pass) {
  const RuleVectors& rule_vectors = pass.rule_vectors;
  const Steps steps = steps_with(pass.step.kind),
              most = rule_vectors.vectors.size == 0 ? Steps::adaptive : Steps::plain;
  if (pass.calibrate.kind != Calibration::none || formula::draws(pass.combine.noise)) return std::nullopt;
  if (rule_vectors.vectors.size > 1 || steps > most) return std::nullopt;
  Sum sum{};
  const double* next = nullptr;  // of the updates
  if (rule_vectors.vectors.size == 1) {
    RuleVector& held = sum.held;
    held.vector = rule_vectors.vectors.data[0].data;
    held.weight = rule_vectors.weights.data[0];
    if (rule_vectors.next.size > 0) {
      held.next = rule_vectors.next.data[0], next = rule_vectors.next.data + 1;
      held.stays =
          held.next == 1.0 && std::all_of(next, next + pass.combine.updates.size, [](double x) { return x == 0.0; });
      if (!held.stays || rule_vectors.outs.data[0].data != held.vector) held.out = rule_vectors.outs.data[0].data;
    }
  }
  Terms& terms = sum.terms;
  for (std::int64_t i = 0; i < pass.combine.updates.size; ++i) {
    const double weight = pass.combine.weights.data[i], in_next = next == nullptr ? 0.0 : next[i];
    if (weight == 0.0 && in_next == 0.0) continue;
    if (terms.count == Terms::kMost) return std::nullopt;
    terms.vectors[terms.count] = pass.combine.updates.data[i].data;
    terms.weights[terms.count] = weight;
    terms.next[terms.count++] = in_next;
  }
  return sum;
}

// P, U: the types of params and of updates. kHeld: there is a rule vector.
template <class P, class U, Steps kSteps, bool kHeld>
struct SumBody {
  static constexpr int kThreads = 256;
  static constexpr std::int64_t kTile = kThreads * kFour;
  static constexpr int kTogether = sizeof(U) == 8 ? 4 : 8;  // vectors whose loads are in progress at once
  struct Shared {};

  StagedStep step;
  Sum sum;
  double params_weight, most_update;
  std::int64_t size;
  bool aligned;         // true if all vectors are aligned to 16 bytes
  std::int32_t* sound;  // set to 0 if a value is not valid

  // Adds vectors k, k + 1, ... k + kCount - 1 to v, and to `next`, the new value of the rule vector. Returns true if
  // their elements are valid.
  template <int kCount, class Span>
  AFFLUX_DEVICE bool add(const Span& span, int k, Doubles& v, Doubles& next) const {
    Vector4<U> read[kCount];
    AFFLUX_UNROLL_ON_DEVICE
    for (int b = 0; b < kCount; ++b) read[b] = span.template load<U>(sum.terms.vectors[k + b]);
    bool valid = true;
    AFFLUX_UNROLL_ON_DEVICE
    for (int b = 0; b < kCount; ++b) {
      const Doubles values = doubles(read[b]);
      if (most_update != kNoLimit) valid = all_within(values, most_update) && valid;
      const double weight = sum.terms.weights[k + b], in_next = sum.terms.next[k + b];
      if (!kHeld || weight != 0.0) add_weighted(v, weight, values);
      if (kHeld && in_next != 0.0) add_weighted(next, in_next, values);
    }
    return valid;
  }

  // Stores the new value of the rule vector, from its old one. Returns true if it is valid.
  template <class Span>
  AFFLUX_DEVICE bool renew(const Span& span, const Vector4<P>& old, const Doubles& next) const {
    if (sum.held.out == nullptr) return true;
    if (sum.held.stays) return span.store(sum.held.out, old), true;
    span.store(sum.held.out, converted<P>(next));
    return all_within(next, step.most);
  }

  // Params, states and the rule vector are loaded first, so that the step does not wait for them after the sum.
  template <class Span>
  AFFLUX_DEVICE void elements(const Span& span) const {
    const auto before = StepValues<P, kSteps>::load(step, span);
    Vector4<P> held{};
    if constexpr (kHeld) held = span.template load<P>(sum.held.vector);
    Doubles v{}, next{};
    if (params_weight != 0.0) add_weighted(v, params_weight, doubles(before.params));
    if constexpr (kHeld) {
      if (sum.held.weight != 0.0) add_weighted(v, sum.held.weight, doubles(held));
      if (sum.held.next != 0.0) add_weighted(next, sum.held.next, doubles(held));
    }
    bool valid = true;
    int k = 0;
    const int count = sum.terms.count;
    for (; k + kTogether <= count; k += kTogether) valid = add<kTogether>(span, k, v, next) && valid;
    if (kTogether > 4 && k + 4 <= count) valid = add<4>(span, k, v, next) && valid, k += 4;
    if (k + 2 <= count) valid = add<2>(span, k, v, next) && valid, k += 2;
    if (k < count) valid = add<1>(span, k, v, next) && valid;
    if constexpr (kHeld) valid = renew(span, held, next) && valid;
    valid = make_step<P, kSteps>(step, before, span, v) && valid;
    if (!valid) *sound = 0;  // no race: all threads that write here write 0
  }

  template <class Block>
  AFFLUX_DEVICE void operator()(const Block& block, Shared&) const {
    each_four<SumBody>(block, size, aligned, [&](const auto& span) { elements(span); });
  }
};

template <class Executor, class P, class U, Steps kSteps, bool kHeld = false>
void run_sum(Executor& executor, const Pass& pass, const Sum& sum, bool aligned, std::int32_t* sound) {
  using Body = SumBody<P, U, kSteps, kHeld>;
  const std::int64_t size = pass.params.size;
  executor.run((size + Body::kTile - 1) / Body::kTile,
               Body{staged_step(pass), sum, pass.combine.params_weight, pass.combine.most, size, aligned, sound});
}

// `sum` is that of the pass; see sum_of.
template <class Executor, class P, class U>
void sum_types(Executor& executor, const Pass& pass, const Sum& sum, bool aligned, std::int32_t* sound) {
  const Steps steps = steps_with(pass.step.kind);
  if (sum.held.vector != nullptr)
    return run_sum<Executor, P, U, Steps::plain, true>(executor, pass, sum, aligned, sound);
  if (steps == Steps::adaptive) return run_sum<Executor, P, U, Steps::adaptive>(executor, pass, sum, aligned, sound);
  if (steps == Steps::momentum) return run_sum<Executor, P, U, Steps::momentum>(executor, pass, sum, aligned, sound);
  run_sum<Executor, P, U, Steps::plain>(executor, pass, sum, aligned, sound);
}

}  // namespace afflux::cuda
