// How one client's cached vector is stored. The bytes of every codec are in docs/codecs.md.
#pragma once
#include <cstdint>

#include "afflux/order.hpp"
#include "afflux/view.hpp"

namespace afflux {

// float32, float64    as it is
// float16, bfloat16   rounded to nearest; what is beyond the largest finite value becomes that
// affine              2^bits grid points from min to max of each kCodecBlock elements, stochastic rounding: unbiased
// affine_vector       the same with the min and max of the whole vector
// rotated             a random rotation of kRotated elements, then the nearest of 2^bits levels: unbiased over
// rotations
enum class Coding : std::int32_t { float32, float64, float16, bfloat16, affine, affine_vector, rotated };

struct Codec {
  Coding coding = Coding::float32;
  std::int32_t bits = 32;  // per element: 8, 4, 2 or 1 for affine, 4, 2 or 1 for rotated
};

constexpr bool operator==(Codec a, Codec b) { return a.coding == b.coding && a.bits == b.bits; }
constexpr bool operator!=(Codec a, Codec b) { return !(a == b); }

// The codec that keeps every bit of a vector of this type.
constexpr Codec exact_codec(Type type) {
  return type == Type::float64 ? Codec{Coding::float64, 64} : Codec{Coding::float32, 32};
}

// Whether a row begins with a head, and is encoded with RowFacts.
constexpr bool has_head(Codec codec) {
  return codec.coding == Coding::affine || codec.coding == Coding::affine_vector || codec.coding == Coding::rotated;
}

// What an encoder needs beside the vector.
struct RowFacts {
  std::uint64_t key = 0;     // of the random bits: another one for every row that is ever stored
  double low = 0, high = 0;  // affine_vector only: the least and the largest element
};

constexpr std::int64_t kCodecBlock = 128, kRowHead = 64;
// A group of kBlock elements is rotated as kRotations vectors of kRotated elements, which lie side by side.
constexpr std::int64_t kRotated = 128, kRotations = 16;

static_assert(kBlock % kCodecBlock == 0 && kRotated * kRotations == kBlock, "codec blocks must nest");

}  // namespace afflux
