// Pooled buffers for versions of params and for slots. A buffer exists as long as a view of it is held; then its memory
// is used again.
#pragma once
#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <vector>

#include "afflux/view.hpp"

namespace afflux::python {

// The memory of the buffers of one server. It exists longer than the server while a buffer is held. All methods run
// with the GIL held.
class Pool : public std::enable_shared_from_this<Pool> {
 public:
  // At most `max_buffers` buffers of `size` elements exist at once; 0: no limit. `until_read`: see afflux::ingest.
  // Throws Error for a negative size or max_buffers.
  Pool(std::int64_t size, Type type, std::int64_t max_buffers, std::int64_t until_read);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // Returns the memory of a free buffer, else of a new one. Throws Error if max_buffers are held, and std::bad_alloc if
  // memory is short.
  void* take();
  // Returns true if max_buffers are held.
  bool full() const { return free_.empty() && max_buffers_ > 0 && allocated_ == max_buffers_; }
  // Adds the caller's `memory` as a free buffer: writable, contiguous, of at least bytes(). The pool holds the object
  // until its own destruction. Throws Error for other memory.
  void lend(const pybind11::buffer& memory);
  void give_back(void* memory) noexcept { free_.push_back(memory); }

  std::int64_t size() const { return size_; }
  std::int64_t bytes() const { return size_ * afflux::bytes(type_); }
  Type type() const { return type_; }
  std::int64_t until_read() const { return until_read_; }
  std::int64_t held() const { return allocated_ - static_cast<std::int64_t>(free_.size()); }
  // Returns the addresses of the buffers that are not held.
  std::vector<std::uintptr_t> free() const;
  std::int64_t allocated() const { return allocated_; }

 private:
  bool is_of_caller(const void* memory) const;

  const std::int64_t size_;
  const Type type_;
  const std::int64_t max_buffers_;
  const std::int64_t until_read_;
  std::vector<void*> free_;
  std::vector<pybind11::buffer_info> lent_;
  std::int64_t allocated_ = 0;
};

// A buffer of a pool, which is written and may then be frozen; freezing is final. A buffer exports its memory by the
// buffer protocol (bfloat16 as uint16), read-only if it is frozen; it is the base of every NumPy view. The destructor
// gives memory back to the pool without a call of Python.
class Buffer {
 public:
  explicit Buffer(std::shared_ptr<Pool> pool);
  ~Buffer();
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  // Returns a new object of Python that holds a buffer. Throws as Pool::take.
  static pybind11::object taken(std::shared_ptr<Pool> pool);
  // Returns the buffer of this Python object, or null if the object is no buffer.
  static const Buffer* in(pybind11::handle object);

  void freeze() { frozen_ = true; }
  bool frozen() const { return frozen_; }
  View<void> view() const { return view_; }
  std::int64_t until_read() const { return pool_->until_read(); }

 private:
  std::shared_ptr<Pool> pool_;
  View<void> view_;
  bool frozen_ = false;
};

void bind_buffers(pybind11::module_& module);

}  // namespace afflux::python
