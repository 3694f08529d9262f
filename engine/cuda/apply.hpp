// apply: each thread computes four elements in all stages; the direction stays in its registers.
#pragma once
#include "cuda/calibrate.hpp"
#include "cuda/calibrate_encoded.hpp"
#include "cuda/codec.hpp"
#include "cuda/heads.hpp"

namespace afflux::cuda {

enum class Rows { none, plain };

// The kernel of rounds without rows or with plain rows. P, U: the types of params and of updates; kRows: the kind of
// cached rows.
template <class P, class U, Rows kRows>
struct ApplyBody {
  static constexpr int kThreads = 256;
  static constexpr std::int64_t kTile = kThreads * kFour;
  struct Shared {};

  Sweep sweep;

  template <class Span>
  AFFLUX_DEVICE void elements(const Span& span) const {
    const Pass& pass = sweep.pass;
    const bool renews = pass.rule_vectors.next.size > 0;
    Doubles v = start<P>(pass, span);
    bool sound = true;
    if constexpr (kRows == Rows::plain) {
      const Calibrate& stage = pass.calibrate;
      Doubles sum = span.template load<double>(stage.sum.data);
      const bool weighted = formula::weighs_differences(stage.kind);
      if (weighted) add_mean(sum, stage.num_clients, v);
      add_differences<U>(pass, span, v, sum);
      span.store(stage.sum_out.data, sum);
      if (!weighted) add_mean(sum, stage.num_clients, v);
      if (renews) sound = renew<P, U>(pass, sweep.renewal, nullptr, span, v);
    } else if (renews) {
      sound = renew<P, U>(pass, sweep.renewal, pass.combine.weights.data, span, v);
    } else {
      sound = combine<U>(pass.combine.updates, pass.combine.weights.data, span, v, pass.combine.most);
    }
    finish<P>(sweep, span, v, sound);
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

template <class Executor, class Body>
void sweep_with(Executor& executor, const Sweep& sweep) {
  executor.run((sweep.pass.params.size + Body::kTile - 1) / Body::kTile, Body{sweep});
}

template <class Executor, class P, class U>
void sweep_types(Executor& executor, const Sweep& sweep) {
  if (sweep.pass.calibrate.kind == Calibration::none)
    return sweep_with<Executor, ApplyBody<P, U, Rows::none>>(executor, sweep);
  with_coder(sweep.pass.calibrate.codec, [&](auto coder) {
    using Coder = decltype(coder);
    if constexpr (std::is_same_v<Coder, Uncoded>)
      sweep_with<Executor, ApplyBody<P, U, Rows::plain>>(executor, sweep);
    else
      sweep_with<Executor, EncodedBody<P, U, Coder>>(executor, sweep);
  });
}

template <class Executor, class P>
void sweep_params(Executor& executor, const Sweep& sweep, Type updates) {
  if (updates == Type::float64) return sweep_types<Executor, P, double>(executor, sweep);
  if (updates == Type::bfloat16) return sweep_types<Executor, P, Bfloat16>(executor, sweep);
  sweep_types<Executor, P, float>(executor, sweep);
}

template <class Executor>
bool apply(const Where& where, const Pass& pass, const RowHeads* heads, const NewHeads& renewed) {
  Executor executor(where);
  const StagedPass staged(executor, pass, heads);
  const StagedHeads new_heads(executor, renewed);  // all memory is allocated before anything is changed
  const Type updates = pass.combine.updates.size > 0 ? pass.combine.updates.data[0].type : Type::float32;
  if (pass.params.type == Type::float64)
    sweep_params<Executor, double>(executor, staged.sweep(), updates);
  else
    sweep_params<Executor, float>(executor, staged.sweep(), updates);
  new_heads.write(executor);
  std::int32_t sound = 1;
  executor.download(&sound, staged.sweep().sound, sizeof sound);
  return sound != 0;
}

}  // namespace afflux::cuda
