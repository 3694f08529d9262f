// Access to objects of the caller, from any library: reading one may raise any exception.
#pragma once
#include <pybind11/pybind11.h>

#include <string>

#include "afflux/afflux.hpp"

namespace afflux::python {

// Returns whether the exception comes from a handler of a signal, see afflux.ops.validation.
inline bool is_from_signal(const pybind11::error_already_set& error) {
  const pybind11::object trace = error.trace() ? pybind11::object(error.trace()) : pybind11::none();
  const auto validation = pybind11::module_::import("afflux.ops.validation");
  return validation.attr("is_from_signal")(error.value(), trace).cast<bool>();
}

// Calls `read` and returns its result. An exception of a Python object becomes an Error about `title()`, such as
// "[gram] vectors". A MemoryError, exceptions that are no Exception (KeyboardInterrupt), and those of a signal's
// handler are not changed.
template <class Title, class Read>
auto read_foreign(const Title& title, const Read& read) {
  try {
    return read();
  } catch (pybind11::error_already_set& error) {
    if (!error.matches(PyExc_Exception) || error.matches(PyExc_MemoryError) || is_from_signal(error)) throw;
    throw Error(title() + " cannot be read: " + error.what());
  } catch (const pybind11::cast_error&) {
    throw Error(title() + " cannot be read: it holds something of another type");
  }
}

}  // namespace afflux::python
