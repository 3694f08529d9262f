// The vectors that the server keeps between rounds, four elements of each.
#pragma once
#include "cuda/combine.hpp"

namespace afflux::cuda {

// Facts about `next`, which the host computes so that the threads need not search in it. Bit s of columns[k]: sum s
// reads vector k of all rule vectors and updates. Bit s of `stays`: rule vector s keeps its value.
struct Renewal {
  const std::uint8_t* columns;
  std::uint32_t stays;
};

// Adds next[s][first + k] * list[k] to sums[s] and, if there are weights, weights[k] * list[k] to v. Each vector is
// read once.
template <class T, class Vector, class Span>
AFFLUX_DEVICE void combine_all(const List<Vector>& list, const double* weights, const RuleVectors& rule_vectors,
                               const Renewal& renewal, std::int64_t first, std::int64_t width, const Span& span,
                               Doubles& v, Doubles (&sums)[kMostRuleVectors]) {
  const std::uint8_t* const columns = renewal.columns + first;
  const double* const next = rule_vectors.next.data + first;
  in_batches<Vector4<T>>(
      list.size, [&](std::int64_t k) { return columns[k] != 0 || (weights != nullptr && weights[k] != 0.0); },
      [&](std::int64_t k) { return span.template load<T>(list.data[k].data); },
      [&](std::int64_t k, const Vector4<T>& read) {
        const Doubles values = doubles(read);
        if (weights != nullptr && weights[k] != 0.0) add_weighted(v, weights[k], values);
        AFFLUX_UNROLL_ON_DEVICE
        for (int s = 0; s < kMostRuleVectors; ++s)
          if ((columns[k] >> s & 1) != 0) add_weighted(sums[s], next[s * width + k], values);
      });
}

// Computes outs[s] = sum_t next[s, t] vectors[t] + sum_i next[s, R + i] u_i. All sums are computed before the first is
// stored. With `weights`, the updates' part of the direction is added to v; with normals z, noise.next[s] z to sum s.
// Returns true if all new values are valid. P, U: the types of params and of updates.
template <class P, class U, class Span>
AFFLUX_DEVICE bool renew(const Pass& pass, const Renewal& renewal, const double* weights, const Span& span, Doubles& v,
                         const Doubles* z = nullptr) {
  const RuleVectors& rule_vectors = pass.rule_vectors;
  const std::int64_t held = rule_vectors.vectors.size, width = held + pass.combine.updates.size;
  Doubles sums[kMostRuleVectors] = {};
  combine_all<P>(rule_vectors.vectors, nullptr, rule_vectors, renewal, 0, width, span, v, sums);
  combine_all<U>(pass.combine.updates, weights, rule_vectors, renewal, held, width, span, v, sums);
  bool sound = true;
  AFFLUX_UNROLL_ON_DEVICE
  for (int s = 0; s < kMostRuleVectors; ++s) {
    if (s >= held) continue;
    const View<void>&vector = rule_vectors.vectors.data[s], &out = rule_vectors.outs.data[s];
    if (z != nullptr && s < pass.combine.noise.next.size) add_term(sums[s], pass.combine.noise.next.data[s], *z);
    if ((renewal.stays >> s & 1u) == 0) {
      sound = all_within(sums[s], pass.most) && sound;
      span.store(out.data, converted<P>(sums[s]));
    } else if (out.data != vector.data) {
      span.store(out.data, span.template load<P>(vector.data));
    }
  }
  return sound;
}

}  // namespace afflux::cuda
