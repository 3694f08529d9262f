// Conversions of vectors from one element type to another, and helpers for a switch over types.
#pragma once
#include "afflux/view.hpp"
#include "formula/half.hpp"

namespace afflux::AFFLUX_ISA {
namespace {

// Sets to[0, n) to from[0, n), rounded to nearest if To is narrower. The two must not overlap.
template <class From, class To>
AFFLUX_FN void convert(const From* __restrict from, To* __restrict to, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) formula::narrow(formula::widened(from[i]), to + i);
}

template <class T>
AFFLUX_FN void convert(const T* __restrict from, T* __restrict to, std::int64_t n) {
  __builtin_memcpy(to, from, static_cast<std::size_t>(n) * sizeof(T));
}

// Sets to[0, n) to vector[begin, begin + n), for a vector of any type.
template <class To>
AFFLUX_FN void convert(Type type, const void* vector, std::int64_t begin, std::int64_t n, To* to) {
  switch (type) {
    case Type::float32:
      return convert(static_cast<const float*>(vector) + begin, to, n);
    case Type::float64:
      return convert(static_cast<const double*>(vector) + begin, to, n);
    case Type::float16:
      return convert(static_cast<const Float16*>(vector) + begin, to, n);
    case Type::bfloat16:
      return convert(static_cast<const Bfloat16*>(vector) + begin, to, n);
  }
}

// Returns the same as afflux::bytes, without a symbol outside this object.
AFFLUX_FN std::int64_t size_of(Type type) { return type == Type::float64 ? 8 : type == Type::float32 ? 4 : 2; }

// Calls body(T{}) for the type of a slot or an update. These are never float16, which the entry points reject.
template <class Body>
AFFLUX_FN void with_type(Type type, const Body& body) {
  switch (type) {
    case Type::float32:
      return body(float{});
    case Type::float64:
      return body(double{});
    case Type::bfloat16:
      return body(Bfloat16{});
    case Type::float16:
      return;
  }
}

}  // namespace
}  // namespace afflux::AFFLUX_ISA
