// The checks of a conversion, and its arithmetic for the sweep.
#pragma once
#include "afflux/afflux.hpp"
#include "api/check.hpp"
#include "api/kernels.hpp"

namespace afflux {

// Returns true if the conversion changes values.
inline bool changes(const Conversion* conversion) {
  return conversion != nullptr && conversion->from != conversion->to;
}

inline formula::Change change_of(Kind from, Kind to) {
  using formula::Change;
  if (from == Kind::model) return to == Kind::update ? Change::subtract : Change::subtract_divide;
  if (from == Kind::update) return to == Kind::gradient ? Change::divide : Change::add;
  return to == Kind::update ? Change::multiply : Change::multiply_add;
}

// Returns true if the conversion reads its base.
inline bool reads_base(const Conversion& conversion) {
  return formula::reads_base(change_of(conversion.from, conversion.to));
}

// Returns the change of a checked conversion whose kinds differ.
inline PartChange part_change(const Conversion& conversion) {
  const auto& [from, to, base, scale] = conversion;
  const bool scaled = from == Kind::gradient || to == Kind::gradient;
  return {change_of(from, to), reads_base(conversion) ? base.data : nullptr, base.type, scaled ? scale : 1.0};
}

namespace check {

// Checks all of a conversion whose kinds differ, but for the memory of the base.
inline void conversion(const char* op, Name base, Name scale, const Conversion& conversion) {
  if (reads_base(conversion)) type(op, base, conversion.base.type, {Type::float32, Type::float64});
  if (conversion.from != Kind::gradient && conversion.to != Kind::gradient) return;
  finite(op, scale, conversion.scale);
  if (conversion.scale <= 0) fail(op, scale.str() + " is " + std::to_string(conversion.scale) + ", must be positive");
}

}  // namespace check
}  // namespace afflux
