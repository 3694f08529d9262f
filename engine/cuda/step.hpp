// The server optimizers, four elements: from the direction d, and from the states as they are stored, to params and
// states. An out may be the vector that its new values come from: a thread reads its elements before it writes.
#pragma once
#include "cuda/combine.hpp"
#include "formula/lanes.hpp"
#include "formula/step.hpp"

namespace afflux::cuda {

// P: the type of params.
template <StepKind kKind, class P, class Span>
AFFLUX_DEVICE void step_of(const Pass& pass, const Span& span, const Doubles& d) {
  constexpr int kStates = static_cast<int>(state_count(kKind)), kRoom = kStates > 0 ? kStates : 1;
  const Step& stage = pass.step;
  const Doubles params = doubles(span.template load<P>(pass.params.data));
  Doubles states[kRoom], out;
  AFFLUX_UNROLL_ON_DEVICE
  for (int k = 0; k < kStates; ++k) states[k] = doubles(span.template load<P>(stage.states.data[k].data));
  AFFLUX_UNROLL_ON_DEVICE
  for (int j = 0; j < kFour; ++j) {
    double values[kRoom];
    AFFLUX_UNROLL_ON_DEVICE
    for (int k = 0; k < kStates; ++k) values[k] = states[k].at[j];
    out.at[j] = formula::step<kKind>(formula::OneLane{}, stage, params.at[j], d.at[j], values);
    AFFLUX_UNROLL_ON_DEVICE
    for (int k = 0; k < kStates; ++k) states[k].at[j] = values[k];
  }
  AFFLUX_UNROLL_ON_DEVICE
  for (int k = 0; k < kStates; ++k) span.store(stage.outs.data[k].data, converted<P>(states[k]));
  span.store(pass.out.data, converted<P>(out));
}

template <class P, class Span>
AFFLUX_DEVICE void step(const Pass& pass, const Span& span, const Doubles& d) {
  switch (pass.step.kind) {
#define AFFLUX_KIND(kind, states) \
  case StepKind::kind:            \
    return step_of<StepKind::kind, P>(pass, span, d);
    AFFLUX_STEP_KINDS(AFFLUX_KIND)
#undef AFFLUX_KIND
  }
}

}  // namespace afflux::cuda
