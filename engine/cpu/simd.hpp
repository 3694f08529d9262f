// The native vector of the instruction set being compiled: kWidth float64 lanes, and how float32 values get there.
// Compiler vectors keep + and * as operators with IEEE meaning, so the order of a sum is what the code says.
#pragma once
#include "formula/fn.hpp"

#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#elif defined(__ARM_NEON)
#include <arm_neon.h>
#endif

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

// kWidth float32 values, any alignment of 4 bytes, as float64. GCC turns the portable conversion into shuffles.
AFFLUX_FN Doubles widen(const float* values) {
#if defined(__AVX512F__)
  return (Doubles)_mm512_cvtps_pd(_mm256_loadu_ps(values));
#elif defined(__AVX__)
  return (Doubles)_mm256_cvtps_pd(_mm_loadu_ps(values));
#elif defined(__SSE2__)
  return (Doubles)_mm_cvtps_pd(_mm_castsi128_ps(_mm_loadl_epi64((const __m128i*)values)));
#elif defined(__ARM_NEON)
  return (Doubles)vcvt_f64_f32(vld1_f32(values));
#else
  return Doubles{static_cast<double>(values[0]), static_cast<double>(values[1])};
#endif
}

AFFLUX_FN void store(double* to, Doubles value) { __builtin_memcpy(to, &value, sizeof value); }

// acc + x * y with float32 values in x and y; see formula::dot_term for why fusing is exact.
AFFLUX_FN Doubles dot_term(Doubles acc, Doubles x, Doubles y) {
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
