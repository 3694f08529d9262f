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
  }
  throw Error("[row_bytes] unknown codec");
}

void encode(Codec codec, View<const float> vector, View<unsigned char> row, int num_threads) {
  check::threads("encode", num_threads);
  check::view("encode", "vector", vector, vector.size);
  check::view("encode", "row", row, row_bytes(codec, vector.size), sizeof(float));
  check::Overlaps overlaps;
  overlaps.read("vector", -1, vector);
  overlaps.write("row", -1, row);
  overlaps.refuse("encode");
  const auto kernel = kernels().encode;
  for_each_superblock(vector.size, num_threads,
                      [&](std::int64_t begin, std::int64_t end) { kernel(codec, vector.data, row.data, begin, end); });
}

void decode(Codec codec, View<const unsigned char> row, View<float> vector, int num_threads) {
  check::threads("decode", num_threads);
  check::view("decode", "vector", vector, vector.size);
  check::view("decode", "row", row, row_bytes(codec, vector.size), sizeof(float));
  check::Overlaps overlaps;
  overlaps.read("row", -1, row);
  overlaps.write("vector", -1, vector);
  overlaps.refuse("decode");
  const auto kernel = kernels().decode;
  for_each_superblock(vector.size, num_threads,
                      [&](std::int64_t begin, std::int64_t end) { kernel(codec, row.data, vector.data, begin, end); });
}

}  // namespace afflux
