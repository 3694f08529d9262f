// Checksums for Python: bytes of uint32 in native byte order.
#pragma once
#include <pybind11/pybind11.h>

#include <cstdint>
#include <vector>

namespace afflux::python {

inline pybind11::bytes as_bytes(const std::vector<std::uint32_t>& numbers) {
  return {reinterpret_cast<const char*>(numbers.data()), numbers.size() * sizeof(std::uint32_t)};
}

}  // namespace afflux::python
