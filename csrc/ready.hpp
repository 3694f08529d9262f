// Separates the arrays of a model that the engine reads in place from the others.
#pragma once
#include <pybind11/pybind11.h>

#include <cstddef>
#include <vector>

namespace afflux::python {

// The indices of the arrays that the engine may be unable to read as they are, or that have another shape than `shapes`
// says: all but contiguous NumPy arrays and torch tensors in the host's memory, of the engine's types.
std::vector<std::size_t> unready(const pybind11::list& arrays, const pybind11::tuple& shapes);

}  // namespace afflux::python
