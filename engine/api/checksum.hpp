// The CRC-32C of bytes that arrive piece by piece.
#pragma once
#include <cstdint>

namespace afflux::checksum {

// The next bytes of a stream, and the CRC of all bytes before them (0 at the beginning).
struct Stream {
  const unsigned char* data;
  std::int64_t size;
  std::uint32_t* crc;
};

// The number of streams that are processed together. In one stream each step depends on the one before it; several
// streams hide the latency of the instruction.
constexpr int kSideBySide = 4;

// Extends the CRC of each stream by its bytes. `table`: computes with a table instead of the CPU's CRC instruction.
void extend(const Stream* streams, std::int64_t count, bool table = false);

// Returns the CRC of two consecutive parts from the CRCs of both parts; `second_size` is in bytes.
std::uint32_t joined(std::uint32_t first, std::uint32_t second, std::int64_t second_size);

}  // namespace afflux::checksum
