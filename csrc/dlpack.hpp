// The part of the DLPack binary interface (versions 0 and 1, and the C functions of 1.3) that a consumer needs.
#pragma once
#include <cstdint>

namespace dlpack {

enum DeviceType : std::int32_t { kCpu = 1, kCuda = 2, kCudaHost = 3, kCudaManaged = 13 };
enum TypeCode : std::uint8_t { kInt = 0, kUInt = 1, kFloat = 2, kBfloat = 4, kComplex = 5, kBool = 6 };

struct Device {
  std::int32_t type, id;
};

struct Type {
  std::uint8_t code, bits;
  std::uint16_t lanes;
};

struct Tensor {
  void* data;
  Device device;
  std::int32_t ndim;
  Type dtype;
  std::int64_t* shape;
  std::int64_t* strides;  // in elements; null: C-contiguous
  std::uint64_t byte_offset;
};

struct Managed {  // capsule "dltensor"
  Tensor tensor;
  void* context;
  void (*deleter)(Managed*);
};

struct ManagedVersioned {  // capsule "dltensor_versioned"
  std::uint32_t major, minor;
  void* context;
  void (*deleter)(ManagedVersioned*);
  std::uint64_t flags;
  Tensor tensor;
};

constexpr std::uint64_t kReadOnly = 1;

// The attribute __dlpack_c_exchange_api__ of a library's type: a capsule "dlpack_exchange_api". Functions return 0, or
// -1 with a Python exception set.
struct Exchange {
  std::uint32_t major, minor;
  Exchange* previous;  // of an older major version; may be null
  int (*allocate)(Tensor*, ManagedVersioned**, void*, void (*)(void*, const char*, const char*));
  int (*managed_from_object)(void* object, ManagedVersioned** out);
  int (*object_from_managed)(ManagedVersioned* managed, void** out);
  int (*tensor_from_object)(void* object, Tensor* out);  // owns nothing; may be null
  int (*current_stream)(std::int32_t device_type, std::int32_t device, void** out);
};

}  // namespace dlpack
