// encode, decode and the heads of rows on a Machine (see reductions.hpp).
#pragma once
#include "cuda/rows.hpp"
#include "cuda/staging.hpp"

namespace afflux::cuda {

inline bool both_aligned(const void* a, const void* b) {
  return reinterpret_cast<std::uintptr_t>(a) % 16 == 0 && reinterpret_cast<std::uintptr_t>(b) % 16 == 0;
}

// run(Coder{}) for a codec that rounds.
template <class Run>
void with_coder(Codec codec, const Run& run) {
  switch (codec.coding) {
    case Coding::float16:
      return run(Halves<Float16>{});
    case Coding::bfloat16:
      return run(Halves<Bfloat16>{});
    case Coding::affine:
    case Coding::affine_vector:
      return run(Affine{});
    case Coding::rotated:
      return run(Rotated{});
    case Coding::float32:
    case Coding::float64:
      return;
  }
}

template <class Machine>
void encode(const Where& where, Codec codec, const RowHead& head, const View<const void>& vector, unsigned char* row) {
  Machine machine(where);
  if (codec == exact_codec(vector.type)) return machine.copy(row, vector.data, vector.size * bytes(vector.type));
  with_coder(codec, [&](auto coder) {
    using Body = EncodeBody<decltype(coder)>;
    machine.run((vector.size + Body::kTile - 1) / Body::kTile,
                Body{codec, head, vector.data, row, vector.size, both_aligned(vector.data, row)});
  });
}

template <class Machine>
void decode(const Where& where, Codec codec, const RowHead& head, const unsigned char* row, const View<void>& vector) {
  Machine machine(where);
  if (codec == exact_codec(vector.type)) return machine.copy(vector.data, row, vector.size * bytes(vector.type));
  with_coder(codec, [&](auto coder) {
    using Body = DecodeBody<decltype(coder)>;
    machine.run((vector.size + Body::kTile - 1) / Body::kTile,
                Body{codec, head, row, vector.data, vector.size, both_aligned(vector.data, row)});
  });
}

template <class Machine>
std::vector<unsigned char> read_heads(const Where& where, const std::vector<const unsigned char*>& rows) {
  Machine machine(where);
  const std::int64_t count = static_cast<std::int64_t>(rows.size()), bytes = count * kRowHead;
  Staging staging;
  const std::int64_t staged = staging.add(rows.data(), count);
  const auto heads = static_cast<unsigned char*>(machine.allocate(bytes));
  staging.upload(machine);
  machine.run(count, ReadHeadsBody{staging.at<const unsigned char* const>(staged), heads});
  std::vector<unsigned char> fetched(static_cast<std::size_t>(bytes));
  machine.download(fetched.data(), heads, bytes);
  return fetched;
}

template <class Machine>
void write_heads(const Where& where, const NewHeads& renewed) {
  Machine machine(where);
  StagedHeads(machine, renewed).write(machine);
}

}  // namespace afflux::cuda
