// The stages with encoded cached rows, one tile. Run by run, the rows of several arrivals are decoded and encoded in
// L1, then their differences are added. h is an old row decoded, q the new row decoded.
#pragma once
#include "cpu/calibrate.hpp"
#include "cpu/codec.hpp"

namespace afflux::AFFLUX_ISA {
namespace {

// A run of one arrival. `now` is its vector in the direction: the update, or q.
template <class T>
struct EncodedArrival {
  const T* now;
  const float* old;
  const float* renewed;  // q, or h if the row is kept
  bool replaced;
  double weight;
  const char* later;  // the memory to prefetch at the same time
};

// Returns true if the direction is zero before the mean of the rows is added; then v is not read.
AFFLUX_FN bool starts_from_zero(const Pass& pass) {
  return plain_bytes(pass.calibrate.codec) == 0 && formula::weighs_differences(pass.calibrate.kind) &&
         pass.combine.params_weight == 0.0 && pass.rule_vectors.vectors.size == 0;
}

// The layout and the prefetching of the runs of a round's arrivals.
struct RunPlan {
  Codec codec;
  std::int64_t run;
  bool near, asks, copies;  // Policy::direct; true if the coder prefetches too; true if it encodes from a copy
  Lookahead ahead = kUsualLookahead;
  int lines;  // prefetched for each 32 elements while the differences are added
  bool from_zero;
  double share, factor;  // of the sum, and of rows, in the direction

  RunPlan(const Pass& pass, const MemoryUse& memory)
      : codec(pass.calibrate.codec),
        run(run_of(codec)),
        near(memory.direct),
        asks(AFFLUX_ISA::asks(codec)),
        copies(asks && !near),
        lines(asks ? 1 : 2),
        from_zero(starts_from_zero(pass)),
        share(formula::share_of_sum(pass.calibrate)),
        factor(pass.calibrate.factor) {
    if (asks && near)
      ahead = {run * static_cast<std::int64_t>(sizeof(float)) + memory.prefetch, true};
    else if (run == kBlock)
      ahead.bytes = 4 * run;
  }
  // Returns the distance of the first byte that is prefetched while the differences are added.
  std::int64_t rest() const { return ahead.bytes + (asks ? 64 * (kFirstLines + kLinesBesideCodes) : 0); }
};

// Adds some arrivals: v += w (now - factor h) if kDirection;  S += q - h if the row is replaced. With the first
// arrivals of a round, v += S / N before.
template <bool kDirection, class T>
AFFLUX_FN void add_differences(const EncodedArrival<T>* arrivals, int count, const RunPlan& plan, bool first,
                               std::int64_t n, double* __restrict v, double* __restrict sum) {
  const Lookahead ahead = plan.ahead;
  const int lines = plan.lines;
  simd::each_wide(n, [&](auto lanes, std::int64_t i) AFFLUX_INLINE {
    auto total = lanes.load(sum + i), direction = first && plan.from_zero ? lanes.fill(0.0) : lanes.load(v + i);
    if (kDirection && first) direction = formula::add_cached_mean(direction, total, lanes.fill(plan.share));
    for (int k = 0; k < count; ++k) {
      const EncodedArrival<T>& arrival = arrivals[k];
      const auto old = lanes.load(arrival.old + i);
      ahead.ask_for(arrival.later + 2 * lines * i);
      if (lines == 2) ahead.ask_for(arrival.later + 2 * lines * i + 64);
      formula::accumulate_difference(lanes.load(arrival.now + i), old, lanes.load(arrival.renewed + i),
                                     kDirection && arrival.weight != 0.0, lanes.fill(arrival.weight),
                                     lanes.fill(plan.factor), arrival.replaced, direction, total);
    }
    if (kDirection) lanes.store(v + i, direction);
    lanes.store(sum + i, total);
  });
}

// Returns an update's run as float32, padded after its end: in place if it is one already, else in x. float64 is
// rounded; a value beyond the range of float32 becomes the largest finite value.
AFFLUX_FN const float* as_floats(Codec codec, const float* update, std::int64_t n, float* x) {
  return padded(codec, update, n, x);
}
template <class T>
AFFLUX_FN const float* as_floats(Codec codec, const T* update, std::int64_t n, float* x) {
  simd::each_wide(n, [&](auto lanes, std::int64_t i) AFFLUX_INLINE { lanes.copy(update + i, x + i); });
  for (std::int64_t i = 0; sizeof(T) == sizeof(double) && i < n; ++i) x[i] = formula::finite_float(x[i]);
  pad(codec, x, n);
  return x;
}

// The type of `now`: float32, except for float64 updates.
template <bool kOfRows, class T>
struct Now {
  using Type = float;
};
template <>
struct Now<false, double> {
  using Type = double;
};

// The scratch memory for the runs of several arrivals. Fewer rotated groups are processed together, because each has
// 8 KB; but more than one, because the direction and the sum, 32 KB, are read from L2 each time.
struct Scratch {
  static constexpr std::int64_t kGroups = 5, kSize = kGroups * kBlock;
  static_assert(kSize >= kTogether * kCodecBlock, "short runs must fit");
  alignas(64) float x[kSize], old[kSize], renewed[kSize];
};

AFFLUX_FN std::int64_t most_together(Codec codec) { return run_of(codec) == kBlock ? Scratch::kGroups : kTogether; }

// Some arrivals of one tile, with the encodings and decodings of their runs.
template <bool kOfRows, class T>
struct EncodedArrivals {
  EncodedArrival<typename Now<kOfRows, T>::Type> arrivals[kTogether];
  const T* updates[kTogether];  // from the tile's first element on
  Encoding encodings[kTogether];
  Decoding decodings[kTogether];
  int encoding_of[kTogether];  // of arrival k; -1: none
  int count, encoded, decoded;
};

// Appends arrival k of the round; its runs use this scratch memory.
template <bool kOfRows, class T>
AFFLUX_FN void append(const Pass& pass, const RowHeads* heads, std::int64_t k, double weight, std::int64_t begin,
                      Scratch& scratch, const RunPlan& plan, EncodedArrivals<kOfRows, T>& some) {
  static const float zeros[kBlock] = {};
  const std::int64_t at = some.count * plan.run;
  const unsigned char* const row = pass.calibrate.rows.data[k].data;
  unsigned char* const new_row = pass.calibrate.new_rows.data[k].data;
  float* const q = scratch.renewed + at;
  const float* const old = row == nullptr ? zeros : scratch.old + at;
  const bool replaced = new_row != nullptr;
  some.arrivals[some.count] = {nullptr, old, replaced ? q : old, replaced, weight, nullptr};
  some.updates[some.count] = static_cast<const T*>(pass.combine.updates.data[k].data) + begin;
  some.encoding_of[some.count] = -1;
  if (row != nullptr) some.decodings[some.decoded++] = {&heads[k].old, row, scratch.old + at};
  if (kOfRows || replaced) {
    some.encoding_of[some.count] = some.encoded;
    float* const copy = plan.copies ? scratch.x + at : nullptr;
    some.encodings[some.encoded++] = {&heads[k].renewed, nullptr, copy, new_row, q};
  }
  ++some.count;
}

// Prefetches into L2 the n elements that the stages read and write beside the arrivals.
AFFLUX_FN void prefetch_others(const Pass& pass, std::int64_t begin, std::int64_t n) {
  const std::int64_t size = size_of(pass.params.type);
  const auto ask = [&](const void* vector, std::int64_t each) AFFLUX_INLINE {
    const char* const first = static_cast<const char*>(vector) + begin * each;
    for (std::int64_t byte = 0; byte < n * each; byte += 64) __builtin_prefetch(first + byte, 0, 2);
  };
  ask(pass.calibrate.sum_out.data, sizeof(double));
  ask(pass.params.data, size);
  if (pass.out.data != pass.params.data) ask(pass.out.data, size);
  for (std::int64_t k = 0; k < pass.step.states.size; ++k) ask(pass.step.states.data[k].data, size);
}

// Processes the runs of some arrivals, one after the other. With the first arrivals, the mean of the rows is added, and
// the memory that the other stages need for the next tile is prefetched.
template <bool kDirection, bool kOfRows, class T>
AFFLUX_FN void add_runs(const RunPlan& plan, const Pass& pass, bool first, Tile tile, Scratch& scratch,
                        EncodedArrivals<kOfRows, T>& some, double* v, double* sum) {
  const std::int64_t run = plan.run;
  for (std::int64_t i = 0; i < tile.size; i += run) {
    const std::int64_t n = tile.size - i < run ? tile.size - i : run;
    for (int k = 0; k < some.count; ++k) {
      const T* const update = some.updates[k] + i;
      float* const x = scratch.x + k * run;
      const float* const from = as_floats(plan.codec, update, n, x);
      const int encoding = some.encoding_of[k];
      if (encoding >= 0) some.encodings[encoding].from = from;
      some.arrivals[k].later = reinterpret_cast<const char*>(update) + plan.rest();
      if constexpr (kOfRows)
        some.arrivals[k].now = scratch.renewed + k * run;
      else if constexpr (sizeof(T) == sizeof(double))
        some.arrivals[k].now = update;
      else
        some.arrivals[k].now = encoding >= 0 && plan.copies ? x : from;
    }
    if (first && plan.near) prefetch_others(pass, tile.begin + tile.size + i, n);
    code_runs(plan.codec, {tile.begin + i, n, some.decodings, some.decoded, some.encodings, some.encoded, plan.ahead});
    add_differences<kDirection>(some.arrivals, some.count, plan, first, n, v + i, sum + i);
  }
}

// Copies the sum to sum_out if that is other memory: there it is changed in place.
AFFLUX_FN void copy_sum(const Calibrate& stage, Tile tile) {
  if (stage.sum_out.data == stage.sum.data) return;
  __builtin_memcpy(stage.sum_out.data + tile.begin, stage.sum.data + tile.begin,
                   static_cast<std::size_t>(tile.size) * sizeof(double));
}

// Adds the mean of the rows if kDirection, and the differences of all arrivals that have work. The function is not
// inlined, so that only passes with encoded rows use this scratch memory on the stack.
template <bool kDirection, bool kOfRows, class T>
__attribute__((noinline)) void add_encoded_differences(const Pass& pass, const RowHeads* heads, const MemoryUse& memory,
                                                       Tile tile, double* v) {
  const RunPlan plan(pass, memory);
  bool first = true;
  double* const sum = pass.calibrate.sum_out.data + tile.begin;
  copy_sum(pass.calibrate, tile);
  Scratch scratch;
  EncodedArrivals<kOfRows, T> some;
  some.count = some.encoded = some.decoded = 0;
  for (std::int64_t k = 0; k < pass.combine.updates.size; ++k) {
    if (!has_work(pass, k)) continue;
    append(pass, heads, k, kDirection ? pass.combine.weights.data[k] : 0.0, tile.begin, scratch, plan, some);
    if (some.count < most_together(plan.codec)) continue;
    add_runs<kDirection>(plan, pass, first, tile, scratch, some, v, sum);
    first = false;
    some.count = some.encoded = some.decoded = 0;
  }
  if (some.count > 0 || first) add_runs<kDirection>(plan, pass, first, tile, scratch, some, v, sum);
}

}  // namespace
}  // namespace afflux::AFFLUX_ISA
