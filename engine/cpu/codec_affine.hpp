// The affine codec, one block of kCodecBlock elements. The layout of the codes lets whole native vectors be packed and
// unpacked: element e of the block is in byte e mod (16 * bits), at bit bits * (e div (16 * bits)).
#pragma once
#include "cpu/combine.hpp"
#include "cpu/simd_float.hpp"
#include "formula/codec.hpp"
#include "formula/random.hpp"
#include "formula/reduce.hpp"

namespace afflux::AFFLUX_ISA {
namespace {

using formula::Grid;

// Calls body(element, byte, shift) for every native vector of a block; vectors that share bytes come one after the
// other. Calls packed(byte) when these bytes are complete.
template <int kBits, class Body, class Packed>
AFFLUX_FN void each_code(const Body& body, const Packed& packed) {
#pragma GCC unroll 32
  for (int byte = 0; byte < 16 * kBits; byte += simd::kFloats) {
#pragma GCC unroll 8
    for (int part = 0; part < 8 / kBits; ++part) body(byte + 16 * kBits * part, byte, kBits * part);
    packed(byte);
  }
}

// Finds the smallest and the largest value of a block. kCopies: also copies the block to `copy`.
template <bool kCopies>
AFFLUX_FN void block_extremes(const float* x, float* copy, float& least, float& most) {
  simd::Floats low = simd::all(__builtin_inff()), high = -low;
#pragma GCC unroll 8
  for (int e = 0; e < kCodecBlock; e += simd::kFloats) {
    const simd::Floats values = simd::load_floats(x + e);
    low = simd::lesser(low, values);
    high = simd::greater(high, values);
    if (kCopies) simd::store_floats(copy + e, values);
  }
  simd::extremes(low, high, least, most);
}

// The grids of blocks of several rows, side by side.
struct Grids {
  alignas(64) float low[kTogether], step[kTogether], per_step[kTogether];
};
AFFLUX_FN void make_grids(const float* least, const float* most, int bits, Grids& grids) {
  for (int k = 0; k < kTogether; ++k) {
    const Grid grid = formula::grid_over(least[k], most[k], bits);
    grids.low[k] = grid.low;
    grids.step[k] = grid.step;
    grids.per_step[k] = grid.per_step;
  }
}

// Encodes a block, and sets `decoded` to the decoded values. kBelow: elements may be below the grid.
template <int kBits, bool kBelow>
AFFLUX_FN void affine_encode(const float* x, const Grid& grid, std::uint64_t random, unsigned char* codes,
                             float* decoded) {
  const simd::Floats low = simd::all(grid.low), step = simd::all(grid.step), per_step = simd::all(grid.per_step);
  const simd::Floats top = simd::all(formula::grid_top(kBits));
  const simd::Words high = simd::all(static_cast<std::uint32_t>(random >> 32));
  const simd::Words first = simd::all(static_cast<std::uint32_t>(random)) + simd::count_up() * formula::kWeyl;
  simd::Words packed{};
  each_code<kBits>(
      [&](int element, int, int shift) AFFLUX_INLINE {
        const simd::Words bits = formula::mixed(first + static_cast<std::uint32_t>(element) * formula::kWeyl, high);
        const simd::Words code = formula::affine_code(simd::FloatLanes{}, simd::load_floats(x + element), low, per_step,
                                                      top, kBelow, bits, kBits);
        simd::store_floats(decoded + element, formula::affine_value(simd::FloatLanes{}, code, low, step));
        packed = shift == 0 ? code : packed | (code << shift);
      },
      [&](int byte) AFFLUX_INLINE { simd::store_bytes(codes + byte, packed); });
}

template <int kBits>
AFFLUX_FN void affine_decode(const unsigned char* codes, float low, float step, float* out) {
  simd::Words bytes{};
  each_code<kBits>(
      [&](int element, int byte, int shift) AFFLUX_INLINE {
        if (shift == 0) bytes = simd::load_bytes(codes + byte);
        const simd::Words code = kBits == 8 ? bytes : (bytes >> shift) & ((1u << kBits) - 1);
        simd::store_floats(out + element,
                           formula::affine_value(simd::FloatLanes{}, code, simd::all(low), simd::all(step)));
      },
      [](int) AFFLUX_INLINE {});
}

}  // namespace
}  // namespace afflux::AFFLUX_ISA
