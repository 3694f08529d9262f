// The codecs of cached rows, one tile for each block of threads. Each thread has four elements, so a warp has a block
// of kCodecBlock. A coder is a struct with kThreads, Shared, and
//
//   read(tile, head, row, thread)                         returns a Read: a thread's part of a row, to decode later
//   decode(block, shared, tile, head, read, out)          decodes what was read into `out`
//   encode(block, shared, tile, head, x, row, decoded)    encodes x, into `row` unless it is null; decodes the result
//
// where `read` is an Each<Read>; x, out and decoded are Each<Vector4<float>>, x with zeros after the vector's end.
#pragma once
#include "api/kernels.hpp"
#include "cuda/vector4.hpp"
#include "formula/codec.hpp"

namespace afflux::cuda {

constexpr int kLanesOfRun = kCodecBlock / kFour;
static_assert(kLanesOfRun == kWarp, "a warp has a run");

// Elements of a row from `begin` on, four for each thread.
struct Tile {
  Codec codec;
  std::int64_t begin, size;  // of the whole vector
  bool aligned;              // of rows without a head, to 16 bytes

  AFFLUX_DEVICE std::int64_t of(int thread) const { return begin + thread * kFour; }
  // Return the first element of a thread's run, and true if there is such a run.
  AFFLUX_DEVICE std::int64_t run(int thread) const { return begin + thread / kWarp * kCodecBlock; }
  AFFLUX_DEVICE bool has_run(int thread) const { return run(thread) < size; }
};

// Packs codes of `bits` bits, one in each byte of a thread's word, to the bytes of a run: element e of the run is in
// byte e mod (16 * bits), at bit bits * (e div (16 * bits)). Afterwards each of the first 4 * bits threads of a warp
// has a word of the run.
template <class Block>
AFFLUX_DEVICE void pack(const Block& block, int bits, typename Block::template Each<std::uint32_t>& words) {
  block.each_in_warp([&](int thread) { words[thread] <<= bits * (thread % kWarp / (4 * bits)); });
  for (int offset = kWarp / 2; offset >= 4 * bits; offset /= 2)
    block.butterfly(words, offset, [](std::uint32_t a, std::uint32_t b) { return a | b; });
}
AFFLUX_DEVICE void store_word(unsigned char* codes, int bits, int thread, std::uint32_t word) {
  const int lane = thread % kWarp;
  if (lane < 4 * bits) reinterpret_cast<std::uint32_t*>(codes)[lane] = word;
}
// Returns a word with the codes of a thread's four elements; code_in() returns the code of element j.
AFFLUX_DEVICE std::uint32_t load_word(const unsigned char* codes, int bits, int thread) {
  const int lane = thread % kWarp;
  return reinterpret_cast<const std::uint32_t*>(codes)[lane % (4 * bits)] >> (bits * (lane / (4 * bits)));
}
AFFLUX_DEVICE std::uint32_t code_in(std::uint32_t word, int bits, int j) {
  return (word >> (8 * j)) & ((1u << bits) - 1u);
}

}  // namespace afflux::cuda
