// float32 and 32-bit words in the native vectors of the instruction set that is compiled, for the codecs. As in
// simd.hpp, operators have IEEE meaning; intrinsics are used only where the compiler's own code is slower.
#pragma once
#include "cpu/simd.hpp"

namespace afflux::AFFLUX_ISA {
namespace {
namespace simd {

constexpr int kFloats = 2 * kWidth;

typedef float Floats __attribute__((vector_size(kFloats * 4)));
typedef std::uint32_t Words __attribute__((vector_size(kFloats * 4)));
typedef std::int32_t Ints __attribute__((vector_size(kFloats * 4)));

AFFLUX_FN Floats load_floats(const float* from) {
  Floats values;
  __builtin_memcpy(&values, from, sizeof values);
  return values;
}
AFFLUX_FN void store_floats(float* to, Floats values) { __builtin_memcpy(to, &values, sizeof values); }
// The loads after it read what was stored. Clang 22 else takes half of a stored vector from its register, lane by lane.
AFFLUX_FN void to_memory() { asm volatile("" : : : "memory"); }
AFFLUX_FN Floats all(float value) { return value - Floats{}; }
AFFLUX_FN Words all(std::uint32_t value) { return value + Words{}; }
AFFLUX_FN Words bits_of(Floats values) { return (Words)values; }
AFFLUX_FN Floats floats_of(Words bits) { return (Floats)bits; }

// Returns 0, 1, ... kFloats - 1.
AFFLUX_FN Words count_up() {
  Words result{};
  for (int i = 0; i < kFloats; ++i) result[i] = static_cast<std::uint32_t>(i);
  return result;
}

// Return x < acc ? x : acc and acc < x ? x : acc, like formula::lesser and formula::greater.
AFFLUX_FN Floats lesser(Floats acc, Floats x) {
#if defined(__AVX512F__)
  return (Floats)_mm512_mask_min_ps((__m512)x, 0xFFFF, (__m512)x, (__m512)acc);
#elif defined(__AVX__)
  return (Floats)_mm256_min_ps((__m256)x, (__m256)acc);
#elif defined(__SSE2__)
  return (Floats)_mm_min_ps((__m128)x, (__m128)acc);
#else
  return x < acc ? x : acc;
#endif
}
AFFLUX_FN Floats greater(Floats acc, Floats x) {
#if defined(__AVX512F__)
  return (Floats)_mm512_mask_max_ps((__m512)x, 0xFFFF, (__m512)x, (__m512)acc);
#elif defined(__AVX__)
  return (Floats)_mm256_max_ps((__m256)x, (__m256)acc);
#elif defined(__SSE2__)
  return (Floats)_mm_max_ps((__m128)x, (__m128)acc);
#else
  return acc < x ? x : acc;
#endif
}

// Sets `least` to the smallest lane of `low`, and `most` to the largest lane of `high`.
AFFLUX_FN void extremes(Floats low, Floats high, float& least, float& most) {
#if defined(__AVX512F__)
  // Both are computed together: the largest value is the negative of the smallest negated value.
  const __m512 a = (__m512)low, b = (__m512)-high;
  const __m256 a8 = _mm256_min_ps(_mm512_castps512_ps256(a), _mm512_extractf32x8_ps(a, 1));
  const __m256 b8 = _mm256_min_ps(_mm512_castps512_ps256(b), _mm512_extractf32x8_ps(b, 1));
  const __m256 first = _mm256_permute2f128_ps(a8, b8, 0x20), second = _mm256_permute2f128_ps(a8, b8, 0x31);
  __m256 four = _mm256_min_ps(first, second);
  four = _mm256_min_ps(four, _mm256_permute_ps(four, 0x4E));
  four = _mm256_min_ps(four, _mm256_permute_ps(four, 0xB1));
  least = _mm256_cvtss_f32(four);
  most = -_mm_cvtss_f32(_mm256_extractf128_ps(four, 1));
#else
  least = low[0];
  most = high[0];
#pragma GCC unroll 8
  for (int lane = 1; lane < kFloats; ++lane) {
    least = low[lane] < least ? low[lane] : least;
    most = most < high[lane] ? high[lane] : most;
  }
#endif
}

// Rounds towards 0; the values must fit.
AFFLUX_FN Words truncated(Floats values) { return (Words) __builtin_convertvector(values, Ints); }
AFFLUX_FN Floats converted(Words values) { return __builtin_convertvector((Ints)values, Floats); }

// Returns a * b + c, where a * b must be exact: then one fused instruction and two separate ones give the same bits.
AFFLUX_FN Floats exact_product_plus(Floats a, Floats b, Floats c) {
#if defined(__AVX512F__)
  return (Floats)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (Floats)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

AFFLUX_FN Doubles magnitude(Doubles values) {
  typedef std::int64_t Longs __attribute__((vector_size(kWidth * 8)));
  return (Doubles)((Longs)values & INT64_MAX);
}

// The operations on lanes for formulas over float32.
struct FloatLanes {
  AFFLUX_FN Floats lesser(Floats acc, Floats x) { return simd::lesser(acc, x); }
  AFFLUX_FN Floats greater(Floats acc, Floats x) { return simd::greater(acc, x); }
  AFFLUX_FN Words truncated(Floats values) { return simd::truncated(values); }
  AFFLUX_FN Floats converted(Words values) { return simd::converted(values); }
  AFFLUX_FN Floats exact_product_plus(Floats a, Floats b, Floats c) { return simd::exact_product_plus(a, b, c); }
};

// Shifts by a count that is not a constant. The instruction with a count for each lane, if there is one, is faster.
AFFLUX_FN Words shifted_left(Words words, int count) {
#if defined(__AVX2__)
  return words << all(static_cast<std::uint32_t>(count));
#else
  return words << count;
#endif
}

// Returns table[index mod kPicked], for a table that repeats after 2^kBits entries; kBits is 1, 2 or 4.
constexpr int kPicked = 16;
template <int kBits>
AFFLUX_FN Floats pick(const float* table, Words index) {
#if defined(__AVX512F__)
  return (Floats)_mm512_permutexvar_ps((__m512i)index, _mm512_loadu_ps(table));
#elif defined(__AVX2__)
  const __m256i where = (__m256i)index;
  if (kBits <= 2) return (Floats)_mm256_permutevar_ps(_mm256_loadu_ps(table), where);
  const __m256 lower = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table), where);
  const __m256 upper = _mm256_permutevar8x32_ps(_mm256_loadu_ps(table + 8), where);
  return (Floats)_mm256_blendv_ps(lower, upper, _mm256_castsi256_ps(_mm256_slli_epi32(where, 28)));
#else
  if (kBits == 4) {
    Floats result;
    for (int lane = 0; lane < kFloats; ++lane) result[lane] = table[index[lane] % kPicked];
    return result;
  }
  const Floats low = (index & 1u) != 0u ? all(table[1]) : all(table[0]);
  if (kBits == 1) return low;
  const Floats high = (index & 1u) != 0u ? all(table[3]) : all(table[2]);
  return (index & 2u) != 0u ? high : low;
#endif
}

// Conversions of kFloats float16 values from and to memory; for finite values they give the bits of
// formula::narrow_finite. The instructions have their own rounding mode, and keep the subnormals of float16 whatever
// the thread's floating-point mode is.
#if defined(__F16C__)
AFFLUX_FN Floats load_halves(const Float16* from) {
#if defined(__AVX512F__)
  return (Floats)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)from));
#else
  return (Floats)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)from));
#endif
}
// Stores the values as float16, and returns the stored values.
AFFLUX_FN Floats store_halves(Float16* to, Floats values) {
  const Words sign = bits_of(values) & 0x80000000u;
  const Floats magnitude = lesser(all(65504.0f), floats_of(bits_of(values) & 0x7FFFFFFFu));
  const Floats finite = floats_of(bits_of(magnitude) | sign);
#if defined(__AVX512F__)
  const __m256i halves = _mm512_cvtps_ph((__m512)finite, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  _mm256_storeu_si256((__m256i*)to, halves);
  return (Floats)_mm512_cvtph_ps(halves);
#else
  const __m128i halves = _mm256_cvtps_ph((__m256)finite, _MM_FROUND_TO_NEAREST_INT);
  _mm_storeu_si128((__m128i*)to, halves);
  return (Floats)_mm256_cvtph_ps(halves);
#endif
}
#endif

// Conversions of kFloats bytes to words, one word for each byte, and back; the words are below 256.
AFFLUX_FN Words load_bytes(const unsigned char* from) {
#if defined(__AVX512F__)
  return (Words)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)from));
#elif defined(__AVX2__)
  return (Words)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from));
#elif defined(__SSE2__)
  std::int32_t four;
  __builtin_memcpy(&four, from, 4);
  const __m128i zero = _mm_setzero_si128(), pairs = _mm_unpacklo_epi8(_mm_cvtsi32_si128(four), zero);
  return (Words)_mm_unpacklo_epi16(pairs, zero);
#else
  std::uint32_t four;
  __builtin_memcpy(&four, from, 4);
  return (Words)vmovl_u16(vget_low_u16(vmovl_u8(vcreate_u8(four))));
#endif
}
AFFLUX_FN void store_bytes(unsigned char* to, Words words) {
#if defined(__AVX512F__)
  _mm_storeu_si128((__m128i*)to, _mm512_cvtepi32_epi8((__m512i)words));
#elif defined(__AVX2__)
  const __m256i whole = (__m256i)words;
  const __m128i pairs = _mm_packus_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256(whole, 1));
  _mm_storel_epi64((__m128i*)to, _mm_packus_epi16(pairs, pairs));
#elif defined(__SSE2__)
  const __m128i pairs = _mm_packs_epi32((__m128i)words, (__m128i)words);
  const std::int32_t four = _mm_cvtsi128_si32(_mm_packus_epi16(pairs, pairs));
  __builtin_memcpy(to, &four, 4);
#else
  const uint16x4_t pairs = vmovn_u32((uint32x4_t)words);
  const std::uint64_t eight = vget_lane_u64((uint64x1_t)vmovn_u16(vcombine_u16(pairs, pairs)), 0);
  const std::uint32_t four = static_cast<std::uint32_t>(eight);
  __builtin_memcpy(to, &four, 4);
#endif
}

}  // namespace simd
}  // namespace
}  // namespace afflux::AFFLUX_ISA
