// Normal noise: the elements of a vector z ~ N(0, I), each a function of key, nonce and its index in the whole vector.
// The random bits are those of ChaCha20 (RFC 8439), a cipher, because noise that a reader of params knows or guesses
// must not give the rest away. The normals are those of Box and Muller (1958), from + - * / sqrt in float64 in a fixed
// order, so that every instruction set, thread and shard draws the same bits.
//
// A group is kNoiseGroup elements, or half as many pairs, from three sets of 16 blocks. Of a set, word k of block b has
// the place 16 k + b; two words from an even place on, the lower half first, are a lane. Pair p < 128 has lane p of the
// first set and the lower half of lane p of the third one; pair 128 + p has that of the second set and the upper half.
// It is elements p and p + 256, or 128 + p and 384 + p. So vectors of any width need no transposition.
#pragma once
#include "afflux/pass.hpp"
#include "formula/combine.hpp"
#include "formula/lanes.hpp"

namespace afflux::formula {

constexpr int kNoiseGroup = 512, kNoiseBlocks = 48, kNoiseSet = 16, kBlockWords = 16;
// Block numbers have 32 bits.
constexpr std::int64_t kMostNoise = (std::int64_t{1} << 32) / kNoiseBlocks * kNoiseGroup;

// Returns true if a pass with this noise has any.
AFFLUX_FN bool draws(const Noise& noise) {
  bool any = noise.sigma > 0.0;
  for (std::int64_t s = 0; s < noise.next.size; ++s) any = any || noise.next.data[s] != 0.0;
  return any;
}

template <class T>
AFFLUX_FN T rotated(T word, int bits) {
  return (word << bits) | (word >> (32 - bits));
}

// RFC 8439, 2.1. T: a word, or a vector of the words of several blocks.
template <class T>
AFFLUX_FN void quarter_round(T& a, T& b, T& c, T& d) {
  a = a + b, d = rotated(d ^ a, 16), c = c + d, b = rotated(b ^ c, 12);
  a = a + b, d = rotated(d ^ a, 8), c = c + d, b = rotated(b ^ c, 7);
}

// RFC 8439, 2.3: the words of blocks, from their state.
template <class T>
AFFLUX_FN void chacha20(const T (&state)[kBlockWords], T (&x)[kBlockWords]) {
  AFFLUX_UNROLL
  for (int k = 0; k < kBlockWords; ++k) x[k] = state[k];
  for (int twice = 0; twice < 10; ++twice) {
    quarter_round(x[0], x[4], x[8], x[12]);
    quarter_round(x[1], x[5], x[9], x[13]);
    quarter_round(x[2], x[6], x[10], x[14]);
    quarter_round(x[3], x[7], x[11], x[15]);
    quarter_round(x[0], x[5], x[10], x[15]);
    quarter_round(x[1], x[6], x[11], x[12]);
    quarter_round(x[2], x[7], x[8], x[13]);
    quarter_round(x[3], x[4], x[9], x[14]);
  }
  AFFLUX_UNROLL
  for (int k = 0; k < kBlockWords; ++k) x[k] = x[k] + state[k];
}

// Sets the state of blocks with these numbers. `fill` makes a T of a word.
template <class T, class Fill>
AFFLUX_FN void chacha20_state(const std::uint32_t* key, const std::uint32_t* nonce, T number, const Fill& fill,
                              T (&state)[kBlockWords]) {
  state[0] = fill(0x61707865u), state[1] = fill(0x3320646Eu), state[2] = fill(0x79622D32u),
  state[3] = fill(0x6B206574u);
  AFFLUX_UNROLL
  for (int k = 0; k < 8; ++k) state[4 + k] = fill(key[k]);
  state[12] = number;
  AFFLUX_UNROLL
  for (int k = 0; k < 3; ++k) state[13 + k] = fill(nonce[k]);
}

// Returns a number below 2^52 as float64.
template <class Lanes, class Bits>
AFFLUX_FN auto small_number(Lanes lanes, Bits number) {
  return lanes.number_of(number | 0x4330000000000000u) - 4503599627370496.0;  // 2^52
}

// Returns log x for normal x > 0. The error is below 2 ulp, or 2^-52.
template <class Lanes, class Number>
AFFLUX_FN Number log_of_normal(Lanes lanes, Number x) {
  const std::uint64_t least = 0x3FE6A09E667F3BCDu;  // the square root of 1/2
  const auto shifted = lanes.bits_of(x) + (0x3FF0000000000000u - least);
  const Number k = small_number(lanes, shifted >> 52) - 1023.0;
  const Number m = lanes.number_of((shifted & 0x000FFFFFFFFFFFFFu) + least), s = (m - 1.0) / (m + 1.0), q = s * s;
  Number series = lanes.fill(2.0 / 19);
  AFFLUX_UNROLL
  for (int n = 17; n > 0; n -= 2) series = series * q + 2.0 / n;
  return k * 0.6931471805599453 + series * s;
}

// Sets two independent normals from 96 random bits: `radius` has 64, `angle` 32.
//   r = sqrt(-2 log u),  u = 2^-53, 2 * 2^-53, ... 1,  of the 53 upper bits of `radius`; so r is below 8.6
//   (r cos t, r sin t),  t = an axis + x,  |x| < pi/4,  of 43 bits: the others, a sign and an exchange of the axes
template <class Lanes, class Bits, class Number>
AFFLUX_FN void box_muller(Lanes lanes, Bits radius, Bits angle, Number& first, Number& second) {
  const Bits integer = radius >> 11, turn = (angle << 11) | (radius & 0x7FFu);
  const Number upper = small_number(lanes, integer >> 27), lower = small_number(lanes, integer & 0x7FFFFFFu);
  const Number u = (upper * 134217728.0 + (lower + 1.0)) * 0x1p-53;
  const Number r = lanes.root(log_of_normal(lanes, u) * -2.0);
  const Number odd = small_number(lanes, ((turn << 1) & 0x3FFFFFFFFFFu) | 1u);
  const Number x = (odd - 0x1p41) * (0.7853981633974483 * 0x1p-41), q = x * x;
  Number s = lanes.fill(-1.0 / 1307674368000.0), c = lanes.fill(1.0 / 20922789888000.0);
  s = s * q + 1.0 / 6227020800.0, c = c * q - 1.0 / 87178291200.0;
  s = s * q - 1.0 / 39916800.0, c = c * q + 1.0 / 479001600.0;
  s = s * q + 1.0 / 362880.0, c = c * q - 1.0 / 3628800.0;
  s = s * q - 1.0 / 5040.0, c = c * q + 1.0 / 40320.0;
  s = s * q + 1.0 / 120.0, c = c * q - 1.0 / 720.0;
  s = s * q - 1.0 / 6.0, c = c * q + 1.0 / 24.0;
  s = s * q + 1.0, c = c * q - 0.5;
  s = s * x * r, c = (c * q + 1.0) * r;
  const Bits sine = lanes.bits_of(s), cosine = lanes.bits_of(c) ^ ((turn >> 42) << 63);
  const Bits exchange = Bits{} - ((turn >> 41) & 1u), differing = (sine ^ cosine) & exchange;
  first = lanes.number_of(cosine ^ differing), second = lanes.number_of(sine ^ differing);
}

}  // namespace afflux::formula
