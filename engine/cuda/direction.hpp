// The stages before and after calibration, four elements: the beginning of the direction, and the step.
#pragma once
#include "cuda/staged_pass.hpp"
#include "cuda/step.hpp"

namespace afflux::cuda {

// Returns v = params_weight * params + the rule vectors' part of the direction.
template <class P, class Span>
AFFLUX_DEVICE Doubles start(const Pass& pass, const Span& span) {
  Doubles v{};
  if (pass.combine.params_weight != 0.0)
    add_weighted(v, pass.combine.params_weight, doubles(span.template load<P>(pass.params.data)));
  combine<P>(pass.rule_vectors.vectors, pass.rule_vectors.weights.data, span, v);
  return v;
}

// Adds noise to the direction v if there is some, from normals z, and makes the step. `sound`: true if all values that
// were written before are valid.
template <class P, class Span>
AFFLUX_DEVICE void finish(const Sweep& sweep, const Span& span, Doubles& v, bool sound, const Doubles* z = nullptr) {
  if (z != nullptr) add_term(v, sweep.pass.combine.noise.sigma, *z);
  const auto before = StepValues<P, Steps::all>::load(sweep.step, span);
  sound = make_step<P, Steps::all>(sweep.step, before, span, v) && sound;
  if (!sound) *sweep.sound = 0;  // no race: all threads that write here write 0
}

}  // namespace afflux::cuda
