// ingest: each block of threads processes a superblock. Eight threads process one block of the order (order.hpp), each
// thread four of its lanes. So all accesses are of four elements, and a thread adds up its lanes in its own registers,
// row after row.
#pragma once
#include "afflux/order.hpp"
#include "api/kernels.hpp"
#include "cuda/staging.hpp"
#include "cuda/tree.hpp"
#include "cuda/vector4.hpp"
#include "formula/conversion.hpp"
#include "formula/reduce.hpp"

namespace afflux::cuda {

// The kernel of ingest. T is the type of the slot. P is the type of the base if the parts are converted; void: they are
// copied.
template <class T, class P>
struct IngestBody {
  static constexpr int kThreads = 256;
  static constexpr int kBlocks = kSuperblock / kBlock, kColumns = kLanes / kFour, kRows = kBlock / kLanes;
  static constexpr int kTogether = 8;  // rows whose loads are in progress at once
  static_assert(kThreads == kBlocks * kColumns && kRows % kTogether == 0, "threads must cover a superblock");
  static_assert(kBlocks == kWarp && kLanes == kWarp, "a warp takes the lanes, or the blocks");
  using Value = decltype(formula::widened(T{}));

  struct Shared {
    double lanes[kBlocks][kLanes + 1];  // one more, so that the elements of a column are in different banks
    Value lows[kBlocks][kLanes], highs[kBlocks][kLanes];
    double sums[kBlocks];
    std::int64_t first_nonfinite[kThreads];
  };

  const Part* parts;
  std::int64_t part_count;
  PartChange change;
  T* slot;
  std::int64_t size;
  IngestSums* nodes;  // one for each superblock

  // The reductions of a thread: over four lanes of one block.
  struct Sums {
    Doubles squares;
    Vector4<Value> lows, highs;
    std::int64_t first_nonfinite;
  };

  // Returns the part that holds element i.
  AFFLUX_DEVICE const Part* part_of(std::int64_t i) const {
    std::int64_t low = 0, high = part_count;
    while (high - low > 1) {
      const std::int64_t middle = low + (high - low) / 2;
      (parts[middle].begin <= i ? low : high) = middle;
    }
    return parts + low;
  }

  // Returns the slot's element i, from the value `sent` of a part.
  template <class From>
  AFFLUX_DEVICE T stored(From sent, std::int64_t i) const {
    T value{};
    if constexpr (std::is_void_v<P>) {
      formula::narrow(formula::widened(sent), &value);
    } else {
      formula::with_change(change.change, [&](auto kind) {
        constexpr formula::Change kChange = decltype(kind)::value;
        using W = std::conditional_t<sizeof(From) == 8 || sizeof(P) == 8, double, float>;
        using C = formula::Computed<kChange, W, T>;
        W base{};
        if constexpr (formula::reads_base(kChange)) base = static_cast<W>(on_device<P>(change.base)[i]);
        if constexpr (formula::subtracts_base(kChange)) {
          From seen{};
          formula::narrow(base, &seen);
          formula::narrow(formula::widened(seen), &base);
        }
        const C wide = static_cast<C>(formula::widened(sent));
        formula::narrow(formula::changed<kChange, C>(wide, static_cast<C>(base), change.scale), &value);
      });
    }
    return value;
  }

  AFFLUX_DEVICE T stored_one(const Part& part, std::int64_t i) const {
    const std::int64_t at = i - part.begin;
    switch (part.type) {
      case Type::float32:
        return stored(on_device<float>(part.data)[at], i);
      case Type::float64:
        return stored(on_device<double>(part.data)[at], i);
      case Type::float16:
        return stored(on_device<Float16>(part.data)[at], i);
      case Type::bfloat16:
        return stored(on_device<Bfloat16>(part.data)[at], i);
    }
    return T{};
  }

  // Adds a value to lane j of the four.
  static AFFLUX_DEVICE void add(Sums& sums, int j, T stored) {
    const Value value = formula::widened(stored);
    const double wide = static_cast<double>(value);
    sums.squares.at[j] = formula::dot_term<T>(sums.squares.at[j], wide, wide);
    sums.lows.at[j] = formula::lesser(sums.lows.at[j], value);
    sums.highs.at[j] = formula::greater(sums.highs.at[j], value);
  }

  // Processes a column (four lanes) of a whole block that is in one part.
  template <class From>
  AFFLUX_DEVICE void whole_column(const Part& part, std::int64_t begin, Sums& sums) const {
    const From* const from = on_device<From>(part.data) + (begin - part.begin);
    for (int row = 0; row < kRows; row += kTogether) {
      Vector4<From> read[kTogether];
      AFFLUX_UNROLL_ON_DEVICE
      for (int k = 0; k < kTogether; ++k) read[k] = Span<true>{(row + k) * kLanes, kFour}.template load<From>(from);
      AFFLUX_UNROLL_ON_DEVICE
      for (int k = 0; k < kTogether; ++k) {
        const std::int64_t at = begin + (row + k) * kLanes;
        Vector4<T> four;
        AFFLUX_UNROLL_ON_DEVICE
        for (int j = 0; j < kFour; ++j) four.at[j] = stored(read[k].at[j], at + j);
        Span<true>{at, kFour}.store(slot, four);
        AFFLUX_UNROLL_ON_DEVICE
        for (int j = 0; j < kFour; ++j) add(sums, j, four.at[j]);
      }
    }
  }

  // Processes any other column.
  AFFLUX_DEVICE void column(const Part* part, std::int64_t begin, std::int64_t end, Sums& sums) const {
    for (std::int64_t i = begin; i < end; i += kLanes) AFFLUX_UNROLL_ON_DEVICE
    for (int j = 0; j < kFour; ++j) {
      if (i + j >= end) break;
      while (part[1].begin <= i + j) ++part;
      slot[i + j] = stored_one(*part, i + j);
      add(sums, j, slot[i + j]);
    }
  }

  static AFFLUX_DEVICE bool aligned(const void* address, std::size_t bytes) {
    return reinterpret_cast<std::uintptr_t>(address) % bytes == 0;
  }

  // Returns the index of the first of a thread's values that is not finite, or -1. A non-finite value makes a sum of
  // squares non-finite too.
  AFFLUX_DEVICE std::int64_t first_nonfinite(const Sums& sums, std::int64_t begin, std::int64_t end) const {
    bool all = true;
    AFFLUX_UNROLL_ON_DEVICE
    for (int j = 0; j < kFour; ++j) all = all && formula::finite(sums.squares.at[j]);
    for (std::int64_t i = begin; !all && i < end; i += kLanes)
      for (int j = 0; j < kFour && i + j < end; ++j)
        if (!formula::finite(static_cast<double>(formula::widened(slot[i + j])))) return i + j;
    return -1;
  }

  // Returns the reductions of four lanes, from `column_begin` on, of the block of the order that begins at element
  // `block`.
  AFFLUX_DEVICE Sums sums_of(std::int64_t block, int column_begin) const {
    const std::int64_t begin = block + column_begin, end = block + kBlock < size ? block + kBlock : size;
    const Value infinity = static_cast<Value>(__builtin_inf());
    Sums sums{{}, filled<Value>(infinity), filled<Value>(-infinity), -1};
    if (begin >= end) return sums;
    const Part* const part = part_of(begin);
    const void* const first = static_cast<const char*>(part->data) + (begin - part->begin) * bytes_of(part->type);
    const bool whole = block + kBlock <= size && part->begin <= block && part[1].begin >= block + kBlock &&
                       aligned(slot + begin, alignof(Vector4<T>)) && aligned(first, bytes_of(part->type) < 4 ? 8 : 16);
    if (!whole)
      column(part, begin, end, sums);
    else if (part->type == Type::float32)
      whole_column<float>(*part, begin, sums);
    else if (part->type == Type::float64)
      whole_column<double>(*part, begin, sums);
    else if (part->type == Type::float16)
      whole_column<Float16>(*part, begin, sums);
    else
      whole_column<Bfloat16>(*part, begin, sums);
    sums.first_nonfinite = first_nonfinite(sums, begin, end);
    return sums;
  }

  static AFFLUX_DEVICE int bytes_of(Type type) { return type == Type::float64 ? 8 : type == Type::float32 ? 4 : 2; }

  template <class Block>
  AFFLUX_DEVICE void operator()(const Block& block, Shared& shared) const {
    block.each([&](int thread) {
      const int row = thread / kColumns, first = thread % kColumns * kFour;
      const Sums sums = sums_of(block.index * kSuperblock + row * kBlock, first);
      AFFLUX_UNROLL_ON_DEVICE
      for (int j = 0; j < kFour; ++j) {
        shared.lanes[row][first + j] = sums.squares.at[j];
        shared.lows[row][first + j] = sums.lows.at[j];
        shared.highs[row][first + j] = sums.highs.at[j];
      }
      shared.first_nonfinite[thread] = sums.first_nonfinite;
    });
    // Computes each lane's extremes over all blocks, in their order, in the entries of the first block; and the sum of
    // each block.
    block.each([&](int thread) {
      const int i = thread % kWarp;
      for (int k = 1; k < kBlocks; ++k) {
        if (thread / kWarp == 0) shared.lows[0][i] = formula::lesser(shared.lows[0][i], shared.lows[k][i]);
        if (thread / kWarp == 1) shared.highs[0][i] = formula::greater(shared.highs[0][i], shared.highs[k][i]);
      }
      if (thread / kWarp == 2) shared.sums[i] = formula::lane_sum(shared.lanes[i], kLanes);
    });
    block.each([&](int thread) {
      if (thread != 0) return;
      IngestSums node{0.0, 0.0, 0.0, -1};
      for (int k = 0; k < kBlocks; ++k) node.sum_of_squares = node.sum_of_squares + shared.sums[k];
      for (int half = kLanes / 2; half > 0; half /= 2)
        for (int lane = 0; lane < half; ++lane) {
          shared.lows[0][lane] = formula::lesser(shared.lows[0][lane], shared.lows[0][lane + half]);
          shared.highs[0][lane] = formula::greater(shared.highs[0][lane], shared.highs[0][lane + half]);
        }
      node.min = static_cast<double>(shared.lows[0][0]);
      node.max = static_cast<double>(shared.highs[0][0]);
      for (int k = 0; k < kThreads && !formula::finite(node.sum_of_squares); ++k) {
        const std::int64_t found = shared.first_nonfinite[k];
        if (found >= 0 && (node.first_nonfinite < 0 || found < node.first_nonfinite)) node.first_nonfinite = found;
      }
      nodes[block.index] = node;
    });
  }
};

template <class Executor, class T, class P>
IngestSums ingest_as(Executor& executor, const Part* first, const Part* last, const PartChange& change,
                     const View<void>& slot) {
  const std::int64_t count = superblocks_of(slot.size);
  Staging staging;
  const std::int64_t parts = staging.add(first, last - first + 1);
  const auto nodes = static_cast<IngestSums*>(executor.allocate(count * static_cast<std::int64_t>(sizeof(IngestSums))));
  staging.upload(executor);
  executor.run(count, IngestBody<T, P>{staging.at<const Part>(parts), last - first, change, static_cast<T*>(slot.data),
                                       slot.size, nodes});
  executor.run(1, TreeBody<IngestSums>{nodes, count, nodes});
  IngestSums root;
  executor.download(&root, nodes, sizeof root);
  return root;
}

template <class Executor, class T>
IngestSums ingest_into(Executor& executor, const Part* first, const Part* last, const PartChange* change,
                       const View<void>& slot) {
  if (change == nullptr) return ingest_as<Executor, T, void>(executor, first, last, {}, slot);
  if (change->base_type == Type::float64) return ingest_as<Executor, T, double>(executor, first, last, *change, slot);
  return ingest_as<Executor, T, float>(executor, first, last, *change, slot);
}

template <class Executor>
IngestSums ingest(const Where& where, const Part* first, const Part* last, const PartChange* change,
                  const View<void>& slot) {
  Executor executor(where);
  if (slot.type == Type::float64) return ingest_into<Executor, double>(executor, first, last, change, slot);
  if (slot.type == Type::bfloat16) return ingest_into<Executor, Bfloat16>(executor, first, last, change, slot);
  return ingest_into<Executor, float>(executor, first, last, change, slot);
}

}  // namespace afflux::cuda
