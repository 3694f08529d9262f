// Compiled once per instruction set, AFFLUX_ISA naming it. Everything is internal but the table below; no std template
// and no ordinary inline function may be used in here (test_native.py reads the objects).
#include "api/kernels.hpp"

#include "cpu/apply.hpp"
#include "cpu/codec.hpp"
#include "cpu/gram.hpp"
#include "cpu/ingest.hpp"
#include "cpu/inner.hpp"

namespace afflux::AFFLUX_ISA {

const Kernels kernels{ingest, gram, inner, apply, encode, decode};

}  // namespace afflux::AFFLUX_ISA
