// The server optimizers: the step of one element in the direction d (see Step in afflux/step.hpp). T is float64 or a
// vector of float64; Lanes makes a T from a number (fill) and takes square roots (root). The driver reads params and
// states before, and rounds their new values once to their type.
#pragma once
#include "afflux/step.hpp"
#include "formula/fn.hpp"
#include "formula/reduce.hpp"

namespace afflux::formula {

// Return the new m of the adaptive steps and of Nesterov's momentum, and the new v of Adam and AMSGrad. `rest` is
// 1 - beta, here and below; Nesterov's is 1 - dampening.
template <class T>
AFFLUX_FN T moving_mean(T m, T direction, T beta, T rest) {
  return beta * m + rest * direction;
}
template <class T>
AFFLUX_FN T moving_square(T v, T direction, T beta, T rest) {
  return beta * v + rest * direction * direction;
}

template <class T>
AFFLUX_FN T sum_of_squares(T v, T direction) {
  return v + direction * direction;
}

template <class T>
AFFLUX_FN T sign(T x) {
  const T zero{}, one = zero + 1.0;
  return zero < x ? one : (x < zero ? -one : x);
}

template <class T>
AFFLUX_FN T yogi_square(T v, T direction, T rest) {
  return v - rest * direction * direction * sign(v - direction * direction);
}

// Returns the new v of the adaptive steps.
template <class Lanes, class T>
AFFLUX_FN T second_moment(StepKind kind, Lanes lanes, const Step& step, T v, T direction) {
  const T rest = lanes.fill(1.0 - step.beta2);
  switch (kind) {
    case StepKind::adam:
    case StepKind::amsgrad:
      return moving_square(v, direction, lanes.fill(step.beta2), rest);
    case StepKind::adagrad:
      return sum_of_squares(v, direction);
    case StepKind::yogi:
      return yogi_square(v, direction, rest);
    case StepKind::sgd:
    case StepKind::momentum:
    case StepKind::assign:
    case StepKind::nesterov:
      break;  // these have no v
  }
  return v;
}

// Returns the new params, and replaces the states: m, v and, for AMSGrad, v_hat.
template <class Lanes, class T>
AFFLUX_FN T adaptive_step(StepKind kind, Lanes lanes, const Step& step, T params, T direction, T* states) {
  states[0] = moving_mean(states[0], direction, lanes.fill(step.beta1), lanes.fill(1.0 - step.beta1));
  states[1] = second_moment(kind, lanes, step, states[1], direction);
  T square = states[1];
  if (kind == StepKind::amsgrad) square = states[2] = greater(states[2], square);
  const T root = lanes.root(square);
  return params + lanes.fill(step.lr) * states[0] / (root * lanes.fill(step.root_scale) + lanes.fill(step.epsilon));
}

// Returns the new params, and replaces the kind's states. The drivers of the CPU give the kind at compile time; those
// of CUDA give it at run time, so that one kernel serves all kinds.
template <class Lanes, class T>
AFFLUX_FN T step(StepKind kind, Lanes lanes, const Step& step, T params, T direction, T* states) {
  switch (kind) {
    case StepKind::sgd:
      return params + lanes.fill(step.lr) * direction;
    case StepKind::momentum:
      states[0] = lanes.fill(step.beta1) * states[0] + direction;
      return params + lanes.fill(step.lr) * states[0];
    case StepKind::nesterov:
      states[0] = moving_mean(states[0], direction, lanes.fill(step.beta1), lanes.fill(1.0 - step.beta2));
      return params + lanes.fill(step.lr) * (direction + lanes.fill(step.beta1) * states[0]);
    case StepKind::adam:
    case StepKind::amsgrad:
    case StepKind::adagrad:
    case StepKind::yogi:
      return adaptive_step(kind, lanes, step, params, direction, states);
    case StepKind::assign:
      return lanes.fill(step.lr) * direction;
  }
  return params;
}

}  // namespace afflux::formula
