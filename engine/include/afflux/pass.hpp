// One server round as data: what `apply` does in a single sweep, tile by tile.
#pragma once
#include <cstdint>

#include "afflux/view.hpp"

namespace afflux {

// How one client's cached vector is stored.
enum class Codec : std::int32_t { float32 = 0 };

// Stage 1: v = params_weight * params + sum_i weights[i] * updates[i], float64, in the order given.
// An update whose weight is 0 is not read.
struct Combine {
  List<View<const float>> updates{};
  List<double> weights{};
  double params_weight = 0.0;
};

enum class Calibration : std::int32_t { none = 0, cached_difference = 1 };

// Stage 2. cached_difference (CA2FL, Algorithm 2; h = sum / num_clients, h_i = rows[i] decoded):
//   v = params_weight * params + h + sum_i weights[i] * (updates[i] - h_i)
//   for every i with new_rows[i]:  sum += updates[i] - h_i,  new_rows[i] = encode(updates[i])
// rows[i].data null: the client's row is all zeros. new_rows[i].data null: its row is not replaced.
// new_rows[i] may be rows[i] itself, or a row that only earlier arrivals read.
struct Calibrate {
  Calibration kind = Calibration::none;
  Codec codec = Codec::float32;
  View<double> sum{};
  std::int64_t num_clients = 0;
  List<View<const unsigned char>> rows{};
  List<View<unsigned char>> new_rows{};
};

enum class StepKind : std::int32_t { sgd = 0 };

// Stage 3. sgd: params_out = params + lr * v, rounded once to float32.
struct Step {
  StepKind kind = StepKind::sgd;
  double lr = 1.0;
};

// `out` may be `params` itself; any other overlap between what is written and what is read is refused.
struct Pass {
  View<const float> params{};
  View<float> out{};
  Combine combine{};
  Calibrate calibrate{};
  Step step{};
};

}  // namespace afflux
