// The memory of NumPy's own arrays, read from their fields: a third of the time that NumPy takes to describe them.
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

// Nothing for what the buffer protocol has to describe, or to refuse: an array of a subclass or of another type, one
// that is not contiguous or not aligned, and if it is `written` one that is read-only or that NumPy warns of.
inline std::optional<NumpyArray> numpy_array(pybind11::handle object, bool written) {
  using Api = pybind11::detail::npy_api;
  if (Py_TYPE(object.ptr()) != Api::get().PyArray_Type_) return {};
  const auto* const array = pybind11::detail::array_proxy(object.ptr());
  const auto* const descr = pybind11::detail::array_descriptor_proxy(array->descr);
  constexpr int kPlain = Api::NPY_ARRAY_C_CONTIGUOUS_ | Api::NPY_ARRAY_ALIGNED_, kWarnOnWrite = 1 << 31;
  const int wanted = kPlain | (written ? Api::NPY_ARRAY_WRITEABLE_ : 0);
  const bool is_float = descr->type_num == Api::NPY_FLOAT_, is_double = descr->type_num == Api::NPY_DOUBLE_;
  if ((array->flags & (wanted | kWarnOnWrite)) != wanted || descr->byteorder != '=' || !(is_float || is_double))
    return {};
  return NumpyArray{array->data, array->nd, array->dimensions, is_float ? Type::float32 : Type::float64};
}

}  // namespace afflux::python
