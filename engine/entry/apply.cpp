#include <cmath>

#include "afflux/afflux.hpp"
#include "cpu/dispatch.hpp"
#include "cpu/parallel_for.hpp"
#include "entry/check.hpp"
#include "entry/overlap.hpp"

namespace afflux {
namespace {

void check_combine(const Pass& pass, check::Overlaps& overlaps) {
  const Combine& stage = pass.combine;
  check::list("apply", "updates", stage.updates);
  if (stage.weights.size != stage.updates.size)
    check::fail("apply", "weights has " + std::to_string(stage.weights.size) + " entries, updates has " +
                             std::to_string(stage.updates.size));
  const View<const double> weights{stage.weights.data, stage.weights.size, {}};
  check::view("apply", "weights", weights, stage.weights.size);
  overlaps.read("weights", -1, weights);
  if (!std::isfinite(stage.params_weight)) check::fail("apply", "params_weight is not finite");
  for (std::int64_t i = 0; i < stage.updates.size; ++i) {
    check::view("apply", check::item("updates", i), stage.updates.data[i], pass.params.size);
    overlaps.read("updates", i, stage.updates.data[i]);
    if (!std::isfinite(stage.weights.data[i])) check::fail("apply", check::item("weights", i) + " is not finite");
  }
}

void check_calibrate(const Pass& pass, check::Overlaps& overlaps) {
  const Calibrate& stage = pass.calibrate;
  if (stage.kind == Calibration::none) return;
  const std::int64_t arrivals = pass.combine.updates.size;
  check::list("apply", "rows", stage.rows);
  check::list("apply", "new_rows", stage.new_rows);
  if (stage.num_clients < 1)
    check::fail("apply", "num_clients is " + std::to_string(stage.num_clients) + ", must be at least 1");
  check::view("apply", "sum", stage.sum, pass.params.size);
  overlaps.write("sum", -1, stage.sum);
  if (stage.rows.size != arrivals || stage.new_rows.size != arrivals)
    check::fail("apply", "rows has " + std::to_string(stage.rows.size) + " and new_rows " +
                             std::to_string(stage.new_rows.size) + " entries, updates has " + std::to_string(arrivals));
  const std::int64_t bytes = row_bytes(stage.codec, pass.params.size);
  for (std::int64_t i = 0; i < arrivals; ++i) {
    if (stage.rows.data[i].data != nullptr) {
      check::view("apply", check::item("rows", i), stage.rows.data[i], bytes, sizeof(float));
      overlaps.read("rows", i, stage.rows.data[i]);
    }
    if (stage.new_rows.data[i].data != nullptr) {
      check::view("apply", check::item("new_rows", i), stage.new_rows.data[i], bytes, sizeof(float));
      overlaps.write("new_rows", i, stage.new_rows.data[i]);
    }
  }
}

void check_pass(const Pass& pass) {
  check::Overlaps overlaps;
  check::view("apply", "params", pass.params, pass.params.size);
  check::view("apply", "out", pass.out, pass.params.size);
  overlaps.read("params", -1, pass.params);
  overlaps.write("out", -1, pass.out);
  check_combine(pass, overlaps);
  check_calibrate(pass, overlaps);
  if (!std::isfinite(pass.step.lr)) check::fail("apply", "lr is not finite");
  overlaps.refuse("apply");
}

}  // namespace

void apply(const Pass& pass, int num_threads) {
  check::threads("apply", num_threads);
  check_pass(pass);
  const auto kernel = kernels().apply;
  for_each_superblock(pass.params.size, num_threads,
                      [&](std::int64_t begin, std::int64_t end) { kernel(pass, begin, end); });
}

}  // namespace afflux
