// _engine.apply: executes one round, an afflux.ops.Pass, whose attributes are read by name.
#pragma once
#include <pybind11/pybind11.h>

namespace afflux::python {

void bind_apply(pybind11::module_& module);

}  // namespace afflux::python
