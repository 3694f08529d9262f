// Access to one element of a vector, widened to float64.
#pragma once
#include <type_traits>

#include "afflux/view.hpp"
#include "cuda/block.hpp"
#include "formula/half.hpp"

namespace afflux::cuda {

// A tag for vectors of several types: the type of each is read from its view.
struct Mixed {};

// Returns element i. T is the type of the vector, or Mixed.
template <class T>
AFFLUX_DEVICE double element(const View<const void>& vector, std::int64_t i) {
  if constexpr (!std::is_same_v<T, Mixed>)
    return formula::widened(on_device<T>(vector.data)[i]);
  else if (vector.type == Type::float32)
    return on_device<float>(vector.data)[i];
  else if (vector.type == Type::float64)
    return on_device<double>(vector.data)[i];
  else
    return formula::widened(on_device<Bfloat16>(vector.data)[i]);
}

// Calls body(T{}) for the common type of these vectors, or body(Mixed{}) if their types differ.
template <class Body>
void with_common_type(const View<const void>* vectors, std::int64_t count, const Body& body) {
  const Type type = vectors[0].type;
  for (std::int64_t i = 0; i < count; ++i)
    if (vectors[i].type != type) return body(Mixed{});
  if (type == Type::float64) return body(double{});
  if (type == Type::bfloat16) return body(Bfloat16{});
  body(float{});
}

}  // namespace afflux::cuda
