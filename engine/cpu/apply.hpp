// apply, tile by tile: each stage reads and writes a tile of the direction, which stays in L1 between the stages.
// Tiles are elementwise, so their size changes no bit. Element types are chosen per tile and stage, not for the whole
// sweep, so that a new one adds code and does not multiply it.
#pragma once
#include "cpu/convert.hpp"
#include "cpu/kernels.hpp"
#include "cpu/simd.hpp"
#include "formula/calibrate.hpp"
#include "formula/combine.hpp"
#include "formula/step.hpp"

namespace afflux::AFFLUX_ISA {
namespace {

// A tile of every stream should stay in L2; of a thousand streams it cannot, and longer runs of each are a little
// faster.
constexpr std::int64_t kTile = 1024, kLongTile = 4096, kManyUpdates = 64;
constexpr int kTogether = 4;  // updates added for one load and store of v; 8 were no faster

struct Tile {
  std::int64_t begin, size;
};

template <class T>
AFFLUX_FN const T* tile_of(const View<const void>& vector, Tile tile) {
  return static_cast<const T*>(vector.data) + tile.begin;
}

// v = params_weight * params, or +0.0
template <class T>
AFFLUX_FN void start(const Pass& pass, Tile tile, double* __restrict v) {
  const double weight = pass.combine.params_weight;
  if (weight == 0.0) {
    for (std::int64_t i = 0; i < tile.size; ++i) v[i] = 0.0;
    return;
  }
  const T* __restrict params = tile_of<T>(pass.params, tile);
  simd::each(tile.size, [&](auto lanes, std::int64_t i) AFFLUX_INLINE {
    lanes.store(v + i, formula::weighted(lanes.fill(0.0), lanes.fill(weight), lanes.load(params + i)));
  });
}

// v += w[0] a[0] + ... : kCount updates, each added in order.
template <int kCount, class T>
AFFLUX_FN void add_weighted(const T* const* vectors, const double* weights, std::int64_t n, double* __restrict v) {
  simd::each(n, [&](auto lanes, std::int64_t i) AFFLUX_INLINE {
    auto sum = lanes.load(v + i);
    for (int k = 0; k < kCount; ++k) sum = formula::weighted(sum, lanes.fill(weights[k]), lanes.load(vectors[k] + i));
    lanes.store(v + i, sum);
  });
}

// v += sum_i w_i u_i
template <class T>
AFFLUX_FN void combine(const Combine& stage, Tile tile, double* __restrict v) {
  const T* vectors[kTogether];
  double weights[kTogether];
  int count = 0;
  for (std::int64_t k = 0; k < stage.weights.size; ++k) {
    if (stage.weights.data[k] == 0.0) continue;
    vectors[count] = tile_of<T>(stage.updates.data[k], tile);
    weights[count++] = stage.weights.data[k];
    if (count < kTogether) continue;
    add_weighted<kTogether>(vectors, weights, tile.size, v);
    count = 0;
  }
  for (int k = 0; k < count; ++k) add_weighted<1>(vectors + k, weights + k, tile.size, v);
}

// v += w (u - h_i) if the arrival has a direction;  S += u - h_i if its row is replaced.
template <bool kDirection, bool kReplaced, class T, class Row>
AFFLUX_FN void add_difference(const T* __restrict update, const Row* __restrict old, double weight,
                              double* __restrict v, double* __restrict sum, std::int64_t n) {
  simd::each(n, [&](auto lanes, std::int64_t i) AFFLUX_INLINE {
    const auto diff = formula::difference(lanes.load(update + i), lanes.load(old + i));
    if (kDirection) lanes.store(v + i, formula::weighted(lanes.load(v + i), lanes.fill(weight), diff));
    if (kReplaced) lanes.store(sum + i, formula::add_to_sum(lanes.load(sum + i), diff));
  });
}

// v += S / N + sum_i w_i (u_i - h_i);  S += u_i - h_i and h_i <- u_i for the rows to be replaced. Rows are stored in
// the type that an update widens to (exact_codec), hence read where they lie.
template <class T>
AFFLUX_FN void cached_difference(const Pass& pass, Tile tile, double* __restrict v) {
  using Row = decltype(formula::widened(T{}));
  const Calibrate& stage = pass.calibrate;
  double* __restrict sum = stage.sum.data + tile.begin;
  const double inverse = 1.0 / static_cast<double>(stage.num_clients);
  simd::each(tile.size, [&](auto lanes, std::int64_t i) AFFLUX_INLINE {
    lanes.store(v + i, formula::add_cached_mean(lanes.load(v + i), lanes.load(sum + i), lanes.fill(inverse)));
  });

  static const Row zeros[kLongTile] = {};
  for (std::int64_t k = 0; k < pass.combine.weights.size; ++k) {
    const double weight = pass.combine.weights.data[k];
    const unsigned char* const old_row = stage.rows.data[k].data;
    unsigned char* const new_row = stage.new_rows.data[k].data;
    if (weight == 0.0 && new_row == nullptr) continue;
    const T* const update = tile_of<T>(pass.combine.updates.data[k], tile);
    const Row* const old = old_row == nullptr ? zeros : reinterpret_cast<const Row*>(old_row) + tile.begin;
    if (new_row == nullptr) {
      add_difference<true, false>(update, old, weight, v, sum, tile.size);
      continue;
    }
    if (weight == 0.0)
      add_difference<false, true>(update, old, weight, v, sum, tile.size);
    else
      add_difference<true, true>(update, old, weight, v, sum, tile.size);
    convert(update, reinterpret_cast<Row*>(new_row) + tile.begin, tile.size);
  }
}

// The updates' part of the direction, in the type that they are stored in.
template <class T>
AFFLUX_FN void direction(const Pass& pass, Tile tile, double* v) {
  switch (pass.calibrate.kind) {
    case Calibration::none:
      return combine<T>(pass.combine, tile, v);
    case Calibration::cached_difference:
      return cached_difference<T>(pass, tile, v);
  }
}

// `out` may be `params`: each element is read before it is written.
template <class T>
AFFLUX_FN void step(const Pass& pass, Tile tile, const double* v) {
  const T* const params = tile_of<T>(pass.params, tile);
  T* const out = static_cast<T*>(pass.out.data) + tile.begin;
  switch (pass.step.kind) {
    case StepKind::sgd:
      simd::each(tile.size, [&](auto lanes, std::int64_t i) AFFLUX_INLINE {
        lanes.store(out + i, formula::sgd(lanes.load(params + i), lanes.load(v + i), lanes.fill(pass.step.lr)));
      });
  }
}

void apply(const Pass& pass, std::int64_t begin, std::int64_t end) {
  const bool wide = pass.params.type == Type::float64;
  const std::int64_t count = pass.combine.updates.size;
  const Type updates = count > 0 ? pass.combine.updates.data[0].type : Type::float32;
  const std::int64_t size = count < kManyUpdates ? kTile : kLongTile;
  alignas(64) double v[kLongTile];
  for (Tile tile{begin, size}; tile.begin < end; tile.begin += size) {
    if (end - tile.begin < size) tile.size = end - tile.begin;
    wide ? start<double>(pass, tile, v) : start<float>(pass, tile, v);
    with_type(updates, [&](auto sample) AFFLUX_INLINE { direction<decltype(sample)>(pass, tile, v); });
    wide ? step<double>(pass, tile, v) : step<float>(pass, tile, v);
  }
}

}  // namespace
}  // namespace afflux::AFFLUX_ISA
