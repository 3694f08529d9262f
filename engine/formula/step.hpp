// Server optimizers: how the direction v moves one element of params. Float64 inside, rounded once to float32.
#pragma once
#include "formula/fn.hpp"

namespace afflux::formula {

AFFLUX_FN float sgd(float params, double direction, double lr) {
  return static_cast<float>(static_cast<double>(params) + lr * direction);
}

}  // namespace afflux::formula
