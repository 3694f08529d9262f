// Any array library's vector as an afflux::View, without a copy: the buffer protocol first, else DLPack.
#pragma once
#include <pybind11/pybind11.h>

#include <memory>
#include <string>

#include "afflux/afflux.hpp"

namespace afflux::python {

enum class Access { read, write };

// A borrowed one-dimensional contiguous array. Keeps the object's memory alive and in place while it lives; create and
// destroy it with the GIL held. Throws Error naming the operation and the argument.
class Array {
 public:
  Array(const char* op, std::string name, pybind11::handle object, Access access);

  bool is_float() const { return type_ == 'f'; }
  bool is_double() const { return type_ == 'd'; }
  template <class T>
  View<T> view() const {
    expect(type_code<std::remove_const_t<T>>());
    return {static_cast<T*>(data_), size_, device_};
  }
  // An encoded row: uint8, or float32 taken as the bytes it holds.
  template <class T>
  View<T> bytes() const {
    if (type_ != 'f' && type_ != 'B') wrong_type("uint8 or float32");
    return {static_cast<T*>(data_), size_ * item_size_, device_};
  }
  [[noreturn]] void wrong_type(const char* expected) const;

 private:
  template <class T>
  static constexpr char type_code() {
    return std::is_same_v<T, float> ? 'f' : std::is_same_v<T, double> ? 'd' : 'B';
  }
  void expect(char type) const;
  void from_buffer(pybind11::handle object, Access access);
  void from_dlpack(pybind11::handle object, Access access);
  [[noreturn]] void fail(const std::string& what) const;

  const char* op_;
  std::string name_;
  std::shared_ptr<void> owner_;
  void* data_ = nullptr;
  std::int64_t size_ = 0;
  std::int64_t item_size_ = 0;
  char type_ = 0;  // 'f' float32, 'd' float64, 'B' bytes, else 0
  std::string type_name_;
  Device device_{};
};

}  // namespace afflux::python
