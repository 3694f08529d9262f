// The copy of host lists to the device: one copy for all lists of a call.
#pragma once
#include <cstdint>
#include <cstring>
#include <vector>

#include "afflux/view.hpp"

namespace afflux::cuda {

class Staging {
 public:
  // Adds a list, and returns its offset in the staged memory, in bytes.
  template <class T>
  std::int64_t add(const T* data, std::int64_t size) {
    constexpr std::size_t kAlignment = 16;
    bytes_.resize((bytes_.size() + kAlignment - 1) / kAlignment * kAlignment);
    const std::size_t offset = bytes_.size(), more = static_cast<std::size_t>(size) * sizeof(T);
    bytes_.resize(offset + more);
    if (more > 0) std::memcpy(bytes_.data() + offset, data, more);
    return static_cast<std::int64_t>(offset);
  }
  template <class Executor>
  void upload(Executor& executor) {
    const std::int64_t size = static_cast<std::int64_t>(bytes_.size());
    if (size == 0) return;
    base_ = static_cast<unsigned char*>(executor.allocate(size));
    executor.upload(base_, bytes_.data(), size);
  }
  template <class T>
  T* at(std::int64_t offset) const {
    return reinterpret_cast<T*>(base_ + offset);
  }

 private:
  std::vector<unsigned char> bytes_;
  unsigned char* base_ = nullptr;
};

}  // namespace afflux::cuda
