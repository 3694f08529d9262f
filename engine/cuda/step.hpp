// The server optimizers, four elements: from the direction d, the params and the states to the new params and states.
// An out may be the vector that it replaces: a thread reads its elements before it writes them.
#pragma once
#include "cuda/combine.hpp"
#include "formula/step.hpp"

namespace afflux::cuda {

AFFLUX_FN Doubles sign(const Doubles& x) {
  return {{formula::sign(x.at[0]), formula::sign(x.at[1]), formula::sign(x.at[2]), formula::sign(x.at[3])}};
}

// Computes the step. Returns true if all written values are valid. P: the type of params.
template <class P, class Span>
AFFLUX_DEVICE bool step(const Pass& pass, const Span& span, const Doubles& d) {
  const Step& stage = pass.step;
  Doubles states[kMostStates];
  AFFLUX_UNROLL_ON_DEVICE
  for (int k = 0; k < kMostStates; ++k)
    if (k < stage.states.size) states[k] = doubles(span.template load<P>(stage.states.data[k].data));
  const Doubles params = doubles(span.template load<P>(pass.params.data));
  const Doubles out = formula::step(stage.kind, FourLanes{}, stage, params, d, states);
  bool sound = all_within(out, pass.most);
  AFFLUX_UNROLL_ON_DEVICE
  for (int k = 0; k < kMostStates; ++k) {
    if (k >= stage.states.size) continue;
    sound = all_within(states[k], pass.most) && sound;
    span.store(stage.outs.data[k].data, converted<P>(states[k]));
  }
  span.store(pass.out.data, converted<P>(out));
  return sound;
}

}  // namespace afflux::cuda
