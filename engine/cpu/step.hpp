// The server optimizers, one tile: from the direction d, the params and the states to the new params and states.
#pragma once
#include "cpu/combine.hpp"
#include "cpu/soundness.hpp"
#include "formula/step.hpp"

namespace afflux::AFFLUX_ISA {
namespace {

// Computes the step of a tile. Returns true if all written values are valid. An out may be the vector that it replaces:
// each element is read before it is written.
template <StepKind kKind, int kStates, class T>
AFFLUX_FN bool step_of(const Pass& pass, Tile tile, const double* d) {
  constexpr int kSize = kStates > 0 ? kStates : 1;
  const Step& stage = pass.step;
  const T *const params = tile_of<T>(pass.params, tile), *states[kSize] = {};
  T *const out = tile_of<T>(pass.out, tile), *outs[kSize] = {};
  for (int k = 0; k < kStates; ++k) {
    states[k] = tile_of<T>(stage.states.data[k], tile);
    outs[k] = tile_of<T>(stage.outs.data[k], tile);
  }
  Soundness sound(pass.most);
  simd::each(tile.size, [&](auto lanes, std::int64_t i) AFFLUX_INLINE {
    decltype(lanes.fill(0.0)) values[kSize];
    AFFLUX_UNROLL
    for (int k = 0; k < kStates; ++k) {
      lanes.prefetch(states[k] + i, tile.ahead);
      values[k] = lanes.load(states[k] + i);
    }
    lanes.prefetch(params + i, tile.ahead);
    const auto moved = formula::step(kKind, lanes, stage, lanes.load(params + i), lanes.load(d + i), values);
    AFFLUX_UNROLL
    for (int k = 0; k < kStates; ++k) {
      sound.check(values[k]);
      lanes.store(outs[k] + i, values[k]);
    }
    sound.check(moved);
    lanes.store(out + i, moved);
  });
  return sound.everywhere();
}

template <class T>
AFFLUX_FN bool step(const Pass& pass, Tile tile, const double* d) {
  switch (pass.step.kind) {
#define AFFLUX_KIND(kind, states, ...) \
  case StepKind::kind:                 \
    return step_of<StepKind::kind, states, T>(pass, tile, d);
    AFFLUX_STEP_KINDS(AFFLUX_KIND)
#undef AFFLUX_KIND
  }
  return false;
}

}  // namespace
}  // namespace afflux::AFFLUX_ISA
