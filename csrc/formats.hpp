// Reads an array's element type and strides from the buffer protocol and DLPack.
#pragma once
#include <cstdint>
#include <string>

#include "afflux/view.hpp"
#include "dlpack.hpp"

namespace afflux::python {

// A buffer's format without a prefix that says the byte order of this machine (NumPy gives unaligned arrays one).
const char* native_format(const char* format);

// The names of types, as NumPy has them, for messages too.
std::string name_of_format(const std::string& format);
std::string name_of(dlpack::Type type);

// Sets `out` if it is one of the engine's types.
bool float_of(dlpack::Type type, Type* out);

// The number of elements of an array; -1: more than can be addressed.
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

// C-contiguous. `strides` are in units of which an element has `unit`; null: C-contiguous.
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
