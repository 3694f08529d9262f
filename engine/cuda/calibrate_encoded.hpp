// apply with encoded rows: a block of threads computes a tile in all stages, one arrival after the other. h is an old
// row decoded, q the new row decoded.
#pragma once
#include "cuda/calibrate.hpp"
#include "cuda/codec_tile.hpp"
#include "cuda/direction.hpp"

namespace afflux::cuda {

// Returns the update as float32. float64 is rounded; a value beyond the range of float32 becomes the largest finite
// value.
template <class U>
AFFLUX_DEVICE Vector4<float> as_floats(const Vector4<U>& update) {
  Vector4<float> x = converted<float>(update);
  AFFLUX_UNROLL_ON_DEVICE
  for (int j = 0; sizeof(U) == sizeof(double) && j < kFour; ++j) x.at[j] = formula::finite_float(x.at[j]);
  return x;
}

// The kernel of rounds with encoded rows. P, U: the types of params and of updates.
template <class P, class U, class Coder>
struct EncodedBody {
  static constexpr int kThreads = Coder::kThreads;
  static constexpr std::int64_t kTile = kThreads * kFour;
  using Shared = typename Coder::Shared;

  Sweep sweep;

  // Calls body(thread, span) for the threads that have elements.
  template <class Block, class Body>
  AFFLUX_DEVICE void each_span(const Block& block, std::int64_t begin, const Body& body) const {
    block.each_in_warp([&](int thread) {
      const std::int64_t first = begin + thread * kFour;
      if (first < sweep.pass.params.size)
        with_span(first, sweep.pass.params.size, sweep.aligned, [&](const auto& span) { body(thread, span); });
    });
  }

  // The values that a thread reads from an arrival.
  struct Arrival {
    Vector4<U> update;
    typename Coder::Read old;
  };

  // Returns the first arrival from k on that changes the direction or has a new row, or else the number of arrivals.
  AFFLUX_DEVICE std::int64_t wanted(std::int64_t k) const {
    const Pass& pass = sweep.pass;
    while (k < pass.combine.updates.size && direction_weight(pass, k) == 0.0 &&
           pass.calibrate.new_rows.data[k].data == nullptr)
      ++k;
    return k;
  }

  template <class Block, class Arrivals>
  AFFLUX_DEVICE void read(const Block& block, const Tile& tile, std::int64_t k, Arrivals& arrivals) const {
    if (k == sweep.pass.combine.updates.size) return;
    const unsigned char* const row = sweep.pass.calibrate.rows.data[k].data;
    block.each_in_warp([&](int thread) {
      arrivals[thread] = {};
      if (row != nullptr) arrivals[thread].old = Coder::read(tile, sweep.heads[k].old, row, thread);
    });
    each_span(block, tile.begin, [&](int thread, const auto& span) {
      arrivals[thread].update = span.template load<U>(sweep.pass.combine.updates.data[k].data);
    });
  }

  // Adds arrival k: v += w (now - h);  S += q - h if the row is replaced. `now` is the update, or q.
  template <class Block, class Arrivals, class Each>
  AFFLUX_DEVICE void add(const Block& block, Shared& shared, const Tile& tile, std::int64_t k, Arrivals& arrivals,
                         Each& v, Each& sum) const {
    const Calibrate& stage = sweep.pass.calibrate;
    const double weight = direction_weight(sweep.pass, k);
    unsigned char* const new_row = stage.new_rows.data[k].data;
    typename Block::template Each<typename Coder::Read> row;
    typename Block::template Each<Vector4<float>> x, old, renewed;
    block.each_in_warp([&](int thread) {
      x[thread] = as_floats(arrivals[thread].update);
      row[thread] = arrivals[thread].old;
      old[thread] = renewed[thread] = {};
    });
    if (stage.rows.data[k].data != nullptr) Coder::decode(block, shared, tile, sweep.heads[k].old, row, old);
    if (stage.quantize_direction || new_row != nullptr)
      Coder::encode(block, shared, tile, sweep.heads[k].renewed, x, new_row, renewed);
    block.each_in_warp([&](int thread) {
      const Doubles h = doubles(old[thread]);
      const Doubles now = stage.quantize_direction ? doubles(renewed[thread]) : doubles(arrivals[thread].update);
      formula::accumulate_difference(now, h, doubles(renewed[thread]), weight != 0.0, FourLanes::fill(weight),
                                     new_row != nullptr, v[thread], sum[thread]);
    });
  }

  template <class Block>
  AFFLUX_DEVICE void operator()(const Block& block, Shared& shared) const {
    const Pass& pass = sweep.pass;
    const Calibrate& stage = pass.calibrate;
    const Tile tile{stage.codec, block.index * kTile, pass.params.size, sweep.aligned};
    const bool weighted = formula::weighs_differences(stage.kind);
    typename Block::template Each<Doubles> v, sum;
    block.each_in_warp([&](int thread) { v[thread] = sum[thread] = {}; });
    each_span(block, tile.begin, [&](int thread, const auto& span) {
      v[thread] = start<P>(pass, span);
      sum[thread] = span.template load<double>(stage.sum.data);
      if (weighted) add_mean(sum[thread], stage.num_clients, v[thread]);
    });
    // Each arrival is read while the one before it is processed.
    typename Block::template Each<Arrival> now, next;
    std::int64_t k = wanted(0);
    for (read(block, tile, k, next); k < pass.combine.updates.size;) {
      const std::int64_t following = wanted(k + 1);
      block.each_in_warp([&](int thread) { now[thread] = next[thread]; });
      read(block, tile, following, next);
      add(block, shared, tile, k, now, v, sum);
      k = following;
    }
    each_span(block, tile.begin, [&](int thread, const auto& span) {
      span.store(stage.sum_out.data, sum[thread]);
      if (!weighted) add_mean(sum[thread], stage.num_clients, v[thread]);
      const bool renews = pass.rule_vectors.next.size > 0;
      const bool sound = !renews || renew<P, U>(pass, sweep.renewal, nullptr, span, v[thread]);
      finish<P>(sweep, span, v[thread], sound);
    });
  }
};

}  // namespace afflux::cuda
