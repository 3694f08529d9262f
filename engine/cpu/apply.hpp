// apply, tile by tile: each stage reads and writes a tile of the direction, which stays in L1 between the stages.
// Tiles are elementwise, so their size changes no bit; it only has to keep a tile of every stream in L2.
#pragma once
#include "cpu/codec.hpp"
#include "cpu/kernels.hpp"
#include "formula/calibrate.hpp"
#include "formula/combine.hpp"
#include "formula/step.hpp"

namespace afflux::AFFLUX_ISA {
namespace {

constexpr std::int64_t kTile = 1024;

struct Tile {
  std::int64_t begin, size;
};

// v = params_weight * params, or +0.0
AFFLUX_FN void start(const Pass& pass, Tile tile, double* __restrict v) {
  const double weight = pass.combine.params_weight;
  if (weight == 0.0) {
    for (std::int64_t i = 0; i < tile.size; ++i) v[i] = 0.0;
    return;
  }
  const float* __restrict params = pass.params.data + tile.begin;
  for (std::int64_t i = 0; i < tile.size; ++i) v[i] = formula::weighted(0.0, weight, params[i]);
}

// v += sum_i w_i u_i, four updates at a time (one load and store of v for four), each added in order.
AFFLUX_FN void combine(const Combine& stage, Tile tile, double* __restrict v) {
  const float* vector[4];
  double weight[4];
  int count = 0;
  const std::int64_t arrivals = stage.weights.size;
  for (std::int64_t k = 0; k < arrivals; ++k) {
    if (stage.weights.data[k] != 0.0) {
      vector[count] = stage.updates.data[k].data + tile.begin;
      weight[count++] = stage.weights.data[k];
    }
    if (count == 4) {
      const float* __restrict a = vector[0], * __restrict b = vector[1], * __restrict c = vector[2], * __restrict d = vector[3];
      for (std::int64_t i = 0; i < tile.size; ++i) {
        double sum = formula::weighted(v[i], weight[0], a[i]);
        sum = formula::weighted(sum, weight[1], b[i]);
        sum = formula::weighted(sum, weight[2], c[i]);
        v[i] = formula::weighted(sum, weight[3], d[i]);
      }
      count = 0;
    }
  }
  for (int k = 0; k < count; ++k) {
    const float* __restrict a = vector[k];
    for (std::int64_t i = 0; i < tile.size; ++i) v[i] = formula::weighted(v[i], weight[k], a[i]);
  }
}

// The old row of a tile: in place where it is stored as float32, else decoded into `scratch`; zeros for a missing row.
AFFLUX_FN const float* old_row(const Calibrate& stage, std::int64_t arrival, Tile tile, float* scratch) {
  const unsigned char* const row = stage.rows.data[arrival].data;
  if (row == nullptr) {
    for (std::int64_t i = 0; i < tile.size; ++i) scratch[i] = 0.0f;
    return scratch;
  }
  if (stage.codec == Codec::float32) return reinterpret_cast<const float*>(row) + tile.begin;
  decode_range(stage.codec, row, tile.begin, tile.size, scratch);
  return scratch;
}

// v += w (u - h_i) if the arrival has a direction;  S += u - h_i if its row is replaced.
template <bool kDirection, bool kReplaced>
AFFLUX_FN void add_difference(const float* __restrict update, const float* __restrict old, double weight,
                              double* __restrict v, double* __restrict sum, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    const double diff = formula::difference(update[i], old[i]);
    if (kDirection) v[i] = formula::weighted_difference(v[i], weight, diff);
    if (kReplaced) sum[i] = sum[i] + diff;
  }
}

// v += S / N + sum_i w_i (u_i - h_i);  S += u_i - h_i and h_i <- u_i for the rows to be replaced.
AFFLUX_FN void cached_difference(const Pass& pass, Tile tile, double* __restrict v) {
  const Calibrate& stage = pass.calibrate;
  double* __restrict sum = stage.sum.data + tile.begin;
  const double inverse = 1.0 / static_cast<double>(stage.num_clients);
  for (std::int64_t i = 0; i < tile.size; ++i) v[i] = formula::add_cached_mean(v[i], sum[i], inverse);

  float scratch[kTile];
  for (std::int64_t k = 0; k < pass.combine.weights.size; ++k) {
    const double weight = pass.combine.weights.data[k];
    unsigned char* const new_row = stage.new_rows.data[k].data;
    if (weight == 0.0 && new_row == nullptr) continue;
    const float* const update = pass.combine.updates.data[k].data + tile.begin;
    const float* const old = old_row(stage, k, tile, scratch);
    if (new_row == nullptr) {
      add_difference<true, false>(update, old, weight, v, sum, tile.size);
      continue;
    }
    if (weight == 0.0)
      add_difference<false, true>(update, old, weight, v, sum, tile.size);
    else
      add_difference<true, true>(update, old, weight, v, sum, tile.size);
    encode_range(stage.codec, update, tile.begin, tile.size, new_row);
  }
}

// No __restrict: `out` may be `params`.
AFFLUX_FN void step(const Pass& pass, Tile tile, const double* v) {
  switch (pass.step.kind) {
    case StepKind::sgd: {
      const double lr = pass.step.lr;
      const float* const params = pass.params.data + tile.begin;
      float* const out = pass.out.data + tile.begin;
#pragma GCC ivdep
      for (std::int64_t i = 0; i < tile.size; ++i) out[i] = formula::sgd(params[i], v[i], lr);
    }
  }
}

void apply(const Pass& pass, std::int64_t begin, std::int64_t end) {
  alignas(64) double v[kTile];
  for (Tile tile{begin, kTile}; tile.begin < end; tile.begin += kTile) {
    if (end - tile.begin < kTile) tile.size = end - tile.begin;
    start(pass, tile, v);
    switch (pass.calibrate.kind) {
      case Calibration::none:
        combine(pass.combine, tile, v);
        break;
      case Calibration::cached_difference:
        cached_difference(pass, tile, v);
    }
    step(pass, tile, v);
  }
}

}  // namespace
}  // namespace afflux::AFFLUX_ISA
