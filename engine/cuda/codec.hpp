// encode and decode: the codecs of cached rows as separate kernels.
#pragma once
#include <type_traits>

#include "api/kernels.hpp"
#include "cuda/codec_affine.hpp"
#include "cuda/codec_rotated.hpp"

namespace afflux::cuda {

// The coder of float16 and bfloat16 rows.
template <class Half>
struct Halves {
  static constexpr int kThreads = 256;
  struct Shared {};
  using Read = Vector4<Half>;

  static AFFLUX_DEVICE Read read(const Tile& tile, const RowHead&, const unsigned char* row, int thread) {
    Read halves{};
    with_span(tile.of(thread), tile.size, tile.aligned,
              [&](const auto& span) { halves = span.template load<Half>(row); });
    return halves;
  }
  template <class Block, class Reads, class Out>
  static AFFLUX_DEVICE void decode(const Block& block, Shared&, const Tile&, const RowHead&, Reads& read, Out& out) {
    block.each_in_warp([&](int thread) { out[thread] = converted<float>(read[thread]); });
  }
  template <class Block, class Floats>
  static AFFLUX_DEVICE void encode(const Block& block, Shared&, const Tile& tile, const RowHead&, Floats& x,
                                   unsigned char* row, Floats& decoded) {
    block.each_in_warp([&](int thread) {
      Vector4<Half> halves;
      AFFLUX_UNROLL_ON_DEVICE
      for (int j = 0; j < kFour; ++j) formula::narrow_finite(x[thread].at[j], &halves.at[j]);
      if (row != nullptr)
        with_span(tile.of(thread), tile.size, tile.aligned, [&](const auto& span) { span.store(row, halves); });
      decoded[thread] = converted<float>(halves);
    });
  }
};

// The coder of a coding; see codec_tile.hpp.
template <Coding kCoding>
struct CoderOf;

// The coder of plain rows, which are read in place.
struct Uncoded {};
template <>
struct CoderOf<Coding::float32> {
  using Type = Uncoded;
};
template <>
struct CoderOf<Coding::float64> {
  using Type = Uncoded;
};
template <>
struct CoderOf<Coding::float16> {
  using Type = Halves<Float16>;
};
template <>
struct CoderOf<Coding::bfloat16> {
  using Type = Halves<Bfloat16>;
};
template <>
struct CoderOf<Coding::affine> {
  using Type = Affine;
};
template <>
struct CoderOf<Coding::affine_vector> {
  using Type = Affine;
};
template <>
struct CoderOf<Coding::rotated> {
  using Type = Rotated;
};

// Calls run(Coder{}) for the codec's coder.
template <class Run>
void with_coder(Codec codec, const Run& run) {
  switch (codec.coding) {
#define AFFLUX_CODING(coding, ...) \
  case Coding::coding:             \
    return run(typename CoderOf<Coding::coding>::Type{});
    AFFLUX_CODINGS(AFFLUX_CODING)
#undef AFFLUX_CODING
  }
}

// Calls body(thread, span) for the threads that have elements of a tile.
template <class Block, class Body>
AFFLUX_DEVICE void each_span(const Block& block, const Tile& tile, const Body& body) {
  block.each_in_warp([&](int thread) {
    if (tile.of(thread) < tile.size)
      with_span(tile.of(thread), tile.size, tile.aligned, [&](const auto& span) { body(thread, span); });
  });
}

template <class Coder>
struct EncodeBody {
  static constexpr int kThreads = Coder::kThreads;
  static constexpr std::int64_t kTile = kThreads * kFour;
  using Shared = typename Coder::Shared;

  Codec codec;
  RowHead head;
  const void* vector;
  unsigned char* row;
  std::int64_t size;
  bool aligned;

  template <class Block>
  AFFLUX_DEVICE void operator()(const Block& block, Shared& shared) const {
    const Tile tile{codec, block.index * kTile, size, aligned};
    typename Block::template Each<Vector4<float>> x, decoded;
    block.each_in_warp([&](int thread) { x[thread] = {}; });
    each_span(block, tile, [&](int thread, const auto& span) { x[thread] = span.template load<float>(vector); });
    Coder::encode(block, shared, tile, head, x, row, decoded);
  }
};

template <class Coder>
struct DecodeBody {
  static constexpr int kThreads = Coder::kThreads;
  static constexpr std::int64_t kTile = kThreads * kFour;
  using Shared = typename Coder::Shared;

  Codec codec;
  RowHead head;
  const unsigned char* row;
  void* vector;
  std::int64_t size;
  bool aligned;

  template <class Block>
  AFFLUX_DEVICE void operator()(const Block& block, Shared& shared) const {
    const Tile tile{codec, block.index * kTile, size, aligned};
    typename Block::template Each<typename Coder::Read> read;
    typename Block::template Each<Vector4<float>> out;
    block.each_in_warp([&](int thread) { read[thread] = Coder::read(tile, head, row, thread); });
    Coder::decode(block, shared, tile, head, read, out);
    each_span(block, tile, [&](int thread, const auto& span) { span.store(vector, out[thread]); });
  }
};

inline bool both_aligned(const void* a, const void* b) {
  return reinterpret_cast<std::uintptr_t>(a) % 16 == 0 && reinterpret_cast<std::uintptr_t>(b) % 16 == 0;
}

template <class Executor>
void encode(const Where& where, Codec codec, const RowHead& head, const View<const void>& vector, unsigned char* row) {
  Executor executor(where);
  if (codec == exact_codec(vector.type)) return executor.copy(row, vector.data, vector.size * bytes(vector.type));
  with_coder(codec, [&](auto coder) {
    using Coder = decltype(coder);
    if constexpr (!std::is_same_v<Coder, Uncoded>) {
      using Body = EncodeBody<Coder>;
      executor.run((vector.size + Body::kTile - 1) / Body::kTile,
                   Body{codec, head, vector.data, row, vector.size, both_aligned(vector.data, row)});
    }
  });
}

template <class Executor>
void decode(const Where& where, Codec codec, const RowHead& head, const unsigned char* row, const View<void>& vector) {
  Executor executor(where);
  if (codec == exact_codec(vector.type)) return executor.copy(vector.data, row, vector.size * bytes(vector.type));
  with_coder(codec, [&](auto coder) {
    using Coder = decltype(coder);
    if constexpr (!std::is_same_v<Coder, Uncoded>) {
      using Body = DecodeBody<Coder>;
      executor.run((vector.size + Body::kTile - 1) / Body::kTile,
                   Body{codec, head, row, vector.data, vector.size, both_aligned(vector.data, row)});
    }
  });
}

}  // namespace afflux::cuda
