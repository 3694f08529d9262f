// Copies the lists of a pass to the device.
#pragma once
#include <type_traits>
#include <vector>

#include "cuda/rule_vectors.hpp"
#include "cuda/staging.hpp"
#include "cuda/step.hpp"

namespace afflux::cuda {

// An arrival of a round with encoded rows.
struct EncodedArrival {
  enum Uses : std::uint32_t { kRow = 1, kNewRow = 2, kWeight = 4 };

  const void* update;
  const unsigned char* row;  // or null, here and below
  unsigned char* new_row;
  double weight;  // in the direction's differences
  RowHeads heads;
  std::uint32_t uses;  // which of the three there are, combined with |

  AFFLUX_DEVICE bool has(Uses use) const { return (uses & use) != 0; }
  // Returns the arrival with these offsets, in bytes, added to the addresses of the update and of the rows.
  AFFLUX_DEVICE EncodedArrival at(std::int64_t in_update, std::int64_t in_row) const {
    EncodedArrival moved = *this;
    moved.update = static_cast<const char*>(update) + in_update;
    if (has(kRow)) moved.row = row + in_row;
    if (has(kNewRow)) moved.new_row = new_row + in_row;
    return moved;
  }
};

// Returns the arrivals that change the direction or have a new row.
inline std::vector<EncodedArrival> encoded_arrivals(const Pass& pass, const RowHeads* heads) {
  const Calibrate& stage = pass.calibrate;
  std::vector<EncodedArrival> arrivals;
  for (std::int64_t k = 0; stage.kind != Calibration::none && k < pass.combine.updates.size; ++k) {
    const double weight = formula::weighs_differences(stage.kind) ? pass.combine.weights.data[k] : 0.0;
    const unsigned char* const row = stage.rows.data[k].data;
    unsigned char* const new_row = stage.new_rows.data[k].data;
    const std::uint32_t uses = (row != nullptr ? EncodedArrival::kRow : 0u) |
                               (new_row != nullptr ? EncodedArrival::kNewRow : 0u) |
                               (weight != 0.0 ? EncodedArrival::kWeight : 0u);
    if ((uses & ~EncodedArrival::kRow) != 0)
      arrivals.push_back(
          {pass.combine.updates.data[k].data, row, new_row, weight, heads == nullptr ? RowHeads{} : heads[k], uses});
  }
  return arrivals;
}

// Returns true if each arrival has a weight and a new row, and the direction takes updates and rows as they are.
inline bool is_common(const Calibrate& stage, const std::vector<EncodedArrival>& arrivals) {
  constexpr std::uint32_t kBoth = EncodedArrival::kNewRow | EncodedArrival::kWeight;
  bool common = stage.factor == 1.0 && !stage.quantize_direction;
  for (const EncodedArrival& arrival : arrivals) common = common && (arrival.uses & kBoth) == kBoth;
  return common;
}

// The arguments of the kernels of apply: a pass whose lists are all on the device.
struct Sweep {
  Pass pass;
  List<EncodedArrival> arrivals;
  Renewal renewal;
  StagedStep step;
  bool common;          // true for rounds of most rules with encoded rows: is_common
  bool aligned;         // true if all vectors are aligned to 16 bytes
  std::int32_t* sound;  // set to 0 if a result is not valid (see afflux::apply)
};

// Returns true if all vectors are aligned to 16 bytes. Rows with a head are not vectors, and do not count.
inline bool is_aligned(const Pass& pass) {
  bool all = true;
  const auto look = [&](const void* data) { all = all && reinterpret_cast<std::uintptr_t>(data) % 16 == 0; };
  const auto look_all = [&](const auto& list) {
    for (std::int64_t i = 0; i < list.size; ++i) look(list.data[i].data);
  };
  look(pass.params.data);
  look(pass.out.data);
  look_all(pass.combine.updates);
  look_all(pass.step.states);
  look_all(pass.step.outs);
  look_all(pass.rule_vectors.vectors);
  look_all(pass.rule_vectors.outs);
  if (pass.calibrate.kind == Calibration::none) return all;
  look(pass.calibrate.sum.data);
  look(pass.calibrate.sum_out.data);
  if (has_head(pass.calibrate.codec)) return all;
  look_all(pass.calibrate.rows);
  look_all(pass.calibrate.new_rows);
  return all;
}

// A pass with copies of its lists on the device; the rest of the pass is unchanged.
class StagedPass {
 public:
  template <class Executor>
  StagedPass(Executor& executor, const Pass& pass, const RowHeads* heads) {
    Staging staging;
    const std::vector<EncodedArrival> arrivals = encoded_arrivals(pass, heads);
    const std::int64_t count = static_cast<std::int64_t>(arrivals.size());
    const std::int64_t kept_arrivals = staging.add(arrivals.data(), count);
    const std::vector<std::uint8_t> readers = columns(pass.rule_vectors, pass.combine.updates.size);
    const std::int64_t kept_columns = staging.add(readers.data(), static_cast<std::int64_t>(readers.size()));
    const auto added = [&](const auto& list) { return staging.add(list.data, list.size); };
    const std::int64_t offsets[] = {
        added(pass.combine.updates),    added(pass.combine.weights),      added(pass.calibrate.rows),
        added(pass.calibrate.new_rows), added(pass.rule_vectors.vectors), added(pass.rule_vectors.weights),
        added(pass.rule_vectors.next),  added(pass.rule_vectors.outs),    added(pass.combine.noise.next)};
    staging.upload(executor);
    const std::int64_t* offset = offsets;
    const auto moved = [&](const auto& list) {
      using T = std::remove_reference_t<decltype(*list.data)>;
      return List<std::remove_const_t<T>>{staging.at<T>(*offset++), list.size};
    };
    Pass& to = sweep_.pass = pass;
    to.combine.updates = moved(pass.combine.updates);
    to.combine.weights = moved(pass.combine.weights);
    to.calibrate.rows = moved(pass.calibrate.rows);
    to.calibrate.new_rows = moved(pass.calibrate.new_rows);
    to.rule_vectors.vectors = moved(pass.rule_vectors.vectors);
    to.rule_vectors.weights = moved(pass.rule_vectors.weights);
    to.rule_vectors.next = moved(pass.rule_vectors.next);
    to.rule_vectors.outs = moved(pass.rule_vectors.outs);
    to.combine.noise.next = moved(pass.combine.noise.next);
    sweep_.arrivals = {staging.at<const EncodedArrival>(kept_arrivals), count};
    sweep_.renewal = {staging.at<const std::uint8_t>(kept_columns), stays(pass)};
    sweep_.step = staged_step(pass);
    sweep_.common = is_common(pass.calibrate, arrivals);
    sweep_.aligned = is_aligned(pass);
    sweep_.sound = executor.flag();
  }
  const Sweep& sweep() const { return sweep_; }

 private:
  // Return the facts of Renewal.
  static std::vector<std::uint8_t> columns(const RuleVectors& rule_vectors, std::int64_t updates) {
    const std::int64_t held = rule_vectors.vectors.size, width = rule_vectors.next.size == 0 ? 0 : held + updates;
    std::vector<std::uint8_t> found(static_cast<std::size_t>(width), 0);
    for (std::int64_t i = 0; i < held * width; ++i)
      if (rule_vectors.next.data[i] != 0.0)
        found[static_cast<std::size_t>(i % width)] |= static_cast<std::uint8_t>(1 << i / width);
    return found;
  }
  static std::uint32_t stays(const Pass& pass) {
    const RuleVectors& rule_vectors = pass.rule_vectors;
    const List<double>& noise = pass.combine.noise.next;
    const std::int64_t held = rule_vectors.vectors.size, width = held + pass.combine.updates.size;
    std::uint32_t all = 0;
    for (std::int64_t s = 0; s < held && rule_vectors.next.size > 0; ++s) {
      bool same = noise.size == 0 || noise.data[s] == 0.0;
      for (std::int64_t k = 0; k < width; ++k)
        same = same && rule_vectors.next.data[s * width + k] == (k == s ? 1.0 : 0.0);
      all |= static_cast<std::uint32_t>(same) << s;
    }
    return all;
  }

  Sweep sweep_;
};

}  // namespace afflux::cuda
