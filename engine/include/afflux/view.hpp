// Views of the caller's memory. The engine owns no vectors: every entry point reads and writes the memory of its views.
#pragma once
#include <cstdint>
#include <type_traits>

namespace afflux {

enum class DeviceKind : std::int32_t { cpu = 0, cuda = 1 };

struct Device {
  DeviceKind kind = DeviceKind::cpu;
  std::int32_t index = 0;
};

constexpr bool operator==(Device a, Device b) { return a.kind == b.kind && a.index == b.index; }
constexpr bool operator!=(Device a, Device b) { return !(a == b); }

// The element types of vectors. C++17 has no types for float16 and bfloat16; Float16 and Bfloat16 hold their bits.
enum class Type : std::int32_t { float32 = 0, float64 = 1, float16 = 2, bfloat16 = 3 };

struct Float16 {
  std::uint16_t bits;
};
struct Bfloat16 {
  std::uint16_t bits;
};

// Returns the type's name, which is NumPy's: "float32".
constexpr const char* name(Type type) {
  return type == Type::float32   ? "float32"
         : type == Type::float64 ? "float64"
         : type == Type::float16 ? "float16"
                                 : "bfloat16";
}

// Returns the size of an element in bytes.
constexpr std::int64_t bytes(Type type) { return type == Type::float64 ? 8 : type == Type::float32 ? 4 : 2; }

template <class T>
struct TypeOf;
template <>
struct TypeOf<float> : std::integral_constant<Type, Type::float32> {};
template <>
struct TypeOf<double> : std::integral_constant<Type, Type::float64> {};
template <>
struct TypeOf<Float16> : std::integral_constant<Type, Type::float16> {};
template <>
struct TypeOf<Bfloat16> : std::integral_constant<Type, Type::bfloat16> {};

// A contiguous vector of `size` elements on `device`; `data` must be aligned to the size of an element. A View<T> may
// be written, a View<const T> is only read. A null `data` with size 0 is an empty vector; in a field that is documented
// as optional, a null `data` means that the vector is absent.
template <class T>
struct View {
  T* data = nullptr;
  std::int64_t size = 0;
  Device device{};
};

struct Parts;

// A view whose element type is given at run time. A typed view converts to it implicitly. With `parts` the vector lies
// in several pieces of memory (parts.hpp), and `data` is null; only the calls that say so take such a vector.
template <>
struct View<void> {
  void* data = nullptr;
  std::int64_t size = 0;
  Device device{};
  Type type = Type::float32;
  const Parts* parts = nullptr;

  View() = default;
  View(const Parts& parts, std::int64_t size, Type type) : size(size), type(type), parts(&parts) {}
  View(void* data, std::int64_t size, Device device, Type type) : data(data), size(size), device(device), type(type) {}
  template <class T, Type kType = TypeOf<T>::value>
  View(View<T> view) : View(view.data, view.size, view.device, kType) {}
};

template <>
struct View<const void> {
  const void* data = nullptr;
  std::int64_t size = 0;
  Device device{};
  Type type = Type::float32;
  const Parts* parts = nullptr;

  View() = default;
  View(const Parts& parts, std::int64_t size, Type type) : size(size), type(type), parts(&parts) {}
  View(const void* data, std::int64_t size, Device device, Type type)
      : data(data), size(size), device(device), type(type) {}
  View(View<void> view) : data(view.data), size(view.size), device(view.device), type(view.type), parts(view.parts) {}
  template <class T, Type kType = TypeOf<std::remove_const_t<T>>::value>
  View(View<T> view) : View(view.data, view.size, view.device, kType) {}
};

// A short array on the host (of views or of weights), which is read only during a call.
template <class T>
struct List {
  const T* data = nullptr;
  std::int64_t size = 0;
};

}  // namespace afflux
