// apply without cached rows and without rule vectors. The lists of vectors and weights are arguments of the kernel, so
// that no address waits for a load. The host leaves out vectors whose weight is 0, so that no thread looks for them.
#pragma once
#include <optional>

#include "cuda/combine.hpp"
#include "cuda/step.hpp"

namespace afflux::cuda {

// The updates of a round whose weights are not 0.
struct Terms {
  static constexpr int kMost = 64;
  std::int32_t count;
  const void* vectors[kMost];
  double weights[kMost];
};

// Returns nothing if there are too many.
inline std::optional<Terms> terms_of(const Combine& combine) {
  Terms terms{};
  for (std::int64_t i = 0; i < combine.updates.size; ++i) {
    if (combine.weights.data[i] == 0.0) continue;
    if (terms.count == Terms::kMost) return std::nullopt;
    terms.vectors[terms.count] = combine.updates.data[i].data;
    terms.weights[terms.count++] = combine.weights.data[i];
  }
  return terms;
}

// P, U: the types of params and of updates.
template <class P, class U, Steps kSteps>
struct SumBody {
  static constexpr int kThreads = 256;
  static constexpr std::int64_t kTile = kThreads * kFour;
  static constexpr int kTogether = sizeof(U) == 8 ? 4 : 8;  // vectors whose loads are in progress at once
  struct Shared {};

  StagedStep step;
  Terms terms;
  double params_weight, most_update;
  std::int64_t size;
  bool aligned;         // true if all vectors are aligned to 16 bytes
  std::int32_t* sound;  // set to 0 if a value is not valid

  // Adds vectors k, k + 1, ... k + kCount - 1 to v. Returns true if their elements are valid.
  template <int kCount, class Span>
  AFFLUX_DEVICE bool add(const Span& span, int k, Doubles& v) const {
    Vector4<U> read[kCount];
    AFFLUX_UNROLL_ON_DEVICE
    for (int b = 0; b < kCount; ++b) read[b] = span.template load<U>(terms.vectors[k + b]);
    bool valid = true;
    AFFLUX_UNROLL_ON_DEVICE
    for (int b = 0; b < kCount; ++b) {
      const Doubles values = doubles(read[b]);
      if (most_update != kNoLimit) valid = all_within(values, most_update) && valid;
      add_weighted(v, terms.weights[k + b], values);
    }
    return valid;
  }

  // Params and states are loaded first, so that the step does not wait for them after the sum.
  template <class Span>
  AFFLUX_DEVICE void elements(const Span& span) const {
    const auto before = StepValues<P, kSteps>::load(step, span);
    Doubles v{};
    if (params_weight != 0.0) add_weighted(v, params_weight, doubles(before.params));
    bool valid = true;
    int k = 0;
    for (; k + kTogether <= terms.count; k += kTogether) valid = add<kTogether>(span, k, v) && valid;
    if (kTogether > 4 && k + 4 <= terms.count) valid = add<4>(span, k, v) && valid, k += 4;
    if (k + 2 <= terms.count) valid = add<2>(span, k, v) && valid, k += 2;
    if (k < terms.count) valid = add<1>(span, k, v) && valid;
    valid = make_step<P, kSteps>(step, before, span, v) && valid;
    if (!valid) *sound = 0;  // no race: all threads that write here write 0
  }

  template <class Block>
  AFFLUX_DEVICE void operator()(const Block& block, Shared&) const {
    block.each_in_warp([&](int thread) {
      const std::int64_t begin = block.index * kTile + thread * kFour;
      if (begin < size) with_span(begin, size, aligned, [&](const auto& span) { elements(span); });
    });
  }
};

template <class Executor, class P, class U, Steps kSteps>
void run_sum(Executor& executor, const Pass& pass, const Terms& terms, bool aligned, std::int32_t* sound) {
  using Body = SumBody<P, U, kSteps>;
  const std::int64_t size = pass.params.size;
  executor.run((size + Body::kTile - 1) / Body::kTile,
               Body{staged_step(pass), terms, pass.combine.params_weight, pass.combine.most, size, aligned, sound});
}

// `steps` is not Steps::all.
template <class Executor, class P, class U>
void sum_types(Executor& executor, const Pass& pass, Steps steps, const Terms& terms, bool aligned,
               std::int32_t* sound) {
  if (steps == Steps::adaptive) return run_sum<Executor, P, U, Steps::adaptive>(executor, pass, terms, aligned, sound);
  if (steps == Steps::momentum) return run_sum<Executor, P, U, Steps::momentum>(executor, pass, terms, aligned, sound);
  run_sum<Executor, P, U, Steps::plain>(executor, pass, terms, aligned, sound);
}

}  // namespace afflux::cuda
