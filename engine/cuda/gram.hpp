// gram: each block of threads processes a superblock for some tiles of kSide x kSide pairs, each warp one tile, and
// each thread one lane of it. All warps process the same block of the order at the same time, so that they share its
// elements in L1.
#pragma once
#include <type_traits>
#include <vector>

#include "afflux/order.hpp"
#include "api/kernels.hpp"
#include "cuda/block.hpp"
#include "cuda/element.hpp"
#include "cuda/staging.hpp"
#include "cuda/tree.hpp"
#include "formula/reduce.hpp"

namespace afflux::cuda {

constexpr int kSide = 3, kTilesOfBlock = 8;

// The tiles of two panels, numbered row by row. If both panels are the same, only those of the lower triangle:
// (0, 0), (1, 0), (1, 1), (2, 0) ...
struct GramTiles {
  explicit GramTiles(const GramPanels& panels) : symmetric(panels.left == panels.right) {
    const std::int64_t rows = (panels.left_count + kSide - 1) / kSide;
    columns = (panels.right_count + kSide - 1) / kSide;
    count = symmetric ? rows * (rows + 1) / 2 : rows * columns;
    groups = (count + kTilesOfBlock - 1) / kTilesOfBlock;
  }
  bool symmetric;
  std::int64_t columns, count;
  std::int64_t groups;  // blocks of threads for each superblock
};

// The kernel of gram. T: the type of all vectors, or Mixed.
template <class T>
struct GramBody {
  static constexpr int kThreads = kTilesOfBlock * kWarp;
  static constexpr int kPairs = kSide * kSide;
  // Rows whose loads are in progress at once, limited by the registers; mixed types need more of them.
  static constexpr int kTogether = std::is_same_v<T, Mixed> ? 2 : 4;
  static_assert(kLanes == kWarp, "a thread is a lane");
  struct Shared {};

  GramPanels panels;
  GramTiles tiles;
  std::int64_t size, superblocks;
  double* nodes;  // [pair][superblock], pairs as in GramPanels

  struct Tile {
    std::int64_t row, column;  // of its first pair
  };
  AFFLUX_DEVICE Tile tile(std::int64_t number) const {
    if (!tiles.symmetric) return {number / tiles.columns * kSide, number % tiles.columns * kSide};
    std::int64_t row = 0;
    while (number > row) number -= ++row;
    return {row * kSide, number * kSide};
  }

  // Adds to sums[a, b] a lane's part of the products of a tile in [begin, end). The last vector replaces missing ones.
  AFFLUX_DEVICE void lane_sums(Tile tile, std::int64_t begin, std::int64_t end, double (&sums)[kPairs]) const {
    View<const void> x[kSide], y[kSide];
    AFFLUX_UNROLL_ON_DEVICE
    for (int k = 0; k < kSide; ++k) {
      const std::int64_t row = tile.row + k, column = tile.column + k;
      x[k] = panels.left[row < panels.left_count ? row : panels.left_count - 1];
      y[k] = panels.right[column < panels.right_count ? column : panels.right_count - 1];
    }
    const auto rows = [&](std::int64_t first, auto count) {
      constexpr int kRows = decltype(count)::value;
      double left[kRows][kSide], right[kRows][kSide];
      AFFLUX_UNROLL_ON_DEVICE
      for (int r = 0; r < kRows; ++r) AFFLUX_UNROLL_ON_DEVICE
      for (int k = 0; k < kSide; ++k) {
        left[r][k] = element<T>(x[k], first + r * kLanes);
        right[r][k] = element<T>(y[k], first + r * kLanes);
      }
      AFFLUX_UNROLL_ON_DEVICE
      for (int r = 0; r < kRows; ++r) AFFLUX_UNROLL_ON_DEVICE
      for (int p = 0; p < kPairs; ++p) sums[p] = term(sums[p], left[r][p / kSide], right[r][p % kSide]);
    };
    std::int64_t i = begin;
    for (; i + (kTogether - 1) * kLanes < end; i += kTogether * kLanes)
      rows(i, std::integral_constant<int, kTogether>{});
    for (; i < end; i += kLanes) rows(i, std::integral_constant<int, 1>{});
  }

  // Returns acc + x * y. Mixed types round the product, as formula::dot_term does for float64; if both types are
  // narrower, the product is exact, and the result is the same.
  static AFFLUX_DEVICE double term(double acc, double x, double y) {
    using Stored = std::conditional_t<std::is_same_v<T, Mixed>, double, T>;
    return formula::dot_term<Stored>(acc, x, y);
  }

  template <class Block>
  AFFLUX_DEVICE void operator()(const Block& block, Shared&) const {
    const std::int64_t superblock = block.index / tiles.groups, group = block.index % tiles.groups;
    const std::int64_t begin = superblock * kSuperblock;
    const std::int64_t end = begin + kSuperblock < size ? begin + kSuperblock : size;
    typename Block::template Each<double> total[kPairs], sums[kPairs];
    block.each_in_warp([&](int thread) {
      AFFLUX_UNROLL_ON_DEVICE
      for (int p = 0; p < kPairs; ++p) total[p][thread] = 0.0;
    });
    for (std::int64_t first = begin; first < end; first += kBlock) {
      const std::int64_t last = first + kBlock < end ? first + kBlock : end;
      block.each_in_warp([&](int thread) {
        const std::int64_t number = group * kTilesOfBlock + thread / kWarp;
        double mine[kPairs] = {};
        if (number < tiles.count) lane_sums(tile(number), first + thread % kWarp, last, mine);
        AFFLUX_UNROLL_ON_DEVICE
        for (int p = 0; p < kPairs; ++p) sums[p][thread] = mine[p];
      });
      AFFLUX_UNROLL_ON_DEVICE
      for (int p = 0; p < kPairs; ++p) AFFLUX_UNROLL_ON_DEVICE
      for (int half = kLanes / 2; half > 0; half /= 2)
        block.butterfly(sums[p], half, [](double a, double b) { return a + b; });
      block.each_in_warp([&](int thread) {
        AFFLUX_UNROLL_ON_DEVICE
        for (int p = 0; p < kPairs; ++p) total[p][thread] = total[p][thread] + sums[p][thread];
      });
    }
    block.each_in_warp([&](int thread) {
      const std::int64_t number = group * kTilesOfBlock + thread / kWarp;
      if (thread % kWarp != 0 || number >= tiles.count) return;
      const Tile at = tile(number);
      AFFLUX_UNROLL_ON_DEVICE
      for (int p = 0; p < kPairs; ++p) {
        const std::int64_t row = at.row + p / kSide, column = at.column + p % kSide;
        if (row < panels.left_count && column < panels.right_count)
          nodes[(row * panels.right_count + column) * superblocks + superblock] = total[p][thread];
      }
    });
  }
};

template <class Executor, class T>
void gram_of(const Where& where, const GramPanels& panels, double* sums) {
  Executor executor(where);
  const std::int64_t size = panels.left[0].size, superblocks = superblocks_of(size);
  const std::int64_t pairs = panels.left_count * panels.right_count, bytes = pairs * 8;
  Staging staging;
  const std::int64_t left = staging.add(panels.left, panels.left_count);
  const std::int64_t right = panels.left == panels.right ? left : staging.add(panels.right, panels.right_count);
  const auto nodes = static_cast<double*>(executor.allocate(bytes * superblocks));
  const auto roots = static_cast<double*>(executor.results(bytes));
  staging.upload(executor);
  const GramPanels staged{staging.at<const View<const void>>(left), staging.at<const View<const void>>(right),
                          panels.left_count, panels.right_count};
  const GramTiles tiles(panels);
  executor.run(superblocks * tiles.groups, GramBody<T>{staged, tiles, size, superblocks, nodes});
  join_lists(executor, nodes, pairs, superblocks, roots);
  executor.fetch(sums, roots, bytes);
}

template <class Executor>
void gram(const Where& where, const GramPanels& panels, double* sums) {
  std::vector<View<const void>> all(panels.left, panels.left + panels.left_count);
  all.insert(all.end(), panels.right, panels.right + panels.right_count);
  with_common_type(all.data(), static_cast<std::int64_t>(all.size()),
                   [&](auto sample) { gram_of<Executor, decltype(sample)>(where, panels, sums); });
}

}  // namespace afflux::cuda
