// Rejects views that are on different devices, or that overlap if one of them is written.
#pragma once
#include <cstdint>
#include <vector>

#include "afflux/parts.hpp"
#include "api/check.hpp"

namespace afflux::check {

// The memory ranges of all views of a call.
class Overlaps {
 public:
  Overlaps() { ranges_.reserve(kReserved); }
  template <class T>
  void read(Name name, const View<T>& view) {
    add(name, view, false);
  }
  template <class T>
  void write(Name name, const View<T>& view) {
    add(name, view, true);
  }
  // Add numbers that are on the host, whatever the device of the vectors.
  template <class T>
  void read_numbers(Name name, const View<T>& view) {
    add(name, view.data, bytes_of(view), false);
  }
  template <class T>
  void write_numbers(Name name, const View<T>& view) {
    add(name, view.data, bytes_of(view), true);
  }
  // Sets and returns the first vector in parts; null: all vectors are flat.
  void cut(Name name, const Parts& parts) {
    first_in_parts_ = name;
    parts_ = &parts;
  }
  const Parts* parts() const { return parts_; }
  std::string first_in_parts() const { return first_in_parts_.str(); }
  // Returns the device of all vectors; valid after refuse() has returned.
  Device device() const { return device_; }
  // Throws Error for a view that is not on the device of the first view, else for an overlap. O(n log n) in the number
  // of views.
  void refuse(const char* op);
  // Returns the bytes of all views that were added, as a measure of the work. Memory that two views share counts twice.
  std::int64_t traffic() const;

 private:
  struct Range {
    std::uintptr_t begin, end;
    Name name;
    bool written;
  };
  template <class T>
  static std::int64_t bytes_of(const View<T>& view) {
    if constexpr (std::is_void_v<T>)
      return bytes(view.type) * view.size;
    else
      return static_cast<std::int64_t>(sizeof(T)) * view.size;
  }
  template <class T>
  void add(Name name, const View<T>& view, bool written) {
    meet(name, view.device);
    if constexpr (std::is_void_v<T>)
      if (view.parts != nullptr) return add(name, *view.parts, written);
    add(name, view.data, bytes_of(view), written);
  }
  void meet(Name name, Device device);
  void add(Name name, const Parts& parts, bool written);
  void add(Name name, const void* data, std::int64_t bytes, bool written);
  static bool allowed(const Range& read, const Range& written);
  static constexpr std::size_t kReserved = 24;  // a round of ten updates: one allocation
  std::vector<Range> ranges_;
  Name first_{nullptr}, elsewhere_{nullptr};  // a null name: there is none
  Device device_{}, other_{};
  const Parts* parts_ = nullptr;
  Name first_in_parts_{nullptr};
};

}  // namespace afflux::check
