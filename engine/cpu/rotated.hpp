// The rotated codec, one group of kBlock elements: kRotations vectors side by side, element e being number e / 16 of
// vector e mod 16. So a rotation needs no shuffles, and every reduction is one lane's own.
#pragma once
#include "cpu/affine.hpp"

namespace afflux::AFFLUX_ISA {
namespace {

// kPoints vectors of kRotations elements each, `apart` elements from one to the next: the stages of their transform.
template <int kPoints>
AFFLUX_FN void butterflies(float* values, int apart) {
  for (int lane = 0; lane < kRotations; lane += simd::kFloats) {
    simd::Floats x[kPoints];
#pragma GCC unroll 16
    for (int i = 0; i < kPoints; ++i) x[i] = simd::load_floats(values + i * apart + lane);
#pragma GCC unroll 4
    for (int half = 1; half < kPoints; half *= 2) {
#pragma GCC unroll 16
      for (int i = 0; i < kPoints; ++i) {
        if ((i & half) != 0) continue;
        const simd::Floats sum = x[i] + x[i + half];
        x[i + half] = x[i] - x[i + half];
        x[i] = sum;
      }
    }
#pragma GCC unroll 16
    for (int i = 0; i < kPoints; ++i) simd::store_floats(values + i * apart + lane, x[i]);
  }
}

// The Hadamard transform over the numbers of each vector: stages 1, 2, 4, ... 64.
AFFLUX_FN void hadamard(float* values) {
  constexpr int kRow = kRotations;
  for (int i = 0; i < kRotated; i += 16) butterflies<16>(values + i * kRow, kRow);
  for (int i = 0; i < 16; ++i) butterflies<8>(values + i * kRow, 16 * kRow);
}

// to = values with the group's random signs: bit 31 - i mod 32 of word i / 32 for number i.
AFFLUX_FN void flip(const float* values, std::uint64_t random, float scale, float* to) {
  const simd::Words high = simd::all(static_cast<std::uint32_t>(random >> 32));
  const simd::Words first = simd::all(static_cast<std::uint32_t>(random)) + simd::count_up() * formula::kWeyl;
  for (int lane = 0; lane < kRotations; lane += simd::kFloats)
    for (int i = 0; i < kRotated; i += 32) {
      const int word = lane + i / 32 * kRotations;
      simd::Words signs = formula::mixed_well(first + static_cast<std::uint32_t>(word) * formula::kWeyl, high);
#pragma GCC unroll 8
      for (int k = i; k < i + 32; ++k) {
        const simd::Floats value = simd::load_floats(values + k * kRotations + lane) * scale;
        const simd::Words bits = simd::bits_of(value) ^ (signs & 0x80000000u);
        simd::store_floats(to + k * kRotations + lane, simd::floats_of(bits));
        signs = signs << 1;
      }
    }
}

// The level above 0 of each index.
template <int kBits>
AFFLUX_FN simd::Floats level_of(simd::Words index) {
  simd::Floats result = simd::all(formula::level(kBits, 0));
#pragma GCC unroll 8
  for (int k = 1; k < (1 << (kBits - 1)); ++k)
    result = index >= static_cast<std::uint32_t>(k) ? simd::all(formula::level(kBits, k)) : result;
  return result;
}

// values = the rotated block that these codes stand for. Of a code, the upper bit is the sign.
template <int kBits>
AFFLUX_FN void levels(const unsigned char* codes, const float* scales, float* values) {
  constexpr std::uint32_t kSign = 1u << (kBits - 1);
  for (int block = 0; block < kBlock; block += kCodecBlock) {
    simd::Words bytes{};
    each_code<kBits>(
        [&](int element, int byte, int shift) AFFLUX_INLINE {
          if (shift == 0) bytes = simd::load_bytes(codes + block / 8 * kBits + byte);
          const simd::Words code = bytes >> shift;
          const simd::Floats value =
              level_of<kBits>(code & (kSign - 1)) * simd::load_floats(scales + element % kRotations);
          const simd::Words sign = (code & kSign) << (32 - kBits);
          simd::store_floats(values + block + element, simd::floats_of(simd::bits_of(value) | sign));
        },
        [](int) AFFLUX_INLINE {});
  }
}

// Float64 sums over the numbers of each vector, number i in partial sum i mod 4, those by halves.
struct LaneSums {
  simd::Doubles partial[4][2];
};
AFFLUX_FN void add_product(LaneSums& sums, int i, const float* x, const float* y) {
  for (int half = 0; half < 2; ++half) {
    simd::Doubles& sum = sums.partial[i][half];
    sum = simd::dot_term<float>(sum, simd::Many::load(x + half * simd::kWidth),
                                simd::Many::load(y + half * simd::kWidth));
  }
}
AFFLUX_FN void store_sums(const LaneSums& sums, double* to) {
  for (int half = 0; half < 2; ++half)
    simd::Many::store(to + half * simd::kWidth, (sums.partial[0][half] + sums.partial[2][half]) +
                                                    (sums.partial[1][half] + sums.partial[3][half]));
}

// to[lane] = <x, y> of each vector.
AFFLUX_FN void inner_products(const float* x, const float* y, double* to) {
  for (int lane = 0; lane < kRotations; lane += simd::kFloats) {
    LaneSums sums{};
    for (int i = 0; i < kRotated; i += 4)
#pragma GCC unroll 4
      for (int k = 0; k < 4; ++k) {
        const int at = (i + k) * kRotations + lane;
        add_product(sums, k, x + at, y + at);
      }
    store_sums(sums, to + lane);
  }
}

// The codes of y, and in `chosen` their levels before scaling.
template <int kBits>
AFFLUX_FN void nearest(const float* y, const float* rms, unsigned char* codes, float* chosen) {
  for (int block = 0; block < kBlock; block += kCodecBlock) {
    simd::Words packed{};
    each_code<kBits>(
        [&](int element, int, int shift) AFFLUX_INLINE {
          const simd::Words bits = simd::bits_of(simd::load_floats(y + block + element));
          const simd::Floats size = simd::floats_of(bits & 0x7FFFFFFFu);
          const simd::Floats unit = simd::load_floats(rms + element % kRotations);
          simd::Words index{};
#pragma GCC unroll 8
          for (int k = 0; k + 1 < (1 << (kBits - 1)); ++k)
            index = size > unit * formula::threshold(kBits, k) ? index + 1u : index;
          const simd::Words level = simd::bits_of(level_of<kBits>(index)), sign = bits & 0x80000000u;
          simd::store_floats(chosen + block + element, simd::floats_of(level | sign));
          const simd::Words code = index | (sign >> (32 - kBits));
          packed = shift == 0 ? code : packed | (code << shift);
        },
        [&](int byte) AFFLUX_INLINE { simd::store_bytes(codes + block / 8 * kBits + byte, packed); });
  }
}

template <int kBits>
AFFLUX_FN void rotated_decode(const unsigned char* codes, const float* scales, std::uint64_t random, float* out) {
  levels<kBits>(codes, scales, out);
  hadamard(out);
  flip(out, random, 1.0f, out);
}

template <int kBits>
AFFLUX_FN void rotated_encode(const float* x, std::uint64_t random, unsigned char* codes, float* scales,
                              float* decoded) {
  alignas(64) float y[kBlock];
  alignas(64) double squares[kRotations], products[kRotations];
  alignas(64) float rms[kRotations];
  flip(x, random, 1.0f / kRotated, y);
  hadamard(y);
  inner_products(y, y, squares);
  for (int lane = 0; lane < kRotations; ++lane)
    rms[lane] = static_cast<float>(__builtin_sqrt(squares[lane] * (1.0 / kRotated)));
  nearest<kBits>(y, rms, codes, decoded);
  inner_products(y, decoded, products);
  for (int lane = 0; lane < kRotations; ++lane) {
    // At most 2^115, so that whatever is decoded is finite.
    const double scale = products[lane] > 0.0 ? squares[lane] / products[lane] : 0.0, most = 0x1p115;
    scales[lane] = static_cast<float>(scale < most ? scale : most);
  }
  rotated_decode<kBits>(codes, scales, random, decoded);
}

}  // namespace
}  // namespace afflux::AFFLUX_ISA
