// Conversion of a piece of a part while it is copied into a slot (see Conversion in afflux.hpp).
#pragma once
#include "afflux/order.hpp"
#include "api/kernels.hpp"
#include "cpu/convert.hpp"
#include "cpu/simd.hpp"
#include "formula/conversion.hpp"

namespace afflux::AFFLUX_ISA {
namespace {

// Returns vector[begin, begin + n) as values of type X: in place if the vector has that type, else converted into
// `room`.
template <class X>
__attribute__((noinline)) const X* read_as(Type type, const void* vector, std::int64_t begin, std::int64_t n, X* room) {
  if (type == TypeOf<X>::value) return static_cast<const X*>(vector) + begin;
  convert(type, vector, begin, n, room);
  return room;
}

// Returns base[0, n) rounded to Narrow and widened again, in `room`.
template <class Narrow, class W>
AFFLUX_FN const W* rounded_through(const W* base, std::int64_t n, W* room) {
  for (std::int64_t i = 0; i < n; ++i) {
    Narrow seen;
    formula::narrow(base[i], &seen);
    formula::narrow(formula::widened(seen), room + i);
  }
  return room;
}

// Returns base[0, n) rounded to this type, in which the client has received it: in `room`, or in place if nothing is
// rounded.
template <class W>
__attribute__((noinline)) const W* seen_as(Type type, const W* base, std::int64_t n, W* room) {
  if (type == Type::float16) return rounded_through<Float16>(base, n, room);
  if (type == Type::bfloat16) return rounded_through<Bfloat16>(base, n, room);
  if (type == Type::float32 && sizeof(W) > 4) return rounded_through<float>(base, n, room);
  return base;
}

template <formula::Change kChange, class W, class T>
AFFLUX_FN void change_all(const W* __restrict sent, const W* __restrict base, double scale, std::int64_t n,
                          T* __restrict slot) {
  using C = formula::Computed<kChange, W, T>;
  for (std::int64_t i = 0; i < n; ++i) {
    C seen{};
    if constexpr (formula::reads_base(kChange)) seen = static_cast<C>(base[i]);
    formula::narrow(formula::changed<kChange, C>(static_cast<C>(sent[i]), seen, scale), slot + i);
  }
}

// Converts n elements, at most a block: those of the part from `at` on, with those of the base from `begin` on. W is a
// type that holds both exactly.
template <class W, class T>
AFFLUX_FN void change_piece(const PartChange& how, const Part& part, std::int64_t at, std::int64_t begin,
                            std::int64_t n, T* slot) {
  formula::with_change(how.change, [&](auto change) AFFLUX_INLINE {
    constexpr formula::Change kChange = decltype(change)::value;
    W sent_room[kBlock], base_room[kBlock];
    const W* const sent = read_as(part.type, part.data, at, n, sent_room);
    const W* base = nullptr;
    if constexpr (formula::reads_base(kChange)) base = read_as(how.base_type, how.base, begin, n, base_room);
    if constexpr (formula::subtracts_base(kChange)) base = seen_as(part.type, base, n, base_room);
    change_all<kChange>(sent, base, how.scale, n, slot);
  });
}

}  // namespace
}  // namespace afflux::AFFLUX_ISA
