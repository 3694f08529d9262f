// DLPack's C functions, which a library may offer beside __dlpack__: tens of nanoseconds for an array, where torch's
// __dlpack__ takes microseconds.
#pragma once
#include <pybind11/pybind11.h>

#include "dlpack.hpp"

namespace afflux::python {

// What the object says of its memory, in the host's memory; it holds while the GIL and the object are. False where
// __dlpack__ has to be asked: the library has no such functions, a subclass may have another __dlpack__, the memory is
// a GPU's, whose streams __dlpack__ orders, or there is none.
bool described(pybind11::handle object, dlpack::Tensor* out);

// What torch says beside it; false for objects without such an attribute.
bool requires_grad(pybind11::handle object);
bool is_negative(pybind11::handle object);  // its memory holds the values with the other sign

}  // namespace afflux::python
