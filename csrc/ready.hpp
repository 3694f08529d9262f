// The division of a model's arrays into those that the engine reads in place and the others.
#pragma once
#include <pybind11/pybind11.h>

#include <cstddef>
#include <vector>

namespace afflux::python {

// Returns the indices of the arrays that the engine may be unable to read in place, or whose shape is not the one in
// `shapes`. The other arrays are contiguous NumPy arrays and torch tensors on the host, of the engine's types. Throws
// Error if the two lists have different lengths.
std::vector<std::size_t> unready(const pybind11::list& arrays, const pybind11::tuple& shapes);

}  // namespace afflux::python
