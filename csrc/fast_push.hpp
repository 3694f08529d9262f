// The most frequent push in C++ instead of Python: a vector that needs no conversion joins a buffer that it does not
// fill. Every other push, and every error, is left to server/pushing.py, before anything has changed. Both make the
// same decisions (tests/server/test_fast_push.py).
#pragma once
#include <pybind11/pybind11.h>

namespace afflux::python {

void bind_fast_push(pybind11::module_& module);

}  // namespace afflux::python
