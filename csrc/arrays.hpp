// Vectors of any array library as an afflux::View, without a copy: afflux's own buffers, else the buffer protocol, else
// DLPack (also for types that the buffer protocol lacks, such as bfloat16).
#pragma once
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstddef>
#include <deque>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "afflux/afflux.hpp"
#include "dlpack.hpp"
#include "foreign.hpp"
#include "parts.hpp"
#include "values.hpp"

namespace afflux::python {

// lend: as read, but the array is on the host, and gives its memory at once. assign: the same for write, and the array
// may be a tensor that requires grad.
enum class Access { read, lend, write, assign };
inline bool writes(Access access) { return access == Access::write || access == Access::assign; }
inline bool is_at_once(Access access) { return access == Access::lend || access == Access::assign; }
enum class Shape { vector, any };  // any: C-contiguous, of any number of dimensions, treated as flat

// The name of an argument or, with an index, of one item of a sequence, or of one of its parts. The text is built only
// for a message.
struct Argument {
  Argument(const char* op, const char* name, std::ptrdiff_t index = -1, pybind11::handle shape = {})
      : op(op), name(name), shape(shape), index(static_cast<std::int32_t>(index)) {}

  const char* op;
  const char* name;
  pybind11::handle shape;  // the expected shape, a tuple; null: any shape
  std::int32_t index, part = -1;
};

// The CUDA stream of one call: the current stream of the library of the first array on a GPU. The libraries of the
// other arrays make their memory ready on this stream. A Call exists from before the first Array until after the
// engine's call, on the same thread.
class Call {
 public:
  Call();
  ~Call();
  Call(const Call&) = delete;
  Call& operator=(const Call&) = delete;

  // Returns the call's stream, as an argument of DLPack: 1 for the default stream. The first call of this function in a
  // Call takes the current stream of the object's library.
  static std::uintptr_t stream_for(pybind11::handle object, int device);
  // Returns whether the current stream of a library is that of the current Call. It becomes so in a Call without one.
  static bool has_stream_of(const dlpack::Exchange& library, int device);

 private:
  friend class Array;
  void set_stream(std::uintptr_t stream);

  bool known_ = false;
  std::uintptr_t stream_ = 0;
  Call* const outer_;
};

// A borrowed contiguous array. It keeps the object's memory alive and in place until its destruction. Create and
// destroy it with the GIL held. The constructor throws Error; the message names the operation and the argument.
class Array {
 public:
  Array(Argument argument, pybind11::handle object, Access access, Shape shape = Shape::vector);
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;

  // Returns a vector of any of the engine's types. Throws Error for another type.
  View<void> view() const;
  // Returns a vector of float64. Throws Error for another type.
  View<double> doubles() const;
  // Returns the array as one that is assigned. Throws Error for a type that is no number, and without `integers` also
  // for one of integers or booleans.
  Target target(bool integers) const;
  // Throws Unavailable for an array on another device.
  void check_on(Device device) const;
  // Returns an encoded row as bytes. Throws Error unless the array is uint8 or of the codec's row type.
  View<unsigned char> row(Codec codec) const;
  // Returns the beginning of messages: "[operation] argument".
  std::string title() const;

 private:
  enum class Kind { other, type, bytes };

  void acquire(pybind11::handle object, Access access, Shape shape);
  bool from_numpy(pybind11::handle object, Access access, Shape shape);
  void from_buffer(Access access, Shape shape);
  bool from_exchange(pybind11::handle object, Access access, Shape shape);
  void from_dlpack(pybind11::handle object, Access access, Shape shape);
  void set_tensor(const dlpack::Tensor& tensor, Shape shape);
  // Throws Unavailable if the engine does not support this GPU.
  void set_gpu(int index);
  void check_no_grad(pybind11::handle object) const;
  // Returns the object's storage, or null if the object is no torch tensor.
  pybind11::object torch_storage(pybind11::handle object) const;
  // Sets the size. Throws Error for a wrong shape and for an array that is not contiguous. `unit` is the size of an
  // element in the unit of `strides`; null strides: C-contiguous.
  template <class Int>
  void set_shape(int dimensions, const Int* shape, const Int* strides, std::int64_t unit, Shape expected);
  template <class Int>
  void check_shape(int dimensions, const Int* shape) const;
  void set_type(const std::string& name);
  [[noreturn]] void fail(const std::string& problem) const;
  [[noreturn]] void wrong_type(const std::string& expected) const;

  Argument argument_;
  Py_buffer buffer_;
  // The owner of the memory: a Py_buffer, a DLPack tensor or a reference to a Python object, with its release function.
  std::unique_ptr<void, void (*)(void*)> owner_{nullptr, nullptr};
  void* data_ = nullptr;
  std::int64_t size_ = 0;
  std::int64_t item_size_ = 0;
  Kind kind_ = Kind::other;
  Type type_{};
  std::string other_name_;
  Device device_{};
};

// As many arrays as were reserved, one after the other: an Array cannot be moved.
class ArrayBlock {
 public:
  ArrayBlock() = default;
  ~ArrayBlock() {
    while (size_ > 0) arrays_[--size_].~Array();
    std::allocator<Array>().deallocate(arrays_, capacity_);
  }
  ArrayBlock(const ArrayBlock&) = delete;
  ArrayBlock& operator=(const ArrayBlock&) = delete;

  // Call it once, first.
  void reserve(std::size_t capacity) {
    arrays_ = std::allocator<Array>().allocate(capacity);
    capacity_ = capacity;
  }
  template <class... Arguments>
  const Array& emplace(Arguments&&... arguments) {
    const Array* const made = new (arrays_ + size_) Array(std::forward<Arguments>(arguments)...);
    ++size_;
    return *made;
  }
  const Array& front() const { return *arrays_; }

 private:
  Array* arrays_ = nullptr;
  std::size_t capacity_ = 0, size_ = 0;
};

class Vector;

// An afflux.ops.Conversion, with the array that it reads.
class Converted {
 public:
  Converted(const char* op, const pybind11::object& conversion);
  ~Converted();
  const Conversion* get() const { return conversion_ ? &*conversion_ : nullptr; }

 private:
  std::unique_ptr<Vector> base_;
  std::optional<Conversion> conversion_;
};

// The borrowed arrays of a vector in parts.
class PartArrays {
 public:
  // `shapes`: a tuple of the shapes of the arrays; null: any shapes.
  PartArrays(Argument argument, const PartsObject& parts, Access access, pybind11::handle shapes = {});
  PartArrays(const PartArrays&) = delete;
  PartArrays& operator=(const PartArrays&) = delete;

  // Returns the borrowed arrays of an object: those that are lent, if they are to be read, and have the same memory.
  static std::shared_ptr<const PartArrays> of(Argument argument, const PartsObject& parts, Access access);

  // The view refers to this object.
  const View<void>& view() const { return view_; }
  const std::vector<PartView>& list() const { return list_; }

 private:
  // Returns whether the arrays still have the memory that they had when they were borrowed.
  bool is_of(const pybind11::tuple& arrays) const;

  const Borders borders_;
  const Converted conversion_;
  ArrayBlock arrays_;
  std::vector<PartView> list_;
  Parts parts_;
  View<void> view_;
};

// A vector that is an array, or is in parts.
class Vector {
 public:
  Vector(Argument argument, pybind11::handle object, Access access) {
    if (const PartsObject* const parts = PartsObject::in(object))
      parts_ = PartArrays::of(argument, *parts, access);
    else
      array_.emplace(argument, object, access);
  }
  View<void> view() const { return array_ ? array_->view() : parts_->view(); }

 private:
  std::optional<Array> array_;
  std::shared_ptr<const PartArrays> parts_;
};

inline View<void> as_view(const Array& array) { return array.view(); }
inline View<const unsigned char> read_only(View<unsigned char> row) { return {row.data, row.size, row.device}; }

// A sequence of arrays, with the views that the engine reads.
template <class T>
class Arrays {
 public:
  // view(array) returns the view of an item. `optional`: an item may be None, which gives a view without data.
  // `shapes`: a tuple of as many shapes; null: any shapes.
  template <class Make>
  Arrays(const char* op, const char* name, pybind11::handle objects, Access access, Shape shape, bool optional,
         const Make& view, pybind11::handle shapes = {}) {
    const auto title = [&] { return "[" + std::string(op) + "] " + name; };
    const std::size_t count = read_foreign(title, [&] {
      if (PySequence_Check(objects.ptr()) == 0)
        throw Error(title() + " is a " + Py_TYPE(objects.ptr())->tp_name + ", expected a list of arrays");
      return pybind11::len(objects);
    });
    const auto sequence = pybind11::reinterpret_borrow<pybind11::sequence>(objects);
    views_.reserve(std::min<std::size_t>(count, kReserved));  // the length of a sequence may be wrong
    for (std::size_t i = 0; i < count; ++i) {
      // The item is owned while its memory is acquired, because a sequence may create its items on demand.
      const auto object = owned_item(title, sequence, i);
      views_.emplace_back();
      if (optional && object.is_none()) continue;
      Argument argument{op, name, static_cast<std::ptrdiff_t>(i), shapes ? item(shapes, i) : pybind11::handle()};
      if constexpr (std::is_void_v<T>)
        if (const PartsObject* const parts = PartsObject::in(object)) {
          parts_.push_back(PartArrays::of(argument, *parts, access));
          views_.back() = parts_.back()->view();
          continue;
        }
      arrays_.emplace_back(argument, object, access, shape);
      views_.back() = view(arrays_.back());
      // An empty array is not a missing one, but the engine would treat a null pointer as missing.
      if (optional && views_.back().data == nullptr) views_.back().data = aligned_nowhere();
    }
  }
  List<View<T>> list() const { return {views_.data(), static_cast<std::int64_t>(views_.size())}; }

 private:
  static constexpr std::size_t kReserved = 1 << 16;

  template <class Title>
  static pybind11::object owned_item(const Title& title, const pybind11::sequence& sequence, std::size_t i) {
    PyObject* const list = sequence.ptr();
    if (PyList_CheckExact(list) && i < static_cast<std::size_t>(PyList_GET_SIZE(list)))
      return pybind11::reinterpret_borrow<pybind11::object>(PyList_GET_ITEM(list, static_cast<Py_ssize_t>(i)));
    return read_foreign(title, [&] { return pybind11::object(sequence[i]); });
  }

  static T* aligned_nowhere() { return reinterpret_cast<T*>(alignof(std::max_align_t)); }

  std::deque<Array> arrays_;
  std::vector<std::shared_ptr<const PartArrays>> parts_;
  std::vector<View<T>> views_;
};

}  // namespace afflux::python
