// Forks: their number, and descriptors that no forked child keeps.
#pragma once
#include <pybind11/pybind11.h>

#include <cstdint>

namespace afflux::python {

// The number of forks between the process that loaded the engine and this one. Reading it needs no system call; forks
// by C code count too.
extern std::uint64_t forks;

void bind_forks(pybind11::module_& module);

}  // namespace afflux::python
