// How often this process was forked.
#pragma once
#include <cstdint>

namespace afflux::python {

// From the process that loaded the engine on: seen without a system call, also where C code forks.
extern std::uint64_t forks;

}  // namespace afflux::python
