// apply: a thread takes four elements through all stages, and the direction stays in its registers.
#pragma once
#include "cuda/calibrate.hpp"
#include "cuda/memory.hpp"
#include "cuda/step.hpp"

namespace afflux::cuda {

// A pass as a kernel reads it: all lists lie on the device.
struct Sweep {
  Pass pass;
  const RowHeads* heads;
  Renewal renewal;
  bool aligned;          // all vectors are, to 16 bytes
  std::int32_t* finite;  // 1; 0 where the direction was not finite in an element
};

// v = params_weight * params + the memories' part.
template <class P, class Span>
AFFLUX_DEVICE Doubles start(const Pass& pass, const Span& span) {
  Doubles v{};
  if (pass.combine.params_weight != 0.0)
    add_weighted(v, pass.combine.params_weight, doubles(span.template load<P>(pass.params.data)));
  combine<P>(pass.memory.vectors, pass.memory.weights.data, span, v);
  return v;
}

// What is done with the direction.
template <class P, class Span>
AFFLUX_DEVICE void finish(const Sweep& sweep, const Span& span, const Doubles& v) {
  bool finite = true;
  AFFLUX_UNROLLED
  for (int j = 0; j < kFour; ++j) finite = finite && formula::finite(v.at[j]);
  if (!finite) *sweep.finite = 0;  // all that write, write this
  step<P>(sweep.pass, span, v);
}

enum class Rows { none, plain };

// P, U: the types of params and of updates; kRows: the rows that are cached.
template <class P, class U, Rows kRows>
struct ApplyBody {
  static constexpr int kThreads = 256;
  static constexpr std::int64_t kTile = kThreads * kFour;
  struct Shared {};

  Sweep sweep;

  template <class Span>
  AFFLUX_DEVICE void elements(const Span& span) const {
    const Pass& pass = sweep.pass;
    const bool renews = pass.memory.next.size > 0;
    Doubles v = start<P>(pass, span);
    if constexpr (kRows == Rows::plain) {
      const Calibrate& stage = pass.calibrate;
      Doubles sum = span.template load<double>(stage.sum.data);
      const bool difference = stage.kind == Calibration::cached_difference;
      if (difference) add_mean(sum, stage.num_clients, v);
      add_differences<U>(pass, span, v, sum);
      span.store(stage.sum_out.data, sum);
      if (!difference) add_mean(sum, stage.num_clients, v);
      if (renews) renew<P, U>(pass, sweep.renewal, nullptr, span, v);
    } else if (renews) {
      renew<P, U>(pass, sweep.renewal, pass.combine.weights.data, span, v);
    } else {
      combine<U>(pass.combine.updates, pass.combine.weights.data, span, v);
    }
    finish<P>(sweep, span, v);
  }

  template <class Block>
  AFFLUX_DEVICE void operator()(const Block& block, Shared&) const {
    block.each([&](int thread) {
      const std::int64_t begin = block.index * kTile + thread * kFour;
      if (begin < sweep.pass.params.size)
        with_span(begin, sweep.pass.params.size, sweep.aligned, [&](const auto& span) { elements(span); });
    });
  }
};

}  // namespace afflux::cuda
