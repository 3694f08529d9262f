#include "api/sweep_checksums.hpp"

#include <algorithm>

#include "api/checksum.hpp"
#include "formula/codec.hpp"

namespace afflux {

SweepChecksums::SweepChecksums(const Pass& pass, std::int64_t piece, Checksums& checksums)
    : size_(pass.params.size), piece_(piece) {
  const Calibrate& cache = pass.calibrate;
  const bool cached = cache.kind != Calibration::none;
  if (cached) add(checksums.sum, cache.sum_out.data, exact_codec(Type::float64));
  const auto add_each = [&](std::vector<std::vector<std::uint32_t>>& crcs, List<View<void>> vectors) {
    crcs.resize(static_cast<std::size_t>(vectors.size));
    for (std::int64_t i = 0; i < vectors.size; ++i)
      add(crcs[static_cast<std::size_t>(i)], vectors.data[i].data, exact_codec(vectors.data[i].type));
  };
  add(checksums.out, pass.out.data, exact_codec(pass.out.type));
  add_each(checksums.states, pass.step.outs);
  if (pass.rule_vectors.next.size > 0) add_each(checksums.rule_vectors, pass.rule_vectors.outs);
  checksums.rows.resize(static_cast<std::size_t>(cached ? cache.new_rows.size : 0));
  for (std::size_t i = 0; i < checksums.rows.size(); ++i)
    if (const unsigned char* const row = cache.new_rows.data[i].data) add(checksums.rows[i], row, cache.codec);
}

void SweepChecksums::add(std::vector<std::uint32_t>& crcs, const void* data, Codec codec) {
  const auto* const bytes = static_cast<const unsigned char*>(data);
  const auto superblocks = static_cast<std::size_t>((size_ + kSuperblock - 1) / kSuperblock);
  const auto pieces = static_cast<std::size_t>((size_ + piece_ - 1) / piece_);
  const std::size_t head = has_head(codec);
  crcs.assign(head + superblocks, 0);
  if (head != 0) {
    const checksum::Stream stream{bytes, kRowHead, crcs.data()};
    checksum::extend(&stream, 1);
  }
  vectors_.push_back({bytes, codec, crcs.data() + head, std::vector<std::uint32_t>(pieces, 0)});
}

std::int64_t SweepChecksums::offset(Codec codec, std::int64_t element) const {
  if (element == size_) return row_bytes(codec, size_);
  const formula::Place place = formula::place(codec, element);
  return has_head(codec) ? place.facts : place.codes;
}

void SweepChecksums::extend(std::int64_t begin, std::int64_t end) {
  std::vector<checksum::Stream> streams;
  streams.reserve(vectors_.size());
  for (Vector& vector : vectors_) {
    const std::int64_t from = offset(vector.codec, begin), to = offset(vector.codec, end);
    streams.push_back({vector.data + from, to - from, &vector.pieces[static_cast<std::size_t>(begin / piece_)]});
  }
  checksum::extend(streams.data(), static_cast<std::int64_t>(streams.size()));
}

void SweepChecksums::finish() const {
  for (const Vector& vector : vectors_)
    for (std::int64_t begin = 0; begin < size_; begin += piece_) {
      const std::int64_t bytes = offset(vector.codec, std::min(begin + piece_, size_)) - offset(vector.codec, begin);
      std::uint32_t& crc = vector.crcs[begin / kSuperblock];
      crc = checksum::joined(crc, vector.pieces[static_cast<std::size_t>(begin / piece_)], bytes);
    }
}

}  // namespace afflux
