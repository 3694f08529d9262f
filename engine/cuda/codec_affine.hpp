// The affine codec: each warp encodes and decodes a run of kCodecBlock elements.
#pragma once
#include "cuda/codec_tile.hpp"
#include "formula/random.hpp"
#include "formula/reduce.hpp"

namespace afflux::cuda {

struct Affine : Consecutive {
  static constexpr int kRuns = kThreads / kWarp;

  struct Shared {
    std::uint64_t random[kPrepared][kRuns];
  };

  template <class Run>
  static AFFLUX_DEVICE void with_coder(int bits, const Run& run);

  template <class Block, class Heads>
  static AFFLUX_DEVICE void prepare(const Block& block, Shared& shared, const Tile& tile, const Heads& heads,
                                    int count) {
    static_assert(kPrepared * kRuns <= kThreads, "each thread computes the random bits of one run");
    block.each([&](int thread) {
      const int k = thread / kRuns, run = thread % kRuns;
      if (k < count) shared.random[k][run] = formula::block_bits(heads(k).renewed.key, tile.begin / kCodecBlock + run);
    });
  }
};

template <int kBits>
struct AffineCoder : Affine {
  // The grid of a run in a row.
  struct alignas(8) Grid {
    float low, step;
  };
  struct Read {
    std::uint32_t word;
    Grid grid;
  };

  static AFFLUX_DEVICE bool own(const Tile& tile) { return tile.coding == Coding::affine; }
  // The place of a tile is that of its group: first the grids of all runs, if they have their own, then their codes.
  static AFFLUX_DEVICE std::int64_t place(const Tile& tile) {
    const std::int64_t group = tile.begin / kBlock * kBlock;
    return own(tile) ? formula::place({Coding::affine, kBits}, group).facts
                     : formula::place({Coding::affine_vector, kBits}, group).facts;
  }
  static AFFLUX_DEVICE std::uint32_t grid_at(const Tile& tile, int thread) {
    const std::uint32_t within = static_cast<std::uint32_t>(tile.begin) % kBlock;
    return (within / kCodecBlock + static_cast<std::uint32_t>(thread / kWarp)) * sizeof(Grid);
  }
  static AFFLUX_DEVICE std::uint32_t codes_at(const Tile& tile) {
    const std::uint32_t within = static_cast<std::uint32_t>(tile.begin) % kBlock;
    return (own(tile) ? kBlock / kCodecBlock * sizeof(Grid) : 0) + within / 8 * kBits;
  }

  static AFFLUX_DEVICE Read read(const Tile& tile, const RowHeads& heads, const unsigned char* row, int thread) {
    if (!has_run(tile, thread)) return {};
    return {load_word<kBits>(row + codes_at(tile), thread),
            own(tile) ? *on_device<Grid>(row + grid_at(tile, thread)) : Grid{heads.old.low, heads.old.step}};
  }
  template <class Block, class Reads, class Out>
  static AFFLUX_DEVICE void decode(const Block& block, Shared&, const Tile&, const RowHeads&, int, Reads& read,
                                   Out& out) {
    block.each_alone([&](int thread) {
      const Read mine = read[thread];
      AFFLUX_UNROLL_ON_DEVICE
      for (int j = 0; j < kFour; ++j)
        out[thread].at[j] =
            formula::affine_value(formula::OneLane{}, code_in<kBits>(mine.word, j), mine.grid.low, mine.grid.step);
    });
  }

  // Sets low and high to the extremes of each thread's run.
  template <class Block, class Floats, class Each>
  static AFFLUX_DEVICE void find_extremes(const Block& block, const Tile& tile, Floats& x, Each& low, Each& high) {
    block.each_alone([&](int thread) {
      float least = __builtin_inff(), most = -__builtin_inff();
      AFFLUX_UNROLL_ON_DEVICE
      for (int j = 0; j < kFour; ++j) {
        if (follows(tile, thread, j) && has_run(tile, thread)) continue;
        least = formula::OneLane::lesser(least, x[thread].at[j]);
        most = formula::OneLane::greater(most, x[thread].at[j]);
      }
      low[thread] = least;
      high[thread] = most;
    });
    block.least(low);
    block.most(high);
  }

  // Returns the codes of a thread's four elements, one byte for each. After the end of a run with its own grid they are
  // those of its least element.
  static AFFLUX_DEVICE std::uint32_t codes(const Tile& tile, int thread, const Vector4<float>& x, float least,
                                           const formula::Grid& grid, std::uint64_t random, Vector4<float>& decoded) {
    const float top = formula::grid_top(kBits);
    const std::uint32_t low = static_cast<std::uint32_t>(random), high = static_cast<std::uint32_t>(random >> 32);
    const std::uint32_t first = static_cast<std::uint32_t>(thread % kWarp * kFour);
    const bool clamp = !own(tile) || !tile.full;
    const auto code_of = [&](float value, int j) {
      const std::uint32_t dice =
          formula::mixed(low + first * formula::kWeyl + static_cast<std::uint32_t>(j) * formula::kWeyl, high);
      return formula::affine_code(formula::OneLane{}, value, grid.low, grid.per_step, top, clamp, dice, kBits);
    };
    std::uint32_t word = 0;
    AFFLUX_UNROLL_ON_DEVICE
    for (int j = 0; j < kFour; ++j) {
      const std::uint32_t code = code_of(x.at[j], j);
      decoded.at[j] = formula::affine_value(formula::OneLane{}, code, grid.low, grid.step);
      word |= code << (8 * j);
    }
    if (!own(tile) || tile.full) return word;
#if defined(__CUDACC__)
#pragma unroll 1
#endif
    for (int j = 0; j < kFour; ++j)
      if (follows(tile, thread, j)) word = (word & ~(0xFFu << (8 * j))) | code_of(least, j) << (8 * j);
    return word;
  }

  template <class Block, class Floats>
  static AFFLUX_DEVICE void encode(const Block& block, Shared& shared, const Tile& tile, const RowHeads& heads, int k,
                                   Floats& x, unsigned char* row, Floats& decoded) {
    typename Block::template Each<float> low, high;
    typename Block::template Each<std::uint32_t> words;
    if (own(tile)) find_extremes(block, tile, x, low, high);
    block.each_alone([&](int thread) {
      const RowHead& head = heads.renewed;
      const formula::Grid grid = own(tile) ? formula::grid_over(low[thread], high[thread], kBits)
                                           : formula::Grid{head.low, head.step, formula::per_step(head.step, kBits)};
      words[thread] =
          codes(tile, thread, x[thread], low[thread], grid, shared.random[k][thread / kWarp], decoded[thread]);
      if (row != nullptr && own(tile) && thread % kWarp == 0 && has_run(tile, thread))
        *on_device<Grid>(row + grid_at(tile, thread)) = {grid.low, grid.step};
    });
    if (row == nullptr) return;
    pack<kBits>(block, words);
    block.each_alone([&](int thread) {
      if (has_run(tile, thread)) store_word<kBits>(row + codes_at(tile), thread, words[thread]);
    });
  }
};

template <class Run>
AFFLUX_DEVICE void Affine::with_coder(int bits, const Run& run) {
  if (bits == 8) return run(AffineCoder<8>{});
  if (bits == 4) return run(AffineCoder<4>{});
  if (bits == 2) return run(AffineCoder<2>{});
  run(AffineCoder<1>{});
}

}  // namespace afflux::cuda
