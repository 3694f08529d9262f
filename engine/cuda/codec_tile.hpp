// The codecs of cached rows, one tile for each block of threads. Each thread has four elements. A format is a struct
// with kThreads, Shared, and
//
//   first(index)                                returns the first element of a tile
//   offset(thread)                              returns how many elements later a thread's are; kReach: after them all
//   tiles(size)                                 returns the number of tiles of a vector
//   kReadsAhead                                 if rounds read an arrival before they need it; else three blocks of
//                                               threads have registers at once
//   with_coder(bits, run)                       calls run(Coder{}) for the coder of rows of `bits` bits
//   prepare(block, shared, tile, heads, count)  stores the random bits of rows with the heads heads(k), k < count, in
//                                               shared memory
//
// and a coder, which is derived from its format, has
//
//   place(tile)                                             returns the first byte of the tile in a row
//   read(tile, heads, row, thread)                          returns a Read: a thread's part of a row, to decode later
//   decode(block, shared, tile, heads, k, read, out)        decodes what was read into `out`
//   encode(block, shared, tile, heads, k, x, row, decoded)  encodes x, into `row` unless it is null; decodes the result
//
// where `row` is at place(tile), and k is the number of the row among those that were prepared; `read` is an
// Each<Read>; x, out and decoded are Each<Vector4<float>>, x with zeros after the vector's end.
#pragma once
#include "api/kernels.hpp"
#include "cuda/vector4.hpp"
#include "formula/codec.hpp"

namespace afflux::cuda {

constexpr int kLanesOfRun = kCodecBlock / kFour;
static_assert(kLanesOfRun == kWarp, "a warp has a run");

// The rows that are prepared at once at most.
constexpr int kPrepared = 32;

// Elements of a vector and of its row, four for each thread.
struct Tile {
  Coding coding;
  std::int64_t begin;
  int count;   // of elements from `begin` to the vector's end
  bool full;   // no thread's elements are after it
  bool whole;  // and all vectors, and rows without a head, are aligned to 16 bytes
};

// A format whose tiles are consecutive elements.
struct Consecutive {
  static constexpr int kThreads = 256, kReach = kThreads * kFour;
  static constexpr bool kReadsAhead = true;

  static AFFLUX_DEVICE std::int64_t first(std::int64_t index) { return index * kReach; }
  static AFFLUX_DEVICE int offset(int thread) { return thread * kFour; }
  static std::int64_t tiles(std::int64_t size) { return (size + kReach - 1) / kReach; }

  // Returns true if a thread's run has elements.
  static AFFLUX_DEVICE bool has_run(const Tile& tile, int thread) {
    return tile.full || thread / kWarp * static_cast<int>(kCodecBlock) < tile.count;
  }
  // Returns true if a thread's element j is after the vector's end.
  static AFFLUX_DEVICE bool follows(const Tile& tile, int thread, int j) {
    return !tile.full && offset(thread) + j >= tile.count;
  }
};

template <class Format>
AFFLUX_DEVICE Tile tile_at(Coding coding, std::int64_t index, std::int64_t size, bool aligned) {
  const std::int64_t begin = Format::first(index);
  const bool full = begin + Format::kReach <= size;
  return {coding, begin, full ? Format::kReach : static_cast<int>(size - begin), full, full && aligned};
}

// Calls body(span) for a thread's elements of a vector that begins with the tile, if there are any.
template <class Format, class Body>
AFFLUX_DEVICE void with_part(const Tile& tile, int thread, const Body& body) {
  const int offset = Format::offset(thread), count = tile.count - offset;
  if (tile.whole)
    body(Span<true>{offset, kFour});
  else if (count > 0)
    body(Span<false>{offset, count < kFour ? count : kFour});
}

// Packs codes of kBits bits, one in each byte of a thread's word, to the bytes of a run: element e of the run is in
// byte e mod (16 * kBits), at bit kBits * (e div (16 * kBits)). Afterwards each of the first 4 * kBits threads of a
// warp has a word of the run.
template <int kBits, class Block>
AFFLUX_DEVICE void pack(const Block& block, typename Block::template Each<std::uint32_t>& words) {
  block.each_alone([&](int thread) { words[thread] <<= kBits * (thread % kWarp / (4 * kBits)); });
  AFFLUX_UNROLL_ON_DEVICE
  for (int offset = kWarp / 2; offset >= 4 * kBits; offset /= 2)
    block.butterfly(words, offset, [](std::uint32_t a, std::uint32_t b) { return a | b; });
}
// Returns the offset of a thread's word in the codes of a tile, in bytes.
template <int kBits>
AFFLUX_DEVICE std::uint32_t word_at(int thread) {
  return static_cast<std::uint32_t>(thread / kWarp * (16 * kBits) + thread % kWarp % (4 * kBits) * 4);
}
template <int kBits>
AFFLUX_DEVICE void store_word(unsigned char* codes, int thread, std::uint32_t word) {
  if (thread % kWarp < 4 * kBits) *on_device<std::uint32_t>(codes + word_at<kBits>(thread)) = word;
}
// Returns a word with the codes of a thread's four elements; code_in() returns the code of element j.
template <int kBits>
AFFLUX_DEVICE std::uint32_t load_word(const unsigned char* codes, int thread) {
  const std::uint32_t word = *on_device<std::uint32_t>(codes + word_at<kBits>(thread));
  return word >> (kBits * (thread % kWarp / (4 * kBits)));
}
template <int kBits>
AFFLUX_DEVICE std::uint32_t code_in(std::uint32_t word, int j) {
  return (word >> (8 * j)) & ((1u << kBits) - 1u);
}

}  // namespace afflux::cuda
