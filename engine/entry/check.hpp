// What every entry point checks before it writes anything. Messages read "[operation] argument ...".
#pragma once
#include <string>

#include "afflux/afflux.hpp"

namespace afflux::check {

[[noreturn]] inline void fail(const char* op, const std::string& what) {
  throw Error("[" + std::string(op) + "] " + what);
}

inline std::string item(const char* name, std::int64_t index) {
  return std::string(name) + "[" + std::to_string(index) + "]";
}

inline void threads(const char* op, int num_threads) {
  if (num_threads < 1) fail(op, "num_threads is " + std::to_string(num_threads) + ", must be at least 1");
}

// size, null, alignment and device of one view; `alignment` is that of the elements it holds.
template <class T>
void view(const char* op, const std::string& name, const View<T>& view, std::int64_t size, std::size_t alignment) {
  if (view.device.kind != DeviceKind::cpu)
    throw Unavailable("[" + std::string(op) + "] " + name + " is on cuda:" + std::to_string(view.device.index) +
                      ", but this build has no CUDA kernels");
  if (view.size < 0) fail(op, name + " has a negative size");
  if (view.size != size)
    fail(op, name + " has " + std::to_string(view.size) + " elements, expected " + std::to_string(size));
  if (view.size > 0 && view.data == nullptr) fail(op, name + " has no data");
  if (reinterpret_cast<std::uintptr_t>(view.data) % alignment != 0)
    fail(op, name + " is not aligned to " + std::to_string(alignment) + " bytes");
}

template <class T>
void list(const char* op, const char* name, const List<T>& list) {
  if (list.size < 0) fail(op, std::string(name) + " has a negative size");
  if (list.size > 0 && list.data == nullptr) fail(op, std::string(name) + " has no data");
}

template <class T>
void view(const char* op, const std::string& name, const View<T>& v, std::int64_t size) {
  view(op, name, v, size, sizeof(T));
}

}  // namespace afflux::check
