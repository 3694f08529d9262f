// The heads of encoded rows, little-endian: the fields of RowHead, which kernels use, and the codec and size, against
// which a row is checked.
#pragma once
#include <vector>

#include "api/check.hpp"
#include "api/kernels.hpp"

namespace afflux::rows {

// Returns the alignment that a row must have, in bytes.
std::int64_t alignment(Codec codec);

// Returns the head of a row to encode. Throws Error for facts that the codec cannot use.
RowHead head_of(const char* op, check::Name name, Codec codec, const RowFacts& facts);

// Reads a row's head. Throws Error unless this codec has written it for a vector of `size` elements.
RowHead read_head(const char* op, check::Name name, Codec codec, const unsigned char* row, std::int64_t size);

// Writes the head's kRowHead bytes.
void write_head(const RowHead& head, Codec codec, std::int64_t size, unsigned char* to);

// Returns the bytes of a row that have no meaning and must be set to 0.
Padding padding(Codec codec, std::int64_t size);

// A row that is encoded except for its head and padding.
struct Written {
  unsigned char* row;
  RowHead head;
};
// Returns the heads and the padding of these rows, which encode vectors of `size` elements.
cuda::NewHeads new_heads(const std::vector<Written>& written, Codec codec, std::int64_t size);
// Writes the heads and clears the padding of rows on this device.
void finish(const std::vector<Written>& written, Codec codec, std::int64_t size, Device device);

// The heads of rows on a device, readable on the host.
class Heads {
 public:
  Heads(Codec codec, List<View<const unsigned char>> rows, Device device);
  // Returns the head of row i, or null if the codec has no heads, or if there is no row.
  const unsigned char* at(std::int64_t i) const { return heads_[static_cast<std::size_t>(i)]; }

 private:
  std::vector<const unsigned char*> heads_;
  std::vector<unsigned char> fetched_;
};

}  // namespace afflux::rows
