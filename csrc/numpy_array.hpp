// The memory of NumPy arrays, read from their fields: this takes a third of the time of the buffer protocol.
#pragma once
#include <pybind11/numpy.h>

#include <optional>

#include "afflux/view.hpp"

namespace afflux::python {

struct NumpyArray {
  void* data;
  int dimensions;
  const pybind11::ssize_t* shape;
  Type type;
};

// Returns the memory of a NumPy array of float32, float64 or float16. Returns nothing for an array that is left to the
// buffer protocol: one of a subclass, of another type or byte order, one that is not contiguous or not aligned, and, if
// it is `written`, one that is read-only or whose writing makes NumPy warn.
inline std::optional<NumpyArray> numpy_array(pybind11::handle object, bool written) {
  using Api = pybind11::detail::npy_api;
  if (Py_TYPE(object.ptr()) != Api::get().PyArray_Type_) return {};
  const auto* const array = pybind11::detail::array_proxy(object.ptr());
  const auto* const descr = pybind11::detail::array_descriptor_proxy(array->descr);
  constexpr int kPlain = Api::NPY_ARRAY_C_CONTIGUOUS_ | Api::NPY_ARRAY_ALIGNED_, kWarnOnWrite = 1 << 31, kHalf = 23;
  const int required = kPlain | (written ? Api::NPY_ARRAY_WRITEABLE_ : 0), number = descr->type_num;
  if ((array->flags & (required | (written ? kWarnOnWrite : 0))) != required || descr->byteorder != '=' ||
      (number != Api::NPY_FLOAT_ && number != Api::NPY_DOUBLE_ && number != kHalf))
    return {};
  return NumpyArray{array->data, array->nd, array->dimensions,
                    number == Api::NPY_FLOAT_    ? Type::float32
                    : number == Api::NPY_DOUBLE_ ? Type::float64
                                                 : Type::float16};
}

}  // namespace afflux::python
