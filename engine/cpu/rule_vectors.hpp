// The vectors that the server keeps between rounds, one tile.
#pragma once
#include "cpu/combine.hpp"
#include "cpu/convert.hpp"
#include "cpu/noise.hpp"
#include "cpu/soundness.hpp"

namespace afflux::AFFLUX_ISA {
namespace {

// Writes the values to a tile of the vector. Returns true if all values are valid.
template <class T>
AFFLUX_FN bool store(const double* values, const View<void>& vector, Tile tile, double most) {
  T* const to = tile_of<T>(vector, tile);
  Soundness sound(most);
  simd::each(tile.size, [&](auto lanes, std::int64_t i) AFFLUX_INLINE {
    const auto value = lanes.load(values + i);
    sound.check(value);
    lanes.store(to + i, value);
  });
  return sound.everywhere();
}

template <class T>
AFFLUX_FN void copy(const View<void>& vector, const View<void>& out, Tile tile) {
  __builtin_memcpy(tile_of<T>(out, tile), tile_of<T>(vector, tile), static_cast<std::size_t>(tile.size) * sizeof(T));
}

// Computes outs[s] = sum_t next[s, t] vectors[t] + sum_i next[s, R + i] u_i, and adds noise to them and to v, a tile of
// the direction. All sums are computed before the first is stored. Returns true if all new values are valid.
//
// If `together`, the updates' part of the direction is added to `v`, together with the first rule vector that changes:
// so each update is read once. The function is not inlined: its sums would be in the stack frame of every round.
__attribute__((noinline)) bool renew(const Pass& pass, Type updates, Tile tile, double* direction, bool together) {
  const RuleVectors& rule_vectors = pass.rule_vectors;
  const Combine& stage = pass.combine;
  const bool wide = pass.params.type == Type::float64;
  const std::int64_t held = rule_vectors.vectors.size, count = held + stage.updates.size;
  const List<double>& noise = stage.noise.next;
  alignas(64) double sums[kMostRuleVectors][kTile];
  bool kept[kMostRuleVectors];
  NoisySum noisy[1 + kMostRuleVectors];
  int noisy_count = 0;
  double* v = together ? direction : nullptr;
  for (std::int64_t s = 0; s < held; ++s) {
    const double* const row = rule_vectors.next.data + s * count;
    double* const sum = sums[s];
    const double in_noise = noise.size > 0 ? noise.data[s] : 0.0;
    kept[s] = stays(row, s, count) && in_noise == 0.0;
    if (kept[s]) continue;
    if (in_noise != 0.0) noisy[noisy_count++] = {in_noise, sum};
    for (std::int64_t i = 0; i < tile.size; ++i) sum[i] = 0.0;
    wide ? combine<double>(rule_vectors.vectors, row, tile, sum) : combine<float>(rule_vectors.vectors, row, tile, sum);
    with_type(updates, [&](auto sample) AFFLUX_INLINE {
      using T = decltype(sample);
      v != nullptr ? combine<T>(stage.updates, stage.weights.data, row + held, tile, v, sum)
                   : combine<T>(stage.updates, row + held, tile, sum);
    });
    v = nullptr;
  }
  if (v != nullptr)
    with_type(updates, [&](auto sample)
                           AFFLUX_INLINE { combine<decltype(sample)>(stage.updates, stage.weights.data, tile, v); });
  if (stage.noise.sigma > 0.0) noisy[noisy_count++] = {stage.noise.sigma, direction};
  if (noisy_count > 0) add_noise(stage, updates, tile, noisy, noisy_count);
  bool sound = true;
  for (std::int64_t s = 0; s < held; ++s) {
    const View<void>&vector = rule_vectors.vectors.data[s], &out = rule_vectors.outs.data[s];
    if (!kept[s])
      sound =
          (wide ? store<double>(sums[s], out, tile, pass.most) : store<float>(sums[s], out, tile, pass.most)) && sound;
    else if (out.data != vector.data)
      wide ? copy<double>(vector, out, tile) : copy<float>(vector, out, tile);
  }
  return sound;
}

}  // namespace
}  // namespace afflux::AFFLUX_ISA
