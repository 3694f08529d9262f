// The choice of the instruction set for the calls of this process.
#pragma once
#include "api/kernels.hpp"

namespace afflux {

// Returns the table of the chosen instruction set. The first call chooses AFFLUX_ISA, else the best one that runs here.
// Throws Unavailable if AFFLUX_ISA is not one that runs here.
const Kernels& kernels();

}  // namespace afflux
