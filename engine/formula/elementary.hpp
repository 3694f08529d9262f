// exp, log and pow of float64 with the same bits everywhere: they use only + - * / and integer operations on bits.
// Intermediate numbers are sums of two float64 (106 bits), so that almost all of the error comes from the last
// rounding: the error is hardly more than half an ulp.
//
//   log x = k ln 2 + 2 (s + s^3/3 + s^5/5 + ...),  x = 2^k m,  s = (m - 1) / (m + 1),  |s| < 0.172
//   exp x = 2^k (1 + q (1 + q/2 (1 + q/3 (...))))^16,  x = k ln 2 + 16 q,  |q| < 0.022
//   pow(x, y) = exp(y log x), without rounding to float64 between
//
// Special values are those of C99. Subnormal results are rounded twice, the second time from a float64.
#pragma once
#include "formula/fn.hpp"

namespace afflux::formula {

AFFLUX_FN std::uint64_t bits_of(double value) {
  std::uint64_t bits;
  __builtin_memcpy(&bits, &value, sizeof bits);
  return bits;
}

AFFLUX_FN double double_of(std::uint64_t bits) {
  double value;
  __builtin_memcpy(&value, &bits, sizeof value);
  return value;
}

AFFLUX_FN double infinity() { return double_of(0x7FF0000000000000u); }
AFFLUX_FN double not_a_number() { return double_of(0x7FF8000000000000u); }

// Returns 2^k for -1022 <= k <= 1023.
AFFLUX_FN double power_of_two(std::int64_t k) { return double_of(static_cast<std::uint64_t>(k + 1023) << 52); }

// The number high + low, where high is the sum rounded to float64.
struct Double2 {
  double high, low;
};

// Returns a + b exactly, for |a| >= |b| or a = 0.
AFFLUX_FN Double2 ordered_sum(double a, double b) {
  const double high = a + b;
  return {high, b - (high - a)};
}

// Returns a + b exactly.
AFFLUX_FN Double2 exact_sum(double a, double b) {
  const double high = a + b, part = high - a;
  return {high, (a - (high - part)) + (b - part)};
}

// Returns a * b exactly, from halves of 26 bits; without fma, which not every processor has.
AFFLUX_FN Double2 exact_product(double a, double b) {
  const double split = 134217729.0;  // 2^27 + 1
  const double a_moved = split * a, b_moved = split * b;
  const double a_high = a_moved - (a_moved - a), b_high = b_moved - (b_moved - b);
  const double a_low = a - a_high, b_low = b - b_high, high = a * b;
  return {high, ((a_high * b_high - high) + a_high * b_low + a_low * b_high) + a_low * b_low};
}

AFFLUX_FN Double2 sum(Double2 a, Double2 b) {
  const Double2 high = exact_sum(a.high, b.high), low = exact_sum(a.low, b.low);
  const Double2 both = ordered_sum(high.high, high.low + low.high);
  return ordered_sum(both.high, both.low + low.low);
}

AFFLUX_FN Double2 product(Double2 a, Double2 b) {
  const Double2 high = exact_product(a.high, b.high);
  return ordered_sum(high.high, high.low + (a.high * b.low + a.low * b.high));
}

AFFLUX_FN Double2 quotient(Double2 a, Double2 b) {
  const double first = a.high / b.high;
  const Double2 taken = product({first, 0.0}, b);
  const Double2 rest = sum(a, {-taken.high, -taken.low});
  return ordered_sum(first, rest.high / b.high);
}

AFFLUX_FN Double2 quotient(Double2 a, double b) {
  const double first = a.high / b;
  const Double2 taken = exact_product(first, b);
  return ordered_sum(first, (((a.high - taken.high) - taken.low) + a.low) / b);
}

AFFLUX_FN Double2 ln2() { return {double_of(0x3FE62E42FEFA39EFu), double_of(0x3C7ABC9E3B39803Fu)}; }

// Returns log x for finite x > 0.
AFFLUX_FN Double2 log_of(double x) {
  std::int64_t k = -1023;
  if (x < double_of(0x0010000000000000u)) {  // subnormal
    x = x * power_of_two(54);
    k = k - 54;
  }
  k = k + static_cast<std::int64_t>(bits_of(x) >> 52);
  double m = double_of((bits_of(x) & 0x000FFFFFFFFFFFFFu) | 0x3FF0000000000000u);
  if (m > 1.4142135623730951) {
    m = m * 0.5;
    k = k + 1;
  }
  const Double2 s = quotient({m - 1.0, 0.0}, exact_sum(m, 1.0)), square = product(s, s);
  Double2 series{0.0, 0.0};
  for (int n = 31; n > 0; n -= 2) series = sum(product(series, square), quotient({1.0, 0.0}, 1.0 * n));
  const Double2 log_m = product(product({2.0, 0.0}, s), series);
  return sum(product({static_cast<double>(k), 0.0}, ln2()), log_m);
}

// Returns exp x, rounded once.
AFFLUX_FN double exp_of(Double2 x) {
  if (x.high > 710.0) return infinity();
  if (x.high < -746.0) return 0.0;
  const double shift = 6755399441055744.0;  // 1.5 * 2^52: adding it rounds to an integer
  const double k = (x.high * 1.4426950408889634 + shift) - shift;
  const Double2 r = sum(x, product({-k, 0.0}, ln2())), q{r.high * 0.0625, r.low * 0.0625};
  Double2 series{1.0, 0.0};
  for (int n = 10; n > 0; --n) series = sum({1.0, 0.0}, quotient(product(q, series), 1.0 * n));
  for (int squared = 0; squared < 4; ++squared) series = product(series, series);
  const std::int64_t whole = static_cast<std::int64_t>(k), half = whole / 2;
  return series.high * power_of_two(half) * power_of_two(whole - half);
}

AFFLUX_FN double exp(double x) {
  if (x != x) return x;
  return exp_of({x, 0.0});
}

AFFLUX_FN double log(double x) {
  if (x != x || x == infinity()) return x;
  if (x == 0.0) return -infinity();
  if (x < 0.0) return not_a_number();
  return log_of(x).high;
}

// Returns 0 if y is not an integer, 1 if it is odd, 2 if it is even. Infinities are even.
AFFLUX_FN int parity(double y) {
  const double size = y < 0.0 ? -y : y;
  if (size >= 9007199254740992.0) return 2;  // 2^53
  const std::int64_t whole = static_cast<std::int64_t>(size);
  if (static_cast<double>(whole) != size) return 0;
  return whole % 2 == 1 ? 1 : 2;
}

AFFLUX_FN double pow(double x, double y) {
  if (y == 0.0 || x == 1.0) return 1.0;
  if (x != x || y != y) return x + y;
  const int integer = parity(y);
  const bool below_zero = bits_of(x) >> 63 != 0;
  const double size = below_zero ? -x : x, sign = below_zero && integer == 1 ? -1.0 : 1.0;
  if (size == 1.0 && integer != 0) return sign;
  if (size == 0.0 || size == infinity()) return sign * ((size == 0.0) == (y > 0.0) ? 0.0 : infinity());
  if (below_zero && integer == 0) return not_a_number();
  const double most = 73786976294838206464.0;  // 2^66: beyond it only 0 and infinity remain, and products stay finite
  const double factor = y < -most ? -most : most < y ? most : y;
  return sign * exp_of(product({factor, 0.0}, log_of(size)));
}

}  // namespace afflux::formula
