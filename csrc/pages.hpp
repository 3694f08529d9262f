// Pages of a mapped file, read ahead and made present before a sweep: what would be a SIGBUS amid it is an error here.
#pragma once
#include <pybind11/pybind11.h>

namespace afflux::python {

void bind_pages(pybind11::module_& module);

}  // namespace afflux::python
