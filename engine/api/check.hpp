// The checks of arguments that an entry point makes before it writes. Messages have the form "[operation] argument
// ...".
#pragma once
#include <cmath>
#include <initializer_list>
#include <string>

#include "afflux/afflux.hpp"
#include "api/kernels.hpp"

namespace afflux::check {

// The name of an argument or, with an index, of one item of a list. The text is built only for a message.
struct Name {
  Name(const char* name, std::int64_t index = -1) : name(name), index(index) {}
  std::string str() const { return index < 0 ? name : std::string(name) + "[" + std::to_string(index) + "]"; }

  const char* name;
  std::int64_t index;
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

// Checks the size, data, alignment and device of one view; `alignment` is that of its elements, in bytes.
template <class T>
void view(const char* op, Name name, const View<T>& view, std::int64_t size, std::int64_t alignment) {
  const std::string missing = why_not(view.device);
  if (!missing.empty())
    throw Unavailable("[" + std::string(op) + "] " + name.str() + " is on " + where(view.device) + ", but " + missing);
  if (view.size < 0) fail(op, name.str() + " has a negative size");
  if (view.size != size)
    fail(op, name.str() + " has " + std::to_string(view.size) + " elements, expected " + std::to_string(size));
  if (view.size > 0 && view.data == nullptr) fail(op, name.str() + " has no data");
  if (reinterpret_cast<std::uintptr_t>(view.data) % static_cast<std::uintptr_t>(alignment) != 0)
    fail(op, name.str() + " is not aligned to " + std::to_string(alignment) + " bytes");
}

template <class T>
void host(const char* op, Name name, const View<T>& view) {
  if (view.device.kind != DeviceKind::cpu) fail(op, name.str() + " is on " + where(view.device) + ", expected the CPU");
}

template <class T>
void view(const char* op, Name name, const View<T>& v, std::int64_t size) {
  if constexpr (std::is_void_v<T>)
    view(op, name, v, size, bytes(v.type));
  else
    view(op, name, v, size, static_cast<std::int64_t>(sizeof(T)));
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
