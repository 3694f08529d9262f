// Methods and attributes of a class without pybind11's dispatcher, which takes a tenth of the time of a push.
#pragma once
#include <cxxabi.h>
#include <pybind11/pybind11.h>

#include <cstddef>
#include <type_traits>
#include <utility>

#include "attributes.hpp"

namespace afflux::python {

// Calls `call` and returns its object; sets Python's exception and returns null if it throws.
template <class Call>
PyObject* guarded(const Call& call) {
  try {
    return call().release().ptr();
#if defined(__GLIBCXX__)
  } catch (abi::__forced_unwind&) {  // a thread that ends with the process
    throw;
#endif
  } catch (...) {
    pybind11::detail::try_translate_exceptions();
  }
  return nullptr;
}

// The object of C++ in an object of a class without other bases. A descriptor has checked the class.
template <class Class>
Class& self_of(PyObject* self) {
  auto* const instance = reinterpret_cast<pybind11::detail::instance*>(self);
  if (!instance->simple_layout || instance->simple_value_holder[0] == nullptr)
    throw pybind11::type_error("__init__ was not called");
  return *static_cast<Class*>(instance->simple_value_holder[0]);
}

inline pybind11::object as_object(pybind11::object value) { return value; }
inline pybind11::object as_object(bool value) { return pybind11::bool_(value); }
inline pybind11::object as_object(std::int64_t value) { return owned(PyLong_FromLongLong(value)); }
inline pybind11::object as_object(double value) { return owned(PyFloat_FromDouble(value)); }

template <class Class, class Result, class... Arguments>
struct Descriptor {
  template <auto method, std::size_t... i>
  static pybind11::object result(PyObject* self, PyObject* const* arguments, std::index_sequence<i...>) {
    (void)arguments;
    auto& object = self_of<Class>(self);
    if constexpr (std::is_void_v<Result>) {
      (object.*method)(Arguments(arguments[i])...);
      return pybind11::none();
    } else {
      return as_object((object.*method)(Arguments(arguments[i])...));
    }
  }

  template <auto method>
  static PyObject* call(PyObject* self, PyObject* const* arguments, Py_ssize_t count) {
    constexpr std::size_t expected = sizeof...(Arguments);
    if (count != static_cast<Py_ssize_t>(expected)) {
      PyErr_Format(PyExc_TypeError, "takes %d arguments, %zd were given", static_cast<int>(expected), count);
      return nullptr;
    }
    return guarded([&] { return result<method>(self, arguments, std::index_sequence_for<Arguments...>{}); });
  }

  template <auto method>
  static PyObject* get(PyObject* self, void*) {
    return guarded([&] { return result<method>(self, nullptr, std::index_sequence<>{}); });
  }
};

template <class Class, class Result, class... Arguments>
Descriptor<Class, Result, Arguments...> descriptor_of(Result (Class::*)(Arguments...));
template <class Class, class Result, class... Arguments>
Descriptor<Class, Result, Arguments...> descriptor_of(Result (Class::*)(Arguments...) const);

// Adds a method of C++ to a class. Its arguments are handles.
template <auto method>
void add_method(pybind11::handle type, const char* name) {
  using Of = decltype(descriptor_of(method));
  static PyMethodDef definition{name,
                                reinterpret_cast<PyCFunction>(reinterpret_cast<void (*)()>(&Of::template call<method>)),
                                METH_FASTCALL, nullptr};
  type.attr(name) = owned(PyDescr_NewMethod(reinterpret_cast<PyTypeObject*>(type.ptr()), &definition));
}

// Adds a read-only attribute to a class: the result of a method of C++ without arguments.
template <auto method>
void add_attribute(pybind11::handle type, const char* name) {
  using Of = decltype(descriptor_of(method));
  static PyGetSetDef definition{name, &Of::template get<method>, nullptr, nullptr, nullptr};
  type.attr(name) = owned(PyDescr_NewGetSet(reinterpret_cast<PyTypeObject*>(type.ptr()), &definition));
}

// Adds an attribute that Python also sets, by a method of one argument.
template <auto method, auto setter>
void add_attribute(pybind11::handle type, const char* name) {
  using Of = decltype(descriptor_of(method));
  using Set = decltype(descriptor_of(setter));
  static PyGetSetDef definition{name, &Of::template get<method>,
                                [](PyObject* self, PyObject* value, void*) {
                                  if (value == nullptr) {
                                    PyErr_SetString(PyExc_AttributeError, "cannot be deleted");
                                    return -1;
                                  }
                                  PyObject* const done = Set::template call<setter>(self, &value, 1);
                                  Py_XDECREF(done);
                                  return done == nullptr ? -1 : 0;
                                },
                                nullptr, nullptr};
  type.attr(name) = owned(PyDescr_NewGetSet(reinterpret_cast<PyTypeObject*>(type.ptr()), &definition));
}

}  // namespace afflux::python
