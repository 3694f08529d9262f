// Normal noise (formula/noise.hpp), group by group.
#pragma once
#include "cpu/combine.hpp"
#include "cpu/simd_float.hpp"
#include "formula/noise.hpp"

namespace afflux::AFFLUX_ISA {
namespace {

// Sets the words of a set of 16 blocks, the first of which has this number.
AFFLUX_FN void draw_set(const Noise& noise, std::uint32_t number, std::uint32_t* words) {
  for (int b = 0; b < formula::kNoiseSet; b += simd::kFloats) {
    simd::Words state[formula::kBlockWords], block[formula::kBlockWords];
    const auto fill = [](std::uint32_t word) AFFLUX_INLINE { return simd::all(word); };
    const simd::Words numbers = simd::count_up() + (number + static_cast<std::uint32_t>(b));
    formula::chacha20_state(noise.key, noise.nonce, numbers, fill, state);
    formula::chacha20(state, block);
    AFFLUX_UNROLL
    for (int k = 0; k < formula::kBlockWords; ++k)
      __builtin_memcpy(words + k * formula::kNoiseSet + b, &block[k], sizeof block[k]);
  }
}

// Prefetches the tile of the updates after this one, vector by vector, in equal steps: while normals are computed,
// memory would have nothing to do.
class NextTile {
 public:
  AFFLUX_INLINE NextTile(const List<View<const void>>& updates, std::int64_t item, Tile tile, std::int64_t steps)
      : updates_(updates),
        count_(tile.ahead > 0 ? updates.size : 0),
        begin_((tile.begin + tile.size) * item),
        bytes_(tile.size * item),
        step_((updates.size * bytes_ / 64 + steps - 1) / steps) {}
  AFFLUX_INLINE void prefetch() {
    for (std::int64_t line = 0; line < step_ && vector_ < count_; ++line) {
      __builtin_prefetch(static_cast<const char*>(updates_.data[vector_].data) + begin_ + at_, 0, 2);
      at_ += 64;
      if (at_ >= bytes_) at_ = 0, ++vector_;
    }
  }

 private:
  const List<View<const void>>& updates_;
  const std::int64_t count_, begin_, bytes_, step_;
  std::int64_t vector_ = 0, at_ = 0;
};

// Sets the normals of a group.
AFFLUX_FN void draw(const Noise& noise, std::int64_t group, NextTile& next, double* z) {
  constexpr int kWords = formula::kNoiseSet * formula::kBlockWords, kSet = kWords / 2;  // lanes of a set
  alignas(64) std::uint32_t words[3 * kWords];
  const std::uint32_t number = static_cast<std::uint32_t>(group * formula::kNoiseBlocks);
  for (int set = 0; set < 3; ++set)
    draw_set(noise, number + static_cast<std::uint32_t>(set * formula::kNoiseSet), words + set * kWords);
  const simd::Vector lanes;
  for (int j = 0; j < kSet; j += simd::kWidth) {
    next.prefetch();
    simd::Longs radius[2], angles;
    for (int half = 0; half < 2; ++half) __builtin_memcpy(&radius[half], words + half * kWords + 2 * j, sizeof angles);
    __builtin_memcpy(&angles, words + 2 * kWords + 2 * j, sizeof angles);
    AFFLUX_UNROLL
    for (int half = 0; half < 2; ++half) {
      simd::Doubles first, second;
      formula::box_muller(lanes, radius[half], half == 0 ? angles & 0xFFFFFFFFu : angles >> 32, first, second);
      lanes.store(z + half * kSet + j, first);
      lanes.store(z + (2 + half) * kSet + j, second);
    }
  }
}

// A tile of a sum, and the coefficient of z in it.
struct NoisySum {
  double coefficient;
  double* sum;
};

// Adds noise to tiles of sums. The function is not inlined: its normals would be in the stack frame of every round.
__attribute__((noinline)) void add_noise(const Combine& stage, Type updates, Tile tile, const NoisySum* sums,
                                         int count) {
  constexpr std::int64_t kGroup = formula::kNoiseGroup, kSteps = kGroup / simd::kWide;
  const std::int64_t first = stage.noise.first + tile.begin;
  NextTile next(stage.updates, bytes(updates), tile, (tile.size + kGroup - 1) / kGroup * kSteps);
  alignas(64) double z[kGroup];
  for (std::int64_t at = 0; at < tile.size;) {
    const std::int64_t begin = (first + at) % kGroup, left = tile.size - at;
    const std::int64_t size = left < kGroup - begin ? left : kGroup - begin;
    draw(stage.noise, (first + at) / kGroup, next, z);
    for (int k = 0; k < count; ++k) {
      double* const sum = sums[k].sum + at;
      const double coefficient = sums[k].coefficient;
      simd::each(size, [&](auto lanes, std::int64_t i) AFFLUX_INLINE {
        lanes.store(sum + i,
                    formula::weighted(lanes.load(sum + i), lanes.fill(coefficient), lanes.load(z + begin + i)));
      });
    }
    at += size;
  }
}

}  // namespace
}  // namespace afflux::AFFLUX_ISA
