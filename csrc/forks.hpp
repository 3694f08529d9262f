// A counter of forks.
#pragma once
#include <cstdint>

namespace afflux::python {

// The number of forks between the process that loaded the engine and this one. Reading it needs no system call; forks
// by C code count too.
extern std::uint64_t forks;

}  // namespace afflux::python
