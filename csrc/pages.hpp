// Functions that read ahead the pages of a mapped file, and make them present before a sweep: a SIGBUS during the sweep
// becomes an error here.
#pragma once
#include <pybind11/pybind11.h>

#include <cstddef>

namespace afflux::python {

// Makes the system begin to read pages that are only on disk; does not wait.
void prefetch(void* memory, std::size_t size);
// Waits until all pages are present. Returns 0 or the error number; EFAULT: an access would have raised SIGBUS. Does
// nothing on systems that lack this function.
int populate(void* memory, std::size_t size, bool write);
// Replaces the pages of a mapped file by a private copy at the same address. A process that was just forked may call
// it. Returns false if the pages cannot be copied, or are not `readable`: they cannot be read any more.
bool copy_pages(void* memory, std::size_t size, bool readable);

void bind_pages(pybind11::module_& module);

}  // namespace afflux::python
