// Common rounds in registers, which apply (apply.cpp) computes without tiles.
#pragma once
#include "api/kernels.hpp"

namespace afflux::AFFLUX_ISA {

// Returns true if the round can be computed in registers. `updates` is the type of the updates.
bool can_fuse(const Pass& pass, Type updates);

// Computes elements [begin, end), whole packs, of a round that can be fused. Returns true if all written values are
// valid.
bool apply_fused(const Pass& pass, Type updates, const MemoryUse& memory, std::int64_t begin, std::int64_t end);

}  // namespace afflux::AFFLUX_ISA
