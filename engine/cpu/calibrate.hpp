// The stages with cached rows, one tile: S is their sum, h_i the row of arrival i.
#pragma once
#include "cpu/combine.hpp"
#include "cpu/convert.hpp"
#include "formula/calibrate.hpp"

namespace afflux::AFFLUX_ISA {
namespace {

// v += w (u - h_i) if the arrival has a direction;  S += u - h_i if its row is replaced.
template <bool kDirection, bool kReplaced, class T, class Stored>
AFFLUX_FN void add_difference(const T* __restrict update, const Stored* __restrict old, double weight,
                              double* __restrict v, double* __restrict sum, std::int64_t n) {
  simd::each(n, [&](auto lanes, std::int64_t i) AFFLUX_INLINE {
    const auto diff = formula::difference(lanes.load(update + i), lanes.load(old + i));
    if (kDirection) lanes.store(v + i, formula::weighted(lanes.load(v + i), lanes.fill(weight), diff));
    if (kReplaced) lanes.store(sum + i, formula::add_to_sum(lanes.load(sum + i), diff));
  });
}

// v += S / N
AFFLUX_FN void add_mean(const Calibrate& stage, Tile tile, double* __restrict v) {
  const double* __restrict sum = stage.sum.data + tile.begin;
  const double inverse = 1.0 / static_cast<double>(stage.num_clients);
  simd::each(tile.size, [&](auto lanes, std::int64_t i) AFFLUX_INLINE {
    lanes.store(v + i, formula::add_cached_mean(lanes.load(v + i), lanes.load(sum + i), lanes.fill(inverse)));
  });
}

// Rows are stored in the type that an update widens to (exact_codec), hence read where they lie.
template <class T>
using Row = decltype(formula::widened(T{}));

template <class T>
AFFLUX_FN const Row<T>* row_or_zeros(const View<const unsigned char>& row, Tile tile) {
  static const Row<T> zeros[kLongTile] = {};
  return row.data == nullptr ? zeros : reinterpret_cast<const Row<T>*>(row.data) + tile.begin;
}

// v += S / N + sum_i w_i (u_i - h_i);  S += u_i - h_i and h_i <- u_i for the rows to be replaced.
template <class T>
AFFLUX_FN void cached_difference(const Pass& pass, Tile tile, double* __restrict v) {
  const Calibrate& stage = pass.calibrate;
  double* __restrict sum = stage.sum.data + tile.begin;
  add_mean(stage, tile, v);
  for (std::int64_t k = 0; k < pass.combine.weights.size; ++k) {
    const double weight = pass.combine.weights.data[k];
    unsigned char* const new_row = stage.new_rows.data[k].data;
    if (weight == 0.0 && new_row == nullptr) continue;
    const T* const update = tile_of<T>(pass.combine.updates.data[k], tile);
    const Row<T>* const old = row_or_zeros<T>(stage.rows.data[k], tile);
    if (new_row == nullptr) {
      add_difference<true, false>(update, old, weight, v, sum, tile.size);
      continue;
    }
    if (weight == 0.0)
      add_difference<false, true>(update, old, weight, v, sum, tile.size);
    else
      add_difference<true, true>(update, old, weight, v, sum, tile.size);
    convert(update, reinterpret_cast<Row<T>*>(new_row) + tile.begin, tile.size);
  }
}

// S += u_i - h_i and h_i <- u_i for the rows to be replaced;  v += S / N, with the new S.
template <class T>
AFFLUX_FN void cached_mean(const Pass& pass, Tile tile, double* __restrict v) {
  const Calibrate& stage = pass.calibrate;
  double* __restrict sum = stage.sum.data + tile.begin;
  for (std::int64_t k = 0; k < pass.combine.updates.size; ++k) {
    unsigned char* const new_row = stage.new_rows.data[k].data;
    if (new_row == nullptr) continue;
    const T* const update = tile_of<T>(pass.combine.updates.data[k], tile);
    add_difference<false, true>(update, row_or_zeros<T>(stage.rows.data[k], tile), 0.0, v, sum, tile.size);
    convert(update, reinterpret_cast<Row<T>*>(new_row) + tile.begin, tile.size);
  }
  add_mean(stage, tile, v);
}

}  // namespace
}  // namespace afflux::AFFLUX_ISA
