#include "afflux/afflux.hpp"
#include "api/check.hpp"
#include "api/heads.hpp"
#include "api/overlap.hpp"
#include "cpu/dispatch.hpp"
#include "cpu/parallel_for.hpp"

namespace afflux {
namespace {

void check_codec(const char* op, Codec codec, const View<const void>& vector, const View<const unsigned char>& row,
                 int num_threads) {
  check::threads(op, num_threads);
  check::type(op, "vector", vector.type, {codec.coding == Coding::float64 ? Type::float64 : Type::float32});
  check::view(op, "vector", vector, vector.size);
  check::view(op, "row", row, row_bytes(codec, vector.size), rows::alignment(codec));
}

}  // namespace

void encode(Codec codec, View<const void> vector, View<unsigned char> row, int num_threads, const RowFacts& facts) {
  check_codec("encode", codec, vector, {row.data, row.size, row.device}, num_threads);
  check::Overlaps overlaps;
  overlaps.read("vector", vector);
  overlaps.write("row", row);
  overlaps.refuse("encode");
  const RowHead head = rows::head_of("encode", "facts", codec, facts);
  const Device device = overlaps.device();
  const int threads = threads_worth(overlaps.traffic(), num_threads);
  const auto kernel = kernels().encode;
  if (device.kind == DeviceKind::cuda)
    cuda::backend()->encode(cuda::on(device), codec, head, vector, row.data);
  else
    for_each_piece(vector.size, threads, [&](std::int64_t begin, std::int64_t end) {
      kernel(codec, head, vector.data, row.data, begin, end);
    });
  if (has_head(codec)) rows::finish({{row.data, head}}, codec, vector.size, device);
}

void decode(Codec codec, View<const unsigned char> row, View<void> vector, int num_threads) {
  check_codec("decode", codec, vector, row, num_threads);
  check::Overlaps overlaps;
  overlaps.read("row", row);
  overlaps.write("vector", vector);
  overlaps.refuse("decode");
  const Device device = overlaps.device();
  const rows::Heads found(codec, {&row, 1}, device);
  RowHead head{};
  if (found.at(0) != nullptr) head = rows::read_head("decode", "row", codec, found.at(0), vector.size);
  if (device.kind == DeviceKind::cuda) return cuda::backend()->decode(cuda::on(device), codec, head, row.data, vector);
  const auto kernel = kernels().decode;
  for_each_piece(vector.size, threads_worth(overlaps.traffic(), num_threads),
                 [&](std::int64_t begin, std::int64_t end) { kernel(codec, head, row.data, vector.data, begin, end); });
}

}  // namespace afflux
