// encode and decode: the codecs of cached rows, a run of elements at a time.
#include "cpu/codec.hpp"

#include "cpu/codec_rotated.hpp"
#include "cpu/combine.hpp"
#include "cpu/convert.hpp"
#include "cpu/kernels.hpp"

namespace afflux::AFFLUX_ISA {
namespace {

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

AFFLUX_FN void prefetch_update(const Lookahead& ahead, const float* update, int first, int count) {
  const char* const line = reinterpret_cast<const char*>(update) + ahead.bytes + 64 * first;
  for (int i = 0; i < count; ++i) ahead.ask_for(line + 64 * i);
}

AFFLUX_FN void find_extremes(const Runs& runs, float* least, float* most) {
  for (int k = 0; k < runs.encoded; ++k) {
    const Encoding& one = runs.encodings[k];
    prefetch_update(runs.ahead, one.from, 0, kFirstLines);
    one.x != nullptr ? block_extremes<true>(one.from, one.x, least[k], most[k])
                     : block_extremes<false>(one.from, one.x, least[k], most[k]);
  }
}

AFFLUX_FN void grids_of_rows(const Encoding* runs, int count, int bits, Grids& grids) {
  for (int k = 0; k < count; ++k) {
    const float step = runs[k].head->step;
    grids.low[k] = runs[k].head->low;
    grids.step[k] = step;
    grids.per_step[k] = formula::per_step(step, bits);
  }
}

// Decodes and encodes runs of affine rows. The latency of the extremes and of the grids is long, so other work follows
// each of them.
template <int kBits>
__attribute__((noinline)) void code_affine(Codec codec, const Runs& runs) {
  const bool own = formula::info_of(codec).own_grids;
  const formula::Place at = formula::place(codec, runs.begin);
  alignas(64) float least[kTogether] = {}, most[kTogether] = {};
  Grids grids;
  find_extremes(runs, least, most);
  for (int k = 0; k < runs.decoded; ++k) {
    const Decoding& one = runs.decodings[k];
    const unsigned char *const facts = one.row + at.facts, *const codes = one.row + at.codes;
    for (int byte = 0; byte < 16 * kBits; byte += 64) __builtin_prefetch(codes + 8 * 16 * kBits + byte, 1, 2);
    affine_decode<kBits>(codes, own ? read<float>(facts) : one.head->low, own ? read<float>(facts + 4) : one.head->step,
                         one.out);
  }
  own ? make_grids(least, most, kBits, grids) : grids_of_rows(runs.encodings, runs.encoded, kBits, grids);
  unsigned char discarded[16 * kBits];
  for (int k = 0; k < runs.encoded; ++k) {
    const Encoding& one = runs.encodings[k];
    const Grid grid{grids.low[k], grids.step[k], grids.per_step[k]};
    const std::uint64_t random = formula::block_bits(one.head->key, runs.begin / kCodecBlock);
    if (own && one.row != nullptr) {
      write(one.row + at.facts, grid.low);
      write(one.row + at.facts + 4, grid.step);
    }
    unsigned char* const codes = one.row == nullptr ? discarded : one.row + at.codes;
    const float* const x = one.x != nullptr ? one.x : one.from;
    prefetch_update(runs.ahead, one.from, kFirstLines, kLinesBesideCodes);
    own ? affine_encode<kBits, false>(x, grid, random, codes, one.decoded)
        : affine_encode<kBits, true>(x, grid, random, codes, one.decoded);
  }
}

template <int kBits>
__attribute__((noinline)) void code_rotated(Codec codec, const Runs& runs) {
  alignas(64) float scales[kRotations];
  unsigned char discarded[kBlock / 8 * kBits];
  const formula::Place at = formula::place(codec, runs.begin);
  const std::int64_t block = runs.begin / kBlock;
  for (int k = 0; k < runs.decoded; ++k) {
    const Decoding& one = runs.decodings[k];
    const unsigned char *const facts = one.row + at.facts, *const later = facts + sizeof scales + sizeof discarded;
    for (std::size_t byte = 0; byte < sizeof scales + sizeof discarded; byte += 64)
      __builtin_prefetch(later + byte, 1, 2);
    __builtin_memcpy(scales, facts, sizeof scales);
    rotated_decode<kBits>(one.row + at.codes, scales, formula::block_bits(one.head->key, block), one.out);
  }
  for (int k = 0; k < runs.encoded; ++k) {
    const Encoding& one = runs.encodings[k];
    unsigned char* const codes = one.row == nullptr ? discarded : one.row + at.codes;
    rotated_encode<kBits>(one.from, formula::block_bits(one.head->key, block), codes, scales, one.decoded);
    if (one.row != nullptr) write(one.row + at.facts, scales);
  }
}

// Decodes float16 or bfloat16 to float32.
template <class Half>
AFFLUX_FN void decode_halves(const Half* from, float* to, std::int64_t n) {
  convert(from, to, n);
}
// Encodes float32 as float16 or bfloat16, and sets `decoded` to the decoded values.
template <class Half>
AFFLUX_FN void encode_halves(const float* __restrict x, Half* __restrict to, float* __restrict decoded,
                             std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    Half half{};
    formula::narrow_finite(x[i], &half);
    to[i] = half;
    decoded[i] = formula::widened(half);
  }
}
#if defined(__F16C__)
AFFLUX_FN void decode_halves(const Float16* from, float* to, std::int64_t n) {
  const std::int64_t whole = n - n % simd::kFloats;
  for (std::int64_t i = 0; i < whole; i += simd::kFloats) simd::store_floats(to + i, simd::load_halves(from + i));
  convert(from + whole, to + whole, n - whole);
}
AFFLUX_FN void encode_halves(const float* x, Float16* to, float* decoded, std::int64_t n) {
  const std::int64_t whole = n - n % simd::kFloats;
  for (std::int64_t i = 0; i < whole; i += simd::kFloats)
    simd::store_floats(decoded + i, simd::store_halves(to + i, simd::load_floats(x + i)));
  encode_halves<Float16>(x + whole, to + whole, decoded + whole, n - whole);
}
#endif

template <class Half>
AFFLUX_FN void code_halves(Codec codec, const Runs& runs) {
  const formula::Place at = formula::place(codec, runs.begin);
  Half discarded[kCodecBlock];
  for (int k = 0; k < runs.decoded; ++k) {
    const Decoding& one = runs.decodings[k];
    decode_halves(reinterpret_cast<const Half*>(one.row + at.codes), one.out, runs.n);
  }
  for (int k = 0; k < runs.encoded; ++k) {
    const Encoding& one = runs.encodings[k];
    Half* const to = one.row == nullptr ? discarded : reinterpret_cast<Half*>(one.row + at.codes);
    encode_halves(one.from, to, one.decoded, runs.n);
  }
}

// The functions that encode and decode the runs of a coding, for each of its widths. kAsks: they prefetch some of an
// update's lines, and may copy the run to x.
template <Coding kCoding>
struct Coder;

// The coder of plain rows, which are read in place.
struct Uncoded {
  static constexpr bool kAsks = false;
  template <int kBits>
  AFFLUX_FN void code(Codec, const Runs&) {}
};
template <>
struct Coder<Coding::float32> : Uncoded {};
template <>
struct Coder<Coding::float64> : Uncoded {};

template <class Half>
struct HalvesCoder {
  static constexpr bool kAsks = false;
  template <int kBits>
  AFFLUX_FN void code(Codec codec, const Runs& runs) {
    code_halves<Half>(codec, runs);
  }
};
template <>
struct Coder<Coding::float16> : HalvesCoder<Float16> {};
template <>
struct Coder<Coding::bfloat16> : HalvesCoder<Bfloat16> {};

template <>
struct Coder<Coding::affine> {
  static constexpr bool kAsks = true;
  template <int kBits>
  AFFLUX_FN void code(Codec codec, const Runs& runs) {
    code_affine<kBits>(codec, runs);
  }
};
template <>
struct Coder<Coding::affine_vector> : Coder<Coding::affine> {};

template <>
struct Coder<Coding::rotated> {
  static constexpr bool kAsks = false;
  template <int kBits>
  AFFLUX_FN void code(Codec codec, const Runs& runs) {
    code_rotated<kBits>(codec, runs);
  }
};

// Calls the coder's code<codec.bits>, if codec.bits is one of the coding's widths.
template <class Coder, int kWidths, int kBits = 64>
AFFLUX_FN void code_with(Codec codec, const Runs& runs) {
  if constexpr ((kWidths & kBits) != 0)
    if (codec.bits == kBits) return Coder::template code<kBits>(codec, runs);
  if constexpr (kBits > 1) code_with<Coder, kWidths, kBits / 2>(codec, runs);
}

}  // namespace

void code_runs(Codec codec, const Runs& runs) {
  switch (codec.coding) {
#define AFFLUX_CODING(coding, name, widths, ...) \
  case Coding::coding:                           \
    return code_with<Coder<Coding::coding>, widths>(codec, runs);
    AFFLUX_CODINGS(AFFLUX_CODING)
#undef AFFLUX_CODING
  }
}

bool asks(Codec codec) {
  switch (codec.coding) {
#define AFFLUX_CODING(coding, ...) \
  case Coding::coding:             \
    return Coder<Coding::coding>::kAsks;
    AFFLUX_CODINGS(AFFLUX_CODING)
#undef AFFLUX_CODING
  }
  return false;
}

void encode(Codec codec, const RowHead& head, const void* vector, unsigned char* row, std::int64_t begin,
            std::int64_t end) {
  if (const std::int64_t bytes = plain_bytes(codec)) return copy(vector, row, begin * bytes, end * bytes);
  const std::int64_t run = run_of(codec);
  alignas(64) float scratch[kBlock], decoded[kBlock];
  for (std::int64_t i = begin; i < end; i += run) {
    const std::int64_t n = end - i < run ? end - i : run;
    const float* const from = padded(codec, static_cast<const float*>(vector) + i, n, scratch);
    const Encoding one{&head, from, nullptr, row, decoded};
    code_runs(codec, {i, n, nullptr, 0, &one, 1, kUsualLookahead});
  }
}

void decode(Codec codec, const RowHead& head, const unsigned char* row, void* vector, std::int64_t begin,
            std::int64_t end) {
  if (const std::int64_t bytes = plain_bytes(codec)) return copy(row, vector, begin * bytes, end * bytes);
  const std::int64_t run = run_of(codec);
  float* const to = static_cast<float*>(vector);
  alignas(64) float scratch[kBlock];
  for (std::int64_t i = begin; i < end; i += run) {
    const std::int64_t n = end - i < run ? end - i : run;
    const Decoding one{&head, row, n == run ? to + i : scratch};
    code_runs(codec, {i, n, &one, 1, nullptr, 0, kUsualLookahead});
    if (n < run) convert(scratch, to + i, n);
  }
}

}  // namespace afflux::AFFLUX_ISA
