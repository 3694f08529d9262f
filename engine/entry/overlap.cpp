#include "entry/overlap.hpp"

#include <algorithm>
#include <cstring>

#include "entry/check.hpp"

namespace afflux::check {

void Overlaps::add(const char* name, std::int64_t index, const void* data, std::int64_t bytes, bool written) {
  if (bytes == 0) return;
  const auto begin = reinterpret_cast<std::uintptr_t>(data);
  ranges_.push_back({begin, begin + static_cast<std::uintptr_t>(bytes), name, index, written});
}

// In place is allowed where the sweep reads an element before it writes it: out over params, and a row replaced by its
// own arrival or, for a client that is twice in the buffer, by a later one.
bool Overlaps::allowed(const Range& a, const Range& b) {
  if (!a.written && !b.written) return true;
  if (a.begin != b.begin || a.end != b.end || a.written == b.written) return false;
  const Range& from = a.written ? b : a;
  const Range& to = a.written ? a : b;
  if (std::strcmp(from.name, "params") == 0 && std::strcmp(to.name, "out") == 0) return true;
  return std::strcmp(from.name, "rows") == 0 && std::strcmp(to.name, "new_rows") == 0 && from.index <= to.index;
}

std::string Overlaps::title(const Range& range) { return range.index < 0 ? range.name : item(range.name, range.index); }

void Overlaps::refuse(const char* op) {
  std::sort(ranges_.begin(), ranges_.end(), [](const Range& a, const Range& b) { return a.begin < b.begin; });
  for (std::size_t i = 0; i < ranges_.size(); ++i)
    for (std::size_t j = i + 1; j < ranges_.size() && ranges_[j].begin < ranges_[i].end; ++j)
      if (!allowed(ranges_[i], ranges_[j]))
        fail(op, title(ranges_[i]) + " and " + title(ranges_[j]) + " overlap in memory, and one of them is written");
}

}  // namespace afflux::check
