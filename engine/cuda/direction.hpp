// What comes before calibration and after it, four elements: how the direction begins, and what is done with it.
#pragma once
#include "cuda/staged_pass.hpp"
#include "cuda/step.hpp"

namespace afflux::cuda {

// v = params_weight * params + the rule vectors' part.
template <class P, class Span>
AFFLUX_DEVICE Doubles start(const Pass& pass, const Span& span) {
  Doubles v{};
  if (pass.combine.params_weight != 0.0)
    add_weighted(v, pass.combine.params_weight, doubles(span.template load<P>(pass.params.data)));
  combine<P>(pass.rule_vectors.vectors, pass.rule_vectors.weights.data, span, v);
  return v;
}

// What is done with the direction; `sound`: all that was written before is.
template <class P, class Span>
AFFLUX_DEVICE void finish(const Sweep& sweep, const Span& span, const Doubles& v, bool sound) {
  sound = step<P>(sweep.pass, span, v) && sound;
  if (sweep.pass.combine.most != kNoLimit) sound = all_within(v, sweep.pass.combine.most) && sound;
  if (!sound) *sweep.sound = 0;  // all that write, write this
}

}  // namespace afflux::cuda
