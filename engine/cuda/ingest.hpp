// ingest: each block of threads processes a superblock. Eight threads process one block of the order (order.hpp), each
// thread four of its lanes. So all accesses are of four elements, and a thread adds up its lanes in its own registers,
// row after row.
#pragma once
#include <algorithm>

#include "afflux/order.hpp"
#include "api/kernels.hpp"
#include "cuda/pieces.hpp"
#include "cuda/staging.hpp"
#include "cuda/tree.hpp"
#include "cuda/vector4.hpp"
#include "formula/conversion.hpp"
#include "formula/reduce.hpp"

namespace afflux::cuda {

// The kernel of ingest. T is the type of the slot. P is the type of the base if the parts are converted; void: they are
// copied. kSame: all parts have type T, and are copied. Such a kernel needs fewer registers.
template <class T, class P, bool kSame = false>
struct IngestBody {
  static constexpr int kThreads = 256, kWarps = kThreads / kWarp;
  static constexpr int kBlocks = kSuperblock / kBlock, kColumns = kLanes / kFour, kRows = kBlock / kLanes;
  // Of a multiprocessor. nvcc 13.0 would choose 3 for conversions and for float64, and spill registers.
  static constexpr int kBlocksTogether = kSame && sizeof(T) < 8 ? 0 : 2;
  // Rows whose loads are in progress at once, limited by the registers.
  static constexpr int kTogether = sizeof(T) == 8 || !std::is_void_v<P> ? 4 : 8;
  static constexpr int kCopiedRows = sizeof(T) == 8 ? 1 : 4;  // the same, of a block that is copied already
  static_assert(kThreads == kBlocks * kColumns && kRows % kTogether == 0, "threads must cover a superblock");
  static_assert(kLanes == kWarp && kColumns == 8 && kFour == 4, "the reductions in a warp are written for these");
  using Value = decltype(formula::widened(T{}));

  struct Shared {
    Value lows[kWarps][kLanes], highs[kWarps][kLanes];
    double sums[kBlocks];
    std::int64_t first_nonfinite[kThreads];
    bool apart[kBlocks];
  };

  SentParts parts;
  std::int64_t first_superblock;
  PartChange change;
  T* slot;
  std::int64_t size;
  IngestSums* nodes;  // one for each superblock from `first_superblock` on

  void set(const SentParts& sent, std::int64_t first, const PartChange* conversion, const View<void>& to,
           IngestSums* all) {
    parts = sent, first_superblock = first, nodes = all + first;
    if (conversion != nullptr) change = *conversion;
    slot = static_cast<T*>(to.data), size = to.size;
  }

  // The reductions of a thread: over four lanes of one block.
  struct Sums {
    Doubles squares;
    Vector4<Value> lows, highs;
    std::int64_t first_nonfinite;
  };

  // A part with its index and its end.
  struct Piece {
    Part part;
    std::int64_t index, end;
  };
  AFFLUX_DEVICE Piece piece(std::int64_t index) const {
    return {parts.list[index], index, parts.list[index + 1].begin};
  }

  // Returns the part that holds element i.
  AFFLUX_DEVICE Piece piece_with(std::int64_t i) const {
    if (parts.count == 1) return {parts.first, 0, size};
    std::int64_t low = 0, high = parts.count;
    while (high - low > 1) {
      const std::int64_t middle = low + (high - low) / 2;
      (parts.list[middle].begin <= i ? low : high) = middle;
    }
    return piece(low);
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
    if constexpr (kSame) return on_device<T>(part.data)[at];
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
        if constexpr (kSame) {
          four = read[k];
        } else {
          AFFLUX_UNROLL_ON_DEVICE
          for (int j = 0; j < kFour; ++j) four.at[j] = stored(read[k].at[j], at + j);
        }
        store_whole(slot + at, four);
        AFFLUX_UNROLL_ON_DEVICE
        for (int j = 0; j < kFour; ++j) add(sums, j, four.at[j]);
      }
    }
  }

  // Returns true if a thread processes a column of the block that begins at this element by whole_column. Other blocks
  // are copied by all threads first, because a column of them has one element after the other to wait for.
  AFFLUX_DEVICE bool is_whole(std::int64_t block) const {
    if (block + kBlock > size) return false;
    const Piece from = piece_with(block);
    const int bytes = kSame ? static_cast<int>(sizeof(T)) : bytes_of(from.part.type);
    const void* const first = static_cast<const char*>(from.part.data) + (block - from.part.begin) * bytes;
    return from.end >= block + kBlock && aligned(slot + block, alignof(Vector4<T>)) &&
           aligned(first, bytes < 4 ? 8 : 16);
  }

  // Copies a thread's elements of [begin, end).
  AFFLUX_DEVICE void copy(std::int64_t begin, std::int64_t end, int thread) const {
    std::int64_t i = begin + thread;
    if (i >= end) return;
    Piece from = piece_with(i);
    while (i < end) {
      while (from.end <= i) from = piece(from.index + 1);
      if (const std::int64_t last = i + (kTogether - 1) * kThreads; last < end && last < from.end) {
        T read[kTogether];
        AFFLUX_UNROLL_ON_DEVICE
        for (int k = 0; k < kTogether; ++k) read[k] = stored_one(from.part, i + k * kThreads);
        AFFLUX_UNROLL_ON_DEVICE
        for (int k = 0; k < kTogether; ++k, i += kThreads) slot[i] = read[k];
      } else {
        slot[i] = stored_one(from.part, i);
        i += kThreads;
      }
    }
  }

  // Processes a column that is copied already.
  AFFLUX_DEVICE void column(std::int64_t begin, std::int64_t end, Sums& sums) const {
#if defined(__CUDACC__)
#pragma unroll kCopiedRows
#endif
    for (std::int64_t i = begin; i < end; i += kLanes) AFFLUX_UNROLL_ON_DEVICE
    for (int j = 0; j < kFour; ++j)
      if (i + j < end) add(sums, j, slot[i + j]);
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
  AFFLUX_DEVICE Sums sums_of(std::int64_t block, int column_begin, bool apart) const {
    const std::int64_t begin = block + column_begin, end = block + kBlock < size ? block + kBlock : size;
    const Value infinity = static_cast<Value>(__builtin_inf());
    Sums sums{{}, filled<Value>(infinity), filled<Value>(-infinity), -1};
    if (begin >= end) return sums;
    if (apart) {
      column(begin, end, sums);
    } else {
      const Part part = piece_with(begin).part;
      if constexpr (kSame)
        whole_column<T>(part, begin, sums);
      else if (part.type == Type::float32)
        whole_column<float>(part, begin, sums);
      else if (part.type == Type::float64)
        whole_column<double>(part, begin, sums);
      else if (part.type == Type::float16)
        whole_column<Float16>(part, begin, sums);
      else
        whole_column<Bfloat16>(part, begin, sums);
    }
    sums.first_nonfinite = first_nonfinite(sums, begin, end);
    return sums;
  }

  static AFFLUX_DEVICE int bytes_of(Type type) { return type == Type::float64 ? 8 : type == Type::float32 ? 4 : 2; }

  // Joins values of the lanes of blocks that follow each other: those of the blocks of a warp, for each lane. The order
  // is kept: of equal values the first one stays, which may be -0 or 0.
  template <class Block, class Each, class Join>
  static AFFLUX_DEVICE void over_blocks(const Block& block, Each (&values)[kFour], const Join& join) {
    AFFLUX_UNROLL_ON_DEVICE
    for (int j = 0; j < kFour; ++j) {
      block.butterfly(values[j], kColumns, join);
      block.butterfly(values[j], 2 * kColumns, join);
    }
  }

  // A warp has four blocks of the order, of eight threads each.
  template <class Block>
  AFFLUX_DEVICE void operator()(const Block& block, Shared& shared) const {
    constexpr auto kLesser = [](Value a, Value b) { return formula::lesser(a, b); };
    constexpr auto kGreater = [](Value a, Value b) { return formula::greater(a, b); };
    typename Block::template Each<double> squares[kFour];
    typename Block::template Each<Value> lows[kFour], highs[kFour], low, high;
    const std::int64_t begin = (first_superblock + block.index) * kSuperblock;
    block.each([&](int thread) {
      if (thread < kBlocks) shared.apart[thread] = begin + thread * kBlock < size && !is_whole(begin + thread * kBlock);
    });
    block.each([&](int thread) {
      for (int k = 0; k < kBlocks; ++k) {
        const std::int64_t from = begin + k * kBlock, to = from + kBlock < size ? from + kBlock : size;
        if (shared.apart[k]) copy(from, to, thread);
      }
    });
    block.each_in_warp([&](int thread) {
      const int row = thread / kColumns, first = thread % kColumns * kFour;
      const Sums sums = sums_of(begin + row * kBlock, first, shared.apart[row]);
      AFFLUX_UNROLL_ON_DEVICE
      for (int j = 0; j < kFour; ++j) {
        squares[j][thread] = sums.squares.at[j];
        lows[j][thread] = sums.lows.at[j];
        highs[j][thread] = sums.highs.at[j];
      }
      shared.first_nonfinite[thread] = sums.first_nonfinite;
    });
    // The lanes of a block are added by halves (formula::lane_sum): across threads, then within one.
    AFFLUX_UNROLL_ON_DEVICE
    for (int apart = kColumns / 2; apart > 0; apart /= 2) AFFLUX_UNROLL_ON_DEVICE
    for (int j = 0; j < kFour; ++j) block.butterfly(squares[j], apart, [](double a, double b) { return a + b; });
    over_blocks(block, lows, kLesser);
    over_blocks(block, highs, kGreater);
    block.each([&](int thread) {
      const double even = squares[0][thread] + squares[2][thread], odd = squares[1][thread] + squares[3][thread];
      if (thread % kColumns == 0) shared.sums[thread / kColumns] = even + odd;
      if (thread % kWarp >= kColumns) return;
      AFFLUX_UNROLL_ON_DEVICE
      for (int j = 0; j < kFour; ++j) {
        shared.lows[thread / kWarp][thread % kWarp * kFour + j] = lows[j][thread];
        shared.highs[thread / kWarp][thread % kWarp * kFour + j] = highs[j][thread];
      }
    });
    block.each_in_warp([&](int thread) {
      low[thread] = shared.lows[0][thread % kWarp], high[thread] = shared.highs[0][thread % kWarp];
      AFFLUX_UNROLL_ON_DEVICE
      for (int warp = 1; warp < kWarps; ++warp) {
        low[thread] = formula::lesser(low[thread], shared.lows[warp][thread % kWarp]);
        high[thread] = formula::greater(high[thread], shared.highs[warp][thread % kWarp]);
      }
    });
    AFFLUX_UNROLL_ON_DEVICE
    for (int half = kLanes / 2; half > 0; half /= 2) {
      block.butterfly(low, half, kLesser);
      block.butterfly(high, half, kGreater);
    }
    block.each_in_warp([&](int thread) {
      if (thread != 0) return;
      IngestSums node{0.0, static_cast<double>(low[0]), static_cast<double>(high[0]), -1};
      AFFLUX_UNROLL_ON_DEVICE
      for (int k = 0; k < kBlocks; ++k) node.sum_of_squares = node.sum_of_squares + shared.sums[k];
      for (int k = 0; k < kThreads && !formula::finite(node.sum_of_squares); ++k) {
        const std::int64_t found = shared.first_nonfinite[k];
        if (found >= 0 && (node.first_nonfinite < 0 || found < node.first_nonfinite)) node.first_nonfinite = found;
      }
      nodes[block.index] = node;
    });
  }
};

// Calls run(nodes), which fills the nodes of all superblocks, and returns their root.
template <class Executor, class Run>
IngestSums root_of(Executor& executor, std::int64_t size, const Run& run) {
  const std::int64_t count = superblocks_of(size);
  const auto root = static_cast<IngestSums*>(executor.results(sizeof(IngestSums)));
  IngestSums* nodes = root;
  if (count > 1)
    nodes = static_cast<IngestSums*>(executor.allocate(count * static_cast<std::int64_t>(sizeof(IngestSums))));
  run(nodes);
  if (count > 1) join_lists(executor, nodes, 1, count, root);
  IngestSums sums;
  executor.fetch(&sums, root, sizeof sums);
  return sums;
}

// Calls body(kernel), with the kernel's types for an update.
template <class T, class Body>
IngestSums with_kernel(const Part* first, const Part* last, const PartChange* change, const Body& body) {
  if (change == nullptr) {
    const bool same = std::all_of(first, last, [](const Part& part) { return part.type == TypeOf<T>::value; });
    return same ? body(IngestBody<T, void, true>{}) : body(IngestBody<T, void>{});
  }
  return change->base_type == Type::float64 ? body(IngestBody<T, double>{}) : body(IngestBody<T, float>{});
}
template <class Body>
IngestSums with_kernel(const Part* first, const Part* last, const PartChange* change, Type slot, const Body& body) {
  if (slot == Type::float64) return with_kernel<double>(first, last, change, body);
  if (slot == Type::bfloat16) return with_kernel<Bfloat16>(first, last, change, body);
  return with_kernel<float>(first, last, change, body);
}

template <class Executor>
IngestSums ingest(const Where& where, const Part* first, const Part* last, const PartChange* change,
                  const View<void>& slot) {
  Executor executor(where);
  return with_kernel(first, last, change, slot.type, [&](auto kernel) {
    return root_of(executor, slot.size, [&](IngestSums* nodes) {
      Staging staging;
      const std::int64_t list = last - first > 1 ? staging.add(first, last - first + 1) : 0;
      staging.upload(executor);
      kernel.set({*first, staging.at<const Part>(list), last - first}, 0, change, slot, nodes);
      executor.run(superblocks_of(slot.size), kernel);
    });
  });
}

template <class Executor>
IngestSums ingest_from_host(const Where& where, const Part* first, const Part* last, const PartChange* change,
                            const View<void>& slot, int num_threads) {
  Executor executor(where);
  Sender<Executor> sender(executor, where.device, first, last, num_threads);
  return with_kernel(first, last, change, slot.type, [&](auto kernel) {
    return root_of(executor, slot.size, [&](IngestSums* nodes) {
      for (std::int64_t begin = 0, end = 0; begin < slot.size; begin = end) {
        kernel.set(sender.send(begin, slot.size, &end), begin / kSuperblock, change, slot, nodes);
        executor.run(superblocks_of(end - begin), kernel);
      }
    });
  });
}

}  // namespace afflux::cuda
