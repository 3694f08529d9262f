// What every formula header needs: the function qualifier, loops that are unrolled whole, and a refusal of flags that
// would change bits.
#pragma once
#include <cstdint>

#if defined(__FAST_MATH__) || (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__)
#error "afflux is exact: build without -ffast-math"
#endif

// Always inlined and internal: an out-of-line copy in an AVX-512 object would be a weak symbol that the linker may hand
// to a CPU without AVX-512.
#if defined(__CUDACC__)
#define AFFLUX_FN __host__ __device__ static __forceinline__
#define AFFLUX_UNROLL _Pragma("unroll")
#else
#define AFFLUX_FN static inline __attribute__((always_inline))
#define AFFLUX_UNROLL _Pragma("GCC unroll 16")
#endif
