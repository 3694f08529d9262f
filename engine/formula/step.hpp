// Server optimizers: how the direction v moves one element of params. The driver rounds the result once to float32.
#pragma once
#include "formula/fn.hpp"

namespace afflux::formula {

template <class T>
AFFLUX_FN T sgd(T params, T direction, T lr) {
  return params + lr * direction;
}

}  // namespace afflux::formula
