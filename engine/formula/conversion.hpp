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

// The type to which a sent value is converted first: P, the type of the base, if both are then added or subtracted;
// else float64.
template <Change kChange, class P>
struct Sent {
  using Type = double;
};
template <class P>
struct Sent<Change::subtract, P> {
  using Type = P;
};
template <class P>
struct Sent<Change::subtract_divide, P> {
  using Type = P;
};
template <class P>
struct Sent<Change::add, P> {
  using Type = P;
};

// Returns the converted value. Each operation is rounded once, to its own type. A base that is subtracted must be
// rounded already to the type in which the client has received it.
template <Change kChange, class P>
AFFLUX_FN auto changed(typename Sent<kChange, P>::Type sent, P base, double scale) {
  if constexpr (kChange == Change::subtract) {
    return sent - base;
  } else if constexpr (kChange == Change::subtract_divide) {
    return -static_cast<double>(sent - base) / scale;
  } else if constexpr (kChange == Change::divide) {
    return -sent / scale;
  } else if constexpr (kChange == Change::multiply) {
    return -sent * scale;
  } else if constexpr (kChange == Change::multiply_add) {
    return base + static_cast<P>(-sent * scale);
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
