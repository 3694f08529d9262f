// The arguments of `inner` (afflux.hpp).
#pragma once
#include "afflux/view.hpp"

namespace afflux {

// Vectors x_k = vectors[k] + shift * memory, and e = memory_weight * memory + sum_k weights[k] x_k: both in float64,
// element by element, each product rounded before it is added. So no precision is lost if x_k is small beside its
// parts.
struct Inner {
  List<View<const void>> vectors;  // float32, float64 or bfloat16
  List<double> weights;            // of all vectors; without data there is no e
  View<const void> memory;         // optional; it is read if shift or memory_weight is not 0
  double shift = 0.0;
  double memory_weight = 0.0;  // 0 if there are no vectors
};

}  // namespace afflux
