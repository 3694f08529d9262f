#include "columns.hpp"

#include <pybind11/numpy.h>

#include <cstdint>

namespace py = pybind11;

namespace afflux::python {
namespace {

// Returns a read-only NumPy vector with element(tuple) for each tuple of the list.
template <class T, class Element>
py::array column(const py::list& tuples, const Element& element) {
  py::array_t<T> out(static_cast<py::ssize_t>(tuples.size()));
  T* const elements = out.mutable_data();
  for (std::size_t i = 0; i < tuples.size(); ++i) elements[i] = element(PyList_GET_ITEM(tuples.ptr(), i));
  py::detail::array_proxy(out.ptr())->flags &= ~py::detail::npy_api::NPY_ARRAY_WRITEABLE_;
  return out;
}

std::int64_t integer_at(PyObject* tuple, Py_ssize_t place) {
  const long long value = PyLong_AsLongLong(PyTuple_GET_ITEM(tuple, place));
  if (value == -1 && PyErr_Occurred() != nullptr) throw py::error_already_set();
  return value;
}

double real_at(PyObject* tuple, Py_ssize_t place) {
  const double value = PyFloat_AsDouble(PyTuple_GET_ITEM(tuple, place));
  if (value == -1.0 && PyErr_Occurred() != nullptr) throw py::error_already_set();
  return value;
}

// Returns the columns of afflux/_engine.pyi. The indices are those of aggregation.arrivals.PendingArrival.
py::tuple columns(const py::list& arrivals, std::int64_t version) {
  for (const py::handle arrival : arrivals)
    if (!PyTuple_Check(arrival.ptr()) || PyTuple_GET_SIZE(arrival.ptr()) < 11)
      throw py::type_error("columns takes a list of PendingArrival");
  py::tuple clients(arrivals.size());
  for (std::size_t i = 0; i < arrivals.size(); ++i)
    clients[i] = py::reinterpret_borrow<py::object>(PyTuple_GET_ITEM(PyList_GET_ITEM(arrivals.ptr(), i), 0));
  return py::make_tuple(
      clients, column<std::int64_t>(arrivals, [](PyObject* arrival) { return integer_at(arrival, 1); }),
      column<std::int64_t>(arrivals, [version](PyObject* arrival) { return version - integer_at(arrival, 1); }),
      column<std::int64_t>(arrivals, [](PyObject* arrival) { return integer_at(arrival, 2); }),
      column<double>(arrivals, [](PyObject* arrival) { return real_at(arrival, 3); }),
      column<double>(arrivals, [](PyObject* arrival) { return real_at(arrival, 4); }),
      column<std::int64_t>(arrivals, [](PyObject* arrival) { return integer_at(arrival, 8); }),
      column<std::int64_t>(arrivals, [](PyObject* arrival) { return integer_at(arrival, 10); }));
}

}  // namespace

void bind_columns(py::module_& module) { module.def("columns", columns, py::arg("arrivals"), py::arg("version")); }

}  // namespace afflux::python
