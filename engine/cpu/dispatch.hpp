// Which instruction set serves the calls of this process.
#pragma once
#include "api/kernels.hpp"

namespace afflux {

// The chosen table. The first call decides: AFFLUX_ISA, else the best that runs here. Throws Unavailable.
const Kernels& kernels();

}  // namespace afflux
