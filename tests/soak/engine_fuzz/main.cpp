// Calls the engine's public functions with arguments that are drawn from bytes, and keeps the bytes that run new
// places.
//
//   engine_fuzz CALLS SEED
//
// A call is a string of bytes: which function, and each of its arguments; other strings are made by changing, cutting
// and joining kept ones. Vectors lie in memory of exactly their size, so that AddressSanitizer sees each access beside
// them. After an Error or Unavailable the bytes of all vectors must be what they were. Ends by a signal if not, or if a
// call takes more than 5 seconds; any other exception ends it, too.
#include <sanitizer/common_interface_defs.h>
#include <sys/time.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "afflux/afflux.hpp"
#include "coverage.hpp"

namespace {

using namespace afflux;
using Bytes = std::vector<unsigned char>;

// Arguments from bytes; zeros when there are no more.
class Draw {
 public:
  explicit Draw(const Bytes& bytes) : bytes_(bytes) {}
  unsigned byte() { return at_ < bytes_.size() ? bytes_[at_++] : 0; }
  unsigned below(unsigned count) { return byte() % count; }
  // One time in `times`.
  bool rare(unsigned times) { return below(times) == times - 1; }

  std::int64_t size() {
    static constexpr std::int64_t kSizes[] = {0, 1, 7, 8, 127, 128, 129, 255, 256, 1000, 2049, 65536, 65537, 70001};
    return kSizes[below(rare(8) ? std::size(kSizes) : 11)];
  }
  std::int64_t integer() {
    constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();
    const std::int64_t choices[] = {0, 1, 2, 3, 8, 64, 4096, -1, kMost, kMost - 1, kMost / 2, -kMost - 1, 1 << 20};
    return choices[below(std::size(choices))];
  }
  double number() {
    constexpr double kInfinity = std::numeric_limits<double>::infinity();
    static constexpr double kNumbers[] = {0.0,   1.0,       0.5,        -1.0,   0.9,  1e-8,   2.0, 1e300,
                                          -1e38, kInfinity, -kInfinity, 1e-320, -0.0, 3.5e38, 0.1, 1e150};
    const unsigned which = below(std::size(kNumbers) + 1);
    return which < std::size(kNumbers) ? kNumbers[which] : std::numeric_limits<double>::quiet_NaN();
  }
  int threads() { return rare(16) ? static_cast<int>(integer()) : 1 + static_cast<int>(below(3)); }

 private:
  const Bytes& bytes_;
  std::size_t at_ = 0;
};

// All vectors of a call, to be compared after an error.
class Memory {
 public:
  explicit Memory(Draw& draw) : draw_(draw) {}

  // Memory of exactly so many bytes, of some pattern.
  void* fresh(std::int64_t wanted) {
    const std::int64_t bytes = wanted < 0 ? 0 : wanted;
    auto* const data = static_cast<unsigned char*>(std::malloc(static_cast<std::size_t>(bytes) + (bytes == 0)));
    const unsigned pattern = draw_.byte();
    for (std::int64_t i = 0; i < bytes; ++i)
      data[i] = static_cast<unsigned char>(pattern < 128 ? 0 : (i * pattern) >> 3);
    blocks_.push_back({data, bytes, {}});
    return data;
  }
  // Cuts many of the vectors from now on, at the same borders.
  void cut(std::int64_t size) {
    if (!draw_.rare(3)) return;
    for (std::int64_t at = 0; at < size && borders_.size() < 12; at += draw_.size()) borders_.push_back(at);
    borders_.push_back(draw_.rare(24) ? draw_.size() : size);
    if (draw_.rare(64)) borders_[draw_.below(static_cast<unsigned>(borders_.size()))] = draw_.integer();
  }
  // Parts in memory of their own, or of another vector in parts; sometimes of wrong sizes or types.
  View<void> in_parts(std::int64_t size, Type type) {
    Cut& cut = cuts_.emplace_back();
    const bool mixed = draw_.rare(4);
    for (std::size_t i = 0; i + 1 < borders_.size() && !draw_.rare(128); ++i) {
      const bool sound = borders_[i] >= 0 && borders_[i] <= borders_[i + 1] && borders_[i + 1] <= 70001;
      const std::int64_t count = draw_.rare(128) || !sound ? draw_.size() : borders_[i + 1] - borders_[i];
      const Type own = mixed ? static_cast<Type>(draw_.below(4)) : type;
      cut.list.push_back({fresh(count * bytes(own)), count, own});
    }
    if (draw_.rare(16)) cut.list = cuts_[draw_.below(static_cast<unsigned>(cuts_.size()))].list;
    cut.parts = {{borders_.data(), static_cast<std::int64_t>(borders_.size())},
                 {cut.list.data(), static_cast<std::int64_t>(cut.list.size())},
                 nullptr};
    if (draw_.rare(4)) {
      cut.conversion = {static_cast<Kind>(draw_.below(3)), static_cast<Kind>(draw_.below(3)), {}, draw_.number()};
      if (!draw_.rare(4)) cut.conversion.base = {fresh(size * 8), size, {}, draw_.rare(2) ? type : Type::float64};
      cut.parts.conversion = &cut.conversion;
    }
    return {cut.parts, size, type};
  }
  // A vector; sometimes null, of another size or type, or over one that is there already.
  View<void> vector(std::int64_t size, Type type) {
    if (!borders_.empty() && draw_.rare(2)) return in_parts(size, type);
    if (draw_.rare(24)) type = static_cast<Type>(draw_.below(4));
    if (draw_.rare(24)) size = draw_.size();
    void* data = nullptr;
    if (!blocks_.empty() && draw_.rare(16)) {
      const Block& other = blocks_[draw_.below(static_cast<unsigned>(blocks_.size()))];
      const std::int64_t shift = draw_.rare(4) ? bytes(type) : 0;
      if (other.size >= size * bytes(type) + shift) data = other.data + shift;
    }
    if (data == nullptr && !draw_.rare(64)) data = fresh(size * bytes(type));
    Device device{};
    if (draw_.rare(200)) device = {DeviceKind::cuda, static_cast<std::int32_t>(draw_.below(3))};
    if (draw_.rare(200)) size = -1;
    return {data, size, device, type};
  }
  View<double> doubles(std::int64_t size) {
    View<void> view = vector(size, Type::float64);
    if (view.parts != nullptr) view.data = fresh(size * 8);
    return {static_cast<double*>(view.type == Type::float64 ? view.data : fresh(view.size * 8)), view.size,
            view.device};
  }
  View<unsigned char> row(Codec codec, std::int64_t size) {
    std::int64_t count = size < 0 ? 0 : row_bytes(codec, size);
    if (draw_.rare(24)) count += static_cast<std::int64_t>(draw_.below(3)) - 1;
    return {static_cast<unsigned char*>(fresh(count < 0 ? 0 : count)), count, {}};
  }
  void remember() {
    for (Block& block : blocks_) block.before.assign(block.data, block.data + block.size);
  }
  void compare() const {
    for (const Block& block : blocks_)
      if (!block.before.empty() && std::memcmp(block.before.data(), block.data, block.before.size()) != 0) {
        std::puts("an error has changed a vector");
        std::abort();
      }
  }
  ~Memory() {
    for (const Block& block : blocks_) std::free(block.data);
  }

 private:
  struct Block {
    unsigned char* data;
    std::int64_t size;
    Bytes before;
  };
  struct Cut {
    std::vector<PartView> list;
    Parts parts;
    Conversion conversion;
  };
  Draw& draw_;
  std::deque<Block> blocks_;
  std::deque<Cut> cuts_;
  std::vector<std::int64_t> borders_;
};

template <class T>
List<T> list(const std::vector<T>& items) {
  return {items.data(), static_cast<std::int64_t>(items.size())};
}

Codec some_codec(Draw& draw) {
  const std::vector<Codec> all = codecs();
  Codec codec = all[draw.below(static_cast<unsigned>(all.size()))];
  if (draw.rare(64)) codec.bits = static_cast<std::int32_t>(draw.integer());
  return codec;
}

Type some_type(Draw& draw) { return draw.rare(3) ? static_cast<Type>(draw.below(4)) : Type::float32; }

void call_ingest(Draw& draw, Memory& memory) {
  const std::int64_t count = draw.below(4);
  std::int64_t size = 0;
  std::vector<View<const void>> parts;
  for (std::int64_t i = 0; i < count; ++i) {
    parts.push_back(memory.vector(draw.size(), some_type(draw)));
    size += parts.back().size;
  }
  const View<void> slot = memory.vector(size, some_type(draw));
  Conversion change{static_cast<Kind>(draw.below(3)), static_cast<Kind>(draw.below(3)), {}, draw.number()};
  change.base = memory.vector(size, draw.rare(4) ? Type::float64 : Type::float32);
  memory.remember();
  ingest(list(parts), slot, draw.threads(), draw.rare(2) ? &change : nullptr);
}

void call_gram(Draw& draw, Memory& memory) {
  const std::int64_t count = draw.rare(16) ? 60 + draw.below(12) : draw.below(6), size = draw.size() % 3000;
  memory.cut(size);
  std::vector<View<const void>> vectors;
  for (std::int64_t i = 0; i < count; ++i) vectors.push_back(memory.vector(size, some_type(draw)));
  const View<double> out = memory.doubles(count * count);
  memory.remember();
  gram(list(vectors), out, draw.threads());
}

void call_inner(Draw& draw, Memory& memory) {
  const std::int64_t count = draw.rare(16) ? 60 + draw.below(12) : draw.below(6), size = draw.size();
  memory.cut(size);
  std::vector<View<const void>> vectors;
  std::vector<double> weights;
  for (std::int64_t i = 0; i < count; ++i) vectors.push_back(memory.vector(size, some_type(draw)));
  for (std::int64_t i = 0; i < count; ++i) weights.push_back(draw.number());
  Inner terms{list(vectors),
              draw.rare(3) ? List<double>{} : list(weights),
              {},
              draw.rare(2) ? draw.number() : 0.0,
              draw.rare(3) ? draw.number() : 0.0};
  if (!draw.rare(3)) terms.memory = memory.vector(size, some_type(draw));
  const View<double> out = memory.doubles(terms.weights.data == nullptr ? count : 2 * count + 1);
  memory.remember();
  inner(terms, out, draw.threads());
}

void call_codec(Draw& draw, Memory& memory) {
  const Codec codec = some_codec(draw);
  const std::int64_t size = draw.size();
  const View<void> vector = memory.vector(size, codec.coding == Coding::float64 ? Type::float64 : Type::float32);
  const View<unsigned char> row = memory.row(codec, size);
  memory.remember();
  encode(codec, vector, row, draw.threads(), {draw.byte(), draw.number(), draw.number()});
  if (draw.rare(2) && row.size > 0) row.data[draw.byte() % row.size] ^= static_cast<unsigned char>(1 + draw.below(255));
  memory.remember();
  decode(codec, {row.data, row.size, row.device}, vector, draw.threads());
}

void call_crc(Draw& draw, Memory& memory) {
  const std::int64_t size = draw.size();
  View<const unsigned char> data{static_cast<unsigned char*>(memory.fresh(size)), size, {}};
  if (draw.rare(200)) data.device = {DeviceKind::cuda, 0};
  memory.remember();
  crc32c(data, draw.rare(3) ? draw.integer() : 1 + draw.byte() * 40, draw.rare(3) ? draw.integer() : draw.byte(),
         draw.threads(), draw.rare(2));
}

void call_numbers(Draw& draw, Memory&) {
  const double x = draw.number(), y = draw.number() * draw.byte();
  volatile double result = afflux::exp(x) + afflux::log(y) + afflux::pow(x, y);
  static_cast<void>(result);
  row_bytes(some_codec(draw), draw.integer());
  codec_named(std::string(draw.below(9), static_cast<char>(draw.byte())));
}

void call_apply(Draw& draw, Memory& memory) {
  const std::int64_t size = draw.size(), count = draw.below(5), held = draw.rare(3) ? draw.below(6) : 0;
  const Type type = draw.rare(4) ? Type::float64 : Type::float32;
  const Type updates_type = draw.rare(3) ? Type::bfloat16 : type;
  const Codec codec = draw.rare(3) ? exact_codec(updates_type) : some_codec(draw);
  memory.cut(size);
  std::vector<View<const void>> updates;
  std::vector<double> weights, held_weights, next;
  std::vector<View<const unsigned char>> rows;
  std::vector<View<unsigned char>> new_rows;
  std::vector<RowFacts> facts;
  std::vector<View<void>> vectors, outs, states, states_out;
  for (std::int64_t i = 0; i < count; ++i) {
    updates.push_back(memory.vector(size, updates_type));
    weights.push_back(draw.number());
    new_rows.push_back(draw.rare(4) ? View<unsigned char>{} : memory.row(codec, size));
    rows.push_back({});
    if (has_head(codec)) facts.push_back({draw.byte(), draw.rare(8) ? draw.number() : -1.0, 1.0});
    if (new_rows.back().data != nullptr && !draw.rare(3)) {
      const View<unsigned char> row = draw.rare(2) ? new_rows.back() : memory.row(codec, size);
      const View<void> zeros = memory.vector(size, codec.coding == Coding::float64 ? Type::float64 : Type::float32);
      if (!draw.rare(8)) {
        try {
          encode(codec, zeros, row, 1, {1, -1.0, 1.0});
        } catch (const Error&) {
        } catch (const Unavailable&) {
        }
      }
      rows.back() = {row.data, row.size, row.device};
    }
  }
  for (std::int64_t i = 0; i < held; ++i) {
    vectors.push_back(memory.vector(size, type));
    held_weights.push_back(draw.number());
    if (draw.rare(2)) outs.push_back(memory.vector(size, type));
    for (std::int64_t j = 0; j < held + count; ++j) next.push_back(i == j || draw.rare(3) ? draw.number() : 0.0);
  }
  if (draw.rare(2)) outs.clear();
  if (draw.rare(3)) next.clear();
  if (draw.rare(32) && !weights.empty()) weights.pop_back();
  Pass pass;
  pass.params = memory.vector(size, type);
  pass.out =
      draw.rare(3) && pass.params.data != nullptr
          ? View<void>{const_cast<void*>(pass.params.data), pass.params.size, pass.params.device, pass.params.type}
      : draw.rare(3) && pass.params.parts != nullptr
          ? View<void>{*pass.params.parts, pass.params.size, pass.params.type}
          : memory.vector(size, type);
  pass.combine = {list(updates), list(weights), draw.rare(2) ? draw.number() : 0.0};
  if (draw.rare(4)) pass.combine.trim = draw.number();
  std::vector<double> in_noise(vectors.size() + (draw.rare(32) ? 1 : 0), draw.number());
  if (draw.rare(4)) pass.combine.noise = {draw.number(), {1}, {2}, std::int64_t{100} * draw.below(100) - 99, {}};
  if (draw.rare(4)) pass.combine.noise.next = list(in_noise);
  pass.step.kind = static_cast<StepKind>(draw.below(static_cast<unsigned>(std::size(kStepKinds))));
  pass.step.lr = draw.number();
  pass.step.beta1 = draw.rare(8) ? draw.number() : 0.9;
  pass.step.beta2 = draw.rare(8) ? draw.number() : 0.99;
  pass.step.epsilon = draw.rare(8) ? draw.number() : 1e-8;
  pass.step.root_scale = draw.rare(8) ? draw.number() : 1.0;
  for (std::int64_t i = 0; i < state_count(pass.step.kind); ++i) {
    states.push_back(memory.vector(size, type));
    states_out.push_back(memory.vector(size, type));
  }
  if (draw.rare(32)) states.push_back(memory.vector(size, type));
  pass.step.states = list(states);
  if (draw.rare(3)) pass.step.outs = list(states_out);
  pass.rule_vectors = {list(vectors), list(held_weights), list(next), list(outs)};
  Calibrate& stage = pass.calibrate;
  if (draw.rare(2)) {
    stage.kind = static_cast<Calibration>(1 + draw.below(2));
    stage.codec = codec;
    stage.sum = memory.doubles(size);
    stage.num_clients = draw.rare(8) ? draw.integer() : 9;
    stage.rows = list(rows);
    stage.new_rows = list(new_rows);
    stage.facts = list(facts);
    stage.quantize_direction = draw.rare(3);
    if (draw.rare(3)) stage.sum_out = memory.doubles(size);
  }
  Checksums checksums;
  const bool dry = draw.rare(8);
  memory.remember();
  apply(pass, draw.threads(), dry, draw.rare(2) ? &checksums : nullptr);
  if (dry) memory.compare();
}

// Whether the call was carried out.
bool one_call(const Bytes& bytes) {
  static constexpr void (*kCalls[])(Draw&, Memory&) = {call_apply, call_ingest,  call_gram,  call_inner, call_codec,
                                                       call_crc,   call_numbers, call_apply, call_codec};
  Draw draw(bytes);
  Memory memory(draw);
  choose_policy({draw.rare(2) ? 0 : 256, draw.rare(2) ? 0 : Policy::kNever, !draw.rare(4), draw.rare(2)});
  try {
    kCalls[draw.below(std::size(kCalls))](draw, memory);
    return true;
  } catch (const Error&) {
  } catch (const Unavailable&) {
  }
  memory.compare();
  return false;
}

Bytes changed(const std::vector<Bytes>& kept, std::mt19937_64& random) {
  const auto below = [&](std::size_t count) { return static_cast<std::size_t>(random() % count); };
  Bytes bytes = kept[below(kept.size())];
  for (std::size_t times = 1 + below(4); times > 0; --times) {
    const std::size_t kind = below(5), at = bytes.empty() ? 0 : below(bytes.size());
    const auto value = static_cast<unsigned char>(random());
    if (kind == 0 || bytes.empty())
      for (std::size_t more = 1 + below(16); more > 0; --more) bytes.push_back(static_cast<unsigned char>(random()));
    else if (kind == 1)
      bytes[at] = static_cast<unsigned char>(bytes[at] + (value % 2 == 0 ? 1 : -1));
    else if (kind == 2)
      bytes[at] = value;
    else if (kind == 3)
      bytes.erase(bytes.begin() + static_cast<std::ptrdiff_t>(at));
    else {
      const Bytes& other = kept[below(kept.size())];
      bytes.resize(at);
      if (!other.empty())
        bytes.insert(bytes.end(), other.begin() + static_cast<std::ptrdiff_t>(below(other.size())), other.end());
    }
  }
  if (bytes.size() > 400) bytes.resize(400);
  return bytes;
}

// Ends the process if a call sees five ticks of a clock of one second: a process that was stopped meanwhile sees one.
volatile std::sig_atomic_t ticks = 0;

void watch_calls() {
  std::signal(SIGALRM, [](int) {
    if (++ticks <= 5) return;
    std::puts("a call takes more than 5 seconds");
    __sanitizer_print_stack_trace();
    std::_Exit(1);
  });
  const itimerval second{{1, 0}, {1, 0}};
  setitimer(ITIMER_REAL, &second, nullptr);
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 3) return 2;
  watch_calls();
  const long calls = std::atol(arguments[1]);
  std::mt19937_64 random(std::strtoull(arguments[2], nullptr, 10));
  std::vector<Bytes> kept{{}};
  long done = 0;
  for (long call = 0; call < calls; ++call) {
    if (call > 0 && call % 100'000 == 0) std::printf("%ld calls\n", call), std::fflush(stdout);
    const Bytes bytes = changed(kept, random);
    ticks = 0;
    coverage::begin();
    done += one_call(bytes);
    if (coverage::new_places() > 0) kept.push_back(bytes);
  }
  std::printf(
      "%ld calls: %ld carried out, %ld refused with an error; %d places of the engine were run, %zu inputs kept\n",
      calls, done, calls - done, coverage::places(), kept.size());
}
