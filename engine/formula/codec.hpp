// The codecs of cached rows, element by element (docs/reference/codecs.md).
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

// Returns the same as afflux::info, in device code and without a symbol outside this object.
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

// The offsets of a run in a row, in bytes: of its facts, with which it is decoded (a grid of two float32, or the scales
// of a group's rotations), and of its codes.
struct Place {
  std::int64_t facts, codes;
};

// Returns the place of the run whose first element is `element`.
AFFLUX_FN Place place(Codec codec, std::int64_t element) {
  const CodingInfo info = info_of(codec);
  if (!info.has_head) return {0, element / 8 * codec.bits};
  const bool group = info.run == kBlock;  // else runs of kCodecBlock
  const std::int64_t facts = group ? info.run_bytes : info.run_bytes * (kBlock / kCodecBlock);
  const std::int64_t begin = kRowHead + element / kBlock * (facts + kBlock / 8 * codec.bits), within = element % kBlock;
  return {begin + (group ? 0 : within / kCodecBlock * info.run_bytes), begin + facts + within / 8 * codec.bits};
}

// An affine grid. `per_step` is 1 / step, in units of the fraction of a code.
struct Grid {
  float low, step, per_step;
};

// Returns the bits of a code's fraction: code and fraction have 31 bits together.
AFFLUX_FN int fraction_bits(int bits) { return 31 - bits; }
AFFLUX_FN float levels(int bits) { return static_cast<float>((1 << bits) - 1); }
AFFLUX_FN float power_of_two_float(int k) { return float_of(static_cast<std::uint32_t>(k + 127) << 23); }

// `step` is in the range of grid_over's. For such values nvcc 13.0 makes of 1 / step what is written here, and a test
// of the range.
AFFLUX_FN float per_step(float step, int bits) {
#if defined(__CUDA_ARCH__)
  float inverse;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(step));
  inverse = __fmaf_rn(inverse, -__fmaf_rn(inverse, step, -1.0f), inverse);
#else
  const float inverse = 1.0f / step;
#endif
  return inverse * power_of_two_float(fraction_bits(bits));
}

// Returns the grid of values from low to high. Its step is from 2^-90 to about 2^119, and its first point at most
// 2^126, so that all decoded values are finite. A value beyond the end of the grid becomes the end.
AFFLUX_FN Grid grid_over(float low, float high, int bits) {
  const float least = power_of_two_float(-90), most = power_of_two_float(119), highest = power_of_two_float(126);
  const float width = high * 0.5f - low * 0.5f;  // half of the width, which cannot overflow
  float step = width * (2.0f / levels(bits));
  step = step > least ? step : least;
  step = step < most ? step : most;
  // The step is rounded up by at least 16 units in the last place, more than the rounding errors of the quotient: the
  // last point is not below `high`.
  step = float_of((bits_of(step) + 0x10Fu) & 0xFFFFFF00u);
  const float start = low + 0.0f;  // -0.0 would depend on the order of the comparisons
  return {start < highest ? start : highest, step, per_step(step, bits)};
}

// Returns the code and fraction of the grid's last point.
AFFLUX_FN float grid_top(int bits) { return levels(bits) * power_of_two_float(fraction_bits(bits)); }

// Returns the code of x. F is float32 or a vector of float32, W a 32-bit word or a vector of words, here and below.
// `top` is grid_top, `random` a word of random bits. `clamp`: x may be below the grid.
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

// The optimal quantizer of a normal variable (Lloyd 1982, Max 1960): `level` returns the k-th level above 0,
// `threshold` the threshold after that level.
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

// Returns the root mean square of a rotated vector with this sum of squares.
AFFLUX_FN float rotated_rms(double squares) {
  return static_cast<float>(OneLane::root(squares * (1.0 / static_cast<double>(kRotated))));
}

// Returns the code of y: its upper bit is the sign, its lower bits are the number of thresholds that |y| exceeds.
// `y_bits` are the bits of y, `size` is |y|. Each threshold is `threshold` times the rms, so the thresholds do not
// decrease. With 4 bits, bisection compares three of the seven thresholds.
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

// Returns <y, y> / <y, level>, but at most 2^115, so that all decoded values are finite.
AFFLUX_FN float rotated_scale(double squares, double products) {
  const double scale = products > 0.0 ? squares / products : 0.0, most = 0x1p115;
  return static_cast<float>(scale < most ? scale : most);
}

// Returns x, or the largest finite float32 with its sign if x is infinite (after rounding from float64).
AFFLUX_FN float finite_float(float x) {
  const float most = 3.4028234663852886e38f, low = x < most ? x : most;
  return low > -most ? low : -most;
}

}  // namespace afflux::formula
