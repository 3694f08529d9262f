// The coding of runs of cached rows, which the sweeps with encoded rows call: kCodecBlock elements, or kBlock for the
// rotated codec. A unit of its own (codec.cpp) holds the codecs.
#pragma once
#include "api/kernels.hpp"
#include "cpu/simd.hpp"
#include "formula/codec.hpp"
#include "formula/reduce.hpp"

namespace afflux::AFFLUX_ISA {

// A run of one row to encode, and one to decode.
struct Encoding {
  const RowHead* head;
  const float* from;   // the run's part of the vector
  float* x;            // memory for a copy of that part, which affine codecs make; null: they read the part in place
  unsigned char* row;  // null: the codes are not stored
  float* decoded;      // memory for the decoded values
};
struct Decoding {
  const RowHead* head;
  const unsigned char* row;
  float* out;
};

// The prefetch distance of an update's lines in bytes. `near`: into L1, else only into L2.
struct Lookahead {
  std::int64_t bytes;
  bool near;

  AFFLUX_INLINE void ask_for(const char* line) const {
    near ? __builtin_prefetch(line) : __builtin_prefetch(line, 0, 2);
  }
};

constexpr Lookahead kUsualLookahead{simd::kPrefetchDistance, false};

// The runs from element `begin` on of up to kTogether rows, some to decode and some to encode. Float16 and bfloat16
// rows have n elements; for other codecs runs are whole, and `from` is padded after the vector's end (see pad).
struct Runs {
  std::int64_t begin, n;
  const Decoding* decodings;
  int decoded;
  const Encoding* encodings;
  int encoded;
  Lookahead ahead;
};

// Decodes and encodes the runs.
void code_runs(Codec codec, const Runs& runs);

// Returns true if the codec's coder prefetches some of an update's lines, and may copy the run to x.
bool asks(Codec codec);

namespace {

// Each stage prefetches some of the later lines of an update, so that memory is never idle, and never has more requests
// than it can process at once. The stage that adds the differences prefetches the remaining lines.
constexpr int kFirstLines = 1, kLinesBesideCodes = 3;

AFFLUX_FN std::int64_t run_of(Codec codec) { return formula::info_of(codec).run; }

// Returns the bytes of an element of a plain row (float32 or float64), or 0 for any other codec.
AFFLUX_FN std::int64_t plain_bytes(Codec codec) {
  return codec.coding == Coding::float32 ? 4 : codec.coding == Coding::float64 ? 8 : 0;
}

// Sets x[n, run) to what follows the n elements of a short run: its least element if the run has a grid of its own, so
// that the grid is that of the elements; else zeros.
AFFLUX_FN void pad(Codec codec, float* x, std::int64_t n) {
  float rest = 0.0f;
  if (formula::info_of(codec).own_grids) {
    rest = x[0];
    for (std::int64_t i = 1; i < n; ++i) rest = formula::lesser(rest, x[i]);
  }
  for (std::int64_t i = n; i < run_of(codec); ++i) x[i] = rest;
}

// Returns `part` padded to a whole run, in `scratch`; returns `part` itself if it is whole.
AFFLUX_FN const float* padded(Codec codec, const float* part, std::int64_t n, float* scratch) {
  if (n == run_of(codec)) return part;
  for (std::int64_t i = 0; i < n; ++i) scratch[i] = part[i];
  pad(codec, scratch, n);
  return scratch;
}

}  // namespace
}  // namespace afflux::AFFLUX_ISA
