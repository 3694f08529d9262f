// ingest, one superblock: copies a block at a time from the parts into the slot, and reduces the block while it is in
// L1.
#include "afflux/order.hpp"
#include "cpu/conversion.hpp"
#include "cpu/convert.hpp"
#include "cpu/kernels.hpp"
#include "cpu/simd.hpp"
#include "formula/reduce.hpp"

namespace afflux::AFFLUX_ISA {
namespace {

// Prefetches a part at a distance in bytes; near the end of the part, the beginning of the next part.
class Ahead {
 public:
  AFFLUX_INLINE Ahead(const Part* part, const void* from, std::int64_t bytes_left, std::int64_t distance)
      : here_(static_cast<const char*>(from) + distance),
        next_(static_cast<const char*>(part[1].data)),
        left_(next_ == nullptr ? INT64_MAX : bytes_left - distance) {}
  AFFLUX_INLINE void ask_for(std::int64_t byte) const {
    __builtin_prefetch(byte < left_ ? here_ + byte : next_ + (byte - left_));
  }

 private:
  const char *here_, *next_;
  std::int64_t left_;
};

// Calls line(from, i) for each whole cache line of n values of a part, from value `at` on, and copies the values after
// the last whole line to `to`. Lines are prefetched `ahead` bytes before, unless that is 0.
template <class T, class Line>
AFFLUX_FN void copy_lines(const Part* part, std::int64_t at, std::int64_t n, std::int64_t ahead, T* to,
                          const Line& line) {
  constexpr std::int64_t kLine = 64 / sizeof(T), kSize = sizeof(T);
  const T* const from = static_cast<const T*>(part->data) + at;
  const Ahead lines(part, from, (part[1].begin - part->begin - at) * kSize, ahead);
  std::int64_t i = 0;
  for (; i + kLine <= n; i += kLine) {
    if (ahead != 0) lines.ask_for(i * kSize);
    line(from + i, i);
  }
  __builtin_memcpy(to + i, from + i, static_cast<std::size_t>(n - i) * sizeof(T));
}

// Copies values of a part; the target is prefetched too.
template <class T>
AFFLUX_FN void copy(const Part* part, std::int64_t at, std::int64_t n, std::int64_t ahead, T* to) {
  copy_lines(part, at, n, ahead, to, [&](const T* from, std::int64_t i) AFFLUX_INLINE {
    if (ahead != 0) __builtin_prefetch(reinterpret_cast<const char*>(to + i) + ahead, 1);
    __builtin_memcpy(to + i, from, 64);
  });
}

// Writes values that are in L1, from element i on, past the caches. `to` is aligned to kStreamed, here and below.
template <class T>
AFFLUX_FN void stream_out(const T* from, T* to, std::int64_t i, std::int64_t n) {
  constexpr std::int64_t kLine = 64 / sizeof(T);
  for (; i + kLine <= n; i += kLine) simd::stream_line(from + i, to + i);
  __builtin_memcpy(to + i, from + i, static_cast<std::size_t>(n - i) * sizeof(T));
}

// Writes values of a part past the caches to `to`, and through the caches to `copy`.
template <class T>
AFFLUX_FN void copy_streaming(const Part* part, std::int64_t at, std::int64_t n, std::int64_t ahead, T* to, T* copy) {
  constexpr std::int64_t kLine = 64 / sizeof(T);
  copy_lines(part, at, n, ahead, copy,
             [&](const T* from, std::int64_t i) AFFLUX_INLINE { simd::stream_line(from, to + i, copy + i); });
  stream_out(copy, to, n - n % kLine, n);
}

// Sets values[0, end - begin) to elements [begin, end) of the parts, converted by `change`. `part` is the part of the
// first element or an earlier one; on return it is the part of the last element.
template <class T>
AFFLUX_FN void gather(const Part*& part, const PartChange* change, std::int64_t ahead, T* values, std::int64_t begin,
                      std::int64_t end) {
  while (begin < end) {
    while (part[1].begin <= begin) ++part;
    const std::int64_t n = (part[1].begin < end ? part[1].begin : end) - begin;
    const std::int64_t at = begin - part->begin;
    if (change != nullptr)
      if (change->base_type == Type::float64 || part->type == Type::float64)
        change_piece<double>(*change, *part, at, begin, n, values);
      else
        change_piece<float>(*change, *part, at, begin, n, values);
    else if (part->type == TypeOf<T>::value)
      copy(part, at, n, ahead, values);
    else
      convert(part->type, part->data, at, n, values);
    begin += n;
    values += n;
  }
}

// Fills slot[begin, end), a block, from the parts. Returns the address of the values in L1: in the slot or, if the slot
// is written past the caches, in `block`. Each byte of the parts is read once, because their owners may change it.
template <class T>
AFFLUX_FN const T* fill(const Part*& part, const PartChange* change, const MemoryUse& memory, T* slot, T* block,
                        std::int64_t begin, std::int64_t end) {
  constexpr std::int64_t kAhead = 4096;  // prefetch distance in bytes, for a single stream
  T* const to = slot + begin;
  if (!memory.streams) {
    gather(part, change, memory.prefetch, to, begin, end);
    return to;
  }
  while (part[1].begin <= begin) ++part;
  if (change == nullptr && part->type == TypeOf<T>::value && end <= part[1].begin) {
    copy_streaming(part, begin - part->begin, end - begin, kAhead, to, block);
  } else {
    gather(part, change, kAhead, block, begin, end);
    stream_out(block, to, 0, end - begin);
  }
  return block;
}

template <class T>
AFFLUX_FN double block_sum_of_squares(const T* x, std::int64_t n) {
  constexpr int kGroup = 4;  // native vectors per lane group: independent sums hide the latency of an addition
  constexpr int kGroupLanes = kGroup * simd::kWidth;
  static_assert(kLanes % kGroupLanes == 0, "lane groups must divide the lanes");
  double lanes[kLanes];
  const std::int64_t whole = n - n % kLanes;
  for (int lane = 0; lane < kLanes; lane += kGroupLanes) {
    simd::Doubles sum[kGroup] = {};
    for (std::int64_t i = lane; i < whole; i += kLanes)
      for (int part = 0; part < kGroup; ++part) {
        const simd::Doubles value = simd::Vector::load(x + i + part * simd::kWidth);
        sum[part] = simd::dot_term<T>(sum[part], value, value);
      }
    for (int part = 0; part < kGroup; ++part) simd::Vector::store(lanes + lane + part * simd::kWidth, sum[part]);
  }
  for (std::int64_t i = whole; i < n; ++i) {
    const double value = simd::Single::load(x + i);
    lanes[i - whole] = formula::dot_term<T>(lanes[i - whole], value, value);
  }
  return formula::lane_sum(lanes, kLanes);
}

// Updates the smallest and the largest value of each lane. Value is the type in which values of type T are compared.
template <class T, class Value>
AFFLUX_FN void lane_extremes(const T* x, std::int64_t n, Value* lows, Value* highs) {
  const std::int64_t whole = n - n % kLanes;
  for (std::int64_t i = 0; i < whole; i += kLanes)
    for (int lane = 0; lane < kLanes; ++lane) {
      lows[lane] = formula::lesser(lows[lane], formula::widened(x[i + lane]));
      highs[lane] = formula::greater(highs[lane], formula::widened(x[i + lane]));
    }
  for (std::int64_t i = whole; i < n; ++i) {
    lows[i - whole] = formula::lesser(lows[i - whole], formula::widened(x[i]));
    highs[i - whole] = formula::greater(highs[i - whole], formula::widened(x[i]));
  }
}

// Returns the index of the first of n values that is not finite, or -1. Needed only for a block whose sum of squares is
// not finite: such a block has a non-finite value, or is float64 and its sum overflows.
template <class T>
AFFLUX_FN std::int64_t first_nonfinite(const T* x, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i)
    if (!formula::finite(simd::Single::load(x + i))) return i;
  return -1;
}

template <class T>
AFFLUX_FN void ingest_into(const Part* part, const PartChange* change, const MemoryUse& memory, T* slot,
                           std::int64_t begin, std::int64_t end, IngestSums& sums) {
  using Value = decltype(formula::widened(T{}));
  alignas(64) T block[kBlock];
  Value lows[kLanes], highs[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) {
    lows[lane] = static_cast<Value>(__builtin_inf());
    highs[lane] = -static_cast<Value>(__builtin_inf());
  }
  for (std::int64_t i = begin; i < end; i += kBlock) {
    const std::int64_t n = end - i < kBlock ? end - i : kBlock;
    const T* const values = fill(part, change, memory, slot, block, i, i + n);
    const double squares = block_sum_of_squares(values, n);
    sums.sum_of_squares = sums.sum_of_squares + squares;
    lane_extremes(values, n, lows, highs);
    if (formula::finite(squares) || sums.first_nonfinite >= 0) continue;
    const std::int64_t first = first_nonfinite(values, n);
    if (first >= 0) sums.first_nonfinite = i + first;
  }
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int lane = 0; lane < half; ++lane) {
      lows[lane] = formula::lesser(lows[lane], lows[lane + half]);
      highs[lane] = formula::greater(highs[lane], highs[lane + half]);
    }
  sums.min = static_cast<double>(lows[0]);
  sums.max = static_cast<double>(highs[0]);
}

}  // namespace

IngestSums ingest(const Part* first, const PartChange* change, const MemoryUse& memory, Type type, void* slot,
                  std::int64_t begin, std::int64_t end) {
  IngestSums sums{0.0, 0.0, 0.0, -1};
  MemoryUse use = memory;
  use.streams = memory.streams && reinterpret_cast<std::uintptr_t>(slot) % simd::kStreamed == 0;
  with_type(type, [&](auto sample) AFFLUX_INLINE {
    ingest_into(first, change, use, static_cast<decltype(sample)*>(slot), begin, end, sums);
  });
  if (use.streams) simd::stored_streams();
  return sums;
}

}  // namespace afflux::AFFLUX_ISA
