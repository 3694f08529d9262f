// The weighted trimmed mean of the updates, one tile, in runs of kTrimRun elements of all updates: rows, which are
// sorted element by element.
#pragma once
#include <utility>

#include "api/kernels.hpp"
#include "cpu/combine.hpp"
#include "cpu/convert.hpp"
#include "cpu/simd_float.hpp"
#include "formula/trim.hpp"

namespace afflux::AFFLUX_ISA {
namespace {

typedef std::uint64_t LongWords __attribute__((vector_size(simd::kWidth * 8)));

// The vectors of a row's elements, and the largest element.
template <class E>
struct LanesOf {
  using type = simd::Doubles;
  static constexpr double kMost = __DBL_MAX__;
};
template <>
struct LanesOf<float> {
  using type = simd::Floats;
  static constexpr float kMost = __FLT_MAX__;
};

constexpr int kMostInRegisters = 32;  // updates that are sorted in registers, as far as these last

// The memory of a sum, aligned to cache lines (trim_work in api/kernels.hpp).
class TrimWork {
 public:
  TrimWork(std::int64_t updates, double* work) : updates_(updates) {
    const std::uintptr_t past = reinterpret_cast<std::uintptr_t>(work) % 64;
    base_ = work + (past == 0 ? 0 : (64 - past) / sizeof(double));
  }
  template <class E>
  E* rows() const {
    return reinterpret_cast<E*>(base_);
  }
  double* mass_rows() const { return base_ + updates_ * kTrimRun; }
  double* masses() const { return mass_rows() + updates_ * kTrimRun; }

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

// Returns float32 values as the upper halves of 64-bit words.
AFFLUX_FN LongWords as_upper(const float* values) {
#if defined(__AVX512F__)
  return (LongWords)_mm512_cvtepu32_epi64(_mm256_loadu_si256((const __m256i*)values)) << 32;
#elif defined(__AVX2__)
  return (LongWords)_mm256_cvtepu32_epi64(_mm_loadu_si128((const __m128i*)values)) << 32;
#elif defined(__SSE2__)
  return (LongWords)_mm_unpacklo_epi32(_mm_setzero_si128(), _mm_loadl_epi64((const __m128i*)values));
#else
  return (LongWords)vmovl_u32(vreinterpret_u32_f32(vld1_f32(values))) << 32;
#endif
}

// Returns the float32 values in the upper halves of these words.
AFFLUX_FN simd::Doubles upper(const double* words) {
#if defined(__AVX512F__)
  const __m512i shifted = _mm512_srli_epi64(_mm512_loadu_si512(words), 32);
  return (simd::Doubles)_mm512_cvtps_pd(_mm256_castsi256_ps(_mm512_cvtepi64_epi32(shifted)));
#elif defined(__AVX2__)
  const float* const halves = reinterpret_cast<const float*>(words);
  return (simd::Doubles)_mm256_cvtps_pd(_mm_shuffle_ps(_mm_loadu_ps(halves), _mm_loadu_ps(halves + 4), 0xDD));
#elif defined(__SSE2__)
  const __m128 both = _mm_castpd_ps(_mm_loadu_pd(words));
  return (simd::Doubles)_mm_cvtps_pd(_mm_shuffle_ps(both, both, 0xDD));
#else
  return (simd::Doubles)vcvt_f64_f32(vreinterpret_f32_u32(vshrn_n_u64(vreinterpretq_u64_f64(vld1q_f64(words)), 32)));
#endif
}

// Sets a row to values and their mass, each pair packed into one float64 with the bits of the value above those of the
// mass: these numbers have the order in which values are sorted. None is a NaN, because float64 has more bits for the
// exponent than float32.
AFFLUX_FN void pack_row(const float* values, double mass, double* row) {
  const LongWords low = LongWords{} + static_cast<std::uint64_t>(static_cast<std::int64_t>(mass));
  for (int i = 0; i < kTrimRun; i += simd::kWidth)
    simd::Vector::store(row + i, (simd::Doubles)(as_upper(values + i) | low));
}

// Returns the masses in packed numbers.
AFFLUX_FN simd::Doubles mass_in(simd::Doubles packed) {
  const LongWords exponent = LongWords{} + 0x4330000000000000u;  // of 2^52, of which a mass is the last bits
  return (simd::Doubles)(((LongWords)packed & 0xFFFFFFFFu) | exponent) - 0x1p52;
}

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

// Sorts up to N columns of lanes in registers. What is above the rows is not less than any value.
template <class E, class V, std::size_t... row, std::size_t... k>
AFFLUX_FN void sort_columns(int count, const E* const* from, E* rows, std::index_sequence<row...>,
                            std::index_sequence<k...>) {
  constexpr Network<sizeof...(row)> kNetwork;
  for (int i = 0; i < kTrimRun; i += sizeof(V) / sizeof(E)) {
    V x[sizeof...(row)];
    ((int{row} < count ? static_cast<void>(__builtin_memcpy(&x[row], from[row] + i, sizeof(V)))
                       : static_cast<void>(x[row] = LanesOf<E>::kMost - V{})),
     ...);
    (exchange(x[kNetwork.at[k].low], x[kNetwork.at[k].high]), ...);
    ((int{row} < count ? static_cast<void>(__builtin_memcpy(rows + row * kTrimRun + i, &x[row], sizeof(V)))
                       : static_cast<void>(0)),
     ...);
  }
}
template <int N, class E>
__attribute__((noinline)) void sort_rows(int count, const E* const* from, E* rows) {
  sort_columns<E, typename LanesOf<E>::type>(count, from, rows, std::make_index_sequence<N>(),
                                             std::make_index_sequence<Network<N>().count>());
}

// Sorts any number of rows, in memory.
template <class E>
__attribute__((noinline)) void sort_rows(int count, E* rows) {
  using V = typename LanesOf<E>::type;
  constexpr int kVectors = kTrimRun * sizeof(E) / sizeof(V);
  sort_network(count, [&](int a, int b) AFFLUX_INLINE {
    V *const low = reinterpret_cast<V*>(rows + a * kTrimRun), *const high = reinterpret_cast<V*>(rows + b * kTrimRun);
    AFFLUX_UNROLL
    for (int i = 0; i < kVectors; ++i) exchange(low[i], high[i]);
  });
}

// Sorts rows, which may be elsewhere: `from` has their addresses.
template <class E>
AFFLUX_FN void sort(int count, const E* const* from, E* rows) {
  switch (count <= 16 ? (count + 1) / 2 : (count + 7) / 8 * 4) {  // half of the network's size
    case 1:
      return sort_rows<2>(count, from, rows);
    case 2:
      return sort_rows<4>(count, from, rows);
    case 3:
      return sort_rows<6>(count, from, rows);
    case 4:
      return sort_rows<8>(count, from, rows);
    case 5:
      return sort_rows<10>(count, from, rows);
    case 6:
      return sort_rows<12>(count, from, rows);
    case 7:
    case 8:
      return sort_rows<16>(count, from, rows);
    case 12:
      return sort_rows<24>(count, from, rows);
    case 16:
      return sort_rows<32>(count, from, rows);
    default:
      return sort_rows(count, rows);
  }
}

// Sorts rows of float64 with rows of their masses, which have the signs of the values.
AFFLUX_FN void sort_pairs(int count, double* rows, double* masses) {
  using V = simd::Doubles;
  sort_network(count, [&](int a, int b) AFFLUX_INLINE {
    for (int i = 0; i < kTrimRun; i += simd::kWidth) {
      const std::int64_t low = a * kTrimRun + i, high = b * kTrimRun + i;
      const V x = simd::Vector::load(rows + low), y = simd::Vector::load(rows + high),
              v = simd::Vector::load(masses + low), w = simd::Vector::load(masses + high);
      const auto swap = (y < x) | ((y == x) & (w < v));
      simd::Vector::store(rows + low, swap ? y : x);
      simd::Vector::store(rows + high, swap ? x : y);
      simd::Vector::store(masses + low, swap ? w : v);
      simd::Vector::store(masses + high, swap ? v : w);
    }
  });
}

// Sets `sums` to the sum of sorted rows, each times the mass that is kept of it; all have the same mass.
template <class E>
AFFLUX_FN void sum_equal(const formula::TrimmedSum& sum, double mass, const E* rows, double* sums) {
  const simd::VectorPack lanes;
  const formula::Window& window = sum.window;
  const auto place = [&](double before) AFFLUX_INLINE {
    return formula::place_in<double>(before, window.low, window.high, window.below, window.above);
  };
  for (int i = 0; i < kTrimRun; i += simd::kWide) {
    simd::Pack total = lanes.fill(0.0);
    for (int k = 0; k < sum.count; ++k) {
      const double kept = place((k + 1) * mass) - place(k * mass);
      if (kept != 0.0) total = formula::weighted(total, lanes.fill(kept), lanes.load(rows + k * kTrimRun + i));
    }
    lanes.store(sums + i, total);
  }
}

// Does the same with masses that differ: mass(k, i) and value(k, i) are those of row k.
template <class Mass, class Value>
AFFLUX_FN void sum_weighted(const formula::TrimmedSum& sum, const Mass& mass, const Value& value, double* sums) {
  const auto all = [](double number) AFFLUX_INLINE { return simd::Vector::fill(number); };
  const simd::Doubles low = all(sum.window.low), high = all(sum.window.high), below = all(sum.window.below),
                      above = all(sum.window.above);
  constexpr int kColumns = 2;  // at once: each waits for its own sum of the masses
  for (int i = 0; i < kTrimRun; i += kColumns * simd::kWidth) {
    simd::Doubles total[kColumns] = {}, before[kColumns] = {}, place[kColumns] = {low, low};
    for (int k = 0; k < sum.count; ++k) {
      AFFLUX_UNROLL
      for (int j = 0; j < kColumns; ++j) {
        const int at = k * kTrimRun + i + j * simd::kWidth;
        before[j] = before[j] + mass(at);
        const simd::Doubles after = formula::place_in(before[j], low, high, below, above);
        total[j] = formula::weighted(total[j], after - place[j], value(at));
        place[j] = after;
      }
    }
    AFFLUX_UNROLL
    for (int j = 0; j < kColumns; ++j) simd::Vector::store(sums + i + j * simd::kWidth, total[j]);
  }
}

// Adds the trimmed mean of the updates, of type T, to v. The function is not inlined: other rounds have none of its
// stack frame.
template <class T>
__attribute__((noinline)) void add_trimmed(const Combine& stage, double* memory, Tile tile, double* v) {
  constexpr bool kWideValues = sizeof(T) == sizeof(double);
  using E = std::conditional_t<kWideValues, double, float>;
  const TrimWork work(stage.updates.size, memory);
  const double* const masses = work.masses();
  const formula::TrimmedSum sum = formula::trimmed_sum(stage, work.masses());
  const double kept = sum.window.high - sum.window.low;
  const bool in_registers = sum.count <= kMostInRegisters;
  const E* from[kMostInRegisters];
  const double* packed[kMostInRegisters];
  alignas(64) double sums[kTrimRun];
  alignas(64) float values[kTrimRun] = {};
  for (std::int64_t i = 0; sum.count > 0 && i < tile.size; i += kTrimRun) {
    const std::int64_t n = tile.size - i < kTrimRun ? tile.size - i : kTrimRun;
    if (sum.equal) {
      E* const rows = work.rows<E>();
      each_row<T>(stage, tile, i, [&](int k, const T* update) AFFLUX_INLINE {
        E* const row = rows + k * kTrimRun;
        const bool in_place = std::is_same_v<T, E> && in_registers && n == kTrimRun;
        if (in_registers) from[k] = in_place ? reinterpret_cast<const E*>(update) : row;
        if (!in_place) fill_row(update, n, row);
      });
      sort(sum.count, from, rows);
      sum_equal(sum, masses[0], rows, sums);
    } else {
      double *const rows = work.rows<double>(), *const beside = work.mass_rows();
      each_row<T>(stage, tile, i, [&](int k, const T* update) AFFLUX_INLINE {
        double* const row = rows + k * kTrimRun;
        if (in_registers) packed[k] = row;
        if constexpr (kWideValues) {
          fill_row(update, n, row);
          for (int at = 0; at < kTrimRun; ++at) beside[k * kTrimRun + at] = __builtin_copysign(masses[k], row[at]);
        } else if (sizeof(T) == sizeof(float) && n == kTrimRun) {
          pack_row(reinterpret_cast<const float*>(update), masses[k], row);
        } else {
          fill_row(update, n, values);
          pack_row(values, masses[k], row);
        }
      });
      if constexpr (kWideValues) {
        sort_pairs(sum.count, rows, beside);
        sum_weighted(
            sum, [&](int at) AFFLUX_INLINE { return simd::magnitude(simd::Vector::load(beside + at)); },
            [&](int at) AFFLUX_INLINE { return simd::Vector::load(rows + at); }, sums);
      } else {
        sort(sum.count, packed, rows);
        sum_weighted(
            sum, [&](int at) AFFLUX_INLINE { return mass_in(simd::Vector::load(rows + at)); },
            [&](int at) AFFLUX_INLINE { return upper(rows + at); }, sums);
      }
    }
    simd::each(n, [&](auto lanes, std::int64_t at) AFFLUX_INLINE {
      lanes.store(v + i + at, formula::add_trimmed_mean(lanes.load(v + i + at), lanes.fill(sum.weight),
                                                        lanes.load(sums + at), lanes.fill(kept)));
    });
  }
}

}  // namespace
}  // namespace afflux::AFFLUX_ISA
