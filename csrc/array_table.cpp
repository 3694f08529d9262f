#include "array_table.hpp"

#include <pybind11/numpy.h>
#include <pybind11/stl.h>

#include <cstddef>
#include <memory>
#include <string>
#include <unordered_set>
#include <utility>

#include "arrays.hpp"
#include "attributes.hpp"
#include "dlpack.hpp"
#include "exchange.hpp"
#include "formats.hpp"
#include "numpy_array.hpp"
#include "shared_memory.hpp"
#include "values.hpp"

namespace py = pybind11;

namespace afflux::python {
namespace {

bool is_numpy(PyTypeObject* type) { return type == py::detail::npy_api::get().PyArray_Type_; }

bool is_own(PyObject* value) { return is_numpy(Py_TYPE(value)) || is_torch(Py_TYPE(value)); }

// No other types: a defaultdict, for example, creates missing entries.
bool is_dict(py::handle tree) { return PyDict_CheckExact(tree.ptr()) || PyODict_CheckExact(tree.ptr()); }

// Returns whether all keys of a dict are of the class str itself, whose comparison runs no code of Python, and all
// values are NumPy's and torch's own arrays.
bool holds_own(py::handle dict) {
  PyObject *name = nullptr, *value = nullptr;
  for (Py_ssize_t place = 0; PyDict_Next(dict.ptr(), &place, &name, &value) != 0;)
    if (!PyUnicode_CheckExact(name) || !is_own(value)) return false;
  return true;
}

bool is_of_shape(PyObject* array, py::handle expected) {
  static const Name shape("shape");
  const py::object actual = shape.of(array);  // a tuple, or a subclass of it
  const int equal = PyObject_RichCompareBool(actual.ptr(), expected.ptr(), Py_EQ);
  if (equal < 0) throw py::error_already_set();
  return equal == 1;
}

}  // namespace

bool all_own(const py::iterable& values) {
  for (const py::handle value : values)
    if (!is_own(value.ptr())) return false;
  return true;
}

py::object ArrayTable::find_in_dict(py::handle tree) const {
  if (!holds_own(tree)) return py::none();
  py::list arrays(names.size());
  for (std::size_t i = 0; i < names.size(); ++i) {
    PyObject* const array = PyDict_GetItemWithError(tree.ptr(), item(names, i).ptr());
    if (array == nullptr && PyErr_Occurred() != nullptr) throw py::error_already_set();
    if (array == nullptr) return py::none();
    PyList_SET_ITEM(arrays.ptr(), static_cast<Py_ssize_t>(i), Py_NewRef(array));
  }
  if (known.is_none() || PyDict_GET_SIZE(tree.ptr()) == static_cast<Py_ssize_t>(names.size())) return arrays;
  PyObject* name = nullptr;
  for (Py_ssize_t place = 0; PyDict_Next(tree.ptr(), &place, &name, nullptr) != 0;) {
    const int is_known = PySet_Contains(known.ptr(), name);
    if (is_known < 0) throw py::error_already_set();
    if (is_known == 0) return py::none();
  }
  return arrays;
}

bool ArrayTable::is_bare(py::handle tree) const {
  if (!places.empty() || !in_order || !(PyList_CheckExact(tree.ptr()) || PyTuple_CheckExact(tree.ptr()))) return false;
  const auto arrays = py::tuple(held(tree));
  if (arrays.size() != names.size() || !all_own(arrays)) return false;
  for (std::size_t i = 0; i < arrays.size(); ++i)
    if (!is_of_shape(item(arrays, i).ptr(), item(shapes, i))) return false;
  return true;
}

py::object ArrayTable::find(py::handle tree) const {
  if (is_dict(tree)) return find_in_dict(tree);
  if (is_bare(tree)) return py::list(held(tree));
  if (places.empty() || !(PyList_CheckExact(tree.ptr()) || PyTuple_CheckExact(tree.ptr()))) return py::none();
  const auto list = py::tuple(held(tree));
  const auto size = static_cast<py::ssize_t>(list.size());
  if (!all_own(list) || (!known.is_none() && size > longest)) return py::none();
  py::list arrays;
  for (const py::ssize_t place : places) {
    if (place >= size) return py::none();
    arrays.append(item(list, static_cast<std::size_t>(place)));
  }
  return arrays;
}

py::object structure(py::handle tree) {
  static const Name dtype("dtype"), shape("shape");
  if (!is_dict(tree) || !holds_own(tree)) return py::none();
  py::list facts;
  facts.append(py::handle(reinterpret_cast<PyObject*>(Py_TYPE(tree.ptr()))));
  std::unordered_set<const void*> memory;
  PyObject *name = nullptr, *array = nullptr;
  for (Py_ssize_t place = 0; PyDict_Next(tree.ptr(), &place, &name, &array) != 0;) {
    const py::object owner = held(array);
    facts.append(py::handle(name));
    facts.append(py::handle(reinterpret_cast<PyObject*>(Py_TYPE(array))));
    facts.append(dtype.of(owner));
    facts.append(shape.of(owner));
    if (is_numpy(Py_TYPE(array))) continue;
    dlpack::Tensor tensor{};
    if (!described(owner, &tensor) || !memory.insert(static_cast<char*>(tensor.data) + tensor.byte_offset).second)
      return py::none();
  }
  return py::tuple(facts);
}

bool has_float64(const py::list& arrays) {
  static const Name dtype("dtype");
  for (const py::handle array : arrays) {
    dlpack::Tensor tensor{};
    Type type{};
    if (const auto plain = numpy_array(array, false)) {
      if (plain->type == Type::float64) return true;
    } else if (described(array, &tensor)) {
      if (float_of(tensor.dtype, &type) && type == Type::float64) return true;
    } else if (py::str(dtype.of(array)).cast<std::string>() == "float64") {
      return true;
    }
  }
  return false;
}

py::object lend_trees(const ArrayTable& table, const PartsObject& like, const py::list& trees) {
  for (const Type type : {Type::float32, Type::float64}) {
    py::list vectors;
    std::vector<std::vector<Memory>> memory;
    bool is_wider = false;
    for (const py::handle tree : trees) {
      const py::object arrays = table.find(tree);
      if (is_none(arrays)) return py::none();
      std::unique_ptr<PartsObject> parts;
      try {
        parts = std::make_unique<PartsObject>(like, arrays, py::none(), table.shapes, type);
      } catch (const Error&) {  // Python finds the reason
        return py::none();
      }
      memory.emplace_back();
      for (const PartView& part : parts->lent->list()) {
        is_wider = is_wider || part.type == Type::float64;
        memory.back().push_back({part.data, part.size * bytes(part.type)});
      }
      vectors.append(py::cast(std::move(parts)));
    }
    if (is_wider && type == Type::float32) continue;
    return share_memory(memory) ? py::object(py::none()) : vectors;
  }
  return py::none();
}

void bind_array_table(py::module_& module) {
  py::class_<ArrayTable>(module, "ArrayTable", py::module_local())
      .def(py::init<py::tuple, py::tuple, py::object, std::vector<py::ssize_t>, py::ssize_t, bool>(), py::arg("names"),
           py::arg("shapes"), py::arg("known"), py::arg("places"), py::arg("longest"), py::arg("in_order"))
      .def("__reduce__", [](const ArrayTable& t) { return py::make_tuple(py::type::of<ArrayTable>(), t.arguments()); })
      .def("find", &ArrayTable::find, py::arg("tree"))
      .def("is_bare", &ArrayTable::is_bare, py::arg("tree"));
  module.def("all_own", all_own, py::arg("values"));
  module.def("has_float64", has_float64, py::arg("arrays"));
  module.def("structure", structure, py::arg("tree"));
  module.def("lend_trees", lend_trees, py::arg("table"), py::arg("like"), py::arg("trees"));
}

}  // namespace afflux::python
