// The facts of arrivals as vectors, for the rules.
#pragma once
#include <pybind11/pybind11.h>

namespace afflux::python {

void bind_columns(pybind11::module_& module);

}  // namespace afflux::python
