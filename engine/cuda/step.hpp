// The server optimizers, four elements: from the direction d, and from the states as they are stored, to params and
// states. `out` may be `params`, and an out of a state the state itself: a thread reads its elements before it writes.
#pragma once
#include "cuda/combine.hpp"
#include "formula/reduce.hpp"
#include "formula/step.hpp"

namespace afflux::cuda {

// make(j) for the four elements.
template <class Make>
AFFLUX_DEVICE Doubles made(const Make& make) {
  Doubles result;
  AFFLUX_UNROLLED
  for (int j = 0; j < kFour; ++j) result.at[j] = make(j);
  return result;
}

template <class P, class Span>
AFFLUX_DEVICE Doubles load_state(const Step& step, int k, const Span& span) {
  return doubles(span.template load<P>(step.states.data[k].data));
}
template <class P, class Span>
AFFLUX_DEVICE void store_state(const Step& step, int k, const Span& span, const Doubles& values) {
  span.store(step.outs.data[k].data, converted<P>(values));
}

template <class P, class Span>
AFFLUX_DEVICE Doubles adaptive(const Step& step, const Span& span, const Doubles& params, const Doubles& d) {
  const double rest1 = 1.0 - step.beta1, rest2 = 1.0 - step.beta2;
  const Doubles m = load_state<P>(step, 0, span), v = load_state<P>(step, 1, span);
  const Doubles mean = made([&](int j) { return formula::moving_mean(m.at[j], d.at[j], step.beta1, rest1); });
  Doubles square = made([&](int j) {
    if (step.kind == StepKind::adagrad) return formula::sum_of_squares(v.at[j], d.at[j]);
    if (step.kind == StepKind::yogi) return formula::yogi_square(v.at[j], d.at[j], rest2);
    return formula::moving_square(v.at[j], d.at[j], step.beta2, rest2);
  });
  store_state<P>(step, 0, span, mean);
  store_state<P>(step, 1, span, square);
  if (step.kind == StepKind::amsgrad) {
    const Doubles most = load_state<P>(step, 2, span);
    square = made([&](int j) { return formula::greater(most.at[j], square.at[j]); });
    store_state<P>(step, 2, span, square);
  }
  return made([&](int j) {
    return formula::adaptive(params.at[j], mean.at[j], root(square.at[j]), step.lr, step.root_scale, step.epsilon);
  });
}

// P: the type of params.
template <class P, class Span>
AFFLUX_DEVICE void step(const Pass& pass, const Span& span, const Doubles& d) {
  const Step& stage = pass.step;
  const Doubles params = doubles(span.template load<P>(pass.params.data));
  Doubles out;
  if (stage.kind == StepKind::sgd) {
    out = made([&](int j) { return formula::sgd(params.at[j], d.at[j], stage.lr); });
  } else if (stage.kind == StepKind::momentum) {
    const Doubles m = load_state<P>(stage, 0, span);
    const Doubles next = made([&](int j) { return formula::heavy_ball(m.at[j], d.at[j], stage.beta1); });
    store_state<P>(stage, 0, span, next);
    out = made([&](int j) { return formula::sgd(params.at[j], next.at[j], stage.lr); });
  } else {
    out = adaptive<P>(stage, span, params, d);
  }
  span.store(pass.out.data, converted<P>(out));
}

}  // namespace afflux::cuda
