// A vector in parts (afflux/parts.hpp) as an object of Python: arrays, the borders at which a vector is cut, a
// conversion.
#pragma once
#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "afflux/afflux.hpp"

namespace afflux::python {

class PartArrays;
using Borders = std::shared_ptr<const std::vector<std::int64_t>>;

// The class _engine.Parts. It refers to the arrays. Each call finds out where their memory is, unless they are `lent`.
struct PartsObject {
  // Throws Error unless `arrays` is a list or a tuple, and `borders` a vector of int64, which is copied.
  PartsObject(const pybind11::object& arrays, const pybind11::object& borders, const pybind11::object& conversion,
              const pybind11::object& dtype);
  // Lends the arrays, each of its shape in the tuple `shapes`; null: any shapes. Throws Error for an array that the
  // engine does not read where it is on the host.
  PartsObject(const PartsObject& like, const pybind11::object& arrays, const pybind11::object& conversion,
              pybind11::handle shapes, std::optional<Type> dtype);

  static inline PyTypeObject* type = nullptr;  // set once, by bind_parts

  // Returns the parts of this Python object, or null if the object is another one.
  static const PartsObject* in(pybind11::handle object) {
    return Py_TYPE(object.ptr()) == type ? object.cast<const PartsObject*>() : nullptr;
  }

  const pybind11::tuple arrays;
  const Borders borders;
  const pybind11::object conversion;             // an afflux.ops.Conversion, or None
  const std::optional<Type> dtype;               // without: the one that all parts have
  const std::shared_ptr<const PartArrays> lent;  // as they were when this object was made; null: they are not lent
};

// Returns the kind of a vector with this name. Throws Error if there is none, for a conversion of `op`.
Kind kind_named(const char* op, const std::string& name);

void bind_parts(pybind11::module_& module);

}  // namespace afflux::python
