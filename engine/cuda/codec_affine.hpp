// The affine codec: each warp encodes and decodes a run of kCodecBlock elements.
#pragma once
#include "cuda/codec_tile.hpp"
#include "formula/random.hpp"
#include "formula/reduce.hpp"

namespace afflux::cuda {

struct Affine {
  static constexpr int kThreads = 256;
  struct Shared {};

  struct Read {
    std::uint32_t word;
    float low, step;
  };

  static AFFLUX_DEVICE Read read(const Tile& tile, const RowHead& head, const unsigned char* row, int thread) {
    if (!tile.has_run(thread)) return {};
    const formula::Place at = formula::place(tile.codec, tile.run(thread));
    const float* const facts = reinterpret_cast<const float*>(row + at.facts);
    const bool own = formula::info_of(tile.codec).own_grids;
    return {load_word(row + at.codes, tile.codec.bits, thread), own ? facts[0] : head.low, own ? facts[1] : head.step};
  }
  template <class Block, class Reads, class Out>
  static AFFLUX_DEVICE void decode(const Block& block, Shared&, const Tile& tile, const RowHead&, Reads& read,
                                   Out& out) {
    block.each_in_warp([&](int thread) {
      const Read mine = read[thread];
      AFFLUX_UNROLL_ON_DEVICE
      for (int j = 0; j < kFour; ++j) {
        const std::uint32_t code = code_in(mine.word, tile.codec.bits, j);
        out[thread].at[j] = formula::affine_value(formula::OneLane{}, code, mine.low, mine.step);
      }
    });
  }

  // Returns the codes of four elements of a run, from `first` on, one byte for each.
  static AFFLUX_DEVICE std::uint32_t codes(const Vector4<float>& x, const formula::Grid& grid, int bits, bool own,
                                           std::uint64_t random, int first, Vector4<float>& decoded) {
    const float top = formula::grid_top(bits);
    const std::uint32_t counters = static_cast<std::uint32_t>(random), high = static_cast<std::uint32_t>(random >> 32);
    std::uint32_t word = 0;
    AFFLUX_UNROLL_ON_DEVICE
    for (int j = 0; j < kFour; ++j) {
      const std::uint32_t dice =
          formula::mixed(counters + static_cast<std::uint32_t>(first + j) * formula::kWeyl, high);
      const std::uint32_t code =
          formula::affine_code(formula::OneLane{}, x.at[j], grid.low, grid.per_step, top, !own, dice, bits);
      decoded.at[j] = formula::affine_value(formula::OneLane{}, code, grid.low, grid.step);
      word |= code << (8 * j);
    }
    return word;
  }

  template <class Block, class Floats>
  static AFFLUX_DEVICE void encode(const Block& block, Shared&, const Tile& tile, const RowHead& head, Floats& x,
                                   unsigned char* row, Floats& decoded) {
    const int bits = tile.codec.bits;
    const bool own = formula::info_of(tile.codec).own_grids;
    typename Block::template Each<float> low, high;
    typename Block::template Each<std::uint32_t> words;
    block.each_in_warp([&](int thread) {
      low[thread] = __builtin_inff();
      high[thread] = -__builtin_inff();
      AFFLUX_UNROLL_ON_DEVICE
      for (int j = 0; j < kFour; ++j) {
        if (tile.of(thread) + j >= tile.size && tile.has_run(thread)) continue;
        low[thread] = formula::lesser(low[thread], x[thread].at[j]);
        high[thread] = formula::greater(high[thread], x[thread].at[j]);
      }
    });
    for (int offset = own ? kWarp / 2 : 0; offset > 0; offset /= 2) {
      block.butterfly(low, offset, [](float a, float b) { return formula::lesser(a, b); });
      block.butterfly(high, offset, [](float a, float b) { return formula::greater(a, b); });
    }
    block.each_in_warp([&](int thread) {
      const formula::Grid grid = own ? formula::grid_over(low[thread], high[thread], bits)
                                     : formula::Grid{head.low, head.step, formula::per_step(head.step, bits)};
      const std::uint64_t random = formula::block_bits(head.key, tile.run(thread) / kCodecBlock);
      Vector4<float> elements = x[thread];
      AFFLUX_UNROLL_ON_DEVICE
      for (int j = 0; j < kFour; ++j)  // the least element of a short run follows its end
        if (own && tile.of(thread) + j >= tile.size) elements.at[j] = low[thread];
      words[thread] = codes(elements, grid, bits, own, random, thread % kWarp * kFour, decoded[thread]);
      if (row == nullptr || !own || thread % kWarp != 0 || !tile.has_run(thread)) return;
      float* const facts = reinterpret_cast<float*>(row + formula::place(tile.codec, tile.run(thread)).facts);
      facts[0] = grid.low;
      facts[1] = grid.step;
    });
    if (row == nullptr) return;
    pack(block, bits, words);
    block.each_in_warp([&](int thread) {
      if (tile.has_run(thread))
        store_word(row + formula::place(tile.codec, tile.run(thread)).codes, bits, thread, words[thread]);
    });
  }
};

}  // namespace afflux::cuda
