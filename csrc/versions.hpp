// Buffers of params versions. A version lives as long as anybody holds a view of it; then its memory is used again.
#pragma once
#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <mutex>
#include <vector>

namespace afflux::python {

// The memory behind the versions of one server. Thread-safe; outlives the server while a version is held.
class VersionPool : public std::enable_shared_from_this<VersionPool> {
 public:
  // At most `max_versions` buffers of `size` float32 exist at once; 0: no limit.
  VersionPool(std::int64_t size, std::int64_t max_versions);
  ~VersionPool();
  VersionPool(const VersionPool&) = delete;
  VersionPool& operator=(const VersionPool&) = delete;

  // A free buffer, else a new one. Throws Error when max_versions are held, std::bad_alloc when memory is short.
  float* take();
  void give_back(float* data) noexcept;

  std::int64_t size() const { return size_; }
  std::int64_t held() const;
  std::int64_t allocated() const;

 private:
  const std::int64_t size_, max_versions_;
  mutable std::mutex mutex_;
  std::vector<float*> free_;
  std::int64_t allocated_ = 0;
};

// One version: written once, then frozen. Exports its memory through the buffer protocol, read-only when frozen; every
// NumPy view has it as its base. The destructor gives the memory back and calls no Python.
class Version {
 public:
  explicit Version(std::shared_ptr<VersionPool> pool) : pool_(std::move(pool)), data_(pool_->take()) {}
  ~Version() { pool_->give_back(data_); }
  Version(const Version&) = delete;
  Version& operator=(const Version&) = delete;

  void freeze() { frozen_ = true; }
  pybind11::buffer_info buffer() { return {data_, pool_->size(), frozen_}; }

 private:
  std::shared_ptr<VersionPool> pool_;
  float* data_;
  bool frozen_ = false;
};

void bind_versions(pybind11::module_& module);

}  // namespace afflux::python
