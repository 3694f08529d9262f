// inner: of at most 16 vectors of one type by inner_lanes.hpp. For others, each block of threads processes a superblock
// for some of the vectors: for each block of the order, all threads first compute e from every vector, in shared
// memory; then each warp processes some of the vectors, each thread one lane of them.
#pragma once
#include <type_traits>
#include <vector>

#include "afflux/order.hpp"
#include "api/kernels.hpp"
#include "cuda/block.hpp"
#include "cuda/element.hpp"
#include "cuda/inner_lanes.hpp"
#include "cuda/staging.hpp"
#include "cuda/tree.hpp"
#include "formula/combine.hpp"

namespace afflux::cuda {

constexpr int kWarps = 8;

// The kernel of inner. T: the type of all vectors and of the memory, or Mixed.
template <class T>
struct InnerBody {
  static constexpr int kThreads = kWarps * kWarp, kVectorsOfWarp = 2, kVectorsOfBlock = kWarps * kVectorsOfWarp;
  // Steps of a loop that are in progress at once, limited by the registers; mixed types need more of them.
  static constexpr int kStepsTogether = std::is_same_v<T, Mixed> ? 1 : 4;
  static_assert(kLanes == kWarp, "a thread is a lane");
  struct Shared {
    double e[kBlock];
  };

  Inner inner;
  bool adds;  // true if there is an e
  std::int64_t size, superblocks, groups;
  double* nodes;  // [sum][superblock], sums as in Kernels::inner

  AFFLUX_DEVICE double memory_times(double weight, std::int64_t i) const {
    return weight * element<T>(inner.memory, i);
  }
  AFFLUX_DEVICE double x(std::int64_t k, std::int64_t i, double shift) const {
    const double value = element<T>(inner.vectors.data[k], i);
    return inner.shift == 0.0 ? value : value + shift;
  }
  AFFLUX_DEVICE double shift(std::int64_t i) const { return inner.shift == 0.0 ? 0.0 : memory_times(inner.shift, i); }

  AFFLUX_DEVICE double e(std::int64_t i) const {
    const double moved = shift(i);
    double sum = 0.0;
    if (inner.memory_weight != 0.0) sum = sum + memory_times(inner.memory_weight, i);
#if defined(__CUDACC__)
#pragma unroll kStepsTogether
#endif
    for (std::int64_t k = 0; k < inner.vectors.size; ++k)
      if (inner.weights.data[k] != 0.0) sum = formula::weighted(sum, inner.weights.data[k], x(k, i, moved));
    return sum;
  }

  // The sums of one lane over [begin, end), a block of the order.
  struct LaneSums {
    double square[kVectorsOfWarp], product[kVectorsOfWarp], square_of_e;
  };
  AFFLUX_DEVICE LaneSums lane_sums(const Shared& shared, std::int64_t first_vector, int lane, std::int64_t begin,
                                   std::int64_t end) const {
    LaneSums sums{};
#if defined(__CUDACC__)
#pragma unroll kStepsTogether
#endif
    for (std::int64_t i = begin + lane; i < end; i += kLanes) {
      const double moved = shift(i), along = adds ? shared.e[i - begin] : 0.0;
      sums.square_of_e = formula::weighted(sums.square_of_e, along, along);
      AFFLUX_UNROLL_ON_DEVICE
      for (int v = 0; v < kVectorsOfWarp; ++v) {
        if (first_vector + v >= inner.vectors.size) continue;
        const double value = x(first_vector + v, i, moved);
        sums.square[v] = formula::weighted(sums.square[v], value, value);
        sums.product[v] = formula::weighted(sums.product[v], value, along);
      }
    }
    return sums;
  }

  template <class Block>
  AFFLUX_DEVICE void operator()(const Block& block, Shared& shared) const {
    constexpr int kSums = 2 * kVectorsOfWarp + 1;
    const std::int64_t superblock = block.index / groups, group = block.index % groups;
    const std::int64_t begin = superblock * kSuperblock;
    const std::int64_t end = begin + kSuperblock < size ? begin + kSuperblock : size;
    const auto first_vector = [&](int thread) {
      return group * kVectorsOfBlock + static_cast<std::int64_t>(thread) / kWarp * kVectorsOfWarp;
    };
    typename Block::template Each<double> total[kSums], sums[kSums];
    block.each_in_warp([&](int thread) {
      AFFLUX_UNROLL_ON_DEVICE
      for (int s = 0; s < kSums; ++s) total[s][thread] = 0.0;
    });
    for (std::int64_t first = begin; first < end; first += kBlock) {
      const std::int64_t last = first + kBlock < end ? first + kBlock : end;
      if (adds)
        block.each([&](int thread) {
          for (std::int64_t i = first + thread; i < last; i += kThreads) shared.e[i - first] = e(i);
        });
      block.each([&](int thread) {  // after its barrier, shared.e may be overwritten
        const LaneSums mine = lane_sums(shared, first_vector(thread), thread % kWarp, first, last);
        AFFLUX_UNROLL_ON_DEVICE
        for (int v = 0; v < kVectorsOfWarp; ++v) {
          sums[v][thread] = mine.square[v];
          sums[kVectorsOfWarp + v][thread] = mine.product[v];
        }
        sums[kSums - 1][thread] = mine.square_of_e;
      });
      AFFLUX_UNROLL_ON_DEVICE
      for (int s = 0; s < kSums; ++s) AFFLUX_UNROLL_ON_DEVICE
      for (int half = kLanes / 2; half > 0; half /= 2)
        block.butterfly(sums[s], half, [](double a, double b) { return a + b; });
      block.each_in_warp([&](int thread) {
        AFFLUX_UNROLL_ON_DEVICE
        for (int s = 0; s < kSums; ++s) total[s][thread] = total[s][thread] + sums[s][thread];
      });
    }
    block.each_in_warp([&](int thread) {
      if (thread % kWarp != 0) return;
      const std::int64_t vectors = inner.vectors.size;
      AFFLUX_UNROLL_ON_DEVICE
      for (int v = 0; v < kVectorsOfWarp; ++v) {
        const std::int64_t k = first_vector(thread) + v;
        if (k >= vectors) continue;
        nodes[k * superblocks + superblock] = total[v][thread];
        if (adds) nodes[(vectors + 1 + k) * superblocks + superblock] = total[kVectorsOfWarp + v][thread];
      }
      if (adds && group == 0 && thread == 0) nodes[vectors * superblocks + superblock] = total[kSums - 1][thread];
    });
  }
};

// Computes the sums and returns true if a kernel of inner_lanes.hpp serves these vectors.
template <class Executor, class T>
bool inner_of_few(Executor& executor, const Inner& inner, double* sums) {
  const auto run = [&](auto most) {
    constexpr int kMost = decltype(most)::value;
    if (inner.weights.data != nullptr)
      inner_lanes<Executor, T, kMost, true>(executor, inner, sums);
    else
      inner_lanes<Executor, T, kMost, false>(executor, inner, sums);
    return true;
  };
  if (inner.vectors.size <= 4) return run(std::integral_constant<int, 4>{});
  if (inner.vectors.size <= 10) return run(std::integral_constant<int, 10>{});
  return inner.vectors.size <= 16 && run(std::integral_constant<int, 16>{});
}

template <class Executor, class T>
void inner_of(const Where& where, const Inner& inner, double* sums) {
  Executor executor(where);
  if constexpr (!std::is_same_v<T, Mixed>)
    if (inner_of_few<Executor, T>(executor, inner, sums)) return;
  const bool adds = inner.weights.data != nullptr;
  const std::int64_t vectors = inner.vectors.size, size = inner.vectors.data[0].size,
                     superblocks = superblocks_of(size);
  const std::int64_t count = adds ? 2 * vectors + 1 : vectors, bytes = count * 8;
  Staging staging;
  const std::int64_t list = staging.add(inner.vectors.data, vectors);
  const std::int64_t weights = staging.add(inner.weights.data, inner.weights.size);
  const auto nodes = static_cast<double*>(executor.allocate(bytes * superblocks));
  const auto roots = static_cast<double*>(executor.results(bytes));
  staging.upload(executor);
  Inner staged = inner;
  staged.vectors.data = staging.at<const View<const void>>(list);
  staged.weights.data = staging.at<const double>(weights);
  const std::int64_t groups = (vectors + InnerBody<T>::kVectorsOfBlock - 1) / InnerBody<T>::kVectorsOfBlock;
  executor.run(superblocks * groups, InnerBody<T>{staged, adds, size, superblocks, groups, nodes});
  join_lists(executor, nodes, count, superblocks, roots);
  executor.fetch(sums, roots, bytes);
}

template <class Executor>
void inner(const Where& where, const Inner& inner, double* sums) {
  std::vector<View<const void>> all(inner.vectors.data, inner.vectors.data + inner.vectors.size);
  if (inner.memory.data != nullptr) all.push_back(inner.memory);
  with_common_type(all.data(), static_cast<std::int64_t>(all.size()),
                   [&](auto sample) { inner_of<Executor, decltype(sample)>(where, inner, sums); });
}

}  // namespace afflux::cuda
