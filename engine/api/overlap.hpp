// Rejects views that are on different devices, or that overlap if one of them is written.
#pragma once
#include <cstdint>
#include <vector>

#include "api/check.hpp"

namespace afflux::check {

// The memory ranges of all views of a call.
class Overlaps {
 public:
  template <class T>
  void read(Name name, const View<T>& view) {
    add(name, view.data, bytes_of(view), false);
    meet(name, view.device);
  }
  template <class T>
  void write(Name name, const View<T>& view) {
    add(name, view.data, bytes_of(view), true);
    meet(name, view.device);
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
  void meet(Name name, Device device);
  void add(Name name, const void* data, std::int64_t bytes, bool written);
  static bool allowed(const Range& read, const Range& written);
  std::vector<Range> ranges_;
  Name first_{nullptr}, elsewhere_{nullptr};  // a null name: there is none
  Device device_{}, other_{};
};

}  // namespace afflux::check
