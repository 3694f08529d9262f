// Calibration by plain cached rows (float32 or float64 vectors), one tile: S is their sum, h_i the row of arrival i.
#pragma once
#include "cpu/combine.hpp"
#include "cpu/convert.hpp"
#include "formula/calibrate.hpp"

namespace afflux::AFFLUX_ISA {
namespace {

// Returns true if arrival k changes the direction or the sum of the rows; no other arrival is read.
AFFLUX_FN bool has_work(const Pass& pass, std::int64_t k) {
  const Calibrate& rows = pass.calibrate;
  const bool weighs = rows.kind == Calibration::none || formula::weighs_differences(rows.kind);
  return (weighs && pass.combine.weights.data[k] != 0.0) ||
         (rows.kind != Calibration::none && rows.new_rows.data[k].data != nullptr);
}

// The element type of plain rows: the type to which an update widens (exact_codec).
template <class T>
using Row = decltype(formula::widened(T{}));

// The memory and the weight of one arrival.
template <class T>
struct Arrival {
  const T* update;
  const Row<T>* old;
  Row<T>* renewed;  // null: the row is kept
  double weight;
};

// Adds S / N, times the factor, to v.
AFFLUX_FN void add_mean(const View<double>& of, const Calibrate& stage, Tile tile, double* __restrict v) {
  const double* __restrict sum = of.data + tile.begin;
  const double share = formula::share_of_sum(stage);
  simd::each(tile.size, [&](auto lanes, std::int64_t i) AFFLUX_INLINE {
    lanes.store(v + i, formula::add_cached_mean(lanes.load(v + i), lanes.load(sum + i), lanes.fill(share)));
  });
}

template <class T>
AFFLUX_FN const Row<T>* row_or_zeros(const View<const unsigned char>& row, Tile tile) {
  static const Row<T> zeros[kLongTile] = {};
  return row.data == nullptr ? zeros : reinterpret_cast<const Row<T>*>(row.data) + tile.begin;
}

// Adds up to kTogether arrivals: v += w (u - factor h) if kDirection;  S += u - h and h <- u if the row is replaced. v
// and S stay in registers. The old S is read at `from`, the new one is written at `sum`. An arrival with weight 0 adds
// nothing to v, even if it holds non-finite values.
template <bool kDirection, class T>
AFFLUX_FN void add_differences(const Arrival<T>* arrivals, int count, double factor, Tile tile, double* __restrict v,
                               const double* from, double* sum) {
  simd::each_wide(tile.size, [&](auto lanes, std::int64_t i) AFFLUX_INLINE {
    auto direction = lanes.load(v + i), total = lanes.load(from + i);
    for (int k = 0; k < count; ++k) {
      const Arrival<T>& arrival = arrivals[k];
      lanes.prefetch(arrival.update + i, tile.ahead);
      lanes.prefetch(arrival.old + i, tile.ahead);
      const auto update = lanes.load(arrival.update + i);
      formula::accumulate_difference(update, lanes.load(arrival.old + i), update, kDirection && arrival.weight != 0.0,
                                     lanes.fill(arrival.weight), lanes.fill(factor), arrival.renewed != nullptr,
                                     direction, total);
      if (arrival.renewed != nullptr) lanes.copy(arrival.update + i, arrival.renewed + i);
    }
    if (kDirection) lanes.store(v + i, direction);
    lanes.store(sum + i, total);
  });
}

// Adds the differences of all arrivals that change the direction or the sum of the rows.
template <bool kDirection, class T>
AFFLUX_FN void add_all_differences(const Pass& pass, Tile tile, double* __restrict v) {
  const Calibrate& stage = pass.calibrate;
  double* const sum = stage.sum_out.data + tile.begin;
  const double* from = stage.sum.data + tile.begin;
  Arrival<T> arrivals[kTogether];
  int count = 0;
  for (std::int64_t k = 0; k < pass.combine.updates.size; ++k) {
    if (!has_work(pass, k)) continue;
    const double weight = kDirection ? pass.combine.weights.data[k] : 0.0;
    unsigned char* const new_row = stage.new_rows.data[k].data;
    arrivals[count++] = {tile_of<T>(pass.combine.updates.data[k], tile), row_or_zeros<T>(stage.rows.data[k], tile),
                         new_row == nullptr ? nullptr : reinterpret_cast<Row<T>*>(new_row) + tile.begin, weight};
    if (count < kTogether) continue;
    add_differences<kDirection>(arrivals, count, stage.factor, tile, v, from, sum);
    from = sum;
    count = 0;
  }
  if (count > 0 || from != sum) add_differences<kDirection>(arrivals, count, stage.factor, tile, v, from, sum);
}

}  // namespace
}  // namespace afflux::AFFLUX_ISA
