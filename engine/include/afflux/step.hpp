// Stage 3 of a round: the server optimizers. A new one needs a line in the table here, its equation in the comment of
// Step, and its formula in formula/step.hpp. Both drivers and the kinds that Python knows are generated from the table.
#pragma once
#include <cstdint>

#include "afflux/view.hpp"

namespace afflux {

// Every kind, and the number of vectors that it keeps between rounds.
#define AFFLUX_STEP_KINDS(KIND) \
  KIND(sgd, 0)                  \
  KIND(momentum, 1)             \
  KIND(adam, 2)                 \
  KIND(amsgrad, 3)              \
  KIND(adagrad, 2)              \
  KIND(yogi, 2)                 \
  KIND(assign, 0)

enum class StepKind : std::int32_t {
#define AFFLUX_KIND(kind, states) kind,
  AFFLUX_STEP_KINDS(AFFLUX_KIND)
#undef AFFLUX_KIND
};

struct StepInfo {
  const char* name;
  std::int64_t states;
};

// The table, in the order of StepKind.
constexpr StepInfo kStepKinds[] = {
#define AFFLUX_KIND(kind, states) {#kind, states},
    AFFLUX_STEP_KINDS(AFFLUX_KIND)
#undef AFFLUX_KIND
};

// The largest number of vectors that a kind keeps.
constexpr int kMostStates = [] {
  std::int64_t most = 0;
  for (const StepInfo& kind : kStepKinds) most = most < kind.states ? kind.states : most;
  return static_cast<int>(most);
}();

constexpr const char* name(StepKind kind) { return kStepKinds[static_cast<int>(kind)].name; }
constexpr std::int64_t state_count(StepKind kind) { return kStepKinds[static_cast<int>(kind)].states; }
// Whether a kind divides by the root of a moment; `epsilon` must then be greater than 0, so that the divisor is not 0.
constexpr bool divides(StepKind kind) {
  return kind != StepKind::sgd && kind != StepKind::momentum && kind != StepKind::assign;
}

// From the direction d to params and the states m, v, v_hat, in this order:
//   sgd       out = params + lr * d
//   assign    out = lr * d
//   momentum  m = beta1 * m + d,  out = params + lr * m
//   others    m = beta1 * m + (1 - beta1) * d,  out = params + lr * m / (sqrt(V) * root_scale + epsilon)
//   adam      v = beta2 * v + (1 - beta2) * d * d,  V = v
//   amsgrad   v as adam,  v_hat = max(v_hat, v),  V = v_hat
//   adagrad   v = v + d * d,  V = v
//   yogi      v = v - (1 - beta2) * d * d * sign(v - d * d),  V = v
// All in float64; the states, of the type of params, are overwritten, each rounded once, and out is computed from the
// unrounded ones. `outs`, if given, are vectors for the new states; each is states[i] itself or has other memory.
struct Step {
  StepKind kind = StepKind::sgd;
  double lr = 1.0;
  double beta1 = 0.0, beta2 = 0.0;
  double epsilon = 0.0, root_scale = 1.0;
  List<View<void>> states{};
  List<View<void>> outs{};
};

}  // namespace afflux
