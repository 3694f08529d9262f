// The functions of one instruction set's table (api/kernels.hpp), each of which is defined in the unit of its name.
// Every unit is compiled once for each instruction set; AFFLUX_ISA is its name. Apart from these functions, everything
// in a unit is internal: no std template and no ordinary inline function may be used there, and no template may be
// instantiated explicitly, because the linker could take an AVX-512 copy of it for all callers (test_native.py checks
// the symbols of the objects).
#pragma once
#include <type_traits>

#include "api/kernels.hpp"

namespace afflux::AFFLUX_ISA {

std::remove_pointer_t<decltype(Kernels::ingest)> ingest;
std::remove_pointer_t<decltype(Kernels::gram)> gram;
std::remove_pointer_t<decltype(Kernels::inner)> inner;
std::remove_pointer_t<decltype(Kernels::apply)> apply;
std::remove_pointer_t<decltype(Kernels::encode)> encode;
std::remove_pointer_t<decltype(Kernels::decode)> decode;
std::remove_pointer_t<decltype(Kernels::unflatten)> unflatten;

}  // namespace afflux::AFFLUX_ISA
