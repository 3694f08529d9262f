// One server round as data, which `apply` executes in a single sweep, tile by tile.
#pragma once
#include <cstdint>

#include "afflux/codec.hpp"
#include "afflux/step.hpp"
#include "afflux/view.hpp"

namespace afflux {

constexpr double kNoLimit = __builtin_inf();

// Stage 1: v = params_weight * params + sum_s rule_vectors.weights[s] * rule_vectors.vectors[s]
//            + sum_i weights[i] * updates[i],
// float64, in the order given. The updates are all float32, all float64 or all bfloat16. A vector whose weight is 0 is
// not read.
struct Combine {
  List<View<const void>> updates{};
  List<double> weights{};
  double params_weight = 0.0;
  double most = kNoLimit;  // the largest valid |v|, for updates that were not checked
};

constexpr std::int64_t kMostRuleVectors = 4;

// Up to kMostRuleVectors vectors of the type of params that the server keeps between rounds: their terms in the
// direction (stage 1), and their new values, from the old values, in this order, rounded once:
//   vectors[s] = sum_t next[s, t] * vectors[t] + sum_i next[s, R + i] * updates[i]
// for R vectors and M updates; `next` is row-major, R x (R + M), or empty: the vectors stay. A vector whose coefficient
// in a sum is 0 is not read for it, and a vector whose row of `next` is 1 at itself and 0 elsewhere is not written.
// `outs`, if given, are R vectors for the new values; each is vectors[s] itself or has other memory. All are written,
// including unchanged ones, unless `next` is empty.
struct RuleVectors {
  List<View<void>> vectors{};
  List<double> weights{};
  List<double> next{};
  List<View<void>> outs{};
};

enum class Calibration : std::int32_t { none = 0, cached_difference = 1, cached_mean = 2 };

// Stage 2, on v = params_weight * params + sum_s rule_vectors.weights[s] * rule_vectors.vectors[s]. Here h_i is rows[i]
// decoded.
// cached_difference (CA2FL, Algorithm 2):
//   v += sum / num_clients + sum_i weights[i] * (updates[i] - h_i)
//   for every i with new_rows[i]:  new_rows[i] = encode(updates[i]),  sum += decode(new_rows[i]) - h_i
// With quantize_direction, v has decode(encode(updates[i])) in the place of updates[i].
// cached_mean (AFA-CS): the sum and the rows first, in the same way; then, whatever the weights,
//   v += sum / num_clients
// There an update without a new row is not read.
// rows[i].data null: the client's row is all zeros. new_rows[i].data null: its row is not replaced.
// new_rows[i] may be rows[i] itself, or a row that only earlier arrivals read.
// The codecs float32 and float64 are for updates that they hold exactly (see exact_codec); the others round them, from
// float32, to which float64 is rounded first. Codecs with a head (see has_head) take `facts`, one for each arrival.
// sum_out: the memory for the whole new sum, if it is not `sum` itself; then `sum` is only read.
struct Calibrate {
  Calibration kind = Calibration::none;
  Codec codec{};
  View<double> sum{};
  std::int64_t num_clients = 0;
  List<View<const unsigned char>> rows{};
  List<View<unsigned char>> new_rows{};
  List<RowFacts> facts{};
  bool quantize_direction = false;
  View<double> sum_out{};
};

// params and out are both float32 or both float64; everything between is float64.
// `out` may be `params` itself; any other overlap between written and read memory is refused.
struct Pass {
  View<const void> params{};
  View<void> out{};
  Combine combine{};
  Calibrate calibrate{};
  Step step{};
  RuleVectors rule_vectors{};
  // The largest valid absolute value in out, states and rule vectors: at most the largest finite value of their
  // type. It changes no bit; `apply` returns whether all values are valid.
  double most = kNoLimit;
};

}  // namespace afflux
