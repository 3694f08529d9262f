// Stage 3 of a round: the server optimizers. A new optimizer needs a line in the table here, its equation in the
// comment of Step, and its formula in formula/step.hpp. Both drivers (CPU and CUDA) and the kinds in Python are
// generated from the table.
#pragma once
#include <cstdint>

#include "afflux/view.hpp"

namespace afflux {

// All kinds, each with the number of vectors that it keeps between rounds, and whether it divides by the root of a
// moment. Its `epsilon` must then be greater than 0, so that the divisor is not 0.
#define AFFLUX_STEP_KINDS(KIND) \
  KIND(sgd, 0, false)           \
  KIND(momentum, 1, false)      \
  KIND(adam, 2, true)           \
  KIND(amsgrad, 3, true)        \
  KIND(adagrad, 2, true)        \
  KIND(yogi, 2, true)           \
  KIND(assign, 0, false)        \
  KIND(nesterov, 1, false)

enum class StepKind : std::int32_t {
#define AFFLUX_KIND(kind, ...) kind,
  AFFLUX_STEP_KINDS(AFFLUX_KIND)
#undef AFFLUX_KIND
};

struct StepInfo {
  const char* name;
  std::int64_t states;
  bool divides;
};

// The table, in the order of StepKind.
constexpr StepInfo kStepKinds[] = {
#define AFFLUX_KIND(kind, states, divides) {#kind, states, divides},
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
constexpr bool divides(StepKind kind) { return kStepKinds[static_cast<int>(kind)].divides; }

// An optimizer's step, from the direction d to the new params (`out`) and the new states m, v, v_hat, in this order:
//   sgd       out = params + lr * d
//   assign    out = lr * d
//   momentum  m = beta1 * m + d,  out = params + lr * m
//   nesterov  m = beta1 * m + (1 - beta2) * d,  out = params + lr * (d + beta1 * m)
//   others    m = beta1 * m + (1 - beta1) * d,  out = params + lr * m / (sqrt(V) * root_scale + epsilon)
//   adam      v = beta2 * v + (1 - beta2) * d * d,  V = v
//   amsgrad   v as adam,  v_hat = max(v_hat, v),  V = v_hat
//   adagrad   v = v + d * d,  V = v
//   yogi      v = v - (1 - beta2) * d * d * sign(v - d * d),  V = v
// All arithmetic is in float64. The states have the type and size of params, and there are state_count(kind) of them.
// Each new state is rounded once; out is computed from the unrounded states. `outs`, if given, are vectors for the new
// states, each states[i] itself or other memory; else the states are overwritten.
//
// lr, epsilon and root_scale must be finite, beta1 and beta2 at least 0 and less than 1, epsilon at least 0 (greater
// than 0 if divides(kind)), and root_scale greater than 0.
struct Step {
  StepKind kind = StepKind::sgd;
  double lr = 1.0;
  double beta1 = 0.0, beta2 = 0.0;
  double epsilon = 0.0, root_scale = 1.0;
  List<View<void>> states{};
  List<View<void>> outs{};
};

}  // namespace afflux
