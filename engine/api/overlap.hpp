// Refuses views that lie on different devices, or that overlap where one of them is written.
#pragma once
#include <cstdint>
#include <vector>

#include "api/check.hpp"

namespace afflux::check {

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
  // Numbers that lie on the host whatever the device of the vectors.
  template <class T>
  void read_numbers(Name name, const View<T>& view) {
    add(name, view.data, bytes_of(view), false);
  }
  template <class T>
  void write_numbers(Name name, const View<T>& view) {
    add(name, view.data, bytes_of(view), true);
  }
  // The device of all vectors, once refuse() has found that it is one.
  Device device() const { return device_; }
  // Throws Error for the first view elsewhere than the first, and for the first overlap found. O(n log n) in the number
  // of views.
  void refuse(const char* op);
  // Bytes of all views, each once, whether it is read, written or both: a measure of the work, not of the traffic.
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
  Name first_{nullptr}, elsewhere_{nullptr};  // without a name: none
  Device device_{}, other_{};
};

}  // namespace afflux::check
