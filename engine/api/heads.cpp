#include "api/heads.hpp"

#include <cstring>
#include <limits>

#include "formula/codec.hpp"

namespace afflux {
namespace {

// The first bytes of a row's head; the rest of its kRowHead bytes is 0.
struct Head {
  char magic[4];
  std::uint8_t coding, bits, none[2];
  std::int64_t size;
  std::uint64_t key;
  float low, step;
};
static_assert(sizeof(Head) <= kRowHead && __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__, "rows are little-endian");

constexpr char kMagic[4] = {'A', 'F', 'R', '1'};

bool known(Codec codec) {
  constexpr std::size_t kCount = sizeof kCodings / sizeof *kCodings;
  const bool is_width = codec.bits > 0 && (codec.bits & (codec.bits - 1)) == 0;
  return static_cast<std::size_t>(codec.coding) < kCount && is_width && (info(codec.coding).widths & codec.bits) != 0;
}

[[noreturn]] void bad_row(const char* op, const check::Name& name, const std::string& what) {
  check::fail(op, name.str() + " " + what);
}

}  // namespace

std::string name(Codec codec) {
  const CodingInfo& coding = info(codec.coding);
  return coding.has_head ? std::string(coding.name) + "-" + std::to_string(codec.bits) : coding.name;
}

std::vector<Codec> codecs() {
  std::vector<Codec> all;
  std::int32_t number = 0;
  for (const CodingInfo& coding : kCodings) {
    for (std::int32_t bits = 64; bits > 0; bits /= 2)
      if ((coding.widths & bits) != 0) all.push_back({static_cast<Coding>(number), bits});
    ++number;
  }
  return all;
}

Codec codec_named(const std::string& wanted) {
  std::string names;
  for (const Codec codec : codecs()) {
    if (name(codec) == wanted) return codec;
    names += (names.empty() ? "" : ", ") + name(codec);
  }
  throw Error("[codec] '" + wanted + "' is unknown; known: " + names);
}

std::int64_t row_bytes(Codec codec, std::int64_t size) {
  if (size < 0 || size > std::numeric_limits<std::int64_t>::max() / 16)
    throw Error("[row_bytes] size is " + std::to_string(size) + ", which no vector has");
  if (!known(codec)) throw Error("[row_bytes] no codec has " + std::to_string(codec.bits) + " bits of this kind");
  if (!has_head(codec)) return size / 8 * codec.bits + size % 8 * codec.bits / 8;
  if (size == 0) return kRowHead;
  // A row stores whole runs.
  const std::int64_t run = info(codec.coding).run, last = (size - 1) / run * run;
  const std::int64_t end = formula::place(codec, last).codes + run / 8 * codec.bits;
  return (end + 63) / 64 * 64;
}

namespace rows {

std::int64_t alignment(Codec codec) { return has_head(codec) ? 8 : codec.bits / 8; }

RowHead head_of(const char* op, check::Name name, Codec codec, const RowFacts& facts) {
  if (!info(codec.coding).needs_range) return {facts.key, 0.0f, 0.0f};
  check::finite(op, name, facts.low);
  check::finite(op, name, facts.high);
  if (!(facts.low <= facts.high)) bad_row(op, name, "has a low above its high");
  constexpr double kMost = std::numeric_limits<float>::max();
  const auto narrowed = [](double x) { return static_cast<float>(x < -kMost ? -kMost : x > kMost ? kMost : x); };
  const formula::Grid grid = formula::grid_over(narrowed(facts.low), narrowed(facts.high), codec.bits);
  return {facts.key, grid.low, grid.step};
}

RowHead read_head(const char* op, check::Name name, Codec codec, const unsigned char* row, std::int64_t size) {
  Head head;
  std::memcpy(&head, row, sizeof head);
  if (std::memcmp(head.magic, kMagic, sizeof kMagic) != 0) bad_row(op, name, "does not begin with the head of a row");
  const Codec codec_found{static_cast<Coding>(head.coding), head.bits};
  if (!known(codec_found) || !has_head(codec_found)) bad_row(op, name, "has a head that names no codec");
  if (codec_found != codec)
    bad_row(op, name, "was encoded by " + afflux::name(codec_found) + ", expected " + afflux::name(codec));
  if (head.size != size)
    bad_row(op, name, "holds " + std::to_string(head.size) + " elements, expected " + std::to_string(size));
  if (!std::isfinite(head.low) || !std::isfinite(head.step)) bad_row(op, name, "has a grid that is not finite");
  return {head.key, head.low, head.step};
}

void write_head(const RowHead& head, Codec codec, std::int64_t size, unsigned char* to) {
  const Head written{{kMagic[0], kMagic[1], kMagic[2], kMagic[3]},
                     static_cast<std::uint8_t>(codec.coding),
                     static_cast<std::uint8_t>(codec.bits),
                     {},
                     size,
                     head.key,
                     head.low,
                     head.step};
  std::memset(to, 0, kRowHead);
  std::memcpy(to, &written, sizeof written);
}

Padding padding(Codec codec, std::int64_t size) {
  const CodingInfo& coding = info(codec.coding);
  if (size % kBlock == 0 || coding.run == kBlock) return {};
  const formula::Place last = formula::place(codec, (size - 1) / kCodecBlock * kCodecBlock);
  const formula::Place group = formula::place(codec, size / kBlock * kBlock);
  const bool facts = coding.run_bytes > 0;
  return {facts ? last.facts + coding.run_bytes : 0, facts ? group.codes : 0, last.codes + kCodecBlock / 8 * codec.bits,
          row_bytes(codec, size)};
}

cuda::NewHeads new_heads(const std::vector<Written>& written, Codec codec, std::int64_t size) {
  if (written.empty()) return {};
  cuda::NewHeads made{{}, std::vector<unsigned char>(written.size() * kRowHead), padding(codec, size)};
  for (const Written& one : written) {
    write_head(one.head, codec, size, made.heads.data() + made.rows.size() * kRowHead);
    made.rows.push_back(one.row);
  }
  return made;
}

void finish(const std::vector<Written>& written, Codec codec, std::int64_t size, Device device) {
  const cuda::NewHeads made = new_heads(written, codec, size);
  if (made.rows.empty()) return;
  if (device.kind == DeviceKind::cuda) return cuda::backend()->write_heads(cuda::on(device), made);
  for (std::size_t i = 0; i < made.rows.size(); ++i) {
    const auto clear = [&](std::int64_t from, std::int64_t to) {
      std::memset(made.rows[i] + from, 0, static_cast<std::size_t>(to - from));
    };
    std::memcpy(made.rows[i], made.heads.data() + i * kRowHead, kRowHead);
    clear(made.padding.facts_begin, made.padding.facts_end);
    clear(made.padding.codes_begin, made.padding.codes_end);
  }
}

Heads::Heads(Codec codec, List<View<const unsigned char>> rows, Device device) {
  std::vector<const unsigned char*> there;
  for (std::int64_t i = 0; i < rows.size; ++i) {
    heads_.push_back(has_head(codec) ? rows.data[i].data : nullptr);
    if (heads_.back() != nullptr) there.push_back(heads_.back());
  }
  if (device.kind == DeviceKind::cpu || there.empty()) return;
  fetched_ = cuda::backend()->read_heads(cuda::on(device), there);
  std::size_t next = 0;
  for (const unsigned char*& head : heads_)
    if (head != nullptr) head = fetched_.data() + kRowHead * static_cast<std::int64_t>(next++);
}

}  // namespace rows
}  // namespace afflux
