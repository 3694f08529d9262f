// A vector in parts (afflux/parts.hpp) as an object of Python: arrays, the borders at which a vector is cut, a
// conversion.
#pragma once
#include <pybind11/pybind11.h>

#include <cstdint>
#include <optional>
#include <vector>

#include "afflux/view.hpp"

namespace afflux::python {

// The class _engine.Parts. It refers to the arrays, whose memory is read in each call anew.
struct PartsObject {
  // Throws Error unless `arrays` is a list or a tuple, and `borders` a vector of int64, which is copied.
  PartsObject(const pybind11::object& arrays, const pybind11::object& borders, const pybind11::object& conversion,
              const pybind11::object& dtype);
  PartsObject(const PartsObject& like, const pybind11::object& arrays, const pybind11::object& conversion);

  static inline PyTypeObject* type = nullptr;  // set once, by bind_parts

  // Returns the parts of this Python object, or null if the object is another one.
  static const PartsObject* in(pybind11::handle object) {
    return Py_TYPE(object.ptr()) == type ? object.cast<const PartsObject*>() : nullptr;
  }

  const pybind11::tuple arrays;
  const std::vector<std::int64_t> borders;
  const pybind11::object conversion;  // an afflux.ops.Conversion, or None
  const std::optional<Type> dtype;    // without: the one that all parts have
};

void bind_parts(pybind11::module_& module);

}  // namespace afflux::python
