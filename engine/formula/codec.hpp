// The codecs of cached rows, element by element (docs/codecs.md).
//
//   affine   step = (max - min) / (2^bits - 1), rounded up to 16 significant bits;  code = floor((x - min) / step + U),
//            U uniform in [0, 1);  decoded = min + step * code, where the product is exact
//   rotated  y = H D x / 128, D random signs, H the Hadamard matrix;  code = nearest level of y / rms(y);
//            decoded = D H (scale * level),  scale = <y, y> / <y, level>
#pragma once
#include "afflux/codec.hpp"
#include "formula/half.hpp"
#include "formula/lanes.hpp"

namespace afflux::formula {

// afflux::info, for device code and internal to this object.
AFFLUX_FN CodingInfo info_of(Codec codec) {
  switch (codec.coding) {
#define AFFLUX_CODING(coding, ...) \
  case Coding::coding:             \
    return {__VA_ARGS__};
    AFFLUX_CODINGS(AFFLUX_CODING)
#undef AFFLUX_CODING
  }
  return {};
}

// Where a run's part of a row lies, in bytes: what it is decoded with (a grid of two float32, or the scales of a
// group's rotations), and its codes. `element` is the run's first one.
struct Place {
  std::int64_t facts, codes;
};

AFFLUX_FN Place place(Codec codec, std::int64_t element) {
  const CodingInfo info = info_of(codec);
  if (!info.has_head) return {0, element / 8 * codec.bits};
  const bool group = info.run == kBlock;  // else runs of kCodecBlock
  const std::int64_t facts = group ? info.run_bytes : info.run_bytes * (kBlock / kCodecBlock);
  const std::int64_t begin = kRowHead + element / kBlock * (facts + kBlock / 8 * codec.bits), within = element % kBlock;
  return {begin + (group ? 0 : within / kCodecBlock * info.run_bytes), begin + facts + within / 8 * codec.bits};
}

// An affine grid; `per_step` is 1 / step in units of a code's fraction.
struct Grid {
  float low, step, per_step;
};

// Bits of a code's fraction: code and fraction together fill 31.
AFFLUX_FN int fraction_bits(int bits) { return 31 - bits; }
AFFLUX_FN float levels(int bits) { return static_cast<float>((1 << bits) - 1); }
AFFLUX_FN float power_of_two_float(int k) { return float_of(static_cast<std::uint32_t>(k + 127) << 23); }

AFFLUX_FN float per_step(float step, int bits) { return 1.0f / step * power_of_two_float(fraction_bits(bits)); }

// Of values from low to high. Steps are between 2^-90 and 2^119, and low at most 2^126, so that whatever is decoded is
// finite: what lies beyond the grid's end becomes its end.
AFFLUX_FN Grid grid_over(float low, float high, int bits) {
  const float least = power_of_two_float(-90), most = power_of_two_float(119), highest = power_of_two_float(126);
  const float width = high * 0.5f - low * 0.5f;  // halved: it cannot overflow
  float step = width * (2.0f / levels(bits));
  step = step > least ? step : least;
  step = step < most ? step : most;
  // At least 16 units larger than the quotient, which covers its roundings: the last point is not below `high`.
  step = float_of((bits_of(step) + 0x10Fu) & 0xFFFFFF00u);
  const float start = low + 0.0f;  // -0.0 would depend on the order of the comparisons
  return {start < highest ? start : highest, step, per_step(step, bits)};
}

// Code and fraction of the grid's last point.
AFFLUX_FN float grid_top(int bits) { return levels(bits) * power_of_two_float(fraction_bits(bits)); }

// F: a float32 or a vector of them, W: of 32-bit words, here and below. `top` is grid_top, `random` a word of random
// bits. clamp: x may lie below the grid.
template <class Lanes, class F, class W>
AFFLUX_FN W affine_code(Lanes lanes, F x, F low, F per_step, F top, bool clamp, W random, int bits) {
  F place = lanes.lesser(top, (x - low) * per_step);
  if (clamp) place = lanes.greater(F{}, place);
  return (lanes.truncated(place) + (random >> (bits + 1))) >> fraction_bits(bits);
}

template <class Lanes, class F, class W>
AFFLUX_FN F affine_value(Lanes lanes, W code, F low, F step) {
  return lanes.exact_product_plus(step, lanes.converted(code), low);
}

// The best quantiser of a normal variable (Lloyd 1982, Max 1960): the k-th level above 0, and the threshold that
// follows it.
AFFLUX_FN constexpr float level(int bits, int k) {
  const float two[] = {0.4527800346f, 1.5104176085f};
  const float four[] = {0.1283950299f, 0.3880482995f, 0.6567591185f, 0.9423404565f,
                        1.2562311973f, 1.6180463861f, 2.0690172265f, 2.7325895710f};
  return bits == 1 ? 0.7978845608f : bits == 2 ? two[k] : four[k];
}
AFFLUX_FN float threshold(int bits, int k) {
  const float four[] = {0.2582216647f, 0.5224037090f, 0.7995497875f, 1.0992858269f,
                        1.4371387917f, 1.8435318063f, 2.4008033983f};
  return bits == 2 ? 0.9815988216f : four[k];
}

// The root mean square of a rotated vector with this sum of squares.
AFFLUX_FN float rotated_rms(double squares) {
  return static_cast<float>(OneLane::root(squares * (1.0 / static_cast<double>(kRotated))));
}

// The sign of y, whose bits are given, above the number of thresholds (each `threshold` times the rms, so they do not
// descend) that |y| exceeds. Of 4 bits' seven thresholds three are compared, by bisection.
template <int kBits, class F, class W>
AFFLUX_FN W rotated_code(W y_bits, F size, const F* thresholds) {
  W code = (y_bits & 0x80000000u) >> (32 - kBits);
  if constexpr (kBits == 4) {
    const auto four = size > thresholds[3];
    const auto two = size > (four ? thresholds[5] : thresholds[1]);
    const F low = two ? thresholds[2] : thresholds[0], high = two ? thresholds[6] : thresholds[4];
    const auto one = size > (four ? high : low);
    code = four ? code + 4u : code;
    code = two ? code + 2u : code;
    code = one ? code + 1u : code;
  } else {
    AFFLUX_UNROLL
    for (int k = 0; k + 1 < (1 << (kBits - 1)); ++k) code = size > thresholds[k] ? code + 1u : code;
  }
  return code;
}

// <y, y> / <y, level>, at most 2^115, so that whatever is decoded is finite.
AFFLUX_FN float rotated_scale(double squares, double products) {
  const double scale = products > 0.0 ? squares / products : 0.0, most = 0x1p115;
  return static_cast<float>(scale < most ? scale : most);
}

// What float32 cannot hold, once it was rounded to that, becomes its largest value.
AFFLUX_FN float finite_float(float x) {
  const float most = 3.4028234663852886e38f, low = x < most ? x : most;
  return low > -most ? low : -most;
}

}  // namespace afflux::formula
