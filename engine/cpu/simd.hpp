// Elementwise work in the native vectors of the instruction set being compiled: float64 inside; float32, float64 and
// bfloat16 in memory. Compiler vectors keep + and * as operators with IEEE meaning, so the order of a sum is what the
// code says. The conversions are spelled out because GCC turns the portable ones into shuffles.
#pragma once
#include "formula/half.hpp"

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

// kWidth elements at a time, any alignment.
struct Many {
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
  // A bfloat16 is the upper half of a float32.
  AFFLUX_FN Doubles load(const Bfloat16* values) {
#if defined(__AVX512F__)
    const __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)values));
    return (Doubles)_mm512_cvtps_pd(_mm256_castsi256_ps(_mm256_slli_epi32(wide, 16)));
#elif defined(__AVX__)
    const __m128i wide = _mm_cvtepu16_epi32(_mm_loadl_epi64((const __m128i*)values));
    return (Doubles)_mm256_cvtps_pd(_mm_castsi128_ps(_mm_slli_epi32(wide, 16)));
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
  AFFLUX_FN Doubles fill(double value) { return value - Doubles{}; }  // minus +0.0, which keeps -0.0
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
};

// The same for a single element.
struct One {
  AFFLUX_FN double load(const float* value) { return static_cast<double>(*value); }
  AFFLUX_FN double load(const double* value) { return *value; }
  AFFLUX_FN double load(const Bfloat16* value) { return static_cast<double>(formula::widened(*value)); }
  AFFLUX_FN double fill(double value) { return value; }
  AFFLUX_FN double root(double value) { return __builtin_sqrt(value); }
  AFFLUX_FN void store(double* to, double value) { *to = value; }
  AFFLUX_FN void store(float* to, double value) { *to = static_cast<float>(value); }
};

// body(lanes, i) for all of [0, n): vectors first, then what is left one by one. `body` is written once for both.
template <class Body>
AFFLUX_FN void each(std::int64_t n, const Body& body) {
  std::int64_t i = 0;
  for (; i + kWidth <= n; i += kWidth) body(Many{}, i);
  for (; i < n; ++i) body(One{}, i);
}

// acc + x * y of values stored as X and Y; see formula::dot_term for where fusing is exact.
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
