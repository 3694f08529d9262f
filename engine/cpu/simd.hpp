// Elementwise work in the native vectors of the instruction set that is compiled: float64 in registers; float32,
// float64 and bfloat16 in memory. Vectors of the compiler have the operators + and * with IEEE meaning, so a sum has
// the order in the code. The conversions use intrinsics, because GCC turns the portable ones into shuffles.
#pragma once
#include "formula/half.hpp"
#include "formula/lanes.hpp"

#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#else
#error "no vectors are known for this processor"
#endif

#define AFFLUX_INLINE __attribute__((always_inline))

namespace afflux::AFFLUX_ISA {
namespace {
namespace simd {

#if defined(__AVX512F__)
constexpr int kWidth = 8;
#elif defined(__AVX__)
constexpr int kWidth = 4;
#else
constexpr int kWidth = 2;
#endif

typedef double Doubles __attribute__((vector_size(kWidth * 8)));
typedef std::uint64_t Longs __attribute__((vector_size(kWidth * 8)));

constexpr std::int64_t kPrefetchDistance = 2048;
constexpr std::uintptr_t kStreamed = 64;
#if defined(__AVX__)
constexpr bool kCanStream = true;
#else
constexpr bool kCanStream = false;
#endif

// Prefetches `count` elements at a distance of `ahead` bytes; does nothing if `ahead` is 0. The processor's own
// prefetchers follow a stream only for a few lines, and not beyond its page.
template <class T>
AFFLUX_FN void prefetch(const T* values, int count, std::int64_t ahead) {
  if (ahead == 0) return;
  for (std::size_t line = 0; line < static_cast<std::size_t>(count) * sizeof(T); line += 64)
    __builtin_prefetch(reinterpret_cast<const char*>(values) + ahead + line);
}

// Operations on kWidth elements at a time, of any alignment.
struct Vector {
  template <class T>
  AFFLUX_FN void prefetch(const T* values, std::int64_t ahead) {
    simd::prefetch(values, kWidth, ahead);
  }
  AFFLUX_FN Doubles load(const float* values) {
#if defined(__AVX512F__)
    return (Doubles)_mm512_cvtps_pd(_mm256_loadu_ps(values));
#elif defined(__AVX__)
    return (Doubles)_mm256_cvtps_pd(_mm_loadu_ps(values));
#elif defined(__SSE2__)
    return (Doubles)_mm_cvtps_pd(_mm_castsi128_ps(_mm_loadl_epi64((const __m128i*)values)));
#else
    return (Doubles)vcvt_f64_f32(vld1_f32(values));
#endif
  }
  AFFLUX_FN Doubles load(const double* values) {
    Doubles result;
    __builtin_memcpy(&result, values, sizeof result);
    return result;
  }
  // A bfloat16 is the upper half of a float32: one shuffle puts zeros below each.
  AFFLUX_FN Doubles load(const Bfloat16* values) {
#if defined(__AVX512F__)
    const __m256i spread = _mm256_setr_epi8(-1, -1, 0, 1, -1, -1, 2, 3, -1, -1, 4, 5, -1, -1, 6, 7,  //
                                            -1, -1, 8, 9, -1, -1, 10, 11, -1, -1, 12, 13, -1, -1, 14, 15);
    const __m256i twice = _mm256_broadcastsi128_si256(_mm_loadu_si128((const __m128i*)values));
    return (Doubles)_mm512_cvtps_pd(_mm256_castsi256_ps(_mm256_shuffle_epi8(twice, spread)));
#elif defined(__AVX__)
    const __m128i spread = _mm_setr_epi8(-1, -1, 0, 1, -1, -1, 2, 3, -1, -1, 4, 5, -1, -1, 6, 7);
    const __m128i wide = _mm_shuffle_epi8(_mm_loadl_epi64((const __m128i*)values), spread);
    return (Doubles)_mm256_cvtps_pd(_mm_castsi128_ps(wide));
#elif defined(__SSE2__)
    int pair;
    __builtin_memcpy(&pair, values, sizeof pair);
    const __m128i wide = _mm_unpacklo_epi16(_mm_setzero_si128(), _mm_cvtsi32_si128(pair));
    return (Doubles)_mm_cvtps_pd(_mm_castsi128_ps(wide));
#else
    std::uint32_t pair;
    __builtin_memcpy(&pair, values, sizeof pair);
    const uint32x4_t wide = vshll_n_u16(vcreate_u16(pair), 16);
    return (Doubles)vcvt_f64_f32(vreinterpret_f32_u32(vget_low_u32(wide)));
#endif
  }
  AFFLUX_FN Doubles fill(double value) { return value - Doubles{}; }  // subtracts +0.0, which keeps -0.0
  AFFLUX_FN Doubles root(Doubles value) {
#if defined(__AVX512F__)
    return (Doubles)_mm512_sqrt_pd((__m512d)value);
#elif defined(__AVX__)
    return (Doubles)_mm256_sqrt_pd((__m256d)value);
#elif defined(__SSE2__)
    return (Doubles)_mm_sqrt_pd((__m128d)value);
#else
    return (Doubles)vsqrtq_f64((float64x2_t)value);
#endif
  }
  AFFLUX_FN Longs bits_of(Doubles value) { return (Longs)value; }
  AFFLUX_FN Doubles number_of(Longs bits) { return (Doubles)bits; }
  AFFLUX_FN void store(double* to, Doubles value) { __builtin_memcpy(to, &value, sizeof value); }
  AFFLUX_FN void store(float* to, Doubles value) {
#if defined(__AVX512F__)
    _mm256_storeu_ps(to, _mm512_cvtpd_ps((__m512d)value));
#elif defined(__AVX__)
    _mm_storeu_ps(to, _mm256_cvtpd_ps((__m256d)value));
#elif defined(__SSE2__)
    _mm_storel_epi64((__m128i*)to, _mm_castps_si128(_mm_cvtpd_ps((__m128d)value)));
#else
    vst1_f32(to, vcvt_f32_f64((float64x2_t)value));
#endif
  }
  // Stores past the caches, if the instruction set has such stores of half a vector; `to` must be aligned to the size
  // of the store. stored_streams() orders these stores before later ones.
  AFFLUX_FN void stream(float* to, Doubles value) {
#if defined(__AVX512F__)
    _mm256_stream_ps(to, _mm512_cvtpd_ps((__m512d)value));
#elif defined(__AVX__)
    _mm_stream_ps(to, _mm256_cvtpd_ps((__m256d)value));
#else
    store(to, value);
#endif
  }
  // Copies elements to the same type, or to float32, rounded.
  AFFLUX_FN void copy(const double* from, double* to) { __builtin_memcpy(to, from, kWidth * sizeof(double)); }
  template <class From>
  AFFLUX_FN void copy(const From* from, float* to) {
    store(to, load(from));
  }
  AFFLUX_FN void copy(const float* from, float* to) { __builtin_memcpy(to, from, kWidth * sizeof(float)); }
};

// Return x < acc ? x : acc and acc < x ? x : acc. With a mask of all lanes: GCC 12 warns of the intrinsics without one.
AFFLUX_FN Doubles lesser(Doubles acc, Doubles x) {
#if defined(__AVX512F__)
  return (Doubles)_mm512_mask_min_pd((__m512d)x, 0xFF, (__m512d)x, (__m512d)acc);
#elif defined(__AVX__)
  return (Doubles)_mm256_min_pd((__m256d)x, (__m256d)acc);
#elif defined(__SSE2__)
  return (Doubles)_mm_min_pd((__m128d)x, (__m128d)acc);
#else
  return x < acc ? x : acc;
#endif
}
AFFLUX_FN Doubles greater(Doubles acc, Doubles x) {
#if defined(__AVX512F__)
  return (Doubles)_mm512_mask_max_pd((__m512d)x, 0xFF, (__m512d)x, (__m512d)acc);
#elif defined(__AVX__)
  return (Doubles)_mm256_max_pd((__m256d)x, (__m256d)acc);
#elif defined(__SSE2__)
  return (Doubles)_mm_max_pd((__m128d)x, (__m128d)acc);
#else
  return acc < x ? x : acc;
#endif
}

// The same operations on a single element.
struct Single : formula::OneLane {
  template <class T>
  AFFLUX_FN void prefetch(const T*, std::int64_t) {}
  AFFLUX_FN double load(const float* value) { return static_cast<double>(*value); }
  AFFLUX_FN double load(const double* value) { return *value; }
  AFFLUX_FN double load(const Bfloat16* value) { return static_cast<double>(formula::widened(*value)); }
  AFFLUX_FN void store(double* to, double value) { *to = value; }
  AFFLUX_FN void store(float* to, double value) { *to = static_cast<float>(value); }
  template <class From, class To>
  AFFLUX_FN void copy(const From* from, To* to) {
    formula::narrow(formula::widened(*from), to);
  }
};

// The elements of four vectors, which are processed together: whole cache lines of each stream, and sums of many
// streams that stay in registers. Pack has named members, because GCC keeps arrays in memory.
constexpr int kWide = 4 * kWidth;

struct Pack {
  Doubles a, b, c, d;
};
AFFLUX_FN Pack operator+(Pack x, Pack y) { return {x.a + y.a, x.b + y.b, x.c + y.c, x.d + y.d}; }
AFFLUX_FN Pack operator-(Pack x, Pack y) { return {x.a - y.a, x.b - y.b, x.c - y.c, x.d - y.d}; }
AFFLUX_FN Pack operator*(Pack x, Pack y) { return {x.a * y.a, x.b * y.b, x.c * y.c, x.d * y.d}; }

struct VectorPack {
  template <class T>
  AFFLUX_FN Pack load(const T* values) {
    return {Vector::load(values), Vector::load(values + kWidth), Vector::load(values + 2 * kWidth),
            Vector::load(values + 3 * kWidth)};
  }
  AFFLUX_FN Pack fill(double value) {
    const Doubles all = Vector::fill(value);
    return {all, all, all, all};
  }
  template <class T>
  AFFLUX_FN void store(T* to, Pack values) {
    Vector::store(to, values.a);
    Vector::store(to + kWidth, values.b);
    Vector::store(to + 2 * kWidth, values.c);
    Vector::store(to + 3 * kWidth, values.d);
  }
  template <class From, class To>
  AFFLUX_FN void copy(const From* from, To* to) {
    for (int part = 0; part < 4; ++part) Vector::copy(from + part * kWidth, to + part * kWidth);
  }
  template <class T>
  AFFLUX_FN void prefetch(const T* values, std::int64_t ahead) {
    simd::prefetch(values, kWide, ahead);
  }
};

// Copies 64 bytes past the caches; `to` is aligned to kStreamed.
AFFLUX_FN void stream_line(const void* from, void* to) {
#if defined(__AVX512F__)
  _mm512_stream_si512((__m512i*)to, _mm512_loadu_si512(from));
#elif defined(__AVX__)
  for (int half = 0; half < 2; ++half)
    _mm256_stream_si256((__m256i*)to + half, _mm256_loadu_si256((const __m256i*)from + half));
#else
  __builtin_memcpy(to, from, 64);
#endif
}
// Does the same, and also copies the bytes to `copy`. They are read once.
AFFLUX_FN void stream_line(const void* from, void* to, void* copy) {
#if defined(__AVX512F__)
  const __m512i line = _mm512_loadu_si512(from);
  _mm512_stream_si512((__m512i*)to, line);
  _mm512_storeu_si512(copy, line);
#elif defined(__AVX__)
  for (int half = 0; half < 2; ++half) {
    const __m256i part = _mm256_loadu_si256((const __m256i*)from + half);
    _mm256_stream_si256((__m256i*)to + half, part);
    _mm256_storeu_si256((__m256i*)copy + half, part);
  }
#else
  __builtin_memcpy(copy, from, 64);
  __builtin_memcpy(to, copy, 64);
#endif
}

// Orders the stores past the caches before all later stores.
AFFLUX_FN void stored_streams() {
#if defined(__AVX__)
  _mm_sfence();
#endif
}

// Calls body(lanes, i) for all of [0, n): for vectors first, then for the remaining elements one by one. `body` is
// written once for both.
template <class Body>
AFFLUX_FN void each(std::int64_t n, const Body& body) {
  std::int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) body(Vector{}, i);
  for (; i < n; ++i) body(Single{}, i);
}

// Does the same, with four vectors at a time first.
template <class Body>
AFFLUX_FN void each_wide(std::int64_t n, const Body& body) {
  std::int64_t i = 0;
  for (; i + kWide <= n; i += kWide) body(VectorPack{}, i);
  for (; i + kWidth <= n; i += kWidth) body(Vector{}, i);
  for (; i < n; ++i) body(Single{}, i);
}

// Returns acc + x * y for values stored as X and Y; see formula::dot_term for the types that allow a fused
// multiply-add.
template <class X, class Y = X>
AFFLUX_FN Doubles dot_term(Doubles acc, Doubles x, Doubles y) {
  if constexpr (sizeof(X) == sizeof(double) || sizeof(Y) == sizeof(double)) return acc + x * y;
#if defined(__AVX512F__)
  return (Doubles)_mm512_fmadd_pd((__m512d)x, (__m512d)y, (__m512d)acc);
#elif defined(__FMA__)
  return (Doubles)_mm256_fmadd_pd((__m256d)x, (__m256d)y, (__m256d)acc);
#else
  return acc + x * y;
#endif
}

}  // namespace simd
}  // namespace
}  // namespace afflux::AFFLUX_ISA
