// The server optimizers, one tile: from the direction d, and from the states as they are stored, to params and states.
#pragma once
#include "cpu/combine.hpp"
#include "formula/reduce.hpp"
#include "formula/step.hpp"

namespace afflux::AFFLUX_ISA {
namespace {

// `out` may be `params`, here and below, and an out of a state the state itself: each element is read before it is
// written.
template <class T>
AFFLUX_FN void momentum(const Step& step, Tile tile, const T* params, T* out, const double* d) {
  const T* const m = tile_of<T>(step.states.data[0], tile);
  T* const m_out = tile_of<T>(step.outs.data[0], tile);
  simd::each(tile.size, [&](auto lanes, std::int64_t i) AFFLUX_INLINE {
    const auto next = formula::heavy_ball(lanes.load(m + i), lanes.load(d + i), lanes.fill(step.beta1));
    lanes.store(m_out + i, next);
    lanes.store(out + i, formula::sgd(lanes.load(params + i), next, lanes.fill(step.lr)));
  });
}

template <StepKind kKind, class T>
AFFLUX_FN void adaptive(const Step& step, Tile tile, const T* params, T* out, const double* d) {
  const auto state = [&](const List<View<void>>& list, std::int64_t k)
                         AFFLUX_INLINE { return k < list.size ? tile_of<T>(list.data[k], tile) : nullptr; };
  const T *const m = state(step.states, 0), *const v = state(step.states, 1), *const v_hat = state(step.states, 2);
  T *const m_out = state(step.outs, 0), *const v_out = state(step.outs, 1), *const v_hat_out = state(step.outs, 2);
  const double rest1 = 1.0 - step.beta1, rest2 = 1.0 - step.beta2;
  simd::each(tile.size, [&](auto lanes, std::int64_t i) AFFLUX_INLINE {
    lanes.ahead(m + i);
    lanes.ahead(v + i);
    if (kKind == StepKind::amsgrad) lanes.ahead(v_hat + i);
    lanes.ahead(params + i);
    const auto direction = lanes.load(d + i);
    const auto mean = formula::moving_mean(lanes.load(m + i), direction, lanes.fill(step.beta1), lanes.fill(rest1));
    lanes.store(m_out + i, mean);
    auto square = lanes.load(v + i);
    if (kKind == StepKind::adagrad)
      square = formula::sum_of_squares(square, direction);
    else if (kKind == StepKind::yogi)
      square = formula::yogi_square(square, direction, lanes.fill(rest2));
    else
      square = formula::moving_square(square, direction, lanes.fill(step.beta2), lanes.fill(rest2));
    lanes.store(v_out + i, square);
    if (kKind == StepKind::amsgrad) {
      square = formula::greater(lanes.load(v_hat + i), square);
      lanes.store(v_hat_out + i, square);
    }
    lanes.store(out + i, formula::adaptive(lanes.load(params + i), mean, lanes.root(square), lanes.fill(step.lr),
                                           lanes.fill(step.root_scale), lanes.fill(step.epsilon)));
  });
}

template <class T>
AFFLUX_FN void step(const Pass& pass, Tile tile, const double* d) {
  const Step& stage = pass.step;
  const T* const params = tile_of<T>(pass.params, tile);
  T* const out = tile_of<T>(pass.out, tile);
  switch (stage.kind) {
    case StepKind::sgd:
      return simd::each(tile.size, [&](auto lanes, std::int64_t i) AFFLUX_INLINE {
        lanes.ahead(params + i);
        lanes.store(out + i, formula::sgd(lanes.load(params + i), lanes.load(d + i), lanes.fill(stage.lr)));
      });
    case StepKind::momentum:
      return momentum(stage, tile, params, out, d);
    case StepKind::adam:
      return adaptive<StepKind::adam>(stage, tile, params, out, d);
    case StepKind::amsgrad:
      return adaptive<StepKind::amsgrad>(stage, tile, params, out, d);
    case StepKind::adagrad:
      return adaptive<StepKind::adagrad>(stage, tile, params, out, d);
    case StepKind::yogi:
      return adaptive<StepKind::yogi>(stage, tile, params, out, d);
  }
}

}  // namespace
}  // namespace afflux::AFFLUX_ISA
