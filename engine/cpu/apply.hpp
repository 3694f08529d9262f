// apply, tile by tile: each stage reads and writes a tile of the direction, which stays in L1 between the stages.
// Tiles are elementwise, so their size changes no bit; it only has to keep a tile of every stream in L2.
#pragma once
#include "cpu/codec.hpp"
#include "cpu/kernels.hpp"
#include "cpu/simd.hpp"
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
  simd::each(tile.size, [&](auto lanes, std::int64_t i) AFFLUX_INLINE {
    lanes.store(v + i, formula::weighted(lanes.fill(0.0), lanes.fill(weight), lanes.load(params + i)));
  });
}

// v += w[0] a[0] + ... : kCount updates, each added in order, for one load and store of v.
template <int kCount>
AFFLUX_FN void add_weighted(const float* const* vectors, const double* weights, std::int64_t n, double* __restrict v) {
  simd::each(n, [&](auto lanes, std::int64_t i) AFFLUX_INLINE {
    auto sum = lanes.load(v + i);
    for (int k = 0; k < kCount; ++k) sum = formula::weighted(sum, lanes.fill(weights[k]), lanes.load(vectors[k] + i));
    lanes.store(v + i, sum);
  });
}

// v += sum_i w_i u_i, four updates at a time.
AFFLUX_FN void combine(const Combine& stage, Tile tile, double* __restrict v) {
  const float* vectors[4];
  double weights[4];
  int count = 0;
  for (std::int64_t k = 0; k < stage.weights.size; ++k) {
    if (stage.weights.data[k] == 0.0) continue;
    vectors[count] = stage.updates.data[k].data + tile.begin;
    weights[count++] = stage.weights.data[k];
    if (count < 4) continue;
    add_weighted<4>(vectors, weights, tile.size, v);
    count = 0;
  }
  for (int k = 0; k < count; ++k) add_weighted<1>(vectors + k, weights + k, tile.size, v);
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
  simd::each(n, [&](auto lanes, std::int64_t i) AFFLUX_INLINE {
    const auto diff = formula::difference(lanes.load(update + i), lanes.load(old + i));
    if (kDirection) lanes.store(v + i, formula::weighted(lanes.load(v + i), lanes.fill(weight), diff));
    if (kReplaced) lanes.store(sum + i, formula::add_to_sum(lanes.load(sum + i), diff));
  });
}

// v += S / N + sum_i w_i (u_i - h_i);  S += u_i - h_i and h_i <- u_i for the rows to be replaced.
AFFLUX_FN void cached_difference(const Pass& pass, Tile tile, double* __restrict v) {
  const Calibrate& stage = pass.calibrate;
  double* __restrict sum = stage.sum.data + tile.begin;
  const double inverse = 1.0 / static_cast<double>(stage.num_clients);
  simd::each(tile.size, [&](auto lanes, std::int64_t i) AFFLUX_INLINE {
    lanes.store(v + i, formula::add_cached_mean(lanes.load(v + i), lanes.load(sum + i), lanes.fill(inverse)));
  });

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

// `out` may be `params`: each element is read before it is written.
AFFLUX_FN void step(const Pass& pass, Tile tile, const double* v) {
  const float* const params = pass.params.data + tile.begin;
  float* const out = pass.out.data + tile.begin;
  switch (pass.step.kind) {
    case StepKind::sgd:
      simd::each(tile.size, [&](auto lanes, std::int64_t i) AFFLUX_INLINE {
        lanes.store(out + i, formula::sgd(lanes.load(params + i), lanes.load(v + i), lanes.fill(pass.step.lr)));
      });
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
