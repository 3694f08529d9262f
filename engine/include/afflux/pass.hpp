// One server round as data, which `apply` executes in a single sweep, tile by tile.
#pragma once
#include <cstdint>

#include "afflux/codec.hpp"
#include "afflux/step.hpp"
#include "afflux/view.hpp"

namespace afflux {

constexpr double kNoLimit = __builtin_inf();

// Normal noise: each element of z ~ N(0, I) is a function of key, nonce and its index: `first` for element 0. Key and
// nonce are those of ChaCha20 (RFC 8439), in words of which the first byte is the lowest one. Two passes with the same
// key must have different nonces: else the difference of their results has no noise. Rule vectors with noise are as
// secret as the key.
struct Noise {
  double sigma = 0.0;  // of the direction, at least 0; 0: it has no noise
  std::uint32_t key[8] = {}, nonce[3] = {};
  std::int64_t first = 0;
  List<double> next{};  // the coefficients of z in the new rule vectors, R of them; empty: they have no noise
};

// Stage 1, the direction
//   v = params_weight * params + sum_s rule_vectors.weights[s] * rule_vectors.vectors[s]
//       + sum_i weights[i] * updates[i]
// in float64, added in this order. The updates are all float32, all float64 or all bfloat16, each of the size of
// params; there is one finite weight for each. A vector whose weight is 0 is not read.
//
// With a `trim` greater than 0, at most 0.5, the updates' part is W times their weighted trimmed mean instead, element
// by element, where W is the sum of the weights, none of which is negative: the M updates that have a weight are sorted
// by value, a share `trim` of the weights is cut at both ends, and the rest is averaged; 0.5 is the mean of lower and
// upper median. Weights count in units of W / 2^28, and a rest below M units counts as cut (formula/trim.hpp). Not with
// cached rows. The new rule vectors are those of untrimmed updates.
//
// With noise, noise.sigma * z is the last term of v, and noise.next[s] * z that of rule vector s. Not with cached rows.
struct Combine {
  List<View<const void>> updates{};
  List<double> weights{};
  double params_weight = 0.0;
  // The largest valid absolute value in the updates that the sweep reads (for the direction, a row or a rule vector),
  // if they were not checked before. On a GPU only without cached rows and rule vectors.
  double most = kNoLimit;
  double trim = 0.0;
  Noise noise{};
};

constexpr std::int64_t kMostRuleVectors = 4;

// Up to kMostRuleVectors vectors that the server keeps between rounds, of the type and size of params. `weights` are
// their weights in the direction (stage 1). For R vectors and M updates, their new values are
//   vectors[s] = sum_t next[s, t] * vectors[t] + sum_i next[s, R + i] * updates[i] + combine.noise.next[s] * z
// computed from the old values in float64, added in this order, rounded once. `next` is row-major, R x (R + M); if it
// is empty, the vectors stay as they are.
//
// A vector whose coefficient in a sum is 0 is not read for that sum. A vector whose row of `next` is 1 at itself and 0
// elsewhere, and that has no noise, is unchanged, and is not written in place. `outs`, if given, are R vectors for the
// new values; each is vectors[s] itself or other memory. Outs in other memory also receive unchanged vectors, unless
// `next` is empty.
struct RuleVectors {
  List<View<void>> vectors{};
  List<double> weights{};
  List<double> next{};
  List<View<void>> outs{};
};

enum class Calibration : std::int32_t { none = 0, cached_difference = 1, cached_mean = 2 };

// Stage 2, which replaces the updates' part of the direction: before it,
//   v = params_weight * params + sum_s rule_vectors.weights[s] * rule_vectors.vectors[s]
// Below, h_i is rows[i] decoded. `sum` is the sum of the rows of all num_clients clients, float64, of the size of
// params.
//
// cached_difference (CA2FL, Algorithm 1), with the sum from before the round:
//   v += factor * sum / num_clients + sum_i weights[i] * (updates[i] - factor * h_i)
//   for every i with new_rows[i]:  new_rows[i] = encode(updates[i]),  sum += decode(new_rows[i]) - h_i
// With quantize_direction, v has decode(encode(updates[i])) in the place of updates[i]. `factor` is 1; from 0 to 1 it
// makes old rows count less (FedStale, Rodio and Neglia 2024).
//
// cached_mean (AFA-CS): the rows and the sum are replaced first, in the same way; then
//   v += sum / num_clients
// The weights have no effect, and an update without a new row is not read.
//
// `rows` and `new_rows` have one item for each update. rows[i].data null: the client's row is all zeros.
// new_rows[i].data null: the client's row is not replaced. new_rows[i] may be rows[i] itself, or a row that only
// earlier arrivals read. `sum_out`, if given, receives the whole new sum, and `sum` is only read; else `sum` is
// overwritten.
//
// The codecs float32 and float64 are only for updates that they hold exactly (see exact_codec), and do not go with
// quantize_direction. The other codecs round: float64 is first rounded to float32. Codecs with a head (see has_head)
// need `facts`, one item for each update.
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
  double factor = 1.0;
};

// The arguments of `apply`. `params` and `out` are both float32 or both float64, of d elements; all arithmetic between
// them is in float64. The vectors of type View<void> or View<const void> may be in parts (parts.hpp), each of them. A
// result may be written in place of the vector that it replaces (`out` is `params` itself; see also the other stages).
// Any other overlap of written memory throws Error.
struct Pass {
  View<const void> params{};
  View<void> out{};
  Combine combine{};
  Calibrate calibrate{};
  Step step{};
  RuleVectors rule_vectors{};
  // The largest valid absolute value in out, states and rule vectors, greater than 0; never more than the largest
  // finite value of their type. The limit changes no bit of a result: `apply` returns false if a value exceeds it.
  double most = kNoLimit;
};

}  // namespace afflux
