// One server round as data: what `apply` does in a single sweep, tile by tile.
#pragma once
#include <cstdint>

#include "afflux/view.hpp"

namespace afflux {

// How one client's cached vector is stored. float32, float64: as it is, little-endian, in 4 d or 8 d bytes.
enum class Codec : std::int32_t { float32 = 0, float64 = 1 };

// The codec that keeps every bit of a vector of this type.
constexpr Codec exact_codec(Type type) { return type == Type::float64 ? Codec::float64 : Codec::float32; }

// Stage 1: v = params_weight * params + sum_i weights[i] * updates[i], float64, in the order given.
// The updates are all float32, all float64 or all bfloat16. An update whose weight is 0 is not read.
struct Combine {
  List<View<const void>> updates{};
  List<double> weights{};
  double params_weight = 0.0;
};

enum class Calibration : std::int32_t { none = 0, cached_difference = 1 };

// Stage 2. cached_difference (CA2FL, Algorithm 2; h = sum / num_clients, h_i = rows[i] decoded):
//   v = params_weight * params + h + sum_i weights[i] * (updates[i] - h_i)
//   for every i with new_rows[i]:  sum += updates[i] - h_i,  new_rows[i] = encode(updates[i])
// rows[i].data null: the client's row is all zeros. new_rows[i].data null: its row is not replaced.
// new_rows[i] may be rows[i] itself, or a row that only earlier arrivals read.
// The codec must be exact for the updates: float64 for float64, else float32.
struct Calibrate {
  Calibration kind = Calibration::none;
  Codec codec = Codec::float32;
  View<double> sum{};
  std::int64_t num_clients = 0;
  List<View<const unsigned char>> rows{};
  List<View<unsigned char>> new_rows{};
};

enum class StepKind : std::int32_t { sgd = 0 };

// Stage 3. sgd: out = params + lr * v, rounded once to the type of out.
struct Step {
  StepKind kind = StepKind::sgd;
  double lr = 1.0;
};

// params and out are both float32 or both float64; everything between is float64.
// `out` may be `params` itself; any other overlap between what is written and what is read is refused.
struct Pass {
  View<const void> params{};
  View<void> out{};
  Combine combine{};
  Calibrate calibrate{};
  Step step{};
};

}  // namespace afflux
