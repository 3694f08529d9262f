// CRC-32C of bytes that come piece by piece.
#pragma once
#include <cstdint>

namespace afflux::checksum {

// Bytes that follow those that `crc` is of so far; 0 at first.
struct Stream {
  const unsigned char* data;
  std::int64_t size;
  std::uint32_t* crc;
};

// Each byte waits for the previous one; several streams side by side hide the latency of the instruction.
constexpr int kSideBySide = 4;

// Takes all of them in. `table`: without the CPU's instruction.
void extend(const Stream* streams, std::int64_t count, bool table = false);

// The CRC of two consecutive parts, from the CRCs of both parts.
std::uint32_t joined(std::uint32_t first, std::uint32_t second, std::int64_t second_size);

}  // namespace afflux::checksum
