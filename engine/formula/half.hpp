// Conversions of float16 and bfloat16 in integer code, because not every processor converts them, and some flush
// subnormals or round differently. The code has no branches, so that the compiler vectorizes loops over it. NaN stays
// NaN, and becomes a quiet one.
#pragma once
#include "afflux/view.hpp"
#include "formula/fn.hpp"

namespace afflux::formula {

AFFLUX_FN std::uint32_t bits_of(float value) {
  std::uint32_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  return bits;
}

AFFLUX_FN float float_of(std::uint32_t bits) {
  float value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}

// Return the value in the type of computation (float32, or float64 for float64), exactly; here and below.
AFFLUX_FN float widened(float value) { return value; }
AFFLUX_FN double widened(double value) { return value; }

// A float16 has 1 sign bit, 5 exponent bits (bias 15) and 10 mantissa bits. A normal value gets bias 127, infinity and
// NaN get exponent 255, and NaN gets the quiet bit, as from hardware. A subnormal m 2^-24 is computed as
// (2^-14 + m 2^-24) - 2^-14: all three numbers are zero or normal in float32, so the difference is exact even if
// subnormals are flushed.
AFFLUX_FN float widened(Float16 half) {
  const std::uint32_t sign = (half.bits & 0x8000u) << 16, magnitude = half.bits & 0x7FFFu;
  const std::uint32_t mantissa = magnitude << 13, rebias = 112u << 23, smallest = 113u << 23;
  const std::uint32_t quiet = magnitude > 0x7C00u ? 0x00400000u : 0u;
  const std::uint32_t normal = (mantissa + rebias + (magnitude >= 0x7C00u ? rebias : 0u)) | quiet;
  const std::uint32_t subnormal = bits_of(float_of(mantissa + smallest) - float_of(smallest));
  const std::uint32_t is_normal = 0u - static_cast<std::uint32_t>(magnitude >= 0x0400u);  // a mask: no branch
  return float_of(sign | (normal & is_normal) | (subnormal & ~is_normal));
}

// A bfloat16 is the upper half of a float32.
AFFLUX_FN float widened(Bfloat16 value) { return float_of(static_cast<std::uint32_t>(value.bits) << 16); }

// Returns the bits of a float16, rounded to nearest, ties to even, from the bits of a float32 from 0 to below 65536.
AFFLUX_FN std::uint32_t rounded_to_half(std::uint32_t magnitude) {
  const std::uint32_t normal = (magnitude - (112u << 23) + 0xFFFu + ((magnitude >> 13) & 1u)) >> 13;
  // Subnormals have the spacing 2^-24, which float32 has at 0.5: adding 0.5 rounds to it.
  const std::uint32_t subnormal = bits_of(float_of(magnitude) + 0.5f) - bits_of(0.5f);
  const std::uint32_t is_normal = 0u - static_cast<std::uint32_t>(magnitude >= (113u << 23));
  return (normal & is_normal) | (subnormal & ~is_normal);
}

// Store the value in another type, rounded to nearest, ties to even. float64 is rounded to float32 before it is rounded
// to a type of 16 bits.
AFFLUX_FN void narrow(double value, double* to) { *to = value; }
AFFLUX_FN void narrow(double value, float* to) { *to = static_cast<float>(value); }
AFFLUX_FN void narrow(float value, double* to) { *to = static_cast<double>(value); }
AFFLUX_FN void narrow(float value, float* to) { *to = value; }
AFFLUX_FN void narrow(float value, Bfloat16* to) {
  const std::uint32_t bits = bits_of(value);
  const std::uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  const std::uint32_t quiet_nan = (bits >> 16) | 0x0040u;
  to->bits = static_cast<std::uint16_t>((bits & 0x7FFFFFFFu) > 0x7F800000u ? quiet_nan : rounded);
}
AFFLUX_FN void narrow(double value, Bfloat16* to) { narrow(static_cast<float>(value), to); }
// A value beyond the largest finite one by half a unit or more becomes infinity.
AFFLUX_FN void narrow(float value, Float16* to) {
  const std::uint32_t bits = bits_of(value), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7FFFFFFFu;
  const std::uint32_t rounded = rounded_to_half(magnitude), infinity = 0x7C00u, quiet_nan = 0x7E00u;
  const std::uint32_t is_finite = 0u - static_cast<std::uint32_t>(magnitude < 0x47800000u);  // below 65536
  const std::uint32_t kept = (rounded & is_finite) | (infinity & ~is_finite);
  to->bits = static_cast<std::uint16_t>(sign | (magnitude > 0x7F800000u ? quiet_nan : kept));
}
AFFLUX_FN void narrow(double value, Float16* to) { narrow(static_cast<float>(value), to); }

// Store the value rounded to nearest, ties to even. Subnormals are kept; a value beyond the largest finite one becomes
// the largest finite one.
AFFLUX_FN void narrow_finite(float value, Bfloat16* to) {
  const std::uint32_t bits = bits_of(value), sign = bits & 0x80000000u, magnitude = bits & 0x7FFFFFFFu;
  const std::uint32_t rounded = (magnitude + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;
  to->bits = static_cast<std::uint16_t>((sign >> 16) | (rounded < 0x7F80u ? rounded : 0x7F7Fu));
}
AFFLUX_FN void narrow_finite(float value, Float16* to) {
  const std::uint32_t bits = bits_of(value), sign = (bits >> 16) & 0x8000u, magnitude = bits & 0x7FFFFFFFu;
  const std::uint32_t rounded = rounded_to_half(magnitude);
  const std::uint32_t is_finite = 0u - static_cast<std::uint32_t>(magnitude < 0x47800000u);  // below 65536
  const std::uint32_t most = 0x7BFFu, kept = (rounded & is_finite) | (most & ~is_finite);
  to->bits = static_cast<std::uint16_t>(sign | (kept < most ? kept : most));
}

}  // namespace afflux::formula
