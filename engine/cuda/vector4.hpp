// Four consecutive elements of a vector, which one thread processes: 16 bytes of float32 in one access.
#pragma once
#include "afflux/view.hpp"
#include "cuda/block.hpp"
#include "formula/half.hpp"
#include "formula/lanes.hpp"
#include "formula/reduce.hpp"

namespace afflux::cuda {

constexpr int kFour = 4;

template <class T>
struct alignas(sizeof(T) < 4 ? kFour * sizeof(T) : 16) Vector4 {
  T at[kFour];
};

using Doubles = Vector4<double>;

template <class T>
AFFLUX_DEVICE Vector4<T> filled(T value) {
  return {{value, value, value, value}};
}

template <class To, class From>
AFFLUX_DEVICE Vector4<To> converted(const Vector4<From>& from) {
  Vector4<To> to;
  AFFLUX_UNROLL_ON_DEVICE
  for (int j = 0; j < kFour; ++j) formula::narrow(formula::widened(from.at[j]), &to.at[j]);
  return to;
}

template <class T>
AFFLUX_DEVICE Doubles doubles(const Vector4<T>& from) {
  Doubles to;
  AFFLUX_UNROLL_ON_DEVICE
  for (int j = 0; j < kFour; ++j) to.at[j] = static_cast<double>(formula::widened(from.at[j]));
  return to;
}

// Returns true if all four are finite and at most `most` in absolute value.
AFFLUX_DEVICE bool all_within(const Doubles& x, double most) {
  double sound = 1.0;
  AFFLUX_UNROLL_ON_DEVICE
  for (int j = 0; j < kFour; ++j) sound = formula::within(sound, x.at[j], most);
  return sound != 0.0;
}

// Operators and functions for formulas over T, like those of the CPU's vectors of lanes.
AFFLUX_FN Doubles operator+(const Doubles& a, const Doubles& b) {
  return {{a.at[0] + b.at[0], a.at[1] + b.at[1], a.at[2] + b.at[2], a.at[3] + b.at[3]}};
}
AFFLUX_FN Doubles operator-(const Doubles& a, const Doubles& b) {
  return {{a.at[0] - b.at[0], a.at[1] - b.at[1], a.at[2] - b.at[2], a.at[3] - b.at[3]}};
}
AFFLUX_FN Doubles operator*(const Doubles& a, const Doubles& b) {
  return {{a.at[0] * b.at[0], a.at[1] * b.at[1], a.at[2] * b.at[2], a.at[3] * b.at[3]}};
}
AFFLUX_FN Doubles operator/(const Doubles& a, const Doubles& b) {
  return {{a.at[0] / b.at[0], a.at[1] / b.at[1], a.at[2] / b.at[2], a.at[3] / b.at[3]}};
}
AFFLUX_FN Doubles greater(const Doubles& acc, const Doubles& x) {
  return {{formula::greater(acc.at[0], x.at[0]), formula::greater(acc.at[1], x.at[1]),
           formula::greater(acc.at[2], x.at[2]), formula::greater(acc.at[3], x.at[3])}};
}
struct FourLanes {
  AFFLUX_FN Doubles fill(double value) { return {{value, value, value, value}}; }
  AFFLUX_FN Doubles root(const Doubles& values) {
    using formula::OneLane;
    return {{OneLane::root(values.at[0]), OneLane::root(values.at[1]), OneLane::root(values.at[2]),
             OneLane::root(values.at[3])}};
  }
};

// Stores four elements at an aligned address of the device, 16 bytes at a time (8 of types of 2 bytes). Without
// assembly nvcc 13.0 stores some vectors element by element.
template <class T>
AFFLUX_DEVICE void store_whole(T* to, const Vector4<T>& four) {
#if defined(__CUDA_ARCH__)
  constexpr int kWords = sizeof(four) / 4;
  std::uint32_t word[kWords];
  memcpy(word, &four, sizeof four);
  const std::size_t address = __cvta_generic_to_global(to);
  if constexpr (kWords == 2)
    asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(address), "r"(word[0]), "r"(word[1]) : "memory");
  AFFLUX_UNROLL_ON_DEVICE
  for (int k = 0; k + 4 <= kWords; k += 4)
    asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(address + 4 * k), "r"(word[k]), "r"(word[k + 1]),
                 "r"(word[k + 2]), "r"(word[k + 3])
                 : "memory");
#else
  *reinterpret_cast<Vector4<T>*>(to) = four;
#endif
}

// Elements [begin, begin + count) of every vector that a kernel reads or writes. kWhole: there are four of them, and
// all vectors are aligned to 16 bytes. Elements beyond the end are read as 0 and not written.
template <bool kWhole>
struct Span {
  std::int64_t begin;
  int count;

  template <class T>
  AFFLUX_DEVICE Vector4<T> load(const void* vector) const {
    const T* const from = on_device<T>(vector) + begin;
    if constexpr (kWhole) {
      return *reinterpret_cast<const Vector4<T>*>(from);
    } else {
      Vector4<T> four{};
      AFFLUX_UNROLL_ON_DEVICE
      for (int j = 0; j < kFour; ++j)
        if (j < count) four.at[j] = from[j];
      return four;
    }
  }
  template <class T>
  AFFLUX_DEVICE void store(void* vector, const Vector4<T>& four) const {
    T* const to = on_device<T>(vector) + begin;
    if constexpr (kWhole) {
      *reinterpret_cast<Vector4<T>*>(to) = four;
    } else {
      AFFLUX_UNROLL_ON_DEVICE
      for (int j = 0; j < kFour; ++j)
        if (j < count) to[j] = four.at[j];
    }
  }
};

// Calls body(span) for the four elements from `begin` on of vectors of `size` elements.
template <class Body>
AFFLUX_DEVICE void with_span(std::int64_t begin, std::int64_t size, bool aligned, const Body& body) {
  if (aligned && begin + kFour <= size)
    body(Span<true>{begin, kFour});
  else
    body(Span<false>{begin, begin + kFour <= size ? kFour : begin < size ? static_cast<int>(size - begin) : 0});
}

// Calls body(span) for the four elements of each thread of a block of Kernel, whose blocks have a tile each. Without
// the warp's barrier at its end nvcc 13.0 spills registers of the kernels for float64 params on devices of 8.0.
template <class Kernel, class Block, class Body>
AFFLUX_DEVICE void each_four(const Block& block, std::int64_t size, bool aligned, const Body& body) {
  block.each_in_warp([&](int thread) {
    const std::int64_t begin = block.index * Kernel::kTile + thread * kFour;
    if (begin < size) with_span(begin, size, aligned, body);
  });
}

}  // namespace afflux::cuda
