// Codecs of cached rows, element by element. float32: the row is the vector, little-endian, 4 d bytes.
#pragma once
#include "formula/fn.hpp"

namespace afflux::formula {

AFFLUX_FN float encode_float32(float value) { return value; }
AFFLUX_FN float decode_float32(float stored) { return stored; }

}  // namespace afflux::formula
