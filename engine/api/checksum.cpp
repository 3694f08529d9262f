// CRC-32C (Castagnoli), the checksum of afflux's files.
#include "api/checksum.hpp"

#include <algorithm>
#include <array>
#include <cstring>

#include "afflux/afflux.hpp"
#include "api/check.hpp"
#include "cpu/features.hpp"
#include "cpu/parallel_for.hpp"

#if defined(__SSE4_2__) || defined(__x86_64__)
#include <nmmintrin.h>
#if defined(__clang__)  // where the instruction is a feature of its own
#define AFFLUX_CRC __attribute__((target("sse4.2,crc32")))
#else
#define AFFLUX_CRC __attribute__((target("sse4.2")))
#endif
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

// Arithmetic of polynomials modulo the polynomial of the CRC; bit 31 - k is the coefficient of x^k.
constexpr std::uint32_t by_x(std::uint32_t a) { return (a >> 1) ^ (a & 1u ? 0x82F63B78u : 0u); }
constexpr std::uint32_t product(std::uint32_t a, std::uint32_t b) {
  std::uint32_t sum = 0;
  for (std::uint32_t bit = 1u << 31; bit != 0; bit >>= 1, b = by_x(b)) sum ^= a & bit ? b : 0u;
  return sum;
}

struct Powers {
  std::array<std::uint32_t, 63> of{};  // x^(8 * 2^k)
  constexpr Powers() {
    of[0] = 1u << (31 - 8);
    for (std::size_t k = 1; k < of.size(); ++k) of[k] = product(of[k - 1], of[k - 1]);
  }
};
constexpr Powers kPowers;

struct Table {
  std::array<std::uint32_t, 256> of{};
  constexpr Table() {
    for (std::uint32_t byte = 0; byte < 256; ++byte) {
      std::uint32_t crc = byte;
      for (int bit = 0; bit < 8; ++bit) crc = by_x(crc);
      of[byte] = crc;
    }
  }
};
constexpr Table kTable;

using checksum::Stream;

// Extends `count` streams by `size` bytes each.
void by_table(Stream* const* streams, int count, std::int64_t size) {
  for (int k = 0; k < count; ++k) {
    std::uint32_t crc = ~*streams[k]->crc;
    for (const unsigned char *at = streams[k]->data, *end = at + size; at != end; ++at)
      crc = kTable.of[(crc ^ *at) & 0xFFu] ^ (crc >> 8);
    *streams[k]->crc = ~crc;
  }
}

#if defined(AFFLUX_CRC)
#if defined(__aarch64__)
using State = std::uint32_t;
AFFLUX_CRC inline State next(State crc, std::uint64_t word) { return __crc32cd(crc, word); }
AFFLUX_CRC inline State next(State crc, unsigned char byte) { return __crc32cb(crc, byte); }
bool has_instruction() {
#if defined(__linux__)
  return (getauxval(AT_HWCAP) & HWCAP_CRC32) != 0;
#else
  return true;  // every 64-bit ARM processor of Apple has it
#endif
}
#else
using State = std::uint64_t;  // the instruction's own type: a narrower one would cost one more instruction
AFFLUX_CRC inline State next(State crc, std::uint64_t word) { return _mm_crc32_u64(crc, word); }
AFFLUX_CRC inline State next(State crc, unsigned char byte) {
  return _mm_crc32_u8(static_cast<std::uint32_t>(crc), byte);
}
bool has_instruction() { return features::sse42(); }
#endif
// Asked once, when the library is loaded: in a virtual machine cpuid takes many microseconds.
const bool kHasInstruction = has_instruction();

template <int kStreams>
AFFLUX_CRC void side_by_side(Stream* const* streams, std::int64_t size) {
  const unsigned char* data[kStreams];
  State crc[kStreams];
  for (int k = 0; k < kStreams; ++k) {
    data[k] = streams[k]->data;
    crc[k] = ~*streams[k]->crc;
  }
  std::int64_t i = 0;
  for (; i + 8 <= size; i += 8)
    for (int k = 0; k < kStreams; ++k) {
      std::uint64_t word;
      std::memcpy(&word, data[k] + i, sizeof word);
      crc[k] = next(crc[k], word);
    }
  for (; i < size; ++i)
    for (int k = 0; k < kStreams; ++k) crc[k] = next(crc[k], data[k][i]);
  for (int k = 0; k < kStreams; ++k) *streams[k]->crc = ~static_cast<std::uint32_t>(crc[k]);
}

void by_instruction(Stream* const* streams, int count, std::int64_t size) {
  static_assert(checksum::kSideBySide == 4);
  if (count == 4) return side_by_side<4>(streams, size);
  if (count == 3) return side_by_side<3>(streams, size);
  if (count == 2) return side_by_side<2>(streams, size);
  side_by_side<1>(streams, size);
}
#endif

using Kernel = void (*)(Stream* const*, int, std::int64_t);

Kernel kernel(bool table) {
#if defined(AFFLUX_CRC)
  if (!table && kHasInstruction) return by_instruction;
#endif
  return by_table;
}

// Extends all streams, kSideBySide at a time; when one ends, the next one takes its place.
void take(std::vector<Stream>& streams, Kernel go_on) {
  Stream* active[checksum::kSideBySide];
  int width = 0;
  for (std::size_t next = 0; next < streams.size() || width > 0;) {
    while (width < checksum::kSideBySide && next < streams.size()) active[width++] = &streams[next++];
    std::int64_t size = active[0]->size;
    for (int k = 1; k < width; ++k) size = std::min(size, active[k]->size);
    go_on(active, width, size);
    int left = 0;
    for (int k = 0; k < width; ++k) {
      active[k]->data += size;
      active[k]->size -= size;
      if (active[k]->size > 0) active[left++] = active[k];
    }
    width = left;
  }
}

}  // namespace

std::uint32_t checksum::joined(std::uint32_t first, std::uint32_t second, std::int64_t second_size) {
  for (std::size_t k = 0; second_size != 0; ++k, second_size >>= 1)
    if (second_size & 1) first = product(kPowers.of[k], first);
  return first ^ second;
}

void checksum::extend(const Stream* streams, std::int64_t count, bool table) {
  // Long streams are cut into parts, so that kSideBySide of them are in progress until the end.
  constexpr std::int64_t kLeast = 4096;
  std::int64_t total = 0;
  for (std::int64_t i = 0; i < count; ++i) total += streams[i].size;
  const std::int64_t share = std::max((total / kSideBySide + kLeast - 1) / kLeast * kLeast, kLeast);
  std::vector<Stream> parts;
  std::vector<std::uint32_t> later;  // CRCs of parts that are not the first ones
  parts.reserve(static_cast<std::size_t>(count + kSideBySide));
  later.reserve(kSideBySide);
  for (std::int64_t i = 0; i < count; ++i)
    for (std::int64_t at = 0; at < streams[i].size; at += share) {
      if (at > 0) later.push_back(0);
      parts.push_back(
          {streams[i].data + at, std::min(share, streams[i].size - at), at > 0 ? &later.back() : streams[i].crc});
    }
  take(parts, kernel(table));
  const std::uint32_t* next = later.data();
  for (std::int64_t i = 0; i < count; ++i)
    for (std::int64_t at = share; at < streams[i].size; at += share)
      *streams[i].crc = joined(*streams[i].crc, *next++, std::min(share, streams[i].size - at));
}

std::vector<std::uint32_t> crc32c(View<const unsigned char> data, std::int64_t block, std::int64_t head,
                                  int num_threads, bool table) {
  check::threads("crc32c", num_threads);
  check::host("crc32c", "data", data);
  check::view("crc32c", "data", data, data.size);
  if (block < 1) check::fail("crc32c", "block is " + std::to_string(block) + ", must be at least 1");
  if (head < 0 || head > data.size)
    check::fail("crc32c", "head is " + std::to_string(head) + ", data has " + std::to_string(data.size) + " bytes");
  const std::int64_t left = data.size - head, first = head != 0;
  block = std::min(block, std::max<std::int64_t>(left, 1));  // so that no border overflows
  const std::int64_t count = first + (left + block - 1) / block;
  std::vector<std::uint32_t> out(static_cast<std::size_t>(count));
  const auto border = [&](std::int64_t k) { return k < first ? 0 : std::min(head + (k - first) * block, data.size); };
  constexpr std::int64_t kTogether = checksum::kSideBySide;
  const std::int64_t groups = (count + kTogether - 1) / kTogether;
  parallel_for(groups, threads_worth(data.size, num_threads), [&](std::int64_t group) {
    Stream streams[kTogether];
    const std::int64_t from = group * kTogether, some = std::min(kTogether, count - from);
    for (std::int64_t k = 0; k < some; ++k)
      streams[k] = {data.data + border(from + k), border(from + k + 1) - border(from + k), &out[from + k]};
    checksum::extend(streams, some, table);
  });
  return out;
}

}  // namespace afflux
