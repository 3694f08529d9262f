#include <limits>

#include "afflux/afflux.hpp"
#include "cpu/dispatch.hpp"
#include "cpu/parallel_for.hpp"
#include "entry/check.hpp"
#include "entry/overlap.hpp"

namespace afflux {

std::int64_t row_bytes(Codec codec, std::int64_t size) {
  if (size < 0 || size > std::numeric_limits<std::int64_t>::max() / 8)
    throw Error("[row_bytes] size is " + std::to_string(size) + ", which no vector has");
  switch (codec) {
    case Codec::float32:
      return 4 * size;
    case Codec::float64:
      return 8 * size;
  }
  throw Error("[row_bytes] unknown codec");
}

namespace {

void check_codec(const char* op, Codec codec, const View<const void>& vector, const View<const unsigned char>& row,
                 int num_threads) {
  check::threads(op, num_threads);
  check::type(op, "vector", vector.type, {codec == Codec::float64 ? Type::float64 : Type::float32});
  check::view(op, "vector", vector, vector.size);
  check::view(op, "row", row, row_bytes(codec, vector.size), row_bytes(codec, 1));
}

}  // namespace

void encode(Codec codec, View<const void> vector, View<unsigned char> row, int num_threads) {
  check_codec("encode", codec, vector, {row.data, row.size, row.device}, num_threads);
  check::Overlaps overlaps;
  overlaps.read("vector", vector);
  overlaps.write("row", row);
  overlaps.refuse("encode");
  const auto kernel = kernels().encode;
  for_each_piece(vector.size, threads_worth(overlaps.traffic(), num_threads),
                 [&](std::int64_t begin, std::int64_t end) { kernel(codec, vector.data, row.data, begin, end); });
}

void decode(Codec codec, View<const unsigned char> row, View<void> vector, int num_threads) {
  check_codec("decode", codec, vector, row, num_threads);
  check::Overlaps overlaps;
  overlaps.read("row", row);
  overlaps.write("vector", vector);
  overlaps.refuse("decode");
  const auto kernel = kernels().decode;
  for_each_piece(vector.size, threads_worth(overlaps.traffic(), num_threads),
                 [&](std::int64_t begin, std::int64_t end) { kernel(codec, row.data, vector.data, begin, end); });
}

}  // namespace afflux
