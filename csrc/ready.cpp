#include "ready.hpp"

#include <cstdint>
#include <cstring>
#include <string>

#include "afflux/afflux.hpp"
#include "attributes.hpp"
#include "exchange.hpp"
#include "expected.hpp"
#include "formats.hpp"
#include "numpy_array.hpp"

namespace py = pybind11;

namespace afflux::python {
namespace {

bool is_ready_tensor(py::handle array, py::handle shape) {
  dlpack::Tensor tensor{};
  Type type{};
  if (!described(array, &tensor) || !float_of(tensor.dtype, &type) || !has_shape(shape, tensor.ndim, tensor.shape) ||
      !is_contiguous(tensor.ndim, tensor.shape, tensor.strides, 1))
    return false;
  // is_neg() takes as long as all other checks, so it is called only for at most one element. The imaginary parts of
  // conjugates have the negative bit; with more elements they are strided, and rejected above. The engine itself
  // rejects any other tensor that has the bit.
  return elements(tensor.ndim, tensor.shape) > 1 || !is_negative(array);
}

// Accepts only the class ndarray itself: a subclass may give its memory another meaning (masked arrays do).
bool is_ready_array(py::handle array, py::handle shape) {
  if (const auto plain = numpy_array(array, false)) return has_shape(shape, plain->dimensions, plain->shape);
  Py_buffer buffer;
  if (std::strcmp(Py_TYPE(array.ptr())->tp_name, "numpy.ndarray") != 0) return false;
  if (PyObject_GetBuffer(array.ptr(), &buffer, PyBUF_STRIDES | PyBUF_FORMAT) != 0) {
    PyErr_Clear();  // NumPy has types that the buffer protocol lacks
    return false;
  }
  const std::string format = native_format(buffer.format);
  const bool is_aligned =
      buffer.itemsize > 0 &&
      reinterpret_cast<std::uintptr_t>(buffer.buf) % static_cast<std::uintptr_t>(buffer.itemsize) == 0;
  const bool is_ready = (format == "f" || format == "d" || format == "e") && is_aligned &&
                        has_shape(shape, buffer.ndim, buffer.shape) &&
                        is_contiguous(buffer.ndim, buffer.shape, buffer.strides, buffer.itemsize);
  PyBuffer_Release(&buffer);
  return is_ready;
}

}  // namespace

std::vector<std::size_t> unready(const py::list& arrays, const py::tuple& shapes) {
  if (arrays.size() != shapes.size()) throw Error("[unready] arrays and shapes have different lengths");
  std::vector<std::size_t> indices;
  for (std::size_t i = 0; i < arrays.size(); ++i) {
    const py::object array = arrays[i], shape = shapes[i];
    if (!is_ready_array(array, shape) && !is_ready_tensor(array, shape)) indices.push_back(i);
  }
  return indices;
}

}  // namespace afflux::python
