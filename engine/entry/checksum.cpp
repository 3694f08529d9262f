// CRC-32C (Castagnoli) of the blocks of a buffer: what files are checked with. One block follows the other in a block's
// own CRC, so several blocks side by side hide the latency of the instruction, and need no combining.
#include <algorithm>
#include <array>
#include <cstring>

#include "afflux/afflux.hpp"
#include "cpu/parallel_for.hpp"
#include "entry/check.hpp"

#if defined(__SSE4_2__) || defined(__x86_64__)
#include <nmmintrin.h>
#define AFFLUX_CRC __attribute__((target("sse4.2")))
#elif defined(__aarch64__)
#include <arm_acle.h>
#define AFFLUX_CRC __attribute__((target("+crc")))
#endif
#if defined(__aarch64__) && defined(__linux__)
#include <asm/hwcap.h>
#include <sys/auxv.h>
#endif

namespace afflux {
namespace {

constexpr int kSideBySide = 4;

struct Table {
  std::array<std::uint32_t, 256> of{};
  constexpr Table() {
    for (std::uint32_t byte = 0; byte < 256; ++byte) {
      std::uint32_t crc = byte;
      for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ (crc & 1u ? 0x82F63B78u : 0u);
      of[byte] = crc;
    }
  }
};
constexpr Table kTable;

// `blocks` of them, each of `size` bytes, one after the other in memory.
void by_table(const unsigned char* data, std::int64_t size, int blocks, std::uint32_t* out) {
  for (int k = 0; k < blocks; ++k) {
    std::uint32_t crc = ~0u;
    for (const unsigned char* at = data + k * size; at != data + (k + 1) * size; ++at)
      crc = kTable.of[(crc ^ *at) & 0xFFu] ^ (crc >> 8);
    out[k] = ~crc;
  }
}

#if defined(AFFLUX_CRC)
#if defined(__aarch64__)
AFFLUX_CRC inline std::uint32_t next(std::uint32_t crc, std::uint64_t word) { return __crc32cd(crc, word); }
AFFLUX_CRC inline std::uint32_t next(std::uint32_t crc, unsigned char byte) { return __crc32cb(crc, byte); }
bool has_instruction() {
#if defined(__linux__)
  return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0;
#else
  return true;  // every 64-bit ARM of Apple
#endif
}
#else
AFFLUX_CRC inline std::uint32_t next(std::uint32_t crc, std::uint64_t word) {
  return static_cast<std::uint32_t>(_mm_crc32_u64(crc, word));
}
AFFLUX_CRC inline std::uint32_t next(std::uint32_t crc, unsigned char byte) { return _mm_crc32_u8(crc, byte); }
bool has_instruction() { return __builtin_cpu_supports("sse4.2"); }
#endif

template <int kBlocks>
AFFLUX_CRC void side_by_side(const unsigned char* data, std::int64_t size, std::uint32_t* out) {
  std::uint32_t crc[kBlocks];
  for (int k = 0; k < kBlocks; ++k) crc[k] = ~0u;
  std::int64_t i = 0;
  for (; i + 8 <= size; i += 8)
    for (int k = 0; k < kBlocks; ++k) {
      std::uint64_t word;
      std::memcpy(&word, data + k * size + i, sizeof word);
      crc[k] = next(crc[k], word);
    }
  for (; i < size; ++i)
    for (int k = 0; k < kBlocks; ++k) crc[k] = next(crc[k], data[k * size + i]);
  for (int k = 0; k < kBlocks; ++k) out[k] = ~crc[k];
}

void by_instruction(const unsigned char* data, std::int64_t size, int blocks, std::uint32_t* out) {
  if (blocks == kSideBySide) return side_by_side<kSideBySide>(data, size, out);
  for (int k = 0; k < blocks; ++k) side_by_side<1>(data + k * size, size, out + k);
}
#endif

using Kernel = void (*)(const unsigned char*, std::int64_t, int, std::uint32_t*);

Kernel kernel(bool table) {
#if defined(AFFLUX_CRC)
  if (!table && has_instruction()) return by_instruction;
#endif
  return by_table;
}

}  // namespace

std::vector<std::uint32_t> crc32c(View<const unsigned char> data, std::int64_t block, std::int64_t head,
                                  int num_threads, bool table) {
  check::threads("crc32c", num_threads);
  check::view("crc32c", "data", data, data.size);
  if (block < 1) check::fail("crc32c", "block is " + std::to_string(block) + ", must be at least 1");
  if (head < 0 || head > data.size)
    check::fail("crc32c", "head is " + std::to_string(head) + ", data has " + std::to_string(data.size) + " bytes");
  const unsigned char* const body = data.data + head;
  const std::int64_t size = data.size - head, whole = size / block, rest = size % block, first = head != 0;
  std::vector<std::uint32_t> out(static_cast<std::size_t>(first + whole + (rest != 0)));
  const Kernel crc = kernel(table);
  if (head != 0) crc(data.data, head, 1, out.data());
  parallel_for((whole + kSideBySide - 1) / kSideBySide, threads_worth(size, num_threads), [&](std::int64_t group) {
    const std::int64_t from = group * kSideBySide;
    crc(body + from * block, block, static_cast<int>(std::min<std::int64_t>(kSideBySide, whole - from)),
        out.data() + first + from);
  });
  if (rest != 0) crc(body + whole * block, rest, 1, &out.back());
  return out;
}

}  // namespace afflux
