// The executor of kernels on the host, for tests without a GPU (see block.hpp). It runs the blocks of a kernel one
// after the other, and in each phase their threads one after the other: forwards in even blocks, backwards in odd ones.
// A race, where a thread reads what another one writes in the same phase, changes bits of the result, which tests
// compare. Device memory is host memory.
#pragma once
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "api/kernels.hpp"
#include "cuda/block.hpp"
#include "cuda/pieces.hpp"
#include "formula/reduce.hpp"

namespace afflux::cuda {

template <int kThreads>
struct HostBlock {
  std::int64_t index;

  template <class T>
  struct Each {
    T values[kThreads];
    T& operator[](int thread) { return values[thread]; }
  };
  template <class Body>
  void each(const Body& body) const {
    const bool backwards = index % 2 != 0;
    for (int i = 0; i < kThreads; ++i) body(backwards ? kThreads - 1 - i : i);
  }
  template <class Body>
  void each_in_warp(const Body& body) const {
    each(body);
  }
  template <class Body>
  void each_alone(const Body& body) const {
    each(body);
  }
  template <class T, class Join>
  void butterfly(Each<T>& x, int offset, const Join& join) const {
    const Each<T> before = x;
    for (int i = 0; i < kThreads; ++i) x[i] = join(before.values[i], before.values[i ^ offset]);
  }
  void hadamard(Each<float>& x, int offset) const {
    const Each<float> before = x;
    for (int i = 0; i < kThreads; ++i) {
      const float own = before.values[i], other = before.values[i ^ offset];
      x[i] = (i & offset) != 0 ? other - own : own + other;
    }
  }
  template <class Join>
  void reduce(Each<float>& x, const Join& join) const {
    for (int offset = kWarp / 2; offset > 0; offset /= 2) butterfly(x, offset, join);
  }
  void least(Each<float>& x) const {
    reduce(x, [](float a, float b) { return formula::lesser(a, b); });
  }
  void most(Each<float>& x) const {
    reduce(x, [](float a, float b) { return formula::greater(a, b); });
  }
};

// The memory of a host, and that of its device.
struct HostPiece {
  static constexpr std::size_t kMost = kMostPieces;

  std::unique_ptr<unsigned char[]> memory{new unsigned char[static_cast<std::size_t>(2 * kPieceBytes)]};
  unsigned char *const host = memory.get(), *const device = host + kPieceBytes;
};

// Work is done as late as it may be on a device: when the host waits for it.
class HostExecutor {
 public:
  using Piece = HostPiece;

  explicit HostExecutor(const Where&) {}
  ~HostExecutor() { finish(); }
  HostExecutor(const HostExecutor&) = delete;
  HostExecutor& operator=(const HostExecutor&) = delete;

  void* allocate(std::int64_t bytes) {
    const std::size_t size = static_cast<std::size_t>(bytes);
    allocated_.emplace_back(new unsigned char[size]);
    std::memset(allocated_.back().get(), 0xA5, size);  // no kernel may rely on zeros
    return allocated_.back().get();
  }
  void upload(void* to, const void* from, std::int64_t bytes) {
    const auto* const data = static_cast<const unsigned char*>(from);
    work_.emplace_back([to, copy = std::vector<unsigned char>(data, data + bytes)] {
      if (!copy.empty()) std::memcpy(to, copy.data(), copy.size());
    });
  }
  void send(void* to, const void* from, std::int64_t bytes) {
    work_.emplace_back([=] {
      if (bytes > 0) std::memcpy(to, from, static_cast<std::size_t>(bytes));
    });
  }
  void mark(Piece&) {}
  void wait(Piece&) { finish(); }
  // A third of all addresses of lines: tests pass both kinds.
  static bool reads_itself(const void* data, std::int64_t) {
    return reinterpret_cast<std::uintptr_t>(data) / 64 % 3 == 0;
  }
  void download(void* to, const void* from, std::int64_t bytes) {
    send(to, from, bytes);
    finish();
  }
  void copy(void* to, const void* from, std::int64_t bytes) { send(to, from, bytes); }
  void* results(std::int64_t bytes) { return allocate(bytes); }
  void fetch(void* to, const void* results, std::int64_t bytes) { download(to, results, bytes); }
  std::int32_t* flag() { return &(flag_ = 1); }
  bool flag_holds() {
    finish();
    return flag_ != 0;
  }
  template <class Body>
  void run(std::int64_t blocks, const Body& body) {
    work_.emplace_back([=] {
      const auto shared = std::make_unique<typename Body::Shared>();
      for (std::int64_t i = 0; i < blocks; ++i) {
        std::memset(static_cast<void*>(shared.get()), 0xA5, sizeof(typename Body::Shared));
        body(HostBlock<Body::kThreads>{i}, *shared);
      }
    });
  }

  static std::string why_not(std::int32_t device) { return device == 0 ? "" : "this machine has one emulated GPU"; }

 private:
  void finish() {
    for (const auto& work : work_) work();
    work_.clear();
  }

  std::vector<std::function<void()>> work_;
  std::vector<std::unique_ptr<unsigned char[]>> allocated_;
  std::int32_t flag_ = 0;
};

}  // namespace afflux::cuda
