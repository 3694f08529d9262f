// What this machine's processor supports, and the system lets programs use. Not __builtin_cpu_supports: it reads a
// variable of the compiler's runtime, which zig's leaves at zero, so that the slowest instruction set would be chosen.
#pragma once
#if !defined(__aarch64__)
#include <cpuid.h>

namespace afflux::features {

struct Registers {
  unsigned a = 0, b = 0, c = 0, d = 0;
};

// Returns the answer of cpuid; zeros if the processor does not know the leaf.
inline Registers leaf(unsigned number) {
  Registers out;
  return __get_cpuid_count(number, 0, &out.a, &out.b, &out.c, &out.d) != 0 ? out : Registers{};
}

inline bool all(unsigned bits, unsigned wanted) { return (bits & wanted) == wanted; }

// Returns true if the system saves these registers when it switches threads: bits 1 and 2 of XCR0 are those of AVX, and
// 5 to 7 those of AVX-512.
inline bool saved(unsigned wanted) {
  if (!all(leaf(1).c, bit_OSXSAVE)) return false;
  unsigned low, high;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return all(low, wanted);
}

inline bool sse42() { return all(leaf(1).c, bit_SSE4_2); }
inline bool avx2() { return saved(0x06) && all(leaf(1).c, bit_FMA | bit_F16C) && all(leaf(7).b, bit_AVX2); }
inline bool avx512() {
  return avx2() && saved(0xE6) && all(leaf(7).b, bit_AVX512F | bit_AVX512DQ | bit_AVX512BW | bit_AVX512VL);
}

}  // namespace afflux::features
#endif
