// Element types and strides of arrays, from the buffer protocol and DLPack.
#pragma once
#include <cstdint>
#include <string>

#include "afflux/view.hpp"
#include "dlpack.hpp"

namespace afflux::python {

// Returns a buffer's format without a prefix for this machine's byte order (NumPy gives unaligned arrays such a
// prefix).
const char* native_format(const char* format);

// Return NumPy's name of a type, or a description of another type for messages.
std::string name_of_format(const std::string& format);
std::string name_of(dlpack::Type type);

// Sets `out` and returns true if the type is one of the engine's.
bool float_of(dlpack::Type type, Type* out);

// Returns the number of elements of an array, or -1 if it is larger than 2^59.
template <class Int>
std::int64_t elements(int dimensions, const Int* shape) {
  constexpr std::int64_t kMost = std::int64_t{1} << 59;
  std::int64_t count = 1;
  for (int i = 0; i < dimensions; ++i)
    if (shape[i] == 0) return 0;
  for (int i = 0; i < dimensions; ++i)
    if (__builtin_mul_overflow(count, static_cast<std::int64_t>(shape[i]), &count) || count > kMost) return -1;
  return count;
}

// Returns true if the array is C-contiguous. `unit` is the size of an element in the unit of `strides`; null strides:
// C-contiguous.
template <class Int>
bool is_contiguous(int dimensions, const Int* shape, const Int* strides, std::int64_t unit) {
  if (strides == nullptr) return true;
  for (int i = 0; i < dimensions; ++i)
    if (shape[i] == 0) return true;
  std::int64_t contiguous = unit;
  for (int i = dimensions; i-- > 0;) {
    if (shape[i] != 1 && strides[i] != contiguous) return false;
    if (__builtin_mul_overflow(contiguous, static_cast<std::int64_t>(shape[i]), &contiguous)) return false;
  }
  return true;
}

}  // namespace afflux::python
