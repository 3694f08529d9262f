// DLPack's C functions, which a library may offer beside __dlpack__. They take tens of nanoseconds for an array;
// torch's __dlpack__ takes microseconds.
#pragma once
#include <pybind11/pybind11.h>

#include "dlpack.hpp"

namespace afflux::python {

// Returns whether a type is torch.Tensor or torch.nn.Parameter. Does not import torch.
bool is_torch(PyTypeObject* type);

// Describes the object's memory. The description is valid while the GIL and the object are held. Returns the functions
// of the object's library, or null if __dlpack__ must be called: the library has no such functions, a subclass may have
// its own __dlpack__, or the library reports an error.
const dlpack::Exchange* describe(pybind11::handle object, dlpack::Tensor* out);

// Describes the object's memory as `describe`, if that is on the host; else returns false.
bool described(pybind11::handle object, dlpack::Tensor* out);

// Return torch's flags of the object; false for objects without such an attribute or method.
bool requires_grad(pybind11::handle object);
bool is_negative(pybind11::handle object);  // the memory holds the values with the opposite sign

}  // namespace afflux::python
