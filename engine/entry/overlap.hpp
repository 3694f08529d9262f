// Refuses views that overlap where one of them is written.
#pragma once
#include <cstdint>
#include <string>
#include <vector>

#include "afflux/view.hpp"

namespace afflux::check {

class Overlaps {
 public:
  // `index` -1: a single argument; else argument `name[index]`.
  template <class T>
  void read(const char* name, std::int64_t index, const View<T>& view) {
    add(name, index, view.data, static_cast<std::int64_t>(sizeof(T)) * view.size, false);
  }
  template <class T>
  void write(const char* name, std::int64_t index, const View<T>& view) {
    add(name, index, view.data, static_cast<std::int64_t>(sizeof(T)) * view.size, true);
  }
  // Throws Error for the first overlap found. O(n log n) in the number of views.
  void refuse(const char* op);

 private:
  struct Range {
    std::uintptr_t begin, end;
    const char* name;
    std::int64_t index;
    bool written;
  };
  void add(const char* name, std::int64_t index, const void* data, std::int64_t bytes, bool written);
  static bool allowed(const Range& read, const Range& written);
  static std::string title(const Range& range);
  std::vector<Range> ranges_;
};

}  // namespace afflux::check
