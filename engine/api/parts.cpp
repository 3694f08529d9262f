#include "api/parts.hpp"

#include <cstring>

#include "api/conversion.hpp"
#include "cpu/dispatch.hpp"

namespace afflux {
namespace check {
namespace {

std::string count(std::int64_t number, const char* what) {
  return std::to_string(number) + " " + what + (number == 1 ? "" : "s");
}

// Checks that the borders are those of the call's other vectors or, of its first vector in parts, that they ascend from
// 0 to the size.
void check_borders(const char* op, Name name, const Parts& parts, std::int64_t size, Overlaps& overlaps) {
  const List<std::int64_t>& borders = parts.borders;
  list(op, "borders", borders);
  const Parts* const first = overlaps.parts();
  if (first == nullptr) {
    if (borders.size < 1) fail(op, name.str() + " has no borders");
    const std::int64_t* const end = borders.data + borders.size;
    if (borders.data[0] != 0 || end[-1] != size || !std::is_sorted(borders.data, end))
      fail(op, name.str() + " has borders that do not ascend from 0 to " + std::to_string(size));
    overlaps.cut(name, parts);
  } else if (borders.size != first->borders.size ||
             !(borders.data == first->borders.data ||
               std::equal(borders.data, borders.data + borders.size, first->borders.data))) {
    fail(op, name.str() + " is cut at other borders than " + overlaps.first_in_parts());
  }
}

}  // namespace

void parts(const char* op, Name name, const View<const void>& vector, std::int64_t size, Overlaps& overlaps,
           PartTypes types) {
  if (vector.device.kind != DeviceKind::cpu)
    throw Unavailable("[" + std::string(op) + "] " + name.str() + " is in parts on " + where(vector.device) +
                      ": on a GPU, ingest the parts into a flat vector first");
  if (vector.data != nullptr) fail(op, name.str() + " has data and parts");
  memory(op, name, vector.parts, vector.size, size, 1);
  const Parts& parts = *vector.parts;
  check_borders(op, name, parts, size, overlaps);
  list(op, name.name, parts.list);
  if (parts.list.size != parts.borders.size - 1)
    fail(op, name.str() + " has " + count(parts.list.size, "part") + ", its borders have " +
                 std::to_string(parts.borders.size - 1));
  for (std::int64_t i = 0; i < parts.list.size; ++i) {
    const PartView& part = parts.list.data[i];
    const Name title(name.name, name.index, i);
    if (types == PartTypes::exact && part.type != vector.type) type(op, title, part.type, {vector.type});
    memory(op, title, part.data, part.size, parts.borders.data[i + 1] - parts.borders.data[i], bytes(part.type));
  }
  if (parts.conversion == nullptr) return;
  if (types == PartTypes::exact) fail(op, name.str() + " has a conversion, which only updates may have");
  if (!changes(parts.conversion)) return;
  const Name base("conversion.base", name.index);
  conversion(op, base, {"conversion.scale", name.index}, *parts.conversion);
  if (reads_base(*parts.conversion)) read(op, base, parts.conversion->base, size, overlaps);
}

}  // namespace check

namespace {

// Returns the address of element 0 of a flat vector that has `data` at element `begin`.
std::uintptr_t base_of(const void* data, std::int64_t begin, Type type) {
  return reinterpret_cast<std::uintptr_t>(data) - static_cast<std::uintptr_t>(begin * bytes(type));
}

}  // namespace

CutVector::CutVector(const View<const void>& vector)
    : type_(vector.type), conversion_(changes(vector.parts->conversion) ? vector.parts->conversion : nullptr) {
  const Parts& parts = *vector.parts;
  parts_.reserve(index(parts.borders.size));
  for (std::int64_t i = 0; i < parts.list.size; ++i)
    parts_.push_back({parts.list.data[i].data, parts.list.data[i].type, parts.borders.data[i]});
  parts_.push_back({nullptr, type_, parts.borders.data[parts.list.size]});
}

// Calls body(part, begin, end) for the elements of the chunk in each part.
template <class Body>
void CutVector::each_part(const Chunk& chunk, const Body& body) const {
  const Part* part = &parts_[index(chunk.part)];
  for (std::int64_t begin = chunk.begin; begin < chunk.end; ++part) {
    const std::int64_t end = std::min(chunk.end, part[1].begin);
    if (end <= begin) continue;
    body(part, begin, end);
    begin = end;
  }
}

std::uintptr_t CutVector::base(std::int64_t part) const {
  const Part& place = parts_[index(part)];
  return base_of(place.data, place.begin, type_);
}

void CutVector::gather(const Chunk& chunk, void* to) const {
  constexpr MemoryUse kFromCaches{0, false, false, false};
  const auto kernel = kernels().ingest;
  const bool changed = conversion_ != nullptr;
  PartChange change = changed ? part_change(*conversion_) : PartChange{};
  const Parts* const bases = changed && reads_base(*conversion_) ? conversion_->base.parts : nullptr;
  const std::uintptr_t slot = base_of(to, chunk.begin, type_);
  each_part(chunk, [&](const Part* part, std::int64_t begin, std::int64_t end) {
    const std::int64_t number = part - parts_.data();
    if (!converts(number)) return copy(base(number), slot, begin, end);
    if (bases != nullptr) {
      const PartView& from = bases->list.data[number];
      change.base = reinterpret_cast<const void*>(base_of(from.data, part->begin, from.type));
    }
    kernel(part, changed ? &change : nullptr, kFromCaches, type_, reinterpret_cast<void*>(slot), begin, end);
  });
}

void CutVector::scatter(const Chunk& chunk, const void* from) const {
  const std::uintptr_t slot = base_of(from, chunk.begin, type_);
  each_part(chunk, [&](const Part* part, std::int64_t begin, std::int64_t end) {
    copy(slot, base(part - parts_.data()), begin, end);
  });
}

// Copies elements [begin, end) from one vector to another; both are given by the address of element 0.
void CutVector::copy(std::uintptr_t from, std::uintptr_t to, std::int64_t begin, std::int64_t end) const {
  const std::int64_t size = bytes(type_);
  const auto at = [&](std::uintptr_t base) { return base + static_cast<std::uintptr_t>(begin * size); };
  std::memcpy(reinterpret_cast<void*>(at(to)), reinterpret_cast<const void*>(at(from)),
              static_cast<std::size_t>((end - begin) * size));
}

void Cut::add(const View<const void>& vector) {
  if (vector.parts == nullptr) return;
  vectors_.emplace_back(vector);
  for (std::size_t i = 0; i < converts_.size(); ++i)
    if (vectors_.back().converts(static_cast<std::int64_t>(i))) converts_[i] = true;
}

std::int64_t Cut::part_of(std::int64_t element) const {
  return std::upper_bound(borders_.data, borders_.data + borders_.size, element) - borders_.data - 1;
}

// Returns the chunk that begins at this element of the part, and ends at most at `end`.
Chunk Cut::next(std::int64_t begin, std::int64_t part, std::int64_t end) const {
  Chunk chunk{begin, std::min(borders_.data[part + 1], end), part, true};
  if (whole_blocks_ && chunk.end < end) {
    chunk.end -= (chunk.end - begin) % kBlock;
    if (chunk.end == begin) return {begin, std::min(begin + kBlock, end), part, false};
  } else if (!whole_blocks_ && is_short(part)) {
    end = std::min(end, begin + kBlock);
    for (std::int64_t next = part + 1; chunk.end < end && is_short(next); ++next) {
      const std::int64_t longer = std::min(borders_.data[next + 1], end);
      chunk.inside = chunk.inside && longer == chunk.end;
      chunk.end = longer;
    }
  }
  if (chunk.inside && converts_[static_cast<std::size_t>(part)]) chunk.end = std::min(chunk.end, begin + kBlock);
  return chunk;
}

void MovedViews::add(View<const void>& view, bool reads) { add(view, &view.data, nullptr, reads, false); }

void MovedViews::add(View<void>& view) { add(view, nullptr, &view.data, true, false); }

void MovedViews::add_output(View<void>& view, bool writes) { add(view, nullptr, &view.data, false, writes); }

void MovedViews::add(const View<const void>& view, const void** read, void** written, bool reads, bool writes) {
  if (view.parts == nullptr) return;
  // Each scratch vector begins at another line of its page: streams at the same offset would share one set of L1.
  constexpr std::size_t kLine = 64, kApart = 3 * kLine, kLines = 16;
  const std::size_t place = moved_.size() % kLines * kApart + kLine;
  const CutVector& vector = cut_[moved_.size()];
  std::unique_ptr<unsigned char[]> memory(
      new unsigned char[static_cast<std::size_t>(kBlock * bytes(vector.type())) + place + kLine]);
  const std::uintptr_t past = reinterpret_cast<std::uintptr_t>(memory.get()) % kLine;
  unsigned char* const scratch = memory.get() + place - past;
  moved_.push_back({&vector, read, written, reads, writes, std::move(memory), scratch});
}

void MovedViews::enter(const Chunk& chunk) {
  for (const Moved& view : moved_) {
    const CutVector& vector = *view.vector;
    const bool in_place = vector.in_place(chunk);
    if (!in_place && view.reads) vector.gather(chunk, view.scratch);
    const std::uintptr_t address =
        in_place ? vector.base(chunk.part) : base_of(view.scratch, chunk.begin, vector.type());
    if (view.read != nullptr)
      *view.read = reinterpret_cast<const void*>(address);
    else
      *view.written = reinterpret_cast<void*>(address);
  }
}

void MovedViews::leave(const Chunk& chunk) {
  if (chunk.inside) return;  // what is written is not converted
  for (const Moved& view : moved_)
    if (view.writes) view.vector->scatter(chunk, view.scratch);
}

}  // namespace afflux
