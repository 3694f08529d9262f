// The stages with cached rows that a codec stores, one tile: run by run the rows of several arrivals are decoded and
// encoded in L1, then their differences are added. h is an old row decoded, q the new one.
#pragma once
#include "cpu/calibrate.hpp"
#include "cpu/codec.hpp"

namespace afflux::AFFLUX_ISA {
namespace {

// A run of one arrival. `now` is what enters the direction: the update, or q.
template <class T>
struct CodedArrival {
  const T* now;
  const float* old;
  const float* renewed;  // q; null: the row is kept
  double weight;
};

// v += w (now - h) where kDirection;  S += q - h where the row is replaced.
template <bool kDirection, class T>
AFFLUX_FN void add_coded(const CodedArrival<T>* arrivals, int count, std::int64_t n, double* __restrict v,
                         double* __restrict sum) {
  simd::each_wide(n, [&](auto lanes, std::int64_t i) AFFLUX_INLINE {
    auto direction = lanes.load(v + i), total = lanes.load(sum + i);
    for (int k = 0; k < count; ++k) {
      const CodedArrival<T>& arrival = arrivals[k];
      const auto old = lanes.load(arrival.old + i);
      if (kDirection && arrival.weight != 0.0)
        direction = formula::weighted(direction, lanes.fill(arrival.weight),
                                      formula::difference(lanes.load(arrival.now + i), old));
      if (arrival.renewed == nullptr) continue;
      total = formula::add_to_sum(total, formula::difference(lanes.load(arrival.renewed + i), old));
    }
    if (kDirection) lanes.store(v + i, direction);
    lanes.store(sum + i, total);
  });
}

// An update's run as float32 with zeros after its end, in `room` unless it is that already. float64 is rounded; what
// float32 cannot hold becomes its largest value.
AFFLUX_FN const float* as_floats(const float* update, std::int64_t n, std::int64_t run, float* room) {
  return padded(update, n, run, room);
}
template <class T>
AFFLUX_FN const float* as_floats(const T* update, std::int64_t n, std::int64_t run, float* room) {
  const float most = 3.4028234663852886e38f;
  for (std::int64_t i = 0; i < n; ++i) {
    float value;
    formula::narrow(formula::widened(update[i]), &value);
    value = value < most ? value : most;
    room[i] = value > -most ? value : -most;
  }
  for (std::int64_t i = n; i < run; ++i) room[i] = 0.0f;
  return room;
}

// Where the code of rows that are not stored goes.
struct Nowhere {
  alignas(64) unsigned char facts[8 * (kBlock / kCodecBlock)], codes[2 * kBlock];
};

// The type of `now`.
template <bool kOfRows, class T>
struct Now {
  using Type = T;
};
template <class T>
struct Now<true, T> {
  using Type = float;
};

// One run of all arrivals that have a direction or a new row.
template <bool kDirection, bool kOfRows, class T>
AFFLUX_FN void add_coded_run(const Pass& pass, const RowHeads* heads, std::int64_t begin, std::int64_t n, double* v,
                             double* sum) {
  constexpr std::int64_t kRoom = 2 * kBlock;
  const Calibrate& stage = pass.calibrate;
  const std::int64_t run = run_of(stage.codec);
  const int together = static_cast<int>(kRoom / run < kTogether ? kRoom / run : kTogether);
  alignas(64) float old[kRoom], renewed[kRoom], room[kBlock];
  Nowhere nowhere;
  CodedArrival<typename Now<kOfRows, T>::Type> arrivals[kTogether];
  int count = 0;
  for (std::int64_t k = 0; k < pass.combine.updates.size; ++k) {
    const double weight = kDirection ? pass.combine.weights.data[k] : 0.0;
    unsigned char* const new_row = stage.new_rows.data[k].data;
    if (weight == 0.0 && new_row == nullptr) continue;
    const T* const update = static_cast<const T*>(pass.combine.updates.data[k].data) + begin;
    const unsigned char* const row = stage.rows.data[k].data;
    float *const h = old + count * run, *const q = renewed + count * run;
    if (row == nullptr)
      for (std::int64_t i = 0; i < n; ++i) h[i] = 0.0f;
    else
      decode_run(stage.codec, heads[k].old, begin, n, run_in(stage.codec, row, begin), h);
    if (kOfRows || new_row != nullptr) {
      const Target to =
          new_row == nullptr ? Target{nowhere.facts, nowhere.codes} : run_in(stage.codec, new_row, begin);
      encode_run(stage.codec, heads[k].renewed, as_floats(update, n, run, room), begin, n, to, q);
    }
    arrivals[count] = {nullptr, h, new_row == nullptr ? nullptr : q, weight};
    if constexpr (kOfRows)
      arrivals[count].now = q;
    else
      arrivals[count].now = update;
    if (++count < together) continue;
    add_coded<kDirection>(arrivals, count, n, v, sum);
    count = 0;
  }
  if (count > 0) add_coded<kDirection>(arrivals, count, n, v, sum);
}

template <bool kDirection, bool kOfRows, class T>
AFFLUX_FN void add_all_coded(const Pass& pass, const RowHeads* heads, Tile tile, double* v) {
  const std::int64_t run = run_of(pass.calibrate.codec), end = tile.begin + tile.size;
  for (std::int64_t i = tile.begin; i < end; i += run)
    add_coded_run<kDirection, kOfRows, T>(pass, heads, i, end - i < run ? end - i : run, v + (i - tile.begin),
                                          pass.calibrate.sum.data + i);
}

// As cached_difference and cached_mean.
template <class T>
AFFLUX_FN void coded_difference(const Pass& pass, const RowHeads* heads, Tile tile, double* v) {
  add_mean(pass.calibrate, tile, v);
  if (pass.calibrate.quantize_direction)
    add_all_coded<true, true, T>(pass, heads, tile, v);
  else
    add_all_coded<true, false, T>(pass, heads, tile, v);
}

template <class T>
AFFLUX_FN void coded_mean(const Pass& pass, const RowHeads* heads, Tile tile, double* v) {
  add_all_coded<false, false, T>(pass, heads, tile, v);
  add_mean(pass.calibrate, tile, v);
}

}  // namespace
}  // namespace afflux::AFFLUX_ISA
