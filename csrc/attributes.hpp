// Access to attributes of Python objects by name.
#pragma once
#include <pybind11/pybind11.h>

#include <string>
#include <utility>

#include "afflux/afflux.hpp"
#include "foreign.hpp"

namespace afflux::python {

// Takes ownership of a new object that a function of Python has returned. If it is null, throws the exception that the
// function has set.
inline pybind11::object owned(PyObject* created) {
  if (created == nullptr) throw pybind11::error_already_set();
  return pybind11::reinterpret_steal<pybind11::object>(created);
}

// The name of an attribute or a method, interned once, so that a lookup creates no string. Create it with the GIL held.
// The string is never freed, because a static Name may be destroyed after the interpreter.
class Name {
 public:
  explicit Name(const char* text) : text_(owned(PyUnicode_InternFromString(text)).release().ptr()) {}

  pybind11::object of(pybind11::handle owner) const { return owned(PyObject_GetAttr(owner.ptr(), text_)); }
  PyObject* text() const { return text_; }

 private:
  PyObject* text_;
};

// An attribute of a caller's object. Create it once for the process.
class Attribute {
 public:
  explicit Attribute(const char* name) : name_(name), interned_(name) {}
  Attribute(const Attribute&) = delete;
  Attribute& operator=(const Attribute&) = delete;

  // Returns the attribute of a round or of a part of a round. Throws Error if it cannot be read.
  pybind11::object of(pybind11::handle owner) const {
    return read_foreign([this] { return std::string("[apply] ") + name_; }, [&] { return interned_.of(owner); });
  }
  // Returns the attribute, or null if there is none.
  pybind11::object of_any(pybind11::handle owner) const {
    return null_if_missing(PyObject_GetAttr(owner.ptr(), interned_.text()));
  }
  // Calls the method of this name without arguments. Returns null if there is no such method.
  pybind11::object call_any(pybind11::handle owner) const {
    return null_if_missing(PyObject_CallMethodNoArgs(owner.ptr(), interned_.text()));
  }
  // Returns the attribute of the type itself, not of its bases, or null if there is none.
  pybind11::handle of_type(const PyTypeObject* type) const {
    return type->tp_dict == nullptr ? nullptr : PyDict_GetItemWithError(type->tp_dict, interned_.text());
  }
  const char* name() const { return name_; }
  double number_of(pybind11::handle owner) const { return cast<double>(owner, "a number"); }
  std::int64_t integer_of(pybind11::handle owner) const { return cast<std::int64_t>(owner, "an integer"); }
  std::string text_of(pybind11::handle owner) const { return cast<std::string>(owner, "a str"); }
  bool flag_of(pybind11::handle owner) const { return cast<bool>(owner, "a bool"); }

 private:
  static pybind11::object null_if_missing(PyObject* attribute) {
    if (attribute == nullptr) {
      if (PyErr_ExceptionMatches(PyExc_AttributeError) == 0) throw pybind11::error_already_set();
      PyErr_Clear();
    }
    return pybind11::reinterpret_steal<pybind11::object>(attribute);
  }

  template <class T>
  T cast(pybind11::handle owner, const char* expected) const {
    const pybind11::object value = of(owner);
    pybind11::detail::make_caster<T> caster;
    if (read_foreign([this] { return std::string("[apply] ") + name_; }, [&] { return caster.load(value, true); }))
      return pybind11::detail::cast_op<T>(std::move(caster));
    throw Error(std::string("[apply] ") + name_ + " is a " + Py_TYPE(value.ptr())->tp_name + ", expected " + expected);
  }

  const char* name_;
  const Name interned_;
};

}  // namespace afflux::python
