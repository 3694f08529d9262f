// Python's own values: numbers, tuples, lists and dictionaries.
#pragma once
#include <pybind11/pybind11.h>

#include <array>
#include <cstdint>
#include <optional>
#include <string>

#include "attributes.hpp"

namespace afflux::python {

inline pybind11::object integer(std::int64_t value) { return owned(PyLong_FromLongLong(value)); }
inline pybind11::object real(double value) { return owned(PyFloat_FromDouble(value)); }
inline bool is_none(pybind11::handle value) { return value.ptr() == Py_None; }
inline bool is_exactly(pybind11::handle value, pybind11::handle cls) {
  return Py_TYPE(value.ptr()) == reinterpret_cast<PyTypeObject*>(cls.ptr());
}
inline bool is_set(pybind11::handle flag) { return flag.ptr() != Py_False; }
// Returns the value of an object of the class int itself that fits into 64 bits; nothing for any other object.
inline std::optional<std::int64_t> plain_int(pybind11::handle value) {
  if (!PyLong_CheckExact(value.ptr())) return {};
  int overflow = 0;
  const long long number = PyLong_AsLongLongAndOverflow(value.ptr(), &overflow);
  return overflow == 0 ? std::optional<std::int64_t>(number) : std::nullopt;
}

// Returns the value of one of the server's own numbers.
inline std::int64_t count_of(pybind11::handle number) {
  const bool is_int = PyLong_CheckExact(number.ptr());
  const long long value = is_int ? PyLong_AsLongLong(number.ptr()) : 0;
  if (is_int && (value != -1 || PyErr_Occurred() == nullptr)) return value;
  PyErr_Clear();
  throw pybind11::type_error("[Ledger] a number is no int of 64 bits");
}

// The most characters of a client's id; see afflux.ops.validation.MOST_ID_BYTES.
constexpr Py_ssize_t kMostIdBytes = 1024;

inline bool is_plain_id(pybind11::handle client) {
  if (!PyUnicode_CheckExact(client.ptr())) return plain_int(client).has_value();
  return PyUnicode_IS_ASCII(client.ptr()) != 0 && PyUnicode_GET_LENGTH(client.ptr()) <= kMostIdBytes;
}

// Returns a tuple, or a NamedTuple without a call of its class. The items are borrowed.
template <std::size_t N>
pybind11::object tuple_of(pybind11::handle type, const std::array<pybind11::handle, N>& items) {
  auto* const cls = reinterpret_cast<PyTypeObject*>(type.ptr());
  pybind11::object tuple = owned(cls->tp_alloc(cls, N));
#if PY_VERSION_HEX >= 0x030E0000
  reinterpret_cast<PyTupleObject*>(tuple.ptr())->ob_hash = -1;  // not computed yet
#endif
  for (std::size_t i = 0; i < N; ++i)
    PyTuple_SET_ITEM(tuple.ptr(), static_cast<Py_ssize_t>(i), items[i].inc_ref().ptr());
  return tuple;
}

inline pybind11::object held(pybind11::handle object) { return pybind11::reinterpret_borrow<pybind11::object>(object); }
inline pybind11::handle item(pybind11::handle tuple, std::size_t place) {
  return PyTuple_GET_ITEM(tuple.ptr(), static_cast<Py_ssize_t>(place));
}
inline void check_tuple(pybind11::handle tuple, std::size_t size, const char* name) {
  if (!PyTuple_Check(tuple.ptr()) || PyTuple_GET_SIZE(tuple.ptr()) != static_cast<Py_ssize_t>(size))
    throw pybind11::type_error(std::string(name) + " is no tuple of " + std::to_string(size));
}
// Returns the value of a float or an int. Throws Python's exception for another object.
inline double number_of(pybind11::handle value) {
  const double number = PyFloat_AsDouble(value.ptr());
  if (number == -1.0 && PyErr_Occurred() != nullptr) throw pybind11::error_already_set();
  return number;
}

}  // namespace afflux::python
