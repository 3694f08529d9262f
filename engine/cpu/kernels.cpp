// The table of one instruction set.
#include "cpu/kernels.hpp"

namespace afflux::AFFLUX_ISA {

const Kernels kernels{ingest, gram, inner, apply, encode, decode, unflatten};

}  // namespace afflux::AFFLUX_ISA
