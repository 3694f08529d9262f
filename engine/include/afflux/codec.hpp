// The formats of clients' cached vectors (rows). docs/reference/codecs.md has the bytes of each. A new codec needs a
// line in the table here, its formula in formula/codec.hpp, and a coder in cpu/codec.cpp and in cuda/codec.hpp. Checks,
// dispatch and the Python package are generated from the table.
#pragma once
#include <cstdint>

#include "afflux/order.hpp"
#include "afflux/view.hpp"

namespace afflux {

constexpr std::int64_t kCodecBlock = 128, kRowHead = 64;
// The rotated codec rotates a group of kBlock elements as kRotations interleaved vectors of kRotated elements.
constexpr std::int64_t kRotated = 128, kRotations = 16;

static_assert(kBlock % kCodecBlock == 0 && kRotated * kRotations == kBlock, "codec blocks must nest");

// The properties that are the same for all widths of a coding.
struct CodingInfo {
  const char* name;
  std::int32_t widths;     // the possible bits per element, each a power of two, combined with |
  const char* row_type;    // the element type of a row; a row may also be given as uint8
  bool has_head;           // a row begins with a head, and is encoded with RowFacts
  bool needs_range;        // RowFacts must have the smallest and the largest element
  bool own_grids;          // a run has a grid over its elements, so that a short run is padded with its least one
  std::int64_t run;        // elements that are encoded together: kCodecBlock or kBlock
  std::int64_t run_bytes;  // bytes of the scales with which the codes of a run are decoded
};

// All codings. Heads of rows store the number of a coding in this order, so the order must not change. A coding with a
// head is keyed: it encodes runs, not single elements, and a row's key gives its random bits.
//
// float32, float64    unchanged
// float16, bfloat16   rounded to nearest; values beyond the largest finite value become that value
// affine              2^bits grid points from min to max of each kCodecBlock elements, stochastic rounding: unbiased
// affine_vector       the same with the min and max of the whole vector
// rotated             a random rotation of kRotated elements, then the nearest of 2^bits levels: unbiased over
//                     rotations
#define AFFLUX_CODINGS(CODING)                                                                      \
  CODING(float32, "float32", 32, "float32", false, false, false, kCodecBlock, 0)                    \
  CODING(float64, "float64", 64, "float64", false, false, false, kCodecBlock, 0)                    \
  CODING(float16, "float16", 16, "float16", false, false, false, kCodecBlock, 0)                    \
  CODING(bfloat16, "bfloat16", 16, "bfloat16", false, false, false, kCodecBlock, 0)                 \
  CODING(affine, "affine", 8 | 4 | 2 | 1, "uint8", true, false, true, kCodecBlock, 8)               \
  CODING(affine_vector, "affine-vector", 8 | 4 | 2 | 1, "uint8", true, true, false, kCodecBlock, 0) \
  CODING(rotated, "rotated", 4 | 2 | 1, "uint8", true, false, false, kBlock, 4 * kRotations)

enum class Coding : std::int32_t {
#define AFFLUX_CODING(coding, ...) coding,
  AFFLUX_CODINGS(AFFLUX_CODING)
#undef AFFLUX_CODING
};

// The table, in the order of Coding.
constexpr CodingInfo kCodings[] = {
#define AFFLUX_CODING(coding, ...) {__VA_ARGS__},
    AFFLUX_CODINGS(AFFLUX_CODING)
#undef AFFLUX_CODING
};

constexpr const CodingInfo& info(Coding coding) { return kCodings[static_cast<int>(coding)]; }

struct Codec {
  Coding coding = Coding::float32;
  std::int32_t bits = 32;  // per element: one of the coding's widths
};

constexpr bool operator==(Codec a, Codec b) { return a.coding == b.coding && a.bits == b.bits; }
constexpr bool operator!=(Codec a, Codec b) { return !(a == b); }

// Returns the codec that stores vectors of this type without rounding.
constexpr Codec exact_codec(Type type) {
  return type == Type::float64 ? Codec{Coding::float64, 64} : Codec{Coding::float32, 32};
}

constexpr bool has_head(Codec codec) { return info(codec.coding).has_head; }

// The facts that an encoder needs besides the vector.
struct RowFacts {
  std::uint64_t key = 0;     // key of the random bits; every row that is ever stored must have another one
  double low = 0, high = 0;  // the smallest and the largest element, finite; used if the coding needs_range
};

}  // namespace afflux
