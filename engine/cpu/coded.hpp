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
  const char* later;  // what is prefetched meanwhile, 4 bytes for each element
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
      __builtin_prefetch(arrival.later + 4 * i, 0, 2);
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

// An update's run as float32 with zeros after its end, in x unless it is that already. float64 is rounded; what float32
// cannot hold becomes its largest value.
AFFLUX_FN const float* as_floats(const float* update, std::int64_t n, std::int64_t run, float* x) {
  return padded(update, n, run, x);
}
template <class T>
AFFLUX_FN const float* as_floats(const T* update, std::int64_t n, std::int64_t run, float* x) {
  const float most = 3.4028234663852886e38f;
  simd::each_wide(n, [&](auto lanes, std::int64_t i) AFFLUX_INLINE { lanes.copy(update + i, x + i); });
  for (std::int64_t i = n; i < run; ++i) x[i] = 0.0f;
  for (std::int64_t i = 0; sizeof(T) == sizeof(double) && i < n; ++i) {
    const float low = x[i] < most ? x[i] : most;
    x[i] = low > -most ? low : -most;
  }
  return x;
}

// Whether encoding leaves a copy in x.
AFFLUX_FN bool copies(Codec codec) { return codec.coding == Coding::affine || codec.coding == Coding::affine_vector; }

// The type of `now`: float32 holds every update but those of float64.
template <bool kOfRows, class T>
struct Now {
  using Type = float;
};
template <>
struct Now<false, double> {
  using Type = double;
};

// What a run of several arrivals needs beside their memory, 64 KB at most.
struct Rooms {
  static constexpr std::int64_t kSize = kTogether * kCodecBlock;
  static_assert(kSize >= kBlock, "a group must fit");
  alignas(64) float x[kSize], old[kSize], renewed[kSize];
  alignas(64) unsigned char nowhere[kSize];  // for codes that are not stored
};

// One run of all arrivals that have a direction or a new row.
template <bool kDirection, bool kOfRows, class T>
AFFLUX_FN void add_coded_run(const Pass& pass, const RowHeads* heads, std::int64_t begin, std::int64_t n, double* v,
                             double* sum) {
  const Calibrate& stage = pass.calibrate;
  const std::int64_t run = run_of(stage.codec);
  const formula::Place at = formula::place(stage.codec, begin);
  const int together = static_cast<int>(Rooms::kSize / run);
  Rooms rooms;
  CodedArrival<typename Now<kOfRows, T>::Type> arrivals[kTogether];
  Encoding encodings[kTogether];
  Decoding decodings[kTogether];
  int count = 0, encoded = 0, decoded = 0;
  const auto add = [&] {
    decode_runs(stage.codec, begin, n, decodings, decoded);
    encode_runs(stage.codec, begin, n, encodings, encoded);
    add_coded<kDirection>(arrivals, count, n, v, sum);
    count = encoded = decoded = 0;
  };
  for (std::int64_t k = 0; k < pass.combine.updates.size; ++k) {
    const double weight = kDirection ? pass.combine.weights.data[k] : 0.0;
    unsigned char* const new_row = stage.new_rows.data[k].data;
    if (weight == 0.0 && new_row == nullptr) continue;
    const T* const update = static_cast<const T*>(pass.combine.updates.data[k].data) + begin;
    const unsigned char* const row = stage.rows.data[k].data;
    float *const x = rooms.x + count * run, *const h = rooms.old + count * run, *const q = rooms.renewed + count * run;
    const float* const from = as_floats(update, n, run, x);
    const bool encoded_too = kOfRows || new_row != nullptr;
    if (row != nullptr)
      decodings[decoded++] = {&heads[k].old, {row + at.facts, row + at.codes}, h};
    else
      for (std::int64_t i = 0; i < n; ++i) h[i] = 0.0f;
    if (encoded_too)
      encodings[encoded++] = {&heads[k].renewed, from, x,
                              new_row == nullptr ? Target{rooms.nowhere, rooms.nowhere + kRowHead}
                                                 : Target{new_row + at.facts, new_row + at.codes},
                              q};
    arrivals[count] = {nullptr, h, new_row == nullptr ? nullptr : q, weight,
                       reinterpret_cast<const char*>(update) + simd::kAhead + 64};
    if constexpr (!kOfRows && sizeof(T) == sizeof(double))
      arrivals[count].now = update;
    else
      arrivals[count].now = kOfRows ? q : encoded_too && copies(stage.codec) ? x : from;
    if (++count == together) add();
  }
  if (count > 0) add();
}

template <bool kDirection, bool kOfRows, class T>
AFFLUX_FN void add_all_coded(const Pass& pass, const RowHeads* heads, Tile tile, double* v) {
  const std::int64_t run = run_of(pass.calibrate.codec), end = tile.begin + tile.size;
  for (std::int64_t i = tile.begin; i < end; i += run)
    add_coded_run<kDirection, kOfRows, T>(pass, heads, i, end - i < run ? end - i : run, v + (i - tile.begin),
                                          pass.calibrate.sum_out.data + i);
}

// The sum is changed in place, so where it goes elsewhere it goes there first.
AFFLUX_FN void carry_sum(const Calibrate& stage, Tile tile) {
  if (stage.sum_out.data == stage.sum.data) return;
  __builtin_memcpy(stage.sum_out.data + tile.begin, stage.sum.data + tile.begin,
                   static_cast<std::size_t>(tile.size) * sizeof(double));
}

// As cached_difference and cached_mean.
template <class T>
AFFLUX_FN void coded_difference(const Pass& pass, const RowHeads* heads, Tile tile, double* v) {
  add_mean(pass.calibrate.sum, pass.calibrate.num_clients, tile, v);
  carry_sum(pass.calibrate, tile);
  if (pass.calibrate.quantize_direction)
    add_all_coded<true, true, T>(pass, heads, tile, v);
  else
    add_all_coded<true, false, T>(pass, heads, tile, v);
}

template <class T>
AFFLUX_FN void coded_mean(const Pass& pass, const RowHeads* heads, Tile tile, double* v) {
  carry_sum(pass.calibrate, tile);
  add_all_coded<false, false, T>(pass, heads, tile, v);
  add_mean(pass.calibrate.sum_out, pass.calibrate.num_clients, tile, v);
}

}  // namespace
}  // namespace afflux::AFFLUX_ISA
