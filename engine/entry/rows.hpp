// The heads of encoded rows, little-endian: what kernels take as RowHead, with codec and size to check a row against.
#pragma once
#include "cpu/kernels.hpp"
#include "entry/check.hpp"

namespace afflux::rows {

// Alignment that a row must have.
std::int64_t alignment(Codec codec);

// Throws Error for facts that the codec cannot use.
RowHead head_of(const char* op, check::Name name, Codec codec, const RowFacts& facts);

// Throws Error for a head that was not written for a vector of this size by this codec.
RowHead read_head(const char* op, check::Name name, Codec codec, const unsigned char* row, std::int64_t size);

// The head, and zeros where the row of a short last group has bytes without a meaning.
void write_head(const RowHead& head, Codec codec, unsigned char* row, std::int64_t size);

}  // namespace afflux::rows
