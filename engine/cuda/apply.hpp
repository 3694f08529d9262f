// apply: each thread computes four elements in all stages; the direction stays in its registers.
#pragma once
#include "cuda/calibrate.hpp"
#include "cuda/calibrate_encoded.hpp"
#include "cuda/codec.hpp"
#include "cuda/heads.hpp"
#include "cuda/noise.hpp"
#include "cuda/sum.hpp"
#include "cuda/trim.hpp"

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

  // z: of noise, or null.
  template <class Span>
  AFFLUX_DEVICE void elements(const Span& span, const Doubles* z = nullptr) const {
    const Pass& pass = sweep.pass;
    const bool renews = pass.rule_vectors.next.size > 0;
    Doubles v = start<P>(pass, span);
    bool sound = true;
    if constexpr (kRows == Rows::plain) {
      const Calibrate& stage = pass.calibrate;
      Doubles sum = span.template load<double>(stage.sum.data);
      const bool weighted = formula::weighs_differences(stage.kind);
      if (weighted) add_mean(sum, stage, v);
      add_differences<U>(pass, span, v, sum);
      span.store(stage.sum_out.data, sum);
      if (!weighted) add_mean(sum, stage, v);
      if (renews) sound = renew<P, U>(pass, sweep.renewal, nullptr, span, v);
    } else if (renews) {
      sound = renew<P, U>(pass, sweep.renewal, pass.combine.weights.data, span, v, z);
    } else {
      sound = combine<U>(pass.combine.updates, pass.combine.weights.data, span, v, pass.combine.most);
    }
    finish<P>(sweep, span, v, sound, z);
  }

  template <class Block>
  AFFLUX_DEVICE void operator()(const Block& block, Shared&) const {
    each_four<ApplyBody>(block, sweep.pass.params.size, sweep.aligned, [&](const auto& span) { elements(span); });
  }
};

template <class Executor, class Body>
void run_tiles(Executor& executor, const Body& body) {
  executor.run((body.sweep.pass.params.size + Body::kTile - 1) / Body::kTile, body);
}

template <class Executor, class Body>
void run_maybe_noisy(Executor& executor, const Body& body, bool noisy) {
  noisy ? run_noisy(executor, body) : run_tiles(executor, body);
}

template <class Executor, class P, class U>
void sweep_types(Executor& executor, const Sweep& sweep, bool noisy) {
  if (sweep.pass.calibrate.kind == Calibration::none)
    return run_maybe_noisy(executor, ApplyBody<P, U, Rows::none>{sweep}, noisy);
  with_format(sweep.pass.calibrate.codec, [&](auto format) {
    using Format = decltype(format);
    if constexpr (std::is_same_v<Format, Uncoded>)
      run_tiles(executor, ApplyBody<P, U, Rows::plain>{sweep});
    else
      executor.run(Format::tiles(sweep.pass.params.size), EncodedBody<P, U, Format>{sweep});
    if (!std::is_same_v<Format, Uncoded> && sweep.pass.rule_vectors.next.size > 0)
      run_tiles(executor, RenewBody<P, U>{sweep});
  });
}

template <class Body>
void with_update_type(const Combine& combine, const Body& body) {
  const Type type = combine.updates.size > 0 ? combine.updates.data[0].type : Type::float32;
  if (type == Type::float64) return body(double{});
  if (type == Type::bfloat16) return body(Bfloat16{});
  body(float{});
}

// P: the type of params.
template <class Executor, class P>
bool apply_params(Executor& executor, const Pass& pass, const RowHeads* heads, const NewHeads& renewed) {
  const bool noisy = formula::draws(pass.combine.noise);
  if (pass.combine.trim > 0.0) {
    const StagedPass staged(executor, pass, heads);
    const TrimmedTerms terms = trimmed_terms(executor, pass.combine);
    with_update_type(pass.combine, [&](auto u) {
      run_maybe_noisy(executor, TrimmedBody<P, decltype(u)>{staged.sweep(), terms}, noisy);
    });
    return executor.flag_holds();
  }
  if (const std::optional<Sum> sum = sum_of(pass)) {
    const bool aligned = is_aligned(pass);
    std::int32_t* const sound = executor.flag();
    with_update_type(pass.combine,
                     [&](auto u) { sum_types<Executor, P, decltype(u)>(executor, pass, *sum, aligned, sound); });
    return executor.flag_holds();
  }
  const StagedPass staged(executor, pass, heads);
  const StagedHeads new_heads(executor, renewed);  // all memory is allocated before anything is changed
  with_update_type(pass.combine,
                   [&](auto u) { sweep_types<Executor, P, decltype(u)>(executor, staged.sweep(), noisy); });
  new_heads.write(executor);
  return executor.flag_holds();
}

template <class Executor>
bool apply(const Where& where, const Pass& pass, const RowHeads* heads, const NewHeads& renewed) {
  Executor executor(where);
  if (pass.params.type == Type::float64) return apply_params<Executor, double>(executor, pass, heads, renewed);
  return apply_params<Executor, float>(executor, pass, heads, renewed);
}

}  // namespace afflux::cuda
