// The vectors that the server keeps between rounds, four elements of each.
#pragma once
#include "cuda/combine.hpp"

namespace afflux::cuda {

// sums[s] += coefficients[s][k] * list[k], and v += weights[k] * list[k] unless it has no weights, all in one reading.
template <class T, class Vector, class Span>
AFFLUX_DEVICE void combine_all(const List<Vector>& list, const double* weights, const Memory& memory,
                               std::int64_t first, std::int64_t width, const Span& span, Doubles& v,
                               Doubles (&sums)[kMostMemories]) {
  const auto coefficient = [&](std::int64_t s, std::int64_t k) { return memory.next.data[s * width + first + k]; };
  const auto wanted = [&](std::int64_t k) {
    bool any = weights != nullptr && weights[k] != 0.0;
    for (std::int64_t s = 0; s < memory.vectors.size; ++s) any = any || coefficient(s, k) != 0.0;
    return any;
  };
  in_batches<Four<T>>(
      list.size, wanted, [&](std::int64_t k) { return span.template load<T>(list.data[k].data); },
      [&](std::int64_t k, const Four<T>& read) {
        const Doubles values = doubles(read);
        if (weights != nullptr && weights[k] != 0.0) add_weighted(v, weights[k], values);
        AFFLUX_UNROLLED
        for (int s = 0; s < kMostMemories; ++s)
          if (s < memory.vectors.size && coefficient(s, k) != 0.0) add_weighted(sums[s], coefficient(s, k), values);
      });
}

// outs[s] = sum_t next[s, t] vectors[t] + sum_i next[s, R + i] u_i. All sums are made before the first is stored. With
// `weights`, the updates' part of the direction is added to v. P, U: the types of params and of updates.
template <class P, class U, class Span>
AFFLUX_DEVICE void renew(const Pass& pass, const double* weights, const Span& span, Doubles& v) {
  const Memory& memory = pass.memory;
  const std::int64_t held = memory.vectors.size, width = held + pass.combine.updates.size;
  Doubles sums[kMostMemories] = {};
  combine_all<P>(memory.vectors, nullptr, memory, 0, width, span, v, sums);
  combine_all<U>(pass.combine.updates, weights, memory, held, width, span, v, sums);
  AFFLUX_UNROLLED
  for (int s = 0; s < kMostMemories; ++s) {
    if (s >= held) continue;
    const View<void>&vector = memory.vectors.data[s], &out = memory.outs.data[s];
    bool stays = true;
    for (std::int64_t k = 0; k < width; ++k) stays = stays && memory.next.data[s * width + k] == (k == s ? 1.0 : 0.0);
    if (!stays)
      span.store(out.data, converted<P>(sums[s]));
    else if (out.data != vector.data)
      span.store(out.data, span.template load<P>(vector.data));
  }
}

}  // namespace afflux::cuda
