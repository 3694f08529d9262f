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

// The kernel of rounds with encoded rows. P, U: the types of params and of updates; Format: see codec_tile.hpp.
template <class P, class U, class Format>
struct EncodedBody {
  static constexpr int kThreads = Format::kThreads;
  static constexpr bool kReadsAhead = Format::kReadsAhead;
  static constexpr int kBlocksTogether = sizeof(P) + sizeof(U) <= 2 * sizeof(float) ? 3 : 2;

  struct Shared {
    EncodedArrival arrivals[kPrepared];  // with the tile's places in the vectors and rows
    typename Format::Shared format;
  };

  Sweep sweep;

  // The values that a thread reads from an arrival.
  template <class Coder>
  struct Arrival {
    Vector4<U> update;
    typename Coder::Read old;
  };

  template <class Coder>
  AFFLUX_DEVICE Arrival<Coder> read(const Tile& tile, const EncodedArrival& from, int thread) const {
    Arrival<Coder> arrival{};
    with_part<Format>(tile, thread, [&](const auto& span) { arrival.update = span.template load<U>(from.update); });
    if (from.has(EncodedArrival::kRow)) arrival.old = Coder::read(tile, from.heads, from.row, thread);
    return arrival;
  }

  // Adds arrival k: v += w (now - factor h);  S += q - h if the row is replaced. `now` is the update, or q. kCommon:
  // see is_common.
  template <class Coder, bool kCommon, class Block, class Arrivals, class Each>
  AFFLUX_DEVICE void add(const Block& block, Shared& shared, const Tile& tile, int k, Arrivals& arrivals, Each& v,
                         Each& sum) const {
    const EncodedArrival& from = shared.arrivals[k];
    const bool quantize = !kCommon && sweep.pass.calibrate.quantize_direction;
    const bool replaces = kCommon || from.has(EncodedArrival::kNewRow);
    const bool has_weight = kCommon || from.has(EncodedArrival::kWeight);
    const double factor = kCommon ? 1.0 : sweep.pass.calibrate.factor;
    unsigned char* const new_row = from.new_row;
    if (kCommon && new_row == nullptr) __builtin_unreachable();
    typename Block::template Each<typename Coder::Read> row;
    typename Block::template Each<Vector4<float>> x, old, renewed;
    block.each_alone([&](int thread) {
      x[thread] = as_floats(arrivals[thread].update);
      row[thread] = arrivals[thread].old;
      old[thread] = renewed[thread] = {};
    });
    if (kCommon || from.has(EncodedArrival::kRow)) Coder::decode(block, shared.format, tile, from.heads, k, row, old);
    if (quantize || replaces) Coder::encode(block, shared.format, tile, from.heads, k, x, new_row, renewed);
    block.each_alone([&](int thread) {
      AFFLUX_UNROLL_ON_DEVICE
      for (int j = 0; j < kFour; ++j) {
        const double h = old[thread].at[j], q = renewed[thread].at[j];
        double now;  // chosen before it is widened: a float32 is one register
        if constexpr (sizeof(U) == sizeof(double))
          now = quantize ? q : arrivals[thread].update.at[j];
        else
          now = static_cast<double>(quantize ? renewed[thread].at[j] : x[thread].at[j]);
        formula::accumulate_difference(now, h, q, has_weight, from.weight, factor, replaces, v[thread].at[j],
                                       sum[thread].at[j]);
      }
    });
  }

  // Adds `count` arrivals. With kReadsAhead, each is read while the one before it is processed.
  template <class Coder, bool kCommon, class Block, class Each>
  AFFLUX_DEVICE void add_all(const Block& block, Shared& shared, const Tile& tile, const EncodedArrival* arrivals,
                             int count, Each& v, Each& sum) const {
    block.each([&](int thread) {
      if (thread < count) shared.arrivals[thread] = arrivals[thread].at(tile.begin * sizeof(U), Coder::place(tile));
    });
    Format::prepare(
        block, shared.format, tile, [&](int k) -> const RowHeads& { return shared.arrivals[k].heads; }, count);
    typename Block::template Each<Arrival<Coder>> now, next;
    const auto read_to = [&](auto& to, int k) {
      block.each_alone([&](int thread) { to[thread] = read<Coder>(tile, shared.arrivals[k], thread); });
    };
    if (kReadsAhead) read_to(next, 0);
    for (int k = 0; k < count; ++k) {
      if (kReadsAhead) {
        now = next;
        if (k + 1 < count) read_to(next, k + 1);
      } else {
        read_to(now, k);
      }
      add<Coder, kCommon>(block, shared, tile, k, now, v, sum);
    }
    block.each([&](int) {});  // afterwards shared memory may hold other arrivals
  }

  // Calls body(thread, span) for the threads that have elements.
  template <class Block, class Body>
  AFFLUX_DEVICE void each_span(const Block& block, const Tile& tile, const Body& body) const {
    block.each_alone([&](int thread) {
      const std::int64_t first = tile.begin + Format::offset(thread);
      if (first < sweep.pass.params.size)
        with_span(first, sweep.pass.params.size, sweep.aligned, [&](const auto& span) { body(thread, span); });
    });
  }

  template <class Block>
  AFFLUX_DEVICE void operator()(const Block& block, Shared& shared) const {
    const Pass& pass = sweep.pass;
    const Calibrate& stage = pass.calibrate;
    const Tile tile = tile_at<Format>(stage.codec.coding, block.index, pass.params.size, sweep.aligned);
    Tile whole = tile;
    whole.full = whole.whole = true;
    const bool weighted = formula::weighs_differences(stage.kind);
    typename Block::template Each<Doubles> v, sum;
    block.each_alone([&](int thread) { v[thread] = sum[thread] = {}; });
    each_span(block, tile, [&](int thread, const auto& span) {
      v[thread] = start<P>(pass, span);
      sum[thread] = span.template load<double>(stage.sum.data);
      if (weighted) add_mean(sum[thread], stage, v[thread]);
    });
    Format::with_coder(stage.codec.bits, [&](auto coder) {
      for (std::int64_t first = 0; first < sweep.arrivals.size; first += kPrepared) {
        const std::int64_t left = sweep.arrivals.size - first;
        const EncodedArrival* const arrivals = sweep.arrivals.data + first;
        const int count = left < kPrepared ? static_cast<int>(left) : kPrepared;
        if (kReadsAhead && sweep.common && tile.whole)
          add_all<decltype(coder), true>(block, shared, whole, arrivals, count, v, sum);
        else
          add_all<decltype(coder), false>(block, shared, tile, arrivals, count, v, sum);
      }
    });
    each_span(block, tile, [&](int thread, const auto& span) {
      span.store(stage.sum_out.data, sum[thread]);
      if (!weighted) add_mean(sum[thread], stage, v[thread]);
      finish<P>(sweep, span, v[thread], true);
    });
  }
};

// The kernel that renews the rule vectors after a round with encoded rows: its registers would be too many for that
// round's kernel.
template <class P, class U>
struct RenewBody {
  static constexpr int kThreads = 256;
  static constexpr std::int64_t kTile = kThreads * kFour;
  struct Shared {};

  Sweep sweep;

  template <class Block>
  AFFLUX_DEVICE void operator()(const Block& block, Shared&) const {
    const Pass& pass = sweep.pass;
    each_four<RenewBody>(block, pass.params.size, sweep.aligned, [&](const auto& span) {
      Doubles v{};
      if (!renew<P, U>(pass, sweep.renewal, nullptr, span, v)) *sweep.sound = 0;
    });
  }
};

}  // namespace afflux::cuda
