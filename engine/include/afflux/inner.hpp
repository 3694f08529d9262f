// The arguments of `inner` (afflux.hpp).
#pragma once
#include "afflux/view.hpp"

namespace afflux {

// The vectors x_k and their weighted sum e:
//   x_k = vectors[k] + shift * memory
//   e = memory_weight * memory + sum_k weights[k] * x_k
// Both are computed in float64, element by element; each product is rounded before it is added. This keeps the
// precision of an x_k that is small beside its two parts; a Gram matrix of the parts would lose it.
struct Inner {
  List<View<const void>> vectors;  // each float32, float64 or bfloat16, all of one size, flat or in parts (parts.hpp)
  List<double> weights;            // one for each vector; a vector with weight 0 is not added; null data: there is no e
  View<const void> memory;         // optional, of the same types and size; needed if shift or memory_weight is not 0
  double shift = 0.0;
  double memory_weight = 0.0;  // must be 0 without an e, or without vectors
};

}  // namespace afflux
