// Server optimizers: how the direction d moves one element of params (see Step in afflux/pass.hpp). The driver takes
// the square root, and rounds params and states once to their type.
#pragma once
#include "formula/fn.hpp"

namespace afflux::formula {

template <class T>
AFFLUX_FN T sgd(T params, T direction, T lr) {
  return params + lr * direction;
}

template <class T>
AFFLUX_FN T heavy_ball(T m, T direction, T beta) {
  return beta * m + direction;
}

// m of the adaptive steps; `rest` is 1 - beta.
template <class T>
AFFLUX_FN T moving_mean(T m, T direction, T beta, T rest) {
  return beta * m + rest * direction;
}

// v of Adam and AMSGrad; `rest` is 1 - beta, here and below.
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

// `root` is the square root of V.
template <class T>
AFFLUX_FN T adaptive(T params, T m, T root, T lr, T root_scale, T epsilon) {
  return params + lr * m / (root * root_scale + epsilon);
}

}  // namespace afflux::formula
