// The weighted trimmed mean of the updates, one tile, in runs of kTrimRun elements of all updates: rows, whose columns
// are sorted and summed.
#pragma once
#include <limits>
#include <type_traits>
#include <utility>

#include "api/kernels.hpp"
#include "cpu/combine.hpp"
#include "cpu/convert.hpp"
#include "cpu/simd_float.hpp"
#include "formula/trim.hpp"

namespace afflux::AFFLUX_ISA {
namespace {

// The memory of a sum, aligned to cache lines (trim_work in api/kernels.hpp).
class TrimWork {
 public:
  TrimWork(std::int64_t updates, double* work) : updates_(updates) {
    const std::uintptr_t past = reinterpret_cast<std::uintptr_t>(work) % 64;
    base_ = work + (past == 0 ? 0 : (64 - past) / sizeof(double));
  }
  double* sorted() const { return base_; }
  template <class E>
  E* rows() const {
    return reinterpret_cast<E*>(base_ + updates_ * kTrimRun);
  }
  double* masses() const { return base_ + 2 * updates_ * kTrimRun; }
  template <class E>
  const E** addresses() const {  // of the rows
    return reinterpret_cast<const E**>(base_ + updates_ * (2 * kTrimRun + 1));
  }

 private:
  std::int64_t updates_;
  double* base_;
};

// Calls body(row of the update, n elements of the update at `begin`) for each update that has a weight.
template <class T, class Body>
AFFLUX_FN void each_row(const Combine& stage, Tile tile, std::int64_t begin, const Body& body) {
  int row = 0;
  for (std::int64_t k = 0; k < stage.updates.size; ++k) {
    if (stage.weights.data[k] == 0.0) continue;
    const T* const update = tile_of<T>(stage.updates.data[k], tile) + begin;
    simd::prefetch(update, kTrimRun, tile.ahead);
    body(row++, update);
  }
}

// Sets a row to n elements of an update; the rest of the row stays.
template <class T, class E>
AFFLUX_FN void fill_row(const T* update, std::int64_t n, E* row) {
  n == kTrimRun ? convert(update, row, kTrimRun) : convert(update, row, n);
}

// Set `wide` to the values as float64.
AFFLUX_FN void widen(simd::Floats values, simd::Doubles* wide) {
#if defined(__AVX512F__)
  wide[0] = (simd::Doubles)_mm512_cvtps_pd(_mm512_castps512_ps256((__m512)values));
  wide[1] = (simd::Doubles)_mm512_cvtps_pd(_mm512_extractf32x8_ps((__m512)values, 1));
#elif defined(__AVX2__)
  wide[0] = (simd::Doubles)_mm256_cvtps_pd(_mm256_castps256_ps128((__m256)values));
  wide[1] = (simd::Doubles)_mm256_cvtps_pd(_mm256_extractf128_ps((__m256)values, 1));
#elif defined(__SSE2__)
  wide[0] = (simd::Doubles)_mm_cvtps_pd((__m128)values);
  wide[1] = (simd::Doubles)_mm_cvtps_pd(_mm_movehl_ps((__m128)values, (__m128)values));
#else
  wide[0] = (simd::Doubles)vcvt_f64_f32(vget_low_f32((float32x4_t)values));
  wide[1] = (simd::Doubles)vcvt_high_f64_f32((float32x4_t)values);
#endif
}
AFFLUX_FN void widen(simd::Ints values, simd::Doubles* wide) {
#if defined(__AVX512F__)
  wide[0] = (simd::Doubles)_mm512_cvtepi32_pd(_mm512_castsi512_si256((__m512i)values));
  wide[1] = (simd::Doubles)_mm512_cvtepi32_pd(_mm512_extracti64x4_epi64((__m512i)values, 1));
#elif defined(__AVX2__)
  wide[0] = (simd::Doubles)_mm256_cvtepi32_pd(_mm256_castsi256_si128((__m256i)values));
  wide[1] = (simd::Doubles)_mm256_cvtepi32_pd(_mm256_extracti128_si256((__m256i)values, 1));
#elif defined(__SSE2__)
  wide[0] = (simd::Doubles)_mm_cvtepi32_pd((__m128i)values);
  wide[1] = (simd::Doubles)_mm_cvtepi32_pd(_mm_unpackhi_epi64((__m128i)values, (__m128i)values));
#else
  wide[0] = (simd::Doubles)vcvtq_f64_s64(vmovl_s32(vget_low_s32((int32x4_t)values)));
  wide[1] = (simd::Doubles)vcvtq_f64_s64(vmovl_high_s32((int32x4_t)values));
#endif
}
AFFLUX_FN void widen(simd::Doubles values, simd::Doubles* wide) { *wide = values; }

// Values with their masses, each pair packed into one float64 with the bits of the value above those of the mass: these
// numbers have the order in which values are sorted. None is a NaN, because float64 has more bits for the exponent than
// float32.
struct Packed {
  simd::Doubles low, high;
};
AFFLUX_FN Packed packed(simd::Floats values, simd::Words masses) {
#if defined(__AVX512F__)
  return {(simd::Doubles)_mm512_unpacklo_epi32((__m512i)masses, (__m512i)values),
          (simd::Doubles)_mm512_unpackhi_epi32((__m512i)masses, (__m512i)values)};
#elif defined(__AVX2__)
  return {(simd::Doubles)_mm256_unpacklo_epi32((__m256i)masses, (__m256i)values),
          (simd::Doubles)_mm256_unpackhi_epi32((__m256i)masses, (__m256i)values)};
#elif defined(__SSE2__)
  return {(simd::Doubles)_mm_unpacklo_epi32((__m128i)masses, (__m128i)values),
          (simd::Doubles)_mm_unpackhi_epi32((__m128i)masses, (__m128i)values)};
#else
  return {(simd::Doubles)vzip1q_u32((uint32x4_t)masses, (uint32x4_t)values),
          (simd::Doubles)vzip2q_u32((uint32x4_t)masses, (uint32x4_t)values)};
#endif
}
AFFLUX_FN simd::Ints masses_in(Packed pairs) {
#if defined(__AVX512F__)
  return (simd::Ints)_mm512_shuffle_ps((__m512)pairs.low, (__m512)pairs.high, 0x88);
#elif defined(__AVX2__)
  return (simd::Ints)_mm256_shuffle_ps((__m256)pairs.low, (__m256)pairs.high, 0x88);
#elif defined(__SSE2__)
  return (simd::Ints)_mm_shuffle_ps((__m128)pairs.low, (__m128)pairs.high, 0x88);
#else
  return (simd::Ints)vuzp1q_u32((uint32x4_t)pairs.low, (uint32x4_t)pairs.high);
#endif
}
AFFLUX_FN simd::Floats values_in(Packed pairs) {
#if defined(__AVX512F__)
  return (simd::Floats)_mm512_shuffle_ps((__m512)pairs.low, (__m512)pairs.high, 0xDD);
#elif defined(__AVX2__)
  return (simd::Floats)_mm256_shuffle_ps((__m256)pairs.low, (__m256)pairs.high, 0xDD);
#elif defined(__SSE2__)
  return (simd::Floats)_mm_shuffle_ps((__m128)pairs.low, (__m128)pairs.high, 0xDD);
#else
  return (simd::Floats)vuzp2q_u32((uint32x4_t)pairs.low, (uint32x4_t)pairs.high);
#endif
}

// The sum of sorted values, each times the mass that is kept of it. Mass is a vector of integers or float64.
template <class Mass>
class WeightedSum {
 public:
  explicit WeightedSum(const formula::Window& window)
      : low_(Mass{} + window.low),
        high_(Mass{} + window.high),
        below_(Mass{} + window.below),
        above_(Mass{} + window.above),
        place_(low_) {}

  template <class Values>
  AFFLUX_INLINE void add(Mass mass, Values values) {
    before_ = before_ + mass;
    const Mass after = formula::place_in(before_, low_, high_, below_, above_);
    simd::Doubles kept[kParts], wide[kParts];
    widen(after - place_, kept);
    widen(values, wide);
    place_ = after;
    AFFLUX_UNROLL
    for (int i = 0; i < kParts; ++i) total_[i] = formula::weighted(total_[i], kept[i], wide[i]);
  }
  AFFLUX_INLINE void store(double* sums) const {
    for (int i = 0; i < kParts; ++i) simd::Vector::store(sums + i * simd::kWidth, total_[i]);
  }

 private:
  static constexpr int kParts = sizeof(Mass{}[0]) == sizeof(double) ? 1 : 2;
  const Mass low_, high_, below_, above_;
  Mass place_, before_ = {};
  simd::Doubles total_[kParts] = {};
};

// The columns of rows that all have the same mass, so that of the row k in order kept[k] is kept.
template <class E>
struct EqualColumns {
  using Lanes = std::conditional_t<sizeof(E) == sizeof(double), simd::Doubles, simd::Floats>;
  static constexpr int kCount = sizeof(Lanes) / sizeof(E), kParts = 1;
  using Part = Lanes;
  AFFLUX_INLINE static Part part(Lanes lanes, int) { return lanes; }

  AFFLUX_INLINE Lanes load(int row, int at) const {
    Lanes lanes;
    __builtin_memcpy(&lanes, rows[row] + at, sizeof lanes);
    return lanes;
  }
  AFFLUX_INLINE static Lanes most() { return std::numeric_limits<E>::infinity() - Lanes{}; }
  // The sum of sorted rows.
  struct Sum {
    AFFLUX_INLINE void add(int row, Lanes lanes) {
      if (kept[row] == 0.0) return;  // what is cut leaves nothing
      simd::Doubles wide[kCount / simd::kWidth];
      widen(lanes, wide);
      AFFLUX_UNROLL
      for (int i = 0; i < kCount / simd::kWidth; ++i)
        total[i] = formula::weighted(total[i], simd::Vector::fill(kept[row]), wide[i]);
    }
    AFFLUX_INLINE void store(double* sums) const {
      for (int i = 0; i < kCount / simd::kWidth; ++i) simd::Vector::store(sums + i * simd::kWidth, total[i]);
    }
    const double* kept;
    simd::Doubles total[kCount / simd::kWidth] = {};
  };
  AFFLUX_INLINE Sum sum() const { return {kept}; }

  const E* const* rows;
  const double* kept;
};

// The columns of rows with masses that differ.
struct PackedColumns {
  using Lanes = Packed;
  static constexpr int kCount = simd::kFloats, kParts = 2;
  using Part = simd::Doubles;
  AFFLUX_INLINE static Part part(Lanes lanes, int part) { return part == 0 ? lanes.low : lanes.high; }

  AFFLUX_INLINE Lanes load(int row, int at) const {
    return packed(simd::load_floats(rows[row] + at),
                  simd::all(static_cast<std::uint32_t>(static_cast<std::int32_t>(masses[row]))));
  }
  AFFLUX_INLINE static Lanes most() {
    const simd::Doubles all = simd::Vector::fill(std::numeric_limits<double>::max());
    return {all, all};
  }
  struct Sum : WeightedSum<simd::Ints> {
    using WeightedSum::WeightedSum;
    AFFLUX_INLINE void add(int, Lanes lanes) { WeightedSum::add(masses_in(lanes), values_in(lanes)); }
  };
  AFFLUX_INLINE Sum sum() const { return Sum(window); }

  const float* const* rows;
  const double* masses;
  const formula::Window& window;
};

// Calls exchange(a, b), a < b, for the comparators of Batcher's odd-even merge sort of `count` values, in order. After
// an exchange, value a must not be greater than value b.
template <class Exchange>
AFFLUX_FN constexpr void sort_network(int count, const Exchange& exchange) {
  for (int p = 1; p < count; p += p)
    for (int k = p; k >= 1; k /= 2)
      for (int j = k % p; j + k < count; j += 2 * k)
        for (int a = j; a < j + k && a + k < count; ++a)
          if ((a ^ (a + k)) < 2 * p) exchange(a, a + k);
}

template <class V>
AFFLUX_FN void exchange(V& low, V& high) {
  const V x = low, y = high;
  low = simd::lesser(x, y);
  high = simd::greater(y, x);
}

AFFLUX_FN void exchange(Packed& a, Packed& b) {
  exchange(a.low, b.low);
  exchange(a.high, b.high);
}

// The comparators of N values.
template <int N>
struct Network {
  int count = 0;
  struct {
    short low, high;
  } at[N * N] = {};
  constexpr Network() {
    sort_network(N, [this](int a, int b) {
      at[count].low = static_cast<short>(a);
      at[count++].high = static_cast<short>(b);
    });
  }
};

// Sets `sums` to those of sorted rows. Two vectors of columns are summed at once, because each waits for its own sum.
template <class Columns>
AFFLUX_FN void sum_rows(const Columns& columns, int count, const typename Columns::Lanes* sorted, double* sums) {
  constexpr int kVectors = kTrimRun / Columns::kCount;
  for (int i = 0; i < kVectors; i += 2) {
    auto first = columns.sum(), second = columns.sum();
    for (int k = 0; k < count; ++k) {
      first.add(k, sorted[k * kVectors + i]);
      second.add(k, sorted[k * kVectors + i + 1]);
    }
    first.store(sums + i * Columns::kCount);
    second.store(sums + (i + 1) * Columns::kCount);
  }
}

// Sets `sums` to the sums of columns of up to N rows, which are sorted in registers.
template <class Columns, std::size_t... row, std::size_t... k>
AFFLUX_FN void sum_columns(const Columns& columns, int count, double* memory, double* sums, std::index_sequence<row...>,
                           std::index_sequence<k...>) {
  using Lanes = typename Columns::Lanes;
  constexpr Network<sizeof...(row)> kNetwork;
  // What is above the rows is not less than any value.
  const auto load = [&](int at, int from)
                        AFFLUX_INLINE { return from < count ? columns.load(from, at) : Columns::most(); };
  const auto store = [](Lanes* lanes, int part, const typename Columns::Part& value) AFFLUX_INLINE {
    __builtin_memcpy(reinterpret_cast<typename Columns::Part*>(lanes) + part, &value, sizeof value);
  };
  if constexpr (sizeof...(row) * Columns::kParts <= 24) {
    for (int i = 0; i < kTrimRun; i += Columns::kCount) {
      Lanes x[] = {load(i, row)...};
      (exchange(x[kNetwork.at[k].low], x[kNetwork.at[k].high]), ...);
      auto sum = columns.sum();
      ((int{row} < count ? sum.add(row, x[row]) : static_cast<void>(0)), ...);
      sum.store(sums + i);
    }
  } else {  // parts of their lanes, one after the other, because there are no more registers
    constexpr int kVectors = kTrimRun / Columns::kCount;
    Lanes* const sorted = reinterpret_cast<Lanes*>(memory);
    for (int i = 0; i < kVectors; ++i)
      for (int part = 0; part < Columns::kParts; ++part) {
        typename Columns::Part x[] = {Columns::part(load(i * Columns::kCount, row), part)...};
        (exchange(x[kNetwork.at[k].low], x[kNetwork.at[k].high]), ...);
        ((int{row} < count ? store(sorted + row * kVectors + i, part, x[row]) : static_cast<void>(0)), ...);
      }
    sum_rows(columns, count, sorted, sums);
  }
}
template <int N, class Columns>
__attribute__((noinline)) void sum_columns(const Columns& columns, int count, double* memory, double* sums) {
  sum_columns(columns, count, memory, sums, std::make_index_sequence<N>(),
              std::make_index_sequence<Network<N>().count>());
}

// Does the same with any number of rows, which are sorted in memory.
template <class Columns>
__attribute__((noinline)) void sum_many(const Columns& columns, int count, double* memory, double* sums) {
  using Lanes = typename Columns::Lanes;
  constexpr int kVectors = kTrimRun / Columns::kCount;
  Lanes* const rows = reinterpret_cast<Lanes*>(memory);
  for (int k = 0; k < count; ++k)
    for (int i = 0; i < kVectors; ++i) rows[k * kVectors + i] = columns.load(k, i * Columns::kCount);
  sort_network(count, [&](int a, int b) AFFLUX_INLINE {
    Lanes *const low = rows + a * kVectors, *const high = rows + b * kVectors;
    AFFLUX_UNROLL
    for (int i = 0; i < kVectors; ++i) exchange(low[i], high[i]);
  });
  sum_rows(columns, count, rows, sums);
}

// Does the same, in registers if the rows are few.
template <class Columns>
AFFLUX_FN void sum_sorted(const Columns& columns, int count, double* memory, double* sums) {
  switch (count <= 16 ? (count + 1) / 2 : (count + 7) / 8 * 4) {  // half of the network's size
    case 1:
      return sum_columns<2>(columns, count, memory, sums);
    case 2:
      return sum_columns<4>(columns, count, memory, sums);
    case 3:
      return sum_columns<6>(columns, count, memory, sums);
    case 4:
      return sum_columns<8>(columns, count, memory, sums);
    case 5:
      return sum_columns<10>(columns, count, memory, sums);
    case 6:
      return sum_columns<12>(columns, count, memory, sums);
    case 7:
    case 8:
      return sum_columns<16>(columns, count, memory, sums);
    case 12:
      return sum_columns<24>(columns, count, memory, sums);
    case 16:
      return sum_columns<32>(columns, count, memory, sums);
    default:
      return sum_many(columns, count, memory, sums);
  }
}

// Does the same with float64 values, which are sorted with their masses. These have the signs of the values.
inline void sum_pairs(const formula::TrimmedSum& sum, const double* const* from, const double* masses,
                      const TrimWork& work, double* sums) {
  using V = simd::Doubles;
  double *const rows = work.sorted(), *const beside = work.rows<double>();
  for (int k = 0; k < sum.count; ++k)
    for (int i = 0; i < kTrimRun; ++i) {
      rows[k * kTrimRun + i] = from[k][i];  // which may be beside[k * kTrimRun + i]
      beside[k * kTrimRun + i] = __builtin_copysign(masses[k], rows[k * kTrimRun + i]);
    }
  sort_network(sum.count, [&](int a, int b) AFFLUX_INLINE {
    for (int i = 0; i < kTrimRun; i += simd::kWidth) {
      const std::int64_t low = a * kTrimRun + i, high = b * kTrimRun + i;
      const V x = simd::Vector::load(rows + low), y = simd::Vector::load(rows + high),
              v = simd::Vector::load(beside + low), w = simd::Vector::load(beside + high);
      const auto swap = (y < x) | ((y == x) & (w < v));
      simd::Vector::store(rows + low, swap ? y : x);
      simd::Vector::store(rows + high, swap ? x : y);
      simd::Vector::store(beside + low, swap ? w : v);
      simd::Vector::store(beside + high, swap ? v : w);
    }
  });
  for (int i = 0; i < kTrimRun; i += simd::kWidth) {
    WeightedSum<V> total(sum.window);
    for (int k = i; k < sum.count * kTrimRun; k += kTrimRun)
      total.add(simd::magnitude(simd::Vector::load(beside + k)), simd::Vector::load(rows + k));
    total.store(sums + i);
  }
}

// Sets `masses`, which are equal, to what is kept of the sorted rows.
inline void keep_equal(const formula::Window& window, int count, double* masses) {
  const double mass = masses[0];
  std::int32_t place = window.low;
  for (int k = 0; k < count; ++k) {
    const std::int32_t after = formula::place_in(static_cast<std::int32_t>((k + 1) * mass), window.low, window.high,
                                                 window.below, window.above);
    masses[k] = after - place;
    place = after;
  }
}

// Adds the trimmed mean of the updates, of type T, to v. The function is not inlined: other rounds have none of its
// stack frame.
template <class T>
__attribute__((noinline)) void add_trimmed(const Combine& stage, double* memory, Tile tile, double* v) {
  constexpr bool kWideValues = sizeof(T) == sizeof(double);
  using E = std::conditional_t<kWideValues, double, float>;
  const TrimWork work(stage.updates.size, memory);
  double* const masses = work.masses();
  const formula::TrimmedSum sum = formula::trimmed_sum(stage, masses);
  const formula::Window& window = sum.window;
  const double kept = window.high - window.low;
  if (sum.equal) keep_equal(window, sum.count, masses);
  const E** const from = work.addresses<E>();
  alignas(64) double sums[kTrimRun];
  for (std::int64_t i = 0; sum.count > 0 && i < tile.size; i += kTrimRun) {
    const std::int64_t n = tile.size - i < kTrimRun ? tile.size - i : kTrimRun;
    each_row<T>(stage, tile, i, [&](int k, const T* update) AFFLUX_INLINE {
      E* const row = work.rows<E>() + k * kTrimRun;
      const bool in_place = std::is_same_v<T, E> && n == kTrimRun;
      from[k] = in_place ? reinterpret_cast<const E*>(update) : row;
      if (!in_place) fill_row(update, n, row);
    });
    if (sum.equal) {
      sum_sorted(EqualColumns<E>{from, masses}, sum.count, work.sorted(), sums);
    } else if constexpr (kWideValues) {
      sum_pairs(sum, from, masses, work, sums);
    } else {
      sum_sorted(PackedColumns{from, masses, window}, sum.count, work.sorted(), sums);
    }
    simd::each(n, [&](auto lanes, std::int64_t at) AFFLUX_INLINE {
      lanes.store(v + i + at, formula::add_trimmed_mean(lanes.load(v + i + at), lanes.fill(sum.weight),
                                                        lanes.load(sums + at), lanes.fill(kept)));
    });
  }
}

}  // namespace
}  // namespace afflux::AFFLUX_ISA
