// inner for few vectors of one type: a warp processes a block of the order, each thread one lane of it in all vectors.
// Every vector is read once; e, squares and products stay in registers. Addresses and weights are arguments of the
// kernel.
#pragma once
#include "afflux/order.hpp"
#include "api/kernels.hpp"
#include "cuda/block.hpp"
#include "cuda/tree.hpp"
#include "formula/combine.hpp"
#include "formula/half.hpp"

namespace afflux::cuda {

// T: the type of all vectors and of the memory. kAdds: there is an e.
template <class T, int kVectors, bool kAdds>
struct InnerLanesBody {
  static constexpr int kWarpsOfBlock = 2, kThreads = kWarpsOfBlock * kWarp;
  static constexpr int kSums = kAdds ? 2 * kVectors + 1 : kVectors;
  static_assert(kLanes == kWarp, "a thread is a lane");
  struct Shared {};

  const void* vectors[kVectors];
  double weights[kVectors];
  std::int32_t count;  // of the vectors
  const void* memory;  // null: none
  double shift, memory_weight;
  std::int64_t size, blocks;
  double* nodes;  // [sum][block], sums as in Kernels::inner

  // An element of each vector.
  struct Row {
    T x[kVectors], memory;
  };
  AFFLUX_DEVICE Row load(std::int64_t i) const {
    Row row{};
    AFFLUX_UNROLL_ON_DEVICE
    for (int k = 0; k < kVectors; ++k)
      if (k < count) row.x[k] = on_device<T>(vectors[k])[i];
    if (memory != nullptr) row.memory = on_device<T>(memory)[i];
    return row;
  }
  static AFFLUX_DEVICE double wide(T value) { return static_cast<double>(formula::widened(value)); }

  AFFLUX_DEVICE void add(const Row& row, double (&sums)[kSums]) const {
    const double held = wide(row.memory), moved = shift * held;
    double x[kVectors], e = 0.0;
    AFFLUX_UNROLL_ON_DEVICE
    for (int k = 0; k < kVectors; ++k) {
      x[k] = wide(row.x[k]);
      if (shift != 0.0) x[k] = x[k] + moved;
      sums[k] = formula::weighted(sums[k], x[k], x[k]);
    }
    if constexpr (kAdds) {
      if (memory_weight != 0.0) e = e + memory_weight * held;
      AFFLUX_UNROLL_ON_DEVICE
      for (int k = 0; k < kVectors; ++k)
        if (weights[k] != 0.0) e = formula::weighted(e, weights[k], x[k]);
      sums[kVectors] = formula::weighted(sums[kVectors], e, e);
      AFFLUX_UNROLL_ON_DEVICE
      for (int k = 0; k < kVectors; ++k) sums[kVectors + 1 + k] = formula::weighted(sums[kVectors + 1 + k], x[k], e);
    }
  }

  template <class Block>
  AFFLUX_DEVICE void operator()(const Block& block, Shared&) const {
    typename Block::template Each<double> sums[kSums];
    block.each_in_warp([&](int thread) {
      const std::int64_t begin = (block.index * kWarpsOfBlock + thread / kWarp) * kBlock;
      const std::int64_t end = begin + kBlock < size ? begin + kBlock : size;
      double lane[kSums] = {};
      std::int64_t i = begin + thread % kWarp;
      if (i < end) {  // the next row is read while this one is processed
        Row row = load(i);
        for (; i + kLanes < end; i += kLanes) {
          const Row next = load(i + kLanes);
          add(row, lane);
          row = next;
        }
        add(row, lane);
      }
      AFFLUX_UNROLL_ON_DEVICE
      for (int s = 0; s < kSums; ++s) sums[s][thread] = lane[s];
    });
    AFFLUX_UNROLL_ON_DEVICE
    for (int s = 0; s < kSums; ++s) AFFLUX_UNROLL_ON_DEVICE
    for (int half = kLanes / 2; half > 0; half /= 2)
      block.butterfly(sums[s], half, [](double a, double b) { return a + b; });
    block.each_in_warp([&](int thread) {
      const std::int64_t at = block.index * kWarpsOfBlock + thread / kWarp;
      if (thread % kWarp != 0 || at >= blocks) return;
      AFFLUX_UNROLL_ON_DEVICE
      for (int k = 0; k < kVectors; ++k) {
        if (k >= count) continue;
        nodes[k * blocks + at] = sums[k][thread];
        if constexpr (kAdds) nodes[(count + 1 + k) * blocks + at] = sums[kVectors + 1 + k][thread];
      }
      if constexpr (kAdds) nodes[count * blocks + at] = sums[kVectors][thread];
    });
  }
};

// Adds up the blocks of each superblock, in order: [list][blocks] becomes [list][superblocks].
struct SuperblocksBody {
  static constexpr int kThreads = 256;
  struct Shared {};

  const double* nodes;
  std::int64_t blocks, superblocks, lists;
  double* sums;

  template <class Block>
  AFFLUX_DEVICE void operator()(const Block& block, Shared&) const {
    block.each_in_warp([&](int thread) {
      const std::int64_t at = block.index * kThreads + thread;
      if (at >= lists * superblocks) return;
      constexpr std::int64_t kMost = kSuperblock / kBlock;
      const std::int64_t first = at % superblocks * kMost, last = first + kMost < blocks ? first + kMost : blocks;
      double sum = 0.0;
      for (std::int64_t b = first; b < last; ++b) sum = sum + nodes[at / superblocks * blocks + b];
      sums[at] = sum;
    });
  }
};

template <class Executor, class T, int kVectors, bool kAdds>
void inner_lanes(Executor& executor, const Inner& inner, double* sums) {
  using Body = InnerLanesBody<T, kVectors, kAdds>;
  Body body{};
  const std::int64_t vectors = inner.vectors.size, size = inner.vectors.data[0].size;
  for (std::int64_t k = 0; k < vectors; ++k) {
    body.vectors[k] = inner.vectors.data[k].data;
    if (kAdds) body.weights[k] = inner.weights.data[k];
  }
  body.count = static_cast<std::int32_t>(vectors);
  body.memory = inner.memory.data, body.shift = inner.shift, body.memory_weight = inner.memory_weight;
  body.size = size, body.blocks = (size + kBlock - 1) / kBlock;
  const std::int64_t count = kAdds ? 2 * vectors + 1 : vectors, superblocks = superblocks_of(size);
  const auto memory = static_cast<double*>(executor.allocate(count * (body.blocks + superblocks) * 8));
  const auto roots = static_cast<double*>(executor.results(count * 8));
  double* const joined = superblocks > 1 ? memory + count * body.blocks : roots;
  body.nodes = memory;
  executor.run((body.blocks + Body::kWarpsOfBlock - 1) / Body::kWarpsOfBlock, body);
  constexpr std::int64_t kThreads = SuperblocksBody::kThreads;
  executor.run((count * superblocks + kThreads - 1) / kThreads,
               SuperblocksBody{memory, body.blocks, superblocks, count, joined});
  if (superblocks > 1) join_lists(executor, joined, count, superblocks, roots);
  executor.fetch(sums, roots, count * 8);
}

}  // namespace afflux::cuda
