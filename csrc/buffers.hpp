// Pooled buffers for versions of params and for slots: one lives as long as anybody holds a view of it, then its memory
// is used again. And vectors of callers that are only lent.
#pragma once
#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <vector>

#include "afflux/view.hpp"

namespace afflux::python {

class Array;

// The memory behind the buffers of one server. Outlives the server while a buffer is held. Thread-safe, and all its
// methods run with the GIL held: a fork by Python can never catch the mutex locked.
class Pool : public std::enable_shared_from_this<Pool> {
 public:
  // At most `max_buffers` buffers of `size` elements exist at once; 0: no limit. If `checked`, frozen buffers are
  // compared with their checksum when they come back. `until_read`: see afflux::ingest.
  Pool(std::int64_t size, Type type, std::int64_t max_buffers, bool checked, std::int64_t until_read);
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // A free buffer, else a new one. Throws Error when max_buffers are held, std::bad_alloc when memory is short.
  void* take();
  // Whether max_buffers are held.
  bool full() const;
  // Takes in `memory`, writable and of at least bytes(), for its next buffer; keeps the object as long as it lives.
  void lend(const pybind11::buffer& memory);
  void give_back(void* data) noexcept;
  void report_damage(std::int64_t tag) noexcept;

  std::int64_t size() const { return size_; }
  std::int64_t bytes() const { return size_ * afflux::bytes(type_); }
  Type type() const { return type_; }
  bool checked() const { return checked_; }
  std::int64_t until_read() const { return until_read_; }
  std::int64_t held() const;
  // Where the buffers lie that are not held.
  std::vector<std::uintptr_t> free() const;
  std::int64_t allocated() const;
  // Tags of the frozen buffers to which a caller had written before their release.
  std::vector<std::int64_t> damaged() const;

 private:
  bool is_lent(const void* data) const;

  const std::int64_t size_;
  const Type type_;
  const std::int64_t max_buffers_;
  const bool checked_;
  const std::int64_t until_read_;
  mutable std::mutex mutex_;
  std::vector<void*> free_;
  std::vector<pybind11::buffer_info> lent_;
  std::int64_t allocated_ = 0;
  std::vector<std::int64_t> damaged_;
};

// One buffer of a pool: written, then perhaps frozen for good. Or a caller's vector that is only lent, frozen, and held
// while the buffer lives. Exports its memory through the buffer protocol (bfloat16 as uint16), read-only when frozen;
// every NumPy view has it as its base. The destructor gives memory back to the pool without calling Python.
class Buffer {
 public:
  explicit Buffer(std::shared_ptr<Pool> pool);
  Buffer(std::unique_ptr<Array> lent, pybind11::object vector);
  ~Buffer();
  Buffer(const Buffer&) = delete;
  Buffer& operator=(const Buffer&) = delete;

  // The buffer that this Python object is, or null.
  static const Buffer* in(pybind11::handle object);

  void freeze(std::int64_t tag);
  bool frozen() const { return frozen_; }
  bool lent() const { return lent_ != nullptr; }
  pybind11::object vector() const { return lent() ? vector_ : pybind11::none(); }
  View<void> view() const;
  std::int64_t until_read() const { return pool_ == nullptr ? 0 : pool_->until_read(); }
  // Whether it was not written to since it was frozen; true if that is not watched.
  bool intact() const;
  // Of the bytes when they were frozen, in a checked pool.
  std::optional<std::uint64_t> checksum() const { return checksum_; }
  pybind11::buffer_info buffer() const;

 private:
  std::shared_ptr<Pool> pool_;   // null if lent
  std::unique_ptr<Array> lent_;  // null if of a pool
  pybind11::object vector_;      // that is lent
  bool moves_ = false;           // it is torch's, which may move its memory (share_memory_)
  View<void> view_;
  bool frozen_ = false;
  std::int64_t tag_ = 0;
  std::optional<std::uint64_t> checksum_;
};

void bind_buffers(pybind11::module_& module);

}  // namespace afflux::python
