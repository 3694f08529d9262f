// The heads of encoded rows, little-endian: what kernels take as RowHead, with codec and size to check a row against.
#pragma once
#include <vector>

#include "api/check.hpp"
#include "api/kernels.hpp"

namespace afflux::rows {

// Alignment that a row must have.
std::int64_t alignment(Codec codec);

// Throws Error for facts that the codec cannot use.
RowHead head_of(const char* op, check::Name name, Codec codec, const RowFacts& facts);

// Throws Error for a head that was not written for a vector of this size by this codec.
RowHead read_head(const char* op, check::Name name, Codec codec, const unsigned char* row, std::int64_t size);

// The head's kRowHead bytes.
void write_head(const RowHead& head, Codec codec, std::int64_t size, unsigned char* to);

// What has to be cleared beside it.
Padding padding(Codec codec, std::int64_t size);

// A row that was encoded, but for its head.
struct Written {
  unsigned char* row;
  RowHead head;
};
// Both, of rows of vectors of `size` elements.
cuda::NewHeads new_heads(const std::vector<Written>& written, Codec codec, std::int64_t size);
// Gives rows on this device both.
void finish(const std::vector<Written>& written, Codec codec, std::int64_t size, Device device);

// The heads of rows on a device, as they lie there.
class Heads {
 public:
  Heads(Codec codec, List<View<const unsigned char>> rows, Device device);
  // Null if the codec has no heads, or if there is no row.
  const unsigned char* at(std::int64_t i) const { return heads_[static_cast<std::size_t>(i)]; }

 private:
  std::vector<const unsigned char*> heads_;
  std::vector<unsigned char> fetched_;
};

}  // namespace afflux::rows
