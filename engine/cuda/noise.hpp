// Normal noise (formula/noise.hpp): a block of threads draws the normals of its elements into shared memory before it
// computes their direction.
#pragma once
#include "cuda/direction.hpp"
#include "formula/noise.hpp"

namespace afflux::cuda {

// The kernel of Body, which computes v of the four elements of a thread, for rounds with noise.
template <class Body>
struct NoisyBody : Body {
  static constexpr std::int64_t kGroups = Body::kTile / formula::kNoiseGroup;  // of a block
  static constexpr int kBlocks = kGroups * formula::kNoiseBlocks, kPairs = formula::kNoiseGroup / 2;
  static constexpr int kWords = formula::kNoiseSet * formula::kBlockWords;  // of a set
  static_assert(Body::kTile % formula::kNoiseGroup == 0 && kBlocks <= Body::kThreads);
  struct Shared {
    std::uint32_t words[kGroups][3 * kWords];
    double z[kGroups * formula::kNoiseGroup];
  };

  explicit NoisyBody(const Body& body) : Body(body) {}

  // Draws block `index` of ChaCha20 of the block's groups, the first of which is `group`.
  AFFLUX_DEVICE void draw(std::int64_t group, int index, Shared& shared) const {
    const Noise& noise = this->sweep.pass.combine.noise;
    const int in_group = index % formula::kNoiseBlocks;
    const std::uint32_t number = static_cast<std::uint32_t>(group * formula::kNoiseBlocks + index);
    std::uint32_t state[formula::kBlockWords], block[formula::kBlockWords];
    formula::chacha20_state(noise.key, noise.nonce, number, [](std::uint32_t word) { return word; }, state);
    formula::chacha20(state, block);
    std::uint32_t* const words = shared.words[index / formula::kNoiseBlocks] + in_group / formula::kNoiseSet * kWords +
                                 in_group % formula::kNoiseSet;
    AFFLUX_UNROLL_ON_DEVICE
    for (int k = 0; k < formula::kBlockWords; ++k) words[k * formula::kNoiseSet] = block[k];
  }

  // Sets both normals of pair `index` of the block's groups.
  AFFLUX_DEVICE void set_pair(int index, Shared& shared) const {
    const int group = index / kPairs, pair = index % kPairs, half = pair / (kPairs / 2), lane = pair % (kPairs / 2);
    const std::uint32_t* const words = shared.words[group];
    const std::uint64_t radius = words[2 * pair] | static_cast<std::uint64_t>(words[2 * pair + 1]) << 32;
    const std::uint64_t angle = words[2 * kWords + 2 * lane + half];
    double* const z = shared.z + group * formula::kNoiseGroup + pair;
    formula::box_muller(formula::OneLane{}, radius, angle, z[0], z[kPairs]);
  }

  // The elements of a block are those of its groups, so that it draws no group in part. The first group of a vector may
  // begin before it, and then also the four elements of a thread.
  template <class Block>
  AFFLUX_DEVICE void operator()(const Block& block, Shared& shared) const {
    const Pass& pass = this->sweep.pass;
    const std::int64_t first = pass.combine.noise.first, group = first / formula::kNoiseGroup + block.index * kGroups;
    block.each([&](int thread) {
      if (thread < kBlocks) draw(group, thread, shared);
    });
    block.each([&](int thread) {
      for (int pair = thread; pair < kGroups * kPairs; pair += Body::kThreads) set_pair(pair, shared);
    });
    const std::int64_t begin = group * formula::kNoiseGroup - first;
    block.each_in_warp([&](int thread) {
      const std::int64_t at = begin + thread * kFour, from = at < 0 ? 0 : at;
      const std::int64_t to = at + kFour < pass.params.size ? at + kFour : pass.params.size;
      if (from >= to) return;
      with_span(from, to, this->sweep.aligned && first % kFour == 0, [&](const auto& span) {
        Doubles z{};
        AFFLUX_UNROLL_ON_DEVICE
        for (int j = 0; j < kFour; ++j)
          if (j < span.count) z.at[j] = shared.z[from - begin + j];
        this->elements(span, &z);
      });
    });
  }
};

template <class Executor, class Body>
void run_noisy(Executor& executor, const Body& body) {
  const Pass& pass = body.sweep.pass;
  const std::int64_t before = pass.combine.noise.first % formula::kNoiseGroup;  // elements of the first group
  executor.run((before + pass.params.size + Body::kTile - 1) / Body::kTile, NoisyBody<Body>(body));
}

}  // namespace afflux::cuda
