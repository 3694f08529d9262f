// inner of a few vectors of one type, with all stages in registers: each x_k is computed, squared, added to e and
// multiplied with e without a store. The sums of all vectors are in registers, so only as many lanes as one native
// vector has go through a run of rows at a time. The first lanes read the run from memory, the others from L1. Formulas
// and order are those of the tiles (cpu/inner.cpp), which process the last elements; tests compare the bits of both.
#pragma once
#include <utility>

#include "api/kernels.hpp"
#include "cpu/convert.hpp"
#include "cpu/simd.hpp"
#include "formula/combine.hpp"

namespace afflux::AFFLUX_ISA {
namespace {

constexpr int kInnerFew = 16;           // with more vectors, sums are on the stack, which is as slow as tiles
constexpr std::int64_t kInnerRun = 16;  // rows of lanes: 22 KB for ten float32 vectors and a memory
constexpr std::int64_t kLineBytes = 64;

// A function that adds to `lanes`, for elements [begin, end) in whole rows of lanes, the squares of all x's, the square
// of e, and the products of all x's with e.
using InnerFused = void (*)(const Inner& inner, std::int64_t ahead, std::int64_t begin, std::int64_t end,
                            double* lanes);

template <class T>
AFFLUX_FN simd::Doubles fetched(const T* from, std::int64_t ahead) {
  if (ahead != 0) __builtin_prefetch(reinterpret_cast<const char*>(from) + ahead);
  return simd::Vector::load(from);
}

template <class T, bool kShifts, int kCount>
AFFLUX_FN void inner_of_lanes(const T* const* vectors, const double* weights, const float* memory, double shift,
                              std::int64_t ahead, std::int64_t memory_ahead, std::int64_t end, double* lanes) {
  using simd::Vector;
  simd::Doubles square[kCount], product[kCount], square_of_e = Vector::load(lanes + kCount * kLanes);
  AFFLUX_UNROLL
  for (int k = 0; k < kCount; ++k) {
    square[k] = Vector::load(lanes + k * kLanes);
    product[k] = Vector::load(lanes + (kCount + 1 + k) * kLanes);
  }
  for (std::int64_t i = 0; i < end; i += kLanes) {
    simd::Doubles x[kCount], e = Vector::fill(0.0), shifted = e;
    if (kShifts) shifted = Vector::fill(shift) * fetched(memory + i, memory_ahead);
    AFFLUX_UNROLL
    for (int k = 0; k < kCount; ++k) {
      x[k] = fetched(vectors[k] + i, ahead);
      if (kShifts) x[k] = x[k] + shifted;
      e = formula::weighted(e, Vector::fill(weights[k]), x[k]);
      square[k] = formula::weighted(square[k], x[k], x[k]);
    }
    square_of_e = formula::weighted(square_of_e, e, e);
    AFFLUX_UNROLL
    for (int k = 0; k < kCount; ++k) product[k] = formula::weighted(product[k], x[k], e);
  }
  AFFLUX_UNROLL
  for (int k = 0; k < kCount; ++k) {
    Vector::store(lanes + k * kLanes, square[k]);
    Vector::store(lanes + (kCount + 1 + k) * kLanes, product[k]);
  }
  Vector::store(lanes + kCount * kLanes, square_of_e);
}

template <class T, bool kShifts, int kCount>
void inner_fused(const Inner& inner, std::int64_t ahead, std::int64_t begin, std::int64_t end, double* lanes) {
  for (std::int64_t run = begin; run < end; run += kInnerRun * kLanes) {
    const std::int64_t size = end - run < kInnerRun * kLanes ? end - run : kInnerRun * kLanes;
    for (std::int64_t lane = 0; lane < kLanes; lane += simd::kWidth) {
      const T* vectors[kCount];
      for (int k = 0; k < kCount; ++k) vectors[k] = static_cast<const T*>(inner.vectors.data[k].data) + run + lane;
      const auto* const memory = kShifts ? static_cast<const float*>(inner.memory.data) + run + lane : nullptr;
      const auto at_new_line = [&](std::int64_t bytes) { return lane * bytes % kLineBytes == 0 ? ahead : 0; };
      inner_of_lanes<T, kShifts, kCount>(vectors, inner.weights.data, memory, inner.shift, at_new_line(sizeof(T)),
                                         at_new_line(sizeof(float)), size, lanes + lane);
    }
  }
}

template <class T, bool kShifts, int... kCounts>
AFFLUX_FN InnerFused inner_fused_of(std::int64_t count, std::integer_sequence<int, kCounts...>) {
  static constexpr InnerFused kAll[] = {inner_fused<T, kShifts, kCounts + 1>...};
  return kAll[count - 1];
}

// Returns the function for these arguments, or nullptr if there is none: all vectors must be float32 or all bfloat16, a
// memory that is used must be float32, and e must contain every vector and no part of the memory.
AFFLUX_FN InnerFused inner_fused_of(const Inner& inner) {
  const std::int64_t count = inner.vectors.size;
  if (inner.weights.data == nullptr || inner.memory_weight != 0.0 || count < 1 || count > kInnerFew) return nullptr;
  const Type type = inner.vectors.data[0].type;
  for (std::int64_t k = 0; k < count; ++k)
    if (inner.vectors.data[k].type != type || inner.weights.data[k] == 0.0) return nullptr;
  const bool shifts = inner.shift != 0.0;
  if (shifts && inner.memory.type != Type::float32) return nullptr;
  constexpr auto kCounts = std::make_integer_sequence<int, kInnerFew>{};
  if (type == Type::float32)
    return shifts ? inner_fused_of<float, true>(count, kCounts) : inner_fused_of<float, false>(count, kCounts);
  if (type == Type::bfloat16)
    return shifts ? inner_fused_of<Bfloat16, true>(count, kCounts) : inner_fused_of<Bfloat16, false>(count, kCounts);
  return nullptr;
}

}  // namespace
}  // namespace afflux::AFFLUX_ISA
