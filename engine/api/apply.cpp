#include <algorithm>
#include <atomic>
#include <limits>
#include <optional>
#include <vector>

#include "afflux/afflux.hpp"
#include "api/check.hpp"
#include "api/cut_pass.hpp"
#include "api/heads.hpp"
#include "api/sweep_checksums.hpp"
#include "cpu/dispatch.hpp"
#include "cpu/memory_use.hpp"
#include "cpu/parallel_for.hpp"
#include "formula/noise.hpp"

namespace afflux {
namespace {

// Checks vectors that the server keeps between rounds, of the type and size of params, and the vectors for their new
// values; without `outs` the vectors are overwritten.
void check_held(const char* name, List<View<void>> vectors, const char* outs_name, List<View<void>> outs,
                const Pass& pass, check::Overlaps& overlaps) {
  const auto read = [&](check::Name title, const View<void>& view) {
    check::type("apply", title, view.type, {pass.params.type});
    check::read("apply", title, view, pass.params.size, overlaps);
  };
  const auto write = [&](check::Name title, const View<void>& view) {
    check::type("apply", title, view.type, {pass.params.type});
    check::write("apply", title, view, pass.params.size, overlaps);
  };
  check::list("apply", name, vectors);
  check::list("apply", outs_name, outs);
  if (outs.size != 0 && outs.size != vectors.size)
    check::fail("apply", std::string(outs_name) + " has " + std::to_string(outs.size) + " vectors, " + name + " has " +
                             std::to_string(vectors.size));
  for (std::int64_t i = 0; i < vectors.size; ++i) {
    if (outs.size == 0) {
      write({name, i}, vectors.data[i]);
      continue;
    }
    read({name, i}, vectors.data[i]);
    write({outs_name, i}, outs.data[i]);
  }
}

void check_numbers(const char* name, List<double> numbers, std::int64_t size, check::Overlaps& overlaps) {
  const View<const double> view{numbers.data, numbers.size, {}};
  check::view("apply", name, view, size);
  overlaps.read_numbers(name, view);
  for (std::int64_t i = 0; i < size; ++i) check::finite("apply", {name, i}, numbers.data[i]);
}

void check_most(check::Name name, double most) {
  if (!(most > 0.0)) check::fail("apply", name.str() + " is " + std::to_string(most) + ", must be greater than 0");
}

void check_trim(const Pass& pass) {
  const Combine& stage = pass.combine;
  if (!(stage.trim >= 0.0 && stage.trim <= 0.5))
    check::fail("apply", "trim is " + std::to_string(stage.trim) + ", must be from 0 to 0.5");
  if (stage.trim == 0.0) return;
  if (pass.calibrate.kind != Calibration::none) check::fail("apply", "trim does not go with cached rows");
  for (std::int64_t i = 0; i < stage.weights.size; ++i)
    if (stage.weights.data[i] < 0.0)
      check::fail("apply", check::Name("weights", i).str() + " is negative, which does not go with trim");
}

void check_combine(const Pass& pass, check::Overlaps& overlaps) {
  const Combine& stage = pass.combine;
  check::list("apply", "updates", stage.updates);
  if (stage.weights.size != stage.updates.size)
    check::fail("apply", "weights has " + std::to_string(stage.weights.size) + " entries, updates has " +
                             std::to_string(stage.updates.size));
  check_numbers("weights", stage.weights, stage.weights.size, overlaps);
  check::finite("apply", "params_weight", stage.params_weight);
  for (std::int64_t i = 0; i < stage.updates.size; ++i) {
    const check::Name name("updates", i);
    const View<const void>& update = stage.updates.data[i];
    if (i == 0) check::type("apply", name, update.type, {Type::float32, Type::float64, Type::bfloat16});
    check::one_type("apply", name, update.type, stage.updates.data[0].type);
    check::read("apply", name, update, pass.params.size, overlaps, check::PartTypes::any);
  }
  check_most("combine.most", stage.most);
  check_trim(pass);
  const bool alone = pass.calibrate.kind == Calibration::none && pass.rule_vectors.vectors.size == 0;
  if (stage.most != kNoLimit && !alone && pass.out.device.kind == DeviceKind::cuda)
    throw Unavailable("[apply] combine.most on a GPU is for rounds without cached rows and without rule vectors");
}

void check_codec(const Pass& pass) {
  const Calibrate& stage = pass.calibrate;
  const bool exact = stage.codec == exact_codec(Type::float32) || stage.codec == exact_codec(Type::float64);
  if (exact && stage.quantize_direction)
    check::fail("apply", "quantize_direction needs a codec that rounds, not " + name(stage.codec));
  if (has_head(stage.codec) && stage.facts.size != pass.combine.updates.size)
    check::fail("apply", "facts has " + std::to_string(stage.facts.size) + " entries, updates has " +
                             std::to_string(pass.combine.updates.size));
  if (pass.combine.updates.size == 0 || !exact) return;
  const Type updates = pass.combine.updates.data[0].type;
  if (stage.codec != exact_codec(updates))
    check::fail("apply", "codec " + name(stage.codec) + " cannot hold " + name(updates) +
                             " updates: of the exact ones float64 needs float64, float32 and bfloat16 need float32");
}

// Returns the heads of the old and new rows of all arrivals. Called before the sweep, which replaces rows in place.
// Throws Error for a damaged head.
std::vector<RowHeads> heads_of(const Pass& pass, Device device) {
  const Calibrate& stage = pass.calibrate;
  std::vector<RowHeads> heads;
  if (stage.kind == Calibration::none) return heads;
  const rows::Heads found(stage.codec, stage.rows, device);
  for (std::int64_t i = 0; i < stage.rows.size; ++i) {
    RowHeads both{};
    if (found.at(i) != nullptr)
      both.old = rows::read_head("apply", {"rows", i}, stage.codec, found.at(i), pass.params.size);
    if (has_head(stage.codec) && (stage.quantize_direction || stage.new_rows.data[i].data != nullptr))
      both.renewed = rows::head_of("apply", {"facts", i}, stage.codec, stage.facts.data[i]);
    heads.push_back(both);
  }
  return heads;
}

// Returns the rows that the pass encodes and that need a head.
std::vector<rows::Written> written_rows(const Pass& pass, const std::vector<RowHeads>& heads) {
  std::vector<rows::Written> written;
  for (std::size_t i = 0; has_head(pass.calibrate.codec) && i < heads.size(); ++i)
    if (unsigned char* const row = pass.calibrate.new_rows.data[i].data) written.push_back({row, heads[i].renewed});
  return written;
}

void check_calibrate(const Pass& pass, check::Overlaps& overlaps) {
  const Calibrate& stage = pass.calibrate;
  if (stage.kind == Calibration::none) return;
  const std::int64_t arrivals = pass.combine.updates.size;
  check::list("apply", "rows", stage.rows);
  check::list("apply", "new_rows", stage.new_rows);
  if (stage.num_clients < 1)
    check::fail("apply", "num_clients is " + std::to_string(stage.num_clients) + ", must be at least 1");
  if (!(stage.factor >= 0.0 && stage.factor <= 1.0) ||
      (stage.factor != 1.0 && stage.kind != Calibration::cached_difference))
    check::fail("apply", "factor is " + std::to_string(stage.factor) + ", must be from 0 to 1; of a mean it is 1");
  check::view("apply", "sum", stage.sum, pass.params.size);
  if (stage.sum_out.data == nullptr) {
    overlaps.write("sum", stage.sum);
  } else {
    check::view("apply", "sum_out", stage.sum_out, pass.params.size);
    overlaps.read("sum", stage.sum);
    overlaps.write("sum_out", stage.sum_out);
  }
  if (stage.rows.size != arrivals || stage.new_rows.size != arrivals)
    check::fail("apply", "rows has " + std::to_string(stage.rows.size) + " and new_rows " +
                             std::to_string(stage.new_rows.size) + " entries, updates has " + std::to_string(arrivals));
  check_codec(pass);
  const std::int64_t bytes = row_bytes(stage.codec, pass.params.size), alignment = rows::alignment(stage.codec);
  for (std::int64_t i = 0; i < arrivals; ++i) {
    if (stage.rows.data[i].data != nullptr) {
      check::view("apply", {"rows", i}, stage.rows.data[i], bytes, alignment);
      overlaps.read({"rows", i}, stage.rows.data[i]);
    }
    if (stage.new_rows.data[i].data != nullptr) {
      check::view("apply", {"new_rows", i}, stage.new_rows.data[i], bytes, alignment);
      overlaps.write({"new_rows", i}, stage.new_rows.data[i]);
    }
  }
}

void check_beta(check::Name name, double beta) {
  if (!(beta >= 0.0 && beta < 1.0))
    check::fail("apply", name.str() + " is " + std::to_string(beta) + ", must be at least 0 and less than 1");
}

void check_step(const Pass& pass, check::Overlaps& overlaps) {
  const Step& stage = pass.step;
  check::finite("apply", "lr", stage.lr);
  check_beta("beta1", stage.beta1);
  check_beta("beta2", stage.beta2);
  check::finite("apply", "epsilon", stage.epsilon);
  if (stage.epsilon < 0.0) check::fail("apply", "epsilon is " + std::to_string(stage.epsilon) + ", must be at least 0");
  if (divides(stage.kind) && stage.epsilon == 0.0)
    check::fail("apply", "epsilon is 0, must be greater than 0: what has not moved would be 0 / 0");
  check::finite("apply", "root_scale", stage.root_scale);
  if (!(stage.root_scale > 0.0))
    check::fail("apply", "root_scale is " + std::to_string(stage.root_scale) + ", must be greater than 0");
  if (stage.states.size != state_count(stage.kind))
    check::fail("apply", "states has " + std::to_string(stage.states.size) + " vectors, " + name(stage.kind) +
                             " keeps " + std::to_string(state_count(stage.kind)));
  check_held("states", stage.states, "states_out", stage.outs, pass, overlaps);
}

// Checks the rule vectors. They count as written even if `next` is empty: which overlaps are allowed does not depend on
// the values of numbers.
void check_rule_vectors(const Pass& pass, check::Overlaps& overlaps) {
  const RuleVectors& rule_vectors = pass.rule_vectors;
  const std::int64_t held = rule_vectors.vectors.size, count = held + pass.combine.updates.size;
  if (held > kMostRuleVectors)
    check::fail("apply", "rule_vectors.vectors has " + std::to_string(held) + " vectors, at most " +
                             std::to_string(kMostRuleVectors) + " are served");
  check_numbers("rule_vectors.weights", rule_vectors.weights, held, overlaps);
  if (rule_vectors.next.size != 0) check_numbers("rule_vectors.next", rule_vectors.next, held * count, overlaps);
  check_held("rule_vectors.vectors", rule_vectors.vectors, "rule_vectors.outs", rule_vectors.outs, pass, overlaps);
}

void check_noise(const Pass& pass, check::Overlaps& overlaps) {
  const Noise& noise = pass.combine.noise;
  check::finite("apply", "noise.sigma", noise.sigma);
  if (noise.sigma < 0.0) check::fail("apply", "noise.sigma is " + std::to_string(noise.sigma) + ", must be at least 0");
  if (noise.next.size != 0) {
    if (pass.rule_vectors.next.size == 0) check::fail("apply", "noise.next is for rule vectors with `next`");
    check_numbers("noise.next", noise.next, pass.rule_vectors.vectors.size, overlaps);
  }
  if (!formula::draws(noise)) return;
  if (noise.first < 0 || noise.first > formula::kMostNoise - pass.params.size)
    check::fail("apply", "noise.first is " + std::to_string(noise.first) + ", must be from 0 to " +
                             std::to_string(formula::kMostNoise - pass.params.size));
  if (pass.calibrate.kind != Calibration::none) check::fail("apply", "noise does not go with cached rows");
}

void check_pass(const Pass& pass, check::Overlaps& overlaps) {
  check_most("most", pass.most);
  check::type("apply", "params", pass.params.type, {Type::float32, Type::float64});
  check::type("apply", "out", pass.out.type, {pass.params.type});
  check::read("apply", "params", pass.params, pass.params.size, overlaps);
  check::write("apply", "out", pass.out, pass.params.size, overlaps);
  check_combine(pass, overlaps);
  check_calibrate(pass, overlaps);
  check_step(pass, overlaps);
  check_rule_vectors(pass, overlaps);
  check_noise(pass, overlaps);
  overlaps.refuse("apply");
}

double largest(Type type) {
  return type == Type::float64 ? std::numeric_limits<double>::max()
                               : static_cast<double>(std::numeric_limits<float>::max());
}

// Returns the pass with all outs set, by default to the vector itself, and with a limit that is at most the type's.
Pass with_outs(Pass pass) {
  if (pass.calibrate.sum_out.data == nullptr) pass.calibrate.sum_out = pass.calibrate.sum;
  if (pass.step.outs.size == 0) pass.step.outs = pass.step.states;
  if (pass.rule_vectors.outs.size == 0) pass.rule_vectors.outs = pass.rule_vectors.vectors;
  pass.most = std::min(pass.most, largest(pass.params.type));
  return pass;
}

// Throws Error if a vector of whose memory checksums are taken is in parts.
void check_flat(const Pass& pass) {
  const auto check = [](check::Name name, const View<void>& view) {
    if (view.parts != nullptr)
      check::fail("apply", name.str() + " is in parts, but checksums are taken of flat vectors");
  };
  check("out", pass.out);
  for (std::int64_t i = 0; i < pass.step.outs.size; ++i) check({"states", i}, pass.step.outs.data[i]);
  for (std::int64_t i = 0; i < pass.rule_vectors.outs.size; ++i)
    check({"rule_vectors.vectors", i}, pass.rule_vectors.outs.data[i]);
}

using Work = std::vector<double>;  // the scratch memory of a trimmed mean

bool sweep(const Pass& pass, CutPass* cut, const std::vector<RowHeads>& heads, const MemoryUse& memory, int threads,
           Checksums* checksums, PerThread<Work>* works) {
  const auto kernel = kernels().apply;
  std::atomic<bool> sound{true};
  const auto with_work = [&](const Pass& of_chunk, std::int64_t begin, std::int64_t end, double* work) {
    if (!kernel(of_chunk, heads.data(), memory, begin, end, work)) sound.store(false, std::memory_order_relaxed);
  };
  const auto chunk = [&](const Pass& of_chunk, std::int64_t begin, std::int64_t end) {
    if (works == nullptr) return with_work(of_chunk, begin, end, nullptr);
    works->with([&](Work& work) { with_work(of_chunk, begin, end, work.data()); });
  };
  const auto piece = [&](std::int64_t begin, std::int64_t end) {
    cut == nullptr ? chunk(pass, begin, end) : cut->each_chunk(begin, end, chunk);
  };
  if (checksums == nullptr) {
    cut == nullptr ? for_each_piece(pass.params.size, threads, piece) : cut->each_chunk(threads, chunk);
  } else {
    SweepChecksums sums(pass, piece_size(pass.params.size, threads), *checksums);
    for_each_piece(pass.params.size, threads, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t at = begin; at < end; at += SweepChecksums::kStrip) {
        const std::int64_t to = std::min(at + SweepChecksums::kStrip, end);
        piece(at, to);
        sums.extend(at, to);
      }
    });
    sums.finish();
  }
  return sound.load(std::memory_order_relaxed);
}

}  // namespace

bool apply(const Pass& pass, int num_threads, bool dry, Checksums* checksums) {
  check::threads("apply", num_threads);
  check::Overlaps overlaps;
  check_pass(pass, overlaps);
  const Device device = overlaps.device();
  const bool cuda = device.kind == DeviceKind::cuda;
  if (cuda && checksums != nullptr) throw Unavailable("[apply] checksums are taken of host memory, not on cuda");
  const std::vector<RowHeads> heads = heads_of(pass, device);
  if (dry) return true;
  const std::vector<rows::Written> written = written_rows(pass, heads);
  const Codec codec = pass.calibrate.codec;
  if (cuda) {
    const cuda::NewHeads renewed = rows::new_heads(written, codec, pass.params.size);
    return cuda::backend()->apply(cuda::on(device), with_outs(pass), heads.data(), renewed);
  }
  // An invalid AFFLUX_ISA, AFFLUX_POLICY, AFFLUX_THREAD_BYTES or AFFLUX_SPIN_US throws here, before anything is
  // written. With checksums the sweep does not write past the caches, because the written memory is read again.
  kernels();
  const MemoryUse memory = memory_use(overlaps.traffic(), checksums == nullptr);
  const int threads = threads_worth(overlaps.traffic(), num_threads);
  const Pass all = with_outs(pass);
  std::optional<CutPass> cut;
  if (overlaps.parts() != nullptr) {
    if (checksums != nullptr) check_flat(all);
    cut.emplace(all, *overlaps.parts(), threads);
  }
  std::optional<PerThread<Work>> works;
  if (pass.combine.trim > 0.0)
    works.emplace(threads, [&] {
      return std::make_unique<Work>(static_cast<std::size_t>(trim_work(pass.combine.updates.size)));
    });
  rows::finish(written, codec, pass.params.size, device);  // the old heads were already read
  return sweep(all, cut ? &*cut : nullptr, heads, memory, threads, checksums, works ? &*works : nullptr);
}

}  // namespace afflux
