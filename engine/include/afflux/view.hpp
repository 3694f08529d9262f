// Views of the caller's memory. The engine owns no vectors: every entry point reads and writes through these.
#pragma once
#include <cstdint>

namespace afflux {

enum class DeviceKind : std::int32_t { cpu = 0, cuda = 1 };

struct Device {
  DeviceKind kind = DeviceKind::cpu;
  std::int32_t index = 0;
};

constexpr bool operator==(Device a, Device b) { return a.kind == b.kind && a.index == b.index; }
constexpr bool operator!=(Device a, Device b) { return !(a == b); }

// A contiguous vector of `size` elements on `device`; `data` must be aligned to sizeof(T).
// View<T> may be written, View<const T> is only read. A null `data` with size 0 is an empty vector;
// where a field is documented as optional, a null `data` means that it is absent.
template <class T>
struct View {
  T* data = nullptr;
  std::int64_t size = 0;
  Device device{};
};

// A short host array (of views or of weights), read only for the duration of a call.
template <class T>
struct List {
  const T* data = nullptr;
  std::int64_t size = 0;
};

}  // namespace afflux
