// Pages of a mapped file, read ahead and made present before a sweep: a SIGBUS during the sweep becomes an error here.
#pragma once
#include <pybind11/pybind11.h>

#include <cstddef>

namespace afflux::python {

// Makes the system read pages that are only on disk, and does not wait.
void prefetch(void* memory, std::size_t size);
// Waits until all pages are there. Returns 0, or the error number; EFAULT: an access would have been a SIGBUS. Systems
// that cannot tell do nothing.
int populate(void* memory, std::size_t size, bool write);

void bind_pages(pybind11::module_& module);

}  // namespace afflux::python
