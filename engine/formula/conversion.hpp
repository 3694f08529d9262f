// Conversions between updates, gradients and models, element by element.
#pragma once
#include <type_traits>

#include "formula/half.hpp"

namespace afflux::formula {

// The arithmetic between two kinds of vectors (see Conversion in afflux.hpp).
enum class Change {
  subtract,         // model to update
  subtract_divide,  // model to gradient
  divide,           // update to gradient
  multiply,         // gradient to update
  multiply_add,     // gradient to model
  add,              // update to model
};

AFFLUX_FN constexpr bool reads_base(Change change) { return change != Change::divide && change != Change::multiply; }
AFFLUX_FN constexpr bool subtracts_base(Change change) {
  return change == Change::subtract || change == Change::subtract_divide;
}

// The type in which values of type W are converted for a slot of type T: float64, as defined in afflux.hpp. A sum or
// difference of float32 values is computed in float32 unless the slot is float64, with the same bits: a float64 has at
// least 2 * 24 + 2 significant bits, so rounding to it first changes no result (Figueroa 1995).
template <Change kChange, class W, class T>
using Computed =
    std::conditional_t<(kChange == Change::subtract || kChange == Change::add) && sizeof(W) == 4 && sizeof(T) <= 4,
                       float, double>;

// Returns the converted value, which the caller rounds to the slot's type. A base that is subtracted must be rounded
// already to the type in which the client has received it.
template <Change kChange, class C>
AFFLUX_FN C changed(C sent, C base, double scale) {
  if constexpr (kChange == Change::subtract) {
    return sent - base;
  } else if constexpr (kChange == Change::subtract_divide) {
    return -(sent - base) / scale;
  } else if constexpr (kChange == Change::divide) {
    return -sent / scale;
  } else if constexpr (kChange == Change::multiply) {
    return -sent * scale;
  } else if constexpr (kChange == Change::multiply_add) {
    return base + -sent * scale;
  } else {
    return base + sent;
  }
}

// Calls body with the change as a std::integral_constant.
template <class Body>
AFFLUX_FN void with_change(Change change, const Body& body) {
  switch (change) {
    case Change::subtract:
      return body(std::integral_constant<Change, Change::subtract>{});
    case Change::subtract_divide:
      return body(std::integral_constant<Change, Change::subtract_divide>{});
    case Change::divide:
      return body(std::integral_constant<Change, Change::divide>{});
    case Change::multiply:
      return body(std::integral_constant<Change, Change::multiply>{});
    case Change::multiply_add:
      return body(std::integral_constant<Change, Change::multiply_add>{});
    case Change::add:
      return body(std::integral_constant<Change, Change::add>{});
  }
}

}  // namespace afflux::formula
