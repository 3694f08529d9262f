// encode and decode: the codecs of cached rows as separate kernels.
#pragma once
#include <type_traits>

#include "api/kernels.hpp"
#include "cuda/codec_affine.hpp"
#include "cuda/codec_rotated.hpp"

namespace afflux::cuda {

// Returns the nearest finite values. The instructions round like the formula; the least of |x| and the largest finite
// value is that value for a NaN, too.
template <class Half>
AFFLUX_DEVICE Vector4<Half> halves_of(const Vector4<float>& x) {
  Vector4<Half> halves;
#if defined(__CUDA_ARCH__)
  constexpr bool kFloat16 = std::is_same_v<Half, Float16>;
  const float most = formula::float_of(kFloat16 ? 0x477FE000u : 0x7F7F0000u);
  std::uint32_t words[2];
  AFFLUX_UNROLL_ON_DEVICE
  for (int j = 0; j < kFour; j += 2) {
    const float low = copysignf(fminf(fabsf(x.at[j]), most), x.at[j]);
    const float high = copysignf(fminf(fabsf(x.at[j + 1]), most), x.at[j + 1]);
    if constexpr (kFloat16)
      asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(words[j / 2]) : "f"(high), "f"(low));
    else
      asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(words[j / 2]) : "f"(high), "f"(low));
  }
  memcpy(&halves, words, sizeof halves);
#else
  for (int j = 0; j < kFour; ++j) formula::narrow_finite(x.at[j], &halves.at[j]);
#endif
  return halves;
}
// Returns the values. `numbers`: none of them is a NaN, whose bits the instruction would lose.
AFFLUX_DEVICE Vector4<float> floats_of(const Vector4<Bfloat16>& halves, bool) { return converted<float>(halves); }
AFFLUX_DEVICE Vector4<float> floats_of(const Vector4<Float16>& halves, [[maybe_unused]] bool numbers) {
#if defined(__CUDA_ARCH__)
  Vector4<float> x;
  bool same = true;
  AFFLUX_UNROLL_ON_DEVICE
  for (int j = 0; j < kFour; ++j) {
    asm("cvt.f32.f16 %0, %1;" : "=f"(x.at[j]) : "h"(halves.at[j].bits));
    same = same && x.at[j] == x.at[j];
  }
  if (numbers || same) return x;
#endif
  return converted<float>(halves);
}

// The format of float16 and bfloat16 rows, and its coder.
template <class Half>
struct Halves : Consecutive {
  struct Shared {};
  using Read = Vector4<Half>;

  template <class Run>
  static AFFLUX_DEVICE void with_coder(int, const Run& run) {
    run(Halves{});
  }
  template <class Block, class Heads>
  static AFFLUX_DEVICE void prepare(const Block&, Shared&, const Tile&, const Heads&, int) {}

  static AFFLUX_DEVICE std::int64_t place(const Tile& tile) { return tile.begin * sizeof(Half); }
  static AFFLUX_DEVICE Read read(const Tile& tile, const RowHeads&, const unsigned char* row, int thread) {
    Read halves{};
    with_part<Halves>(tile, thread, [&](const auto& span) { halves = span.template load<Half>(row); });
    return halves;
  }
  template <class Block, class Reads, class Out>
  static AFFLUX_DEVICE void decode(const Block& block, Shared&, const Tile&, const RowHeads&, int, Reads& read,
                                   Out& out) {
    block.each_alone([&](int thread) { out[thread] = floats_of(read[thread], false); });
  }
  template <class Block, class Floats>
  static AFFLUX_DEVICE void encode(const Block& block, Shared&, const Tile& tile, const RowHeads&, int, Floats& x,
                                   unsigned char* row, Floats& decoded) {
    block.each_alone([&](int thread) {
      const Read halves = halves_of<Half>(x[thread]);
      if (row != nullptr) with_part<Halves>(tile, thread, [&](const auto& span) { span.store(row, halves); });
      decoded[thread] = floats_of(halves, true);
    });
  }
};

// The format of a coding; see codec_tile.hpp.
template <Coding kCoding>
struct FormatOf;

// The format of plain rows, which are read in place.
struct Uncoded {};
template <>
struct FormatOf<Coding::float32> {
  using Type = Uncoded;
};
template <>
struct FormatOf<Coding::float64> {
  using Type = Uncoded;
};
template <>
struct FormatOf<Coding::float16> {
  using Type = Halves<Float16>;
};
template <>
struct FormatOf<Coding::bfloat16> {
  using Type = Halves<Bfloat16>;
};
template <>
struct FormatOf<Coding::affine> {
  using Type = Affine;
};
template <>
struct FormatOf<Coding::affine_vector> {
  using Type = Affine;
};
template <>
struct FormatOf<Coding::rotated> {
  using Type = Rotated;
};

// Calls run(Format{}) for the format of the codec's coding.
template <class Run>
void with_format(Codec codec, const Run& run) {
  switch (codec.coding) {
#define AFFLUX_CODING(coding, ...) \
  case Coding::coding:             \
    return run(typename FormatOf<Coding::coding>::Type{});
    AFFLUX_CODINGS(AFFLUX_CODING)
#undef AFFLUX_CODING
  }
}

template <class Format>
struct EncodeBody {
  static constexpr int kThreads = Format::kThreads;
  using Shared = typename Format::Shared;

  Codec codec;
  RowHeads heads;
  const float* vector;
  unsigned char* row;
  std::int64_t size;
  bool aligned;

  template <class Block>
  AFFLUX_DEVICE void operator()(const Block& block, Shared& shared) const {
    const Tile tile = tile_at<Format>(codec.coding, block.index, size, aligned);
    typename Block::template Each<Vector4<float>> x, decoded;
    block.each_alone([&](int thread) {
      x[thread] = {};
      with_part<Format>(tile, thread,
                        [&](const auto& span) { x[thread] = span.template load<float>(vector + tile.begin); });
    });
    Format::prepare(block, shared, tile, [&](int) -> const RowHeads& { return heads; }, 1);
    Format::with_coder(codec.bits, [&](auto coder) {
      coder.encode(block, shared, tile, heads, 0, x, row + coder.place(tile), decoded);
    });
  }
};

template <class Format>
struct DecodeBody {
  static constexpr int kThreads = Format::kThreads;
  using Shared = typename Format::Shared;

  Codec codec;
  RowHeads heads;
  const unsigned char* row;
  float* vector;
  std::int64_t size;
  bool aligned;

  template <class Block>
  AFFLUX_DEVICE void operator()(const Block& block, Shared& shared) const {
    const Tile tile = tile_at<Format>(codec.coding, block.index, size, aligned);
    typename Block::template Each<Vector4<float>> out;
    Format::prepare(block, shared, tile, [&](int) -> const RowHeads& { return heads; }, 1);
    Format::with_coder(codec.bits, [&](auto coder) {
      typename Block::template Each<typename decltype(coder)::Read> read;
      block.each_alone([&](int thread) { read[thread] = coder.read(tile, heads, row + coder.place(tile), thread); });
      coder.decode(block, shared, tile, heads, 0, read, out);
    });
    block.each_alone([&](int thread) {
      with_part<Format>(tile, thread, [&](const auto& span) { span.store(vector + tile.begin, out[thread]); });
    });
  }
};

inline bool both_aligned(const void* a, const void* b) {
  return reinterpret_cast<std::uintptr_t>(a) % 16 == 0 && reinterpret_cast<std::uintptr_t>(b) % 16 == 0;
}

template <class Executor>
void encode(const Where& where, Codec codec, const RowHead& head, const View<const void>& vector, unsigned char* row) {
  Executor executor(where);
  if (codec == exact_codec(vector.type)) return executor.copy(row, vector.data, vector.size * bytes(vector.type));
  with_format(codec, [&](auto format) {
    if constexpr (!std::is_same_v<decltype(format), Uncoded>)
      executor.run(decltype(format)::tiles(vector.size),
                   EncodeBody<decltype(format)>{codec,
                                                {head, head},
                                                static_cast<const float*>(vector.data),
                                                row,
                                                vector.size,
                                                both_aligned(vector.data, row)});
  });
}

template <class Executor>
void decode(const Where& where, Codec codec, const RowHead& head, const unsigned char* row, const View<void>& vector) {
  Executor executor(where);
  if (codec == exact_codec(vector.type)) return executor.copy(vector.data, row, vector.size * bytes(vector.type));
  with_format(codec, [&](auto format) {
    if constexpr (!std::is_same_v<decltype(format), Uncoded>)
      executor.run(
          decltype(format)::tiles(vector.size),
          DecodeBody<decltype(format)>{
              codec, {head, head}, row, static_cast<float*>(vector.data), vector.size, both_aligned(vector.data, row)});
  });
}

}  // namespace afflux::cuda
