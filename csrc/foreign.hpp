// Objects of the caller's, of whatever library: reading one of them may raise anything.
#pragma once
#include <pybind11/pybind11.h>

#include <string>

#include "afflux/afflux.hpp"

namespace afflux::python {

// Calls `read`. What a Python object raises there becomes an Error about `title()`, such as "[gram] vectors"; what no
// object is to blame for, as a KeyboardInterrupt or a MemoryError, stays as it is.
template <class Title, class Read>
auto read_foreign(const Title& title, const Read& read) {
  try {
    return read();
  } catch (pybind11::error_already_set& error) {
    if (!error.matches(PyExc_Exception) || error.matches(PyExc_MemoryError)) throw;
    throw Error(title() + " cannot be read: " + error.what());
  } catch (const pybind11::cast_error&) {
    throw Error(title() + " cannot be read: it holds something of another type");
  }
}

}  // namespace afflux::python
