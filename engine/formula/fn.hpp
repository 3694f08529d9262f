// Macros for all formula headers: the qualifier of functions, and loops that are unrolled completely. Compiler flags
// that would change bits are an error.
#pragma once
#include <cstdint>

#if defined(__FAST_MATH__) || (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__)
#error "afflux is exact: build without -ffast-math"
#endif

// Functions are always inlined and internal. An out-of-line copy in an AVX-512 object would be a weak symbol, which the
// linker might use for all callers, also on CPUs without AVX-512.
#if defined(__CUDACC__)
#define AFFLUX_FN __host__ __device__ static __forceinline__
#define AFFLUX_UNROLL _Pragma("unroll")
#else
#define AFFLUX_FN static inline __attribute__((always_inline))
#define AFFLUX_UNROLL _Pragma("GCC unroll 16")
#endif
