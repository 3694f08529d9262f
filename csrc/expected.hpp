// The shapes that a caller expects, as Python tuples.
#pragma once
#include <pybind11/pybind11.h>

namespace afflux::python {

template <class Int>
bool has_shape(pybind11::handle expected, int dimensions, const Int* shape) {
  if (!PyTuple_Check(expected.ptr()) || PyTuple_GET_SIZE(expected.ptr()) != dimensions) return false;
  for (int i = 0; i < dimensions; ++i) {
    PyObject* const dimension = PyTuple_GET_ITEM(expected.ptr(), i);
    int overflow = 0;
    if (!PyLong_Check(dimension) || PyLong_AsLongLongAndOverflow(dimension, &overflow) != shape[i]) return false;
  }
  return true;
}

}  // namespace afflux::python
