// encode and decode as kernels of their own, and the heads of rows on their way.
#pragma once
#include "cuda/codec_affine.hpp"
#include "cuda/codec_rotated.hpp"
#include "cuda/staging.hpp"

namespace afflux::cuda {

// body(thread, span) for the threads that have elements of a tile.
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
    typename Block::template Each<Four<float>> x, decoded;
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
    typename Block::template Each<Four<float>> out;
    block.each_in_warp([&](int thread) { read[thread] = Coder::read(tile, head, row, thread); });
    Coder::decode(block, shared, tile, head, read, out);
    each_span(block, tile, [&](int thread, const auto& span) { span.store(vector, out[thread]); });
  }
};

// The heads of some rows, side by side.
struct ReadHeadsBody {
  static constexpr int kThreads = kRowHead;
  struct Shared {};

  const unsigned char* const* rows;
  unsigned char* heads;

  template <class Block>
  AFFLUX_DEVICE void operator()(const Block& block, Shared&) const {
    block.each([&](int thread) { heads[block.index * kRowHead + thread] = rows[block.index][thread]; });
  }
};

// And back, with zeros where rows have no meaning.
struct WriteHeadsBody {
  static constexpr int kThreads = 256;
  struct Shared {};

  unsigned char* const* rows;
  const unsigned char* heads;
  Blanks blanks;

  template <class Block>
  AFFLUX_DEVICE void operator()(const Block& block, Shared&) const {
    unsigned char* const row = rows[block.index];
    block.each([&](int thread) {
      if (thread < kRowHead) row[thread] = heads[block.index * kRowHead + thread];
      for (std::int64_t i = blanks.facts_begin + thread; i < blanks.facts_end; i += kThreads) row[i] = 0;
      for (std::int64_t i = blanks.codes_begin + thread; i < blanks.codes_end; i += kThreads) row[i] = 0;
    });
  }
};

// New heads on the device, to be written when the codes are.
class StagedHeads {
 public:
  template <class Machine>
  StagedHeads(Machine& machine, const NewHeads& renewed) : count_(static_cast<std::int64_t>(renewed.rows.size())) {
    Staging staging;
    const std::int64_t rows = staging.add(renewed.rows.data(), count_);
    const std::int64_t heads = staging.add(renewed.heads.data(), count_ * kRowHead);
    staging.upload(machine);
    body_ = {staging.at<unsigned char* const>(rows), staging.at<const unsigned char>(heads), renewed.blanks};
  }
  template <class Machine>
  void write(Machine& machine) const {
    machine.run(count_, body_);
  }

 private:
  std::int64_t count_;
  WriteHeadsBody body_;
};

}  // namespace afflux::cuda
