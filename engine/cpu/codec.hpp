// The codecs of cached rows, a run of elements at a time: kCodecBlock, or a group of kBlock where rotations need it.
#pragma once
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

template <int kBits>
AFFLUX_FN void encode_affine(Codec codec, const RowHead& head, const float* x, std::int64_t begin, Target to,
                             float* decoded) {
  const std::uint64_t random = formula::block_bits(head.key, begin / kCodecBlock);
  if (codec.coding == Coding::affine_vector)
    return affine_encode<kBits, true>(x, {head.low, head.step, formula::per_step(head.step, kBits)}, random, to.codes,
                                      decoded);
  const Grid grid = block_grid(x, kBits);
  write(to.facts, grid.low);
  write(to.facts + 4, grid.step);
  affine_encode<kBits, false>(x, grid, random, to.codes, decoded);
}

template <int kBits>
AFFLUX_FN void decode_affine(Codec codec, const RowHead& head, Source from, float* out) {
  if (codec.coding == Coding::affine_vector) return affine_decode<kBits>(from.codes, head.low, head.step, out);
  affine_decode<kBits>(from.codes, read<float>(from.facts), read<float>(from.facts + 4), out);
}

template <int kBits>
AFFLUX_FN void encode_rotated(const RowHead& head, const float* x, std::int64_t begin, Target to, float* decoded) {
  alignas(64) float scales[kRotations];
  rotated_encode<kBits>(x, formula::block_bits(head.key, begin / kBlock), to.codes, scales, decoded);
  write(to.facts, scales);
}

template <int kBits>
AFFLUX_FN void decode_rotated(const RowHead& head, std::int64_t begin, Source from, float* out) {
  alignas(64) float scales[kRotations];
  __builtin_memcpy(scales, from.facts, sizeof scales);
  rotated_decode<kBits>(from.codes, scales, formula::block_bits(head.key, begin / kBlock), out);
}

template <class Half>
AFFLUX_FN void encode_halves(const float* x, std::int64_t n, unsigned char* codes, float* decoded) {
  Half* const to = reinterpret_cast<Half*>(codes);
  for (std::int64_t i = 0; i < n; ++i) {
    Half half{};
    formula::narrow_finite(x[i], &half);
    to[i] = half;
    decoded[i] = formula::widened(half);
  }
}

// A run from `begin` on, and in `decoded` what it is decoded to. Of halves n elements count; the others are whole runs,
// `x` having zeros after the vector's end.
__attribute__((noinline)) void encode_run(Codec codec, const RowHead& head, const float* x, std::int64_t begin,
                                          std::int64_t n, Target to, float* decoded) {
  switch (codec.coding) {
    case Coding::float16:
      return encode_halves<Float16>(x, n, to.codes, decoded);
    case Coding::bfloat16:
      return encode_halves<Bfloat16>(x, n, to.codes, decoded);
    case Coding::affine:
    case Coding::affine_vector:
      return codec.bits == 8   ? encode_affine<8>(codec, head, x, begin, to, decoded)
             : codec.bits == 4 ? encode_affine<4>(codec, head, x, begin, to, decoded)
             : codec.bits == 2 ? encode_affine<2>(codec, head, x, begin, to, decoded)
                               : encode_affine<1>(codec, head, x, begin, to, decoded);
    case Coding::rotated:
      return codec.bits == 4   ? encode_rotated<4>(head, x, begin, to, decoded)
             : codec.bits == 2 ? encode_rotated<2>(head, x, begin, to, decoded)
                               : encode_rotated<1>(head, x, begin, to, decoded);
    case Coding::float32:
    case Coding::float64:
      return;  // rows that are read where they lie
  }
}

__attribute__((noinline)) void decode_run(Codec codec, const RowHead& head, std::int64_t begin, std::int64_t n,
                                          Source from, float* out) {
  switch (codec.coding) {
    case Coding::float16:
      return convert(reinterpret_cast<const Float16*>(from.codes), out, n);
    case Coding::bfloat16:
      return convert(reinterpret_cast<const Bfloat16*>(from.codes), out, n);
    case Coding::affine:
    case Coding::affine_vector:
      return codec.bits == 8   ? decode_affine<8>(codec, head, from, out)
             : codec.bits == 4 ? decode_affine<4>(codec, head, from, out)
             : codec.bits == 2 ? decode_affine<2>(codec, head, from, out)
                               : decode_affine<1>(codec, head, from, out);
    case Coding::rotated:
      return codec.bits == 4   ? decode_rotated<4>(head, begin, from, out)
             : codec.bits == 2 ? decode_rotated<2>(head, begin, from, out)
                               : decode_rotated<1>(head, begin, from, out);
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
  alignas(64) float room[kBlock], decoded[kBlock];
  for (std::int64_t i = begin; i < end; i += run) {
    const std::int64_t n = end - i < run ? end - i : run;
    const float* const x = padded(static_cast<const float*>(vector) + i, n, run, room);
    encode_run(codec, head, x, i, n, run_in(codec, row, i), decoded);
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
    decode_run(codec, head, i, n, run_in(codec, row, i), n == run ? to + i : room);
    if (n < run) convert(room, to + i, n);
  }
}

}  // namespace
}  // namespace afflux::AFFLUX_ISA
