#include "ready.hpp"

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

}  // namespace

std::vector<std::size_t> unready(const py::list& arrays, const py::tuple& shapes) {
  if (arrays.size() != shapes.size()) throw Error("[unready] arrays and shapes have different lengths");
  std::vector<std::size_t> indices;
  for (std::size_t i = 0; i < arrays.size(); ++i) {
    const py::object array = arrays[i], shape = shapes[i];
    const auto plain = numpy_array(array, false);  // no subclass, which may give its memory another meaning
    if (!(plain ? has_shape(shape, plain->dimensions, plain->shape) : is_ready_tensor(array, shape)))
      indices.push_back(i);
  }
  return indices;
}

}  // namespace afflux::python
