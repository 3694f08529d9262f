// unflatten, one piece of an array: converts values from one element type to another.
#include "cpu/convert.hpp"
#include "cpu/kernels.hpp"

namespace afflux::AFFLUX_ISA {

void unflatten(Type from_type, const void* from, Type to_type, void* to, std::int64_t n) {
  switch (to_type) {
    case Type::float32:
      return convert(from_type, from, 0, n, static_cast<float*>(to));
    case Type::float64:
      return convert(from_type, from, 0, n, static_cast<double*>(to));
    case Type::float16:
      return convert(from_type, from, 0, n, static_cast<Float16*>(to));
    case Type::bfloat16:
      return convert(from_type, from, 0, n, static_cast<Bfloat16*>(to));
  }
}

}  // namespace afflux::AFFLUX_ISA
