#include "api/overlap.hpp"

#include <algorithm>
#include <cstring>

namespace afflux::check {

void Overlaps::add(Name name, const void* data, std::int64_t bytes, bool written) {
  if (bytes == 0) return;
  const auto begin = reinterpret_cast<std::uintptr_t>(data);
  ranges_.push_back({begin, begin + static_cast<std::uintptr_t>(bytes), name, written});
}

void Overlaps::add(Name name, const Parts& parts, bool written) {
  for (std::int64_t i = 0; i < parts.list.size; ++i) {
    const PartView& part = parts.list.data[i];
    add({name.name, name.index, i}, part.data, part.size * afflux::bytes(part.type), written);
  }
}

void Overlaps::meet(Name name, Device device) {
  if (first_.name == nullptr) {
    first_ = name;
    device_ = device;
  } else if (elsewhere_.name == nullptr && device != device_) {
    elsewhere_ = name;
    other_ = device;
  }
}

std::int64_t Overlaps::traffic() const {
  std::int64_t sum = 0;
  for (const Range& range : ranges_) sum += static_cast<std::int64_t>(range.end - range.begin);
  return sum;
}

// Writing in place is allowed where the sweep reads an element before it writes the element: an out over the vector
// that it replaces or over the base of a conversion, part over part, and a new row over the row of the same arrival or,
// for a client that is twice in the buffer, of an earlier arrival.
bool Overlaps::allowed(const Range& read, const Range& written) {
  if (read.begin != written.begin || read.end != written.end || read.name.part != written.name.part) return false;
  const auto pair = [&](const char* from, const char* to) {
    return std::strcmp(read.name.name, from) == 0 && std::strcmp(written.name.name, to) == 0;
  };
  if (pair("rows", "new_rows")) return read.name.index <= written.name.index;
  if (pair("conversion.base", "out")) return true;
  return read.name.index == written.name.index &&
         (pair("params", "out") || pair("sum", "sum_out") || pair("states", "states_out") ||
          pair("rule_vectors.vectors", "rule_vectors.outs"));
}

void Overlaps::refuse(const char* op) {
  if (elsewhere_.name != nullptr)
    fail(op, elsewhere_.str() + " is on " + where(other_) + ", " + first_.str() + " is on " + where(device_));
  const auto by_begin = [](const Range& a, const Range& b) {
    return a.begin != b.begin ? a.begin < b.begin : a.name.index < b.name.index;
  };
  const auto first_read = std::partition(ranges_.begin(), ranges_.end(), [](const Range& r) { return r.written; });
  std::sort(ranges_.begin(), first_read, by_begin);
  const auto clash = [op](const Range& a, const Range& b) {
    fail(op, a.name.str() + " and " + b.name.str() + " overlap in memory, and one of them is written");
  };
  for (auto written = ranges_.begin(); written != first_read; ++written)
    if (written + 1 != first_read && (written + 1)->begin < written->end) clash(*written, *(written + 1));
  // The written ranges are disjoint from here on, hence also sorted by their ends.
  auto after = ranges_.begin();  // the first range that ends after the last read begins
  for (auto read = first_read; read != ranges_.end(); ++read) {
    const auto ends_before = [&](const Range& range) { return range.end <= read->begin; };
    if ((after != ranges_.begin() && !ends_before(after[-1])) || (after != first_read && ends_before(*after)))
      after = std::partition_point(ranges_.begin(), first_read, ends_before);
    for (auto written = after; written != first_read && written->begin < read->end; ++written)
      if (!allowed(*read, *written)) clash(*read, *written);
  }
}

}  // namespace afflux::check
