// The server optimizers, four elements: from the direction d, the params and the states to the new params and states.
// An out may be the vector that it replaces: a thread reads its elements before it writes them.
#pragma once
#include "afflux/pass.hpp"
#include "cuda/vector4.hpp"
#include "formula/step.hpp"

namespace afflux::cuda {

AFFLUX_FN Doubles sign(const Doubles& x) {
  return {{formula::sign(x.at[0]), formula::sign(x.at[1]), formula::sign(x.at[2]), formula::sign(x.at[3])}};
}

// The kinds of steps that a kernel serves. A kernel of fewer kinds needs fewer registers.
enum class Steps { plain, momentum, adaptive, all };  // plain: sgd and assign; momentum: Nesterov's, too

// Returns the steps of the smallest kernel that serves a kind; all: there is none of its own.
constexpr Steps steps_with(StepKind kind) {
  switch (kind) {
    case StepKind::sgd:
    case StepKind::assign:
      return Steps::plain;
    case StepKind::momentum:
    case StepKind::nesterov:
      return Steps::momentum;
    case StepKind::adam:
    case StepKind::amsgrad:
    case StepKind::adagrad:
    case StepKind::yogi:
      return Steps::adaptive;
    default:
      return Steps::all;
  }
}

// Returns the number of states that these steps have at most.
constexpr int most_states(Steps steps) {
  return steps == Steps::plain ? 0 : steps == Steps::momentum ? 1 : kMostStates;
}

// A step and its vectors, which a kernel has as arguments. The lists of `stage` are on the host.
struct StagedStep {
  Step stage;
  double most;  // see Pass
  const void* params;
  void* out;
  const void* states[kMostStates];
  void* outs[kMostStates];
};

inline StagedStep staged_step(const Pass& pass) {
  StagedStep step{pass.step, pass.most, pass.params.data, pass.out.data, {}, {}};
  for (std::int64_t k = 0; k < pass.step.states.size; ++k) {
    step.states[k] = pass.step.states.data[k].data;
    step.outs[k] = pass.step.outs.data[k].data;
  }
  return step;
}

// Four elements of params and of the states. P: the type of params.
template <class P, Steps kSteps>
struct StepValues {
  static constexpr int kStates = most_states(kSteps);
  Vector4<P> params, states[kStates > 0 ? kStates : 1];

  template <class Span>
  static AFFLUX_DEVICE StepValues load(const StagedStep& step, const Span& span) {
    StepValues values;
    values.params = span.template load<P>(step.params);
    AFFLUX_UNROLL_ON_DEVICE
    for (int k = 0; k < kStates; ++k)
      if (k < step.stage.states.size) values.states[k] = span.template load<P>(step.states[k]);
    return values;
  }
};

// Returns the new params, and replaces the states.
template <Steps kSteps>
AFFLUX_DEVICE Doubles new_params(const Step& stage, const Doubles& params, const Doubles& d, Doubles* states) {
  if constexpr (kSteps == Steps::adaptive) {
    return formula::adaptive_step(stage.kind, FourLanes{}, stage, params, d, states);
  } else if constexpr (kSteps == Steps::momentum) {
    const StepKind kind = stage.kind == StepKind::nesterov ? StepKind::nesterov : StepKind::momentum;
    return formula::step(kind, FourLanes{}, stage, params, d, states);
  } else if constexpr (kSteps == Steps::plain) {
    const StepKind kind = stage.kind == StepKind::assign ? StepKind::assign : StepKind::sgd;
    return formula::step(kind, FourLanes{}, stage, params, d, states);
  } else {
    return formula::step(stage.kind, FourLanes{}, stage, params, d, states);
  }
}

// Computes the step. Returns true if all written values are valid.
template <class P, Steps kSteps, class Span>
AFFLUX_DEVICE bool make_step(const StagedStep& step, const StepValues<P, kSteps>& values, const Span& span,
                             const Doubles& d) {
  constexpr int kStates = StepValues<P, kSteps>::kStates;
  Doubles states[kStates > 0 ? kStates : 1];
  AFFLUX_UNROLL_ON_DEVICE
  for (int k = 0; k < kStates; ++k)
    if (k < step.stage.states.size) states[k] = doubles(values.states[k]);
  const Doubles out = new_params<kSteps>(step.stage, doubles(values.params), d, states);
  bool sound = all_within(out, step.most);
  AFFLUX_UNROLL_ON_DEVICE
  for (int k = 0; k < kStates; ++k) {
    if (k >= step.stage.states.size) continue;
    sound = all_within(states[k], step.most) && sound;
    span.store(step.outs[k], converted<P>(states[k]));
  }
  span.store(step.out, converted<P>(out));
  return sound;
}

}  // namespace afflux::cuda
