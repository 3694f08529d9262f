// The checks of arguments that an entry point makes before it writes. Messages have the form "[operation] argument
// ...".
#pragma once
#include <cmath>
#include <initializer_list>
#include <string>

#include "afflux/afflux.hpp"
#include "api/kernels.hpp"

namespace afflux::check {

// The name of an argument or, with an index, of one item of a list, or of one of its parts. The text is built only for
// a message. Lists are shorter than 2^31, so that a Name is passed in registers.
struct Name {
  Name(const char* name, std::int64_t index = -1, std::int64_t part = -1)
      : name(name), index(static_cast<std::int32_t>(index)), part(static_cast<std::int32_t>(part)) {}
  std::string str() const {
    const auto at = [](std::int32_t i) { return i < 0 ? std::string() : std::string("[") + std::to_string(i) + "]"; };
    return name + at(index) + at(part);
  }

  const char* name;
  std::int32_t index, part;
};

[[noreturn]] inline void fail(const char* op, const std::string& what) {
  throw Error("[" + std::string(op) + "] " + what);
}

inline void threads(const char* op, int num_threads) {
  if (num_threads < 1) fail(op, "num_threads is " + std::to_string(num_threads) + ", must be at least 1");
}

inline void finite(const char* op, Name name, double value) {
  if (!std::isfinite(value)) fail(op, name.str() + " is not finite");
}

inline std::string where(Device device) {
  return device.kind == DeviceKind::cpu ? "the CPU" : "cuda:" + std::to_string(device.index);
}

// The messages are built outside of the checks, which so can be inlined.
[[noreturn, gnu::cold, gnu::noinline]] inline void bad_memory(const char* op, Name name, const void* data,
                                                              std::int64_t count, std::int64_t expected,
                                                              std::int64_t alignment) {
  if (count < 0) fail(op, name.str() + " has a negative size");
  if (count != expected)
    fail(op, name.str() + " has " + std::to_string(count) + " elements, expected " + std::to_string(expected));
  if (data == nullptr) fail(op, name.str() + " has no data");
  fail(op, name.str() + " is not aligned to " + std::to_string(alignment) + " bytes");
}

// Checks a piece of memory with `count` elements of `alignment` bytes, a power of two.
inline void memory(const char* op, Name name, const void* data, std::int64_t count, std::int64_t expected,
                   std::int64_t alignment) {
  const bool aligned = (reinterpret_cast<std::uintptr_t>(data) & static_cast<std::uintptr_t>(alignment - 1)) == 0;
  if (count < 0 || count != expected || (count > 0 && data == nullptr) || !aligned)
    bad_memory(op, name, data, count, expected, alignment);
}

// Checks the size, data, alignment and device of one view; `alignment` is that of its elements, in bytes.
template <class T>
void view(const char* op, Name name, const View<T>& view, std::int64_t expected, std::int64_t alignment) {
  const std::string missing = why_not(view.device);
  if (!missing.empty())
    throw Unavailable("[" + std::string(op) + "] " + name.str() + " is on " + where(view.device) + ", but " + missing);
  memory(op, name, view.data, view.size, expected, alignment);
}

template <class T>
void host(const char* op, Name name, const View<T>& view) {
  if (view.device.kind != DeviceKind::cpu) fail(op, name.str() + " is on " + where(view.device) + ", expected the CPU");
}

template <class T>
void view(const char* op, Name name, const View<T>& v, std::int64_t size) {
  if constexpr (std::is_void_v<T>) {
    if (v.parts != nullptr) fail(op, name.str() + " is in parts, expected a flat vector");
    view(op, name, v, size, bytes(v.type));
  } else {
    view(op, name, v, size, static_cast<std::int64_t>(sizeof(T)));
  }
}

// Throws Error unless the type is one of `expected`: "out is float64, expected float32".
inline void type(const char* op, Name argument, Type type, std::initializer_list<Type> expected) {
  std::string names;
  std::size_t left = expected.size();
  for (const Type allowed : expected) {
    if (type == allowed) return;
    names += std::string(name(allowed)) + (left > 2 ? ", " : left == 2 ? " or " : "");
    --left;
  }
  fail(op, argument.str() + " is " + name(type) + ", expected " + names);
}

// Throws Error unless an item of a list has the type of the first: "updates[2] is float64, updates[0] is float32".
inline void one_type(const char* op, Name argument, Type type, Type first) {
  if (type != first)
    fail(op, argument.str() + " is " + name(type) + ", " + Name(argument.name, 0).str() + " is " + name(first));
}

template <class T>
void list(const char* op, const char* name, const List<T>& list) {
  if (list.size < 0) fail(op, std::string(name) + " has a negative size");
  if (list.size > 0 && list.data == nullptr) fail(op, std::string(name) + " has no data");
}

}  // namespace afflux::check
