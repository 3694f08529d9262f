// The rotated codec, one group of kBlock elements: kRotations interleaved vectors. Element e is number e / 16 of vector
// e mod 16. So a rotation needs no shuffles, and every reduction stays in one lane. As many vectors as a native vector
// has lanes, from vector `lane` on, go through all steps of a transform together; each step reads and writes L1 once.
#pragma once
#include "cpu/codec_affine.hpp"

namespace afflux::AFFLUX_ISA {
namespace {

// Computes stages 1, 2, 4, ... of the transform of kPoints numbers of each vector, from load(i) to store(i, value).
template <int kPoints, class Load, class Store>
AFFLUX_FN void butterflies(const Load& load, const Store& store) {
  simd::Floats x[kPoints];
#pragma GCC unroll 16
  for (int i = 0; i < kPoints; ++i) x[i] = load(i);
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
  for (int i = 0; i < kPoints; ++i) store(i, x[i]);
}

// The Hadamard transform of each vector, in two steps. `first_stages` computes stages 1, 2, 4, 8: load(i, k) returns
// number i + k, where i is a multiple of 16. `last_stages` computes stages 16, 32, 64: store(i, k, value) stores number
// i + 16 k.
constexpr int kRow = kRotations, kFirst = 16, kLast = kRotated / kFirst;
template <class Load>
AFFLUX_FN void first_stages(const Load& load, float* values) {
  for (int i = 0; i < kRotated; i += kFirst)
    butterflies<kFirst>([&](int k) AFFLUX_INLINE { return load(i, k); },
                        [&](int k, simd::Floats x) AFFLUX_INLINE { simd::store_floats(values + (i + k) * kRow, x); });
}
template <class Store>
AFFLUX_FN void last_stages(const float* values, const Store& store) {
  for (int i = 0; i < kFirst; ++i)
    butterflies<kLast>([&](int k) AFFLUX_INLINE { return simd::load_floats(values + (i + kFirst * k) * kRow); },
                       [&](int k, simd::Floats x) AFFLUX_INLINE { store(i, k, x); });
}

// The random signs of each vector's numbers: number i has bit 31 - i mod 32 of word i / 32.
struct Signs {
  simd::Words words[kRotated / 32];
};
AFFLUX_FN Signs random_signs(std::uint64_t random, int lane) {
  const simd::Words high = simd::all(static_cast<std::uint32_t>(random >> 32));
  const simd::Words first = simd::all(static_cast<std::uint32_t>(random)) + simd::count_up() * formula::kWeyl;
  Signs signs;
#pragma GCC unroll 4
  for (int i = 0; i < kRotated / 32; ++i)
    signs.words[i] = formula::mixed_well(first + static_cast<std::uint32_t>(lane + i * kRow) * formula::kWeyl, high);
  return signs;
}
AFFLUX_FN simd::Floats with_sign(simd::Floats value, simd::Words signs) {
  return simd::floats_of(simd::bits_of(value) ^ (signs & 0x80000000u));
}

// The levels of the codes, repeated to fill the table. The upper bit of a code is the sign; bits above it have no
// effect.
template <int kBits>
struct Levels {
  float of[simd::kPicked] = {};
  constexpr Levels() {
    constexpr int kPositive = 1 << (kBits - 1);
    for (int i = 0; i < simd::kPicked; ++i) {
      const float level = formula::level(kBits, i % kPositive);
      of[i] = i / kPositive % 2 == 0 ? level : -level;
    }
  }
};
template <int kBits>
constexpr Levels<kBits> kLevels;

template <int kBits>
AFFLUX_FN simd::Floats level_of(simd::Words code) {
  return simd::pick<kBits>(kLevels<kBits>.of, code);
}

// Float64 sums over the numbers of each vector: number i is added to partial sum i mod 4, and the partial sums are
// added by halves.
struct LaneSums {
  simd::Doubles partial[4][2];
};
AFFLUX_FN void add_product(LaneSums& sums, int i, const float* x, const float* y) {
  for (int half = 0; half < 2; ++half) {
    simd::Doubles& sum = sums.partial[i % 4][half];
    sum = simd::dot_term<float>(sum, simd::Vector::load(x + half * simd::kWidth),
                                simd::Vector::load(y + half * simd::kWidth));
  }
}
AFFLUX_FN void store_sums(const LaneSums& sums, double* to) {
  for (int half = 0; half < 2; ++half)
    simd::Vector::store(to + half * simd::kWidth, (sums.partial[0][half] + sums.partial[2][half]) +
                                                      (sums.partial[1][half] + sums.partial[3][half]));
}

// Sets `to` to the squared norms of some vectors.
AFFLUX_FN void squared_norms(const float* y, double* to) {
  LaneSums sums{};
  for (int i = 0; i < kRotated; i += 4)
#pragma GCC unroll 4
    for (int k = 0; k < 4; ++k) add_product(sums, k, y + (i + k) * kRow, y + (i + k) * kRow);
  store_sums(sums, to);
}

// Computes the codes of y, their levels before scaling (`chosen`), and the inner products of y and the levels
// (`products`).
template <int kBits>
AFFLUX_FN void nearest(const float* y, const float* rms, unsigned char* codes, float* chosen, double* products) {
  constexpr int kThresholds = (1 << (kBits - 1)) - 1;
  simd::Floats thresholds[kThresholds + 1];
#pragma GCC unroll 8
  for (int k = 0; k < kThresholds; ++k) thresholds[k] = simd::load_floats(rms) * formula::threshold(kBits, k);
  LaneSums sums{};
  for (int i = 0; i < kRotated; i += 8)  // 8 numbers are in kBits bytes of each vector, number n in byte n mod kBits
#pragma GCC unroll 4
    for (int byte = 0; byte < kBits; ++byte) {
      simd::Words packed{};
#pragma GCC unroll 8
      for (int number = byte; number < 8; number += kBits) {
        const int at = (i + number) * kRow;
        const simd::Words bits = simd::bits_of(simd::load_floats(y + at));
        const simd::Floats size = simd::floats_of(bits & 0x7FFFFFFFu);
        const simd::Words code = formula::rotated_code<kBits>(bits, size, thresholds);
        simd::store_floats(chosen + at, level_of<kBits>(code));
        simd::to_memory();
        add_product(sums, number, y + at, chosen + at);
        packed = packed | (code << (number / kBits * kBits));
      }
      simd::store_bytes(codes + (i / 8 * kBits + byte) * kRow, packed);
    }
  store_sums(sums, products);
}

// Computes the codes of y for 1 bit, its squared norms, and its inner products with the levels. The codes are signs and
// do not need the norms, so y is converted once for both sums. y times the level of its sign is |y| times the positive
// level.
AFFLUX_FN void signs_and_sums(const float* y, unsigned char* codes, double* squares, double* products) {
  const simd::Doubles level = simd::Vector::fill(static_cast<double>(formula::level(1, 0)));
  LaneSums norms{}, sums{};
#pragma GCC unroll 2
  for (int half = 0; half < 2; ++half)
    for (int i = 0; i < kRotated; i += 4)
#pragma GCC unroll 4
      for (int k = 0; k < 4; ++k) {
        const simd::Doubles value = simd::Vector::load(y + (i + k) * kRow + half * simd::kWidth);
        simd::Doubles &norm = norms.partial[k][half], &sum = sums.partial[k][half];
        norm = simd::dot_term<float>(norm, value, value);
        sum = simd::dot_term<float>(sum, simd::magnitude(value), level);
      }
  store_sums(norms, squares);
  store_sums(sums, products);
  for (int i = 0; i < kRotated; i += 8) {
    simd::Words packed{};
#pragma GCC unroll 8
    for (int number = 0; number < 8; ++number) {
      const simd::Words bits = simd::bits_of(simd::load_floats(y + (i + number) * kRow));
      packed |= (bits >> (31 - number)) & (1u << number);
    }
    simd::store_bytes(codes + i / 8 * kRow, packed);
  }
}

// Rotates back the numbers of load(i, k), which returns number i + k, into `out`.
template <class Load>
AFFLUX_FN void rotate_back(const Load& load, const Signs& signs, float* out) {
  first_stages(load, out);
  last_stages(out, [&](int i, int k, simd::Floats x) AFFLUX_INLINE {
    const simd::Words word = simd::shifted_left(signs.words[k / 2], i + k % 2 * kFirst);
    simd::store_floats(out + (i + kFirst * k) * kRow, with_sign(x, word));
  });
}

template <int kBits>
AFFLUX_FN void rotated_decode(const unsigned char* codes, const float* scales, std::uint64_t random, float* out) {
  for (int lane = 0; lane < kRotations; lane += simd::kFloats) {
    const simd::Floats scale = simd::load_floats(scales + lane), one_bit = scale * formula::level(1, 0);
    const auto load = [&](int i, int k) AFFLUX_INLINE {
      const int row = (i + k) / 8 * kBits + k % 8 % kBits;
      const simd::Words bytes = simd::load_bytes(codes + row * kRow + lane);
      if constexpr (kBits == 1)
        return with_sign(one_bit, bytes << (31 - k % 8));
      else
        return level_of<kBits>(bytes >> (k % 8 / kBits * kBits)) * scale;
    };
    rotate_back(load, random_signs(random, lane), out + lane);
  }
}

template <int kBits>
AFFLUX_FN void rotated_encode(const float* x, std::uint64_t random, unsigned char* codes, float* scales,
                              float* decoded) {
  alignas(64) float y[kBlock], rms[simd::kFloats];
  alignas(64) double squares[simd::kFloats], products[simd::kFloats];
  for (int lane = 0; lane < kRotations; lane += simd::kFloats) {
    const Signs signs = random_signs(random, lane);
    const auto load = [&](int i, int k) AFFLUX_INLINE {
      const simd::Words word = signs.words[i / 32] << (i % 32 + k);
      return with_sign(simd::load_floats(x + (i + k) * kRow + lane) * (1.0f / kRotated), word);
    };
    first_stages(load, y);
    last_stages(y, [&](int i, int k, simd::Floats value)
                       AFFLUX_INLINE { simd::store_floats(y + (i + kFirst * k) * kRow, value); });
    float* const out = decoded + lane;
    if constexpr (kBits == 1) {
      signs_and_sums(y, codes + lane, squares, products);
    } else {
      squared_norms(y, squares);
      for (int l = 0; l < simd::kFloats; ++l) rms[l] = formula::rotated_rms(squares[l]);
      nearest<kBits>(y, rms, codes + lane, out, products);
    }
    for (int l = 0; l < simd::kFloats; ++l) scales[lane + l] = formula::rotated_scale(squares[l], products[l]);
    const simd::Floats scale = simd::load_floats(scales + lane), one_bit = scale * formula::level(1, 0);
    const auto chosen = [&](int i, int k) AFFLUX_INLINE {
      if constexpr (kBits == 1)
        return with_sign(one_bit, simd::bits_of(simd::load_floats(y + (i + k) * kRow)));
      else
        return simd::load_floats(out + (i + k) * kRow) * scale;
    };
    rotate_back(chosen, signs, out);
  }
}

}  // namespace
}  // namespace afflux::AFFLUX_ISA
