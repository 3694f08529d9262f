// The codecs of cached rows, a run of elements at a time: kCodecBlock, or a group of kBlock where rotations need it.
#pragma once
#include "cpu/combine.hpp"
#include "cpu/convert.hpp"
#include "cpu/kernels.hpp"
#include "cpu/rotated.hpp"

namespace afflux::AFFLUX_ISA {
namespace {

AFFLUX_FN std::int64_t run_of(Codec codec) { return codec.coding == Coding::rotated ? kBlock : kCodecBlock; }

// Bytes of an element where a row is the vector as it is, else 0.
AFFLUX_FN std::int64_t plain_bytes(Codec codec) {
  return codec.coding == Coding::float32 ? 4 : codec.coding == Coding::float64 ? 8 : 0;
}

AFFLUX_FN void copy(const void* from, void* to, std::int64_t begin, std::int64_t end) {
  __builtin_memcpy(static_cast<char*>(to) + begin, static_cast<const char*>(from) + begin,
                   static_cast<std::size_t>(end - begin));
}

template <class T>
AFFLUX_FN void write(unsigned char* to, const T& value) {
  __builtin_memcpy(to, &value, sizeof value);
}
template <class T>
AFFLUX_FN T read(const unsigned char* from) {
  T value;
  __builtin_memcpy(&value, from, sizeof value);
  return value;
}

// A run's part of a row: formula::Place as pointers.
struct Target {
  unsigned char *facts, *codes;
};
struct Source {
  const unsigned char *facts, *codes;
};

AFFLUX_FN Target run_in(Codec codec, unsigned char* row, std::int64_t begin) {
  const formula::Place place = formula::place(codec, begin);
  return {row + place.facts, row + place.codes};
}
AFFLUX_FN Source run_in(Codec codec, const unsigned char* row, std::int64_t begin) {
  const formula::Place place = formula::place(codec, begin);
  return {row + place.facts, row + place.codes};
}

// A run of one row, to be encoded or decoded.
struct Encoding {
  const RowHead* head;
  const float* from;  // the vector
  float* x;           // a copy of it, which affine codecs make
  Target to;
  float* decoded;  // what it will be decoded to
};
struct Decoding {
  const RowHead* head;
  Source from;
  float* out;
};

// What the codes of a run depend on.
struct Prepared {
  Grid grid;
  std::uint64_t random;
};

// Copies the run as well: vectors that begin on pages share few sets of L1, and the run is read again. Half of the
// lines that come later are asked for here, into L2, the others where the differences are added.
template <int kBits>
AFFLUX_FN Prepared prepare_affine(bool own, std::int64_t begin, const Encoding& run) {
  const char* const later = reinterpret_cast<const char*>(run.from) + simd::kAhead;
  for (int line = 0; line < 4 * kCodecBlock; line += 128) __builtin_prefetch(later + line, 0, 2);
  const std::uint64_t random = formula::block_bits(run.head->key, begin / kCodecBlock);
  const Grid grid = block_grid(run.from, kBits, run.x);
  if (!own) return {{run.head->low, run.head->step, formula::per_step(run.head->step, kBits)}, random};
  write(run.to.facts, grid.low);
  write(run.to.facts + 4, grid.step);
  return {grid, random};
}

// The next run is prepared before the codes of this one are made: it takes long until its grid is known.
template <int kBits>
AFFLUX_FN void encode_affine(Codec codec, std::int64_t begin, const Encoding* runs, int count) {
  const bool own = codec.coding == Coding::affine;
  if (count == 0) return;
  Prepared next = prepare_affine<kBits>(own, begin, runs[0]);
  for (int k = 0; k < count; ++k) {
    const Prepared now = next;
    if (k + 1 < count) next = prepare_affine<kBits>(own, begin, runs[k + 1]);
    own ? affine_encode<kBits, false>(runs[k].x, now.grid, now.random, runs[k].to.codes, runs[k].decoded)
        : affine_encode<kBits, true>(runs[k].x, now.grid, now.random, runs[k].to.codes, runs[k].decoded);
  }
}

template <int kBits>
AFFLUX_FN void decode_affine(Codec codec, const Decoding* runs, int count) {
  const bool own = codec.coding == Coding::affine;
  for (int k = 0; k < count; ++k) {
    const Source from = runs[k].from;
    affine_decode<kBits>(from.codes, own ? read<float>(from.facts) : runs[k].head->low,
                         own ? read<float>(from.facts + 4) : runs[k].head->step, runs[k].out);
  }
}

template <int kBits>
AFFLUX_FN void encode_rotated(std::int64_t begin, const Encoding* runs, int count) {
  alignas(64) float scales[kRotations];
  for (int k = 0; k < count; ++k) {
    const std::uint64_t random = formula::block_bits(runs[k].head->key, begin / kBlock);
    rotated_encode<kBits>(runs[k].from, random, runs[k].to.codes, scales, runs[k].decoded);
    write(runs[k].to.facts, scales);
  }
}

template <int kBits>
AFFLUX_FN void decode_rotated(std::int64_t begin, const Decoding* runs, int count) {
  alignas(64) float scales[kRotations];
  for (int k = 0; k < count; ++k) {
    __builtin_memcpy(scales, runs[k].from.facts, sizeof scales);
    const std::uint64_t random = formula::block_bits(runs[k].head->key, begin / kBlock);
    rotated_decode<kBits>(runs[k].from.codes, scales, random, runs[k].out);
  }
}

template <class Half>
AFFLUX_FN void encode_halves(std::int64_t n, const Encoding* runs, int count) {
  for (int k = 0; k < count; ++k) {
    const float* __restrict const x = runs[k].from;
    Half* __restrict const to = reinterpret_cast<Half*>(runs[k].to.codes);
    float* __restrict const decoded = runs[k].decoded;
    for (std::int64_t i = 0; i < n; ++i) {
      Half half{};
      formula::narrow_finite(x[i], &half);
      to[i] = half;
      decoded[i] = formula::widened(half);
    }
  }
}

template <class Half>
AFFLUX_FN void decode_halves(std::int64_t n, const Decoding* runs, int count) {
  for (int k = 0; k < count; ++k) convert(reinterpret_cast<const Half*>(runs[k].from.codes), runs[k].out, n);
}

// The runs from `begin` on of up to kTogether rows. Of halves n elements count; the others are whole, and `from` has
// zeros after the vector's end.
__attribute__((noinline)) void encode_runs(Codec codec, std::int64_t begin, std::int64_t n, const Encoding* runs,
                                           int count) {
  switch (codec.coding) {
    case Coding::float16:
      return encode_halves<Float16>(n, runs, count);
    case Coding::bfloat16:
      return encode_halves<Bfloat16>(n, runs, count);
    case Coding::affine:
    case Coding::affine_vector:
      return codec.bits == 8   ? encode_affine<8>(codec, begin, runs, count)
             : codec.bits == 4 ? encode_affine<4>(codec, begin, runs, count)
             : codec.bits == 2 ? encode_affine<2>(codec, begin, runs, count)
                               : encode_affine<1>(codec, begin, runs, count);
    case Coding::rotated:
      return codec.bits == 4   ? encode_rotated<4>(begin, runs, count)
             : codec.bits == 2 ? encode_rotated<2>(begin, runs, count)
                               : encode_rotated<1>(begin, runs, count);
    case Coding::float32:
    case Coding::float64:
      return;  // rows that are read where they lie
  }
}

__attribute__((noinline)) void decode_runs(Codec codec, std::int64_t begin, std::int64_t n, const Decoding* runs,
                                           int count) {
  switch (codec.coding) {
    case Coding::float16:
      return decode_halves<Float16>(n, runs, count);
    case Coding::bfloat16:
      return decode_halves<Bfloat16>(n, runs, count);
    case Coding::affine:
    case Coding::affine_vector:
      return codec.bits == 8   ? decode_affine<8>(codec, runs, count)
             : codec.bits == 4 ? decode_affine<4>(codec, runs, count)
             : codec.bits == 2 ? decode_affine<2>(codec, runs, count)
                               : decode_affine<1>(codec, runs, count);
    case Coding::rotated:
      return codec.bits == 4   ? decode_rotated<4>(begin, runs, count)
             : codec.bits == 2 ? decode_rotated<2>(begin, runs, count)
                               : decode_rotated<1>(begin, runs, count);
    case Coding::float32:
    case Coding::float64:
      return;
  }
}

// `part` with zeros up to a whole run, in `room`, unless it is whole.
AFFLUX_FN const float* padded(const float* part, std::int64_t n, std::int64_t run, float* room) {
  if (n == run) return part;
  for (std::int64_t i = 0; i < run; ++i) room[i] = i < n ? part[i] : 0.0f;
  return room;
}

void encode(Codec codec, const RowHead& head, const void* vector, unsigned char* row, std::int64_t begin,
            std::int64_t end) {
  if (const std::int64_t bytes = plain_bytes(codec)) return copy(vector, row, begin * bytes, end * bytes);
  const std::int64_t run = run_of(codec);
  alignas(64) float room[kBlock], copied[kCodecBlock], decoded[kBlock];
  for (std::int64_t i = begin; i < end; i += run) {
    const std::int64_t n = end - i < run ? end - i : run;
    const float* const from = padded(static_cast<const float*>(vector) + i, n, run, room);
    const Encoding one{&head, from, copied, run_in(codec, row, i), decoded};
    encode_runs(codec, i, n, &one, 1);
  }
}

void decode(Codec codec, const RowHead& head, const unsigned char* row, void* vector, std::int64_t begin,
            std::int64_t end) {
  if (const std::int64_t bytes = plain_bytes(codec)) return copy(row, vector, begin * bytes, end * bytes);
  const std::int64_t run = run_of(codec);
  float* const to = static_cast<float*>(vector);
  alignas(64) float room[kBlock];
  for (std::int64_t i = begin; i < end; i += run) {
    const std::int64_t n = end - i < run ? end - i : run;
    const Decoding one{&head, run_in(codec, row, i), n == run ? to + i : room};
    decode_runs(codec, i, n, &one, 1);
    if (n < run) convert(room, to + i, n);
  }
}

}  // namespace
}  // namespace afflux::AFFLUX_ISA
