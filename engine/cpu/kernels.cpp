// The kernels of one instruction set. This file is compiled once for each; AFFLUX_ISA is its name. Everything except
// the table below is internal. No std template and no ordinary inline function may be used here (test_native.py checks
// the symbols of the objects).
#include "api/kernels.hpp"

#include "cpu/apply.hpp"
#include "cpu/codec.hpp"
#include "cpu/gram.hpp"
#include "cpu/ingest.hpp"
#include "cpu/inner.hpp"

namespace afflux::AFFLUX_ISA {

const Kernels kernels{ingest, gram, inner, apply, encode, decode};

}  // namespace afflux::AFFLUX_ISA
