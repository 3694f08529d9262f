// The executor of kernels on a device: blocks of threads (block.hpp), memory and stream, by the CUDA runtime.
#pragma once
#include <cuda_runtime.h>
#include <pthread.h>

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <stdexcept>
#include <string>
#include <type_traits>
#include <vector>

#include "api/kernels.hpp"
#include "cuda/pieces.hpp"

namespace afflux::cuda {

inline void check_error(cudaError_t error, const char* call, const char* file, int line) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // clears the error, so that the next call does not report it again
  if (error == cudaErrorMemoryAllocation) throw std::bad_alloc();
  throw std::runtime_error("[cuda] " + std::string(call) + " failed at " + file + ":" + std::to_string(line) + ": " +
                           cudaGetErrorString(error));
}
#define AFFLUX_CUDA(call) ::afflux::cuda::check_error(call, #call, __FILE__, __LINE__)

struct DeviceBlock {
  std::int64_t index;

  template <class T>
  struct Each {
    T value;
    __device__ __forceinline__ T& operator[](int) { return value; }
  };
  template <class Body>
  __device__ __forceinline__ void each(const Body& body) const {
    body(static_cast<int>(threadIdx.x));
    __syncthreads();
  }
  template <class Body>
  __device__ __forceinline__ void each_in_warp(const Body& body) const {
    body(static_cast<int>(threadIdx.x));
    __syncwarp();
  }
  template <class Body>
  __device__ __forceinline__ void each_alone(const Body& body) const {
    body(static_cast<int>(threadIdx.x));
  }
  template <class T, class Join>
  __device__ __forceinline__ void butterfly(Each<T>& x, int offset, const Join& join) const {
    x.value = join(x.value, __shfl_xor_sync(0xFFFFFFFFu, x.value, offset));
  }
  // The product is exact, so that this is a sum or a difference, rounded once.
  __device__ __forceinline__ void hadamard(Each<float>& x, int offset) const {
    const float sign = (threadIdx.x & offset) != 0 ? -1.0f : 1.0f;
    x.value = __fmaf_rn(x.value, sign, __shfl_xor_sync(0xFFFFFFFFu, x.value, offset));
  }
  // Without the sign, the bits of two negative floats have the opposite order.
  static __device__ __forceinline__ int in_order(int bits) { return bits ^ (bits >> 31 & 0x7FFFFFFF); }
  __device__ __forceinline__ void least(Each<float>& x) const {
    x.value = __int_as_float(in_order(__reduce_min_sync(0xFFFFFFFFu, in_order(__float_as_int(x.value)))));
  }
  __device__ __forceinline__ void most(Each<float>& x) const {
    x.value = __int_as_float(in_order(__reduce_max_sync(0xFFFFFFFFu, in_order(__float_as_int(x.value)))));
  }
};

// The blocks that a multiprocessor must have registers for; 0: as many as the compiler chooses.
template <class Body, class = void>
constexpr int kLeastBlocks = 0;
template <class Body>
constexpr int kLeastBlocks<Body, std::void_t<decltype(Body::kBlocksTogether)>> = Body::kBlocksTogether;

template <class Body>
__global__ void __launch_bounds__(Body::kThreads, kLeastBlocks<Body>) kernel(const __grid_constant__ Body body) {
  __shared__ typename Body::Shared shared;
  body(DeviceBlock{static_cast<std::int64_t>(blockIdx.x)}, shared);
}

// Returns afflux's own pool for the scratch memory of calls, which keeps freed memory for later calls. The device's
// default pool returns its unused memory to the system at every synchronization of a stream.
inline cudaMemPool_t scratch_pool(std::int32_t device) {
  static const std::vector<cudaMemPool_t> pools = [] {
    int count = 0;
    AFFLUX_CUDA(cudaGetDeviceCount(&count));
    std::vector<cudaMemPool_t> made(static_cast<std::size_t>(count));
    for (int i = 0; i < count; ++i) {
      cudaMemPoolProps props{};
      props.allocType = cudaMemAllocationTypePinned;
      props.location = {cudaMemLocationTypeDevice, i};
      AFFLUX_CUDA(cudaMemPoolCreate(&made[static_cast<std::size_t>(i)], &props));
      std::uint64_t most = std::numeric_limits<std::uint64_t>::max();
      AFFLUX_CUDA(cudaMemPoolSetAttribute(made[static_cast<std::size_t>(i)], cudaMemPoolAttrReleaseThreshold, &most));
    }
    return made;
  }();
  return pools.at(static_cast<std::size_t>(device));
}

// Pinned memory of the host, which every device can write, and as much of the current device. They are kept for later
// calls (pieces.hpp), at most `kCount` of them.
template <std::int64_t kSize, std::size_t kCount>
class DevicePair {
 public:
  static constexpr std::int64_t kBytes = kSize;
  static constexpr std::size_t kMost = kCount;

  DevicePair() : DevicePair(nullptr) {  // so that an exception frees what is allocated
    AFFLUX_CUDA(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming));
    AFFLUX_CUDA(cudaMalloc(&device, static_cast<std::size_t>(kBytes)));
    AFFLUX_CUDA(cudaHostAlloc(&host, static_cast<std::size_t>(kBytes), cudaHostAllocPortable | cudaHostAllocMapped));
  }
  ~DevicePair() {
    if (host != nullptr) cudaFreeHost(host);
    if (device != nullptr) cudaFree(device);
    if (event_ != nullptr) cudaEventDestroy(event_);
  }
  DevicePair(const DevicePair&) = delete;
  DevicePair& operator=(const DevicePair&) = delete;

  // The memory is in use until all work of the stream before this call is done.
  void mark(cudaStream_t stream) {
    AFFLUX_CUDA(cudaEventRecord(event_, stream));
    marked_ = true;
  }
  void wait() {
    if (marked_) AFFLUX_CUDA(cudaEventSynchronize(event_));
    marked_ = false;
  }

  unsigned char *host = nullptr, *device = nullptr;

 private:
  explicit DevicePair(std::nullptr_t) {}

  cudaEvent_t event_ = nullptr;
  bool marked_ = false;
};

// For vectors of the host.
using DevicePiece = DevicePair<kPieceBytes, kMostPieces>;
// For lists, scratch memory and results of a call.
using DevicePage = DevicePair<std::int64_t{1} << 16, std::numeric_limits<std::size_t>::max()>;

// One call's work on a stream. The destructor frees the allocated memory, in the order of the stream.
class DeviceExecutor {
 public:
  using Piece = DevicePiece;

  explicit DeviceExecutor(const Where& where) : where_(where), stream_(static_cast<cudaStream_t>(where.stream)) {
    AFFLUX_CUDA(cudaGetDevice(&before_));
    if (before_ != where.device) AFFLUX_CUDA(cudaSetDevice(where.device));
  }
  ~DeviceExecutor() {
    for (void* const memory : allocated_) cudaFreeAsync(memory, stream_);
    if (page_ != nullptr) give_back_page();
    if (before_ != where_.device) cudaSetDevice(before_);
  }
  DeviceExecutor(const DeviceExecutor&) = delete;
  DeviceExecutor& operator=(const DeviceExecutor&) = delete;

  void* allocate(std::int64_t bytes) {
    void* memory = nullptr;
    if (bytes == 0) return memory;  // CUDA refuses it
    if (const std::int64_t place = place_in_page(bytes, used_of_device_); place >= 0) return page().device + place;
    allocated_.reserve(allocated_.size() + 1);
    AFFLUX_CUDA(
        cudaMallocFromPoolAsync(&memory, static_cast<std::size_t>(bytes), scratch_pool(where_.device), stream_));
    allocated_.push_back(memory);
    return memory;
  }
  // Copies from the host to the device. The memory `from` may be freed as soon as this returns.
  void upload(void* to, const void* from, std::int64_t bytes) {
    if (const std::int64_t place = place_in_page(bytes, used_of_host_); place >= 0) {
      std::memcpy(page().host + place, from, static_cast<std::size_t>(bytes));
      from = page().host + place;
    }
    send(to, from, bytes);
  }
  // The same from pinned memory, which must stay until the copy is done.
  void send(void* to, const void* from, std::int64_t bytes) {
    AFFLUX_CUDA(cudaMemcpyAsync(to, from, static_cast<std::size_t>(bytes), cudaMemcpyHostToDevice, stream_));
  }
  // Copies from the device to the host, after all earlier work of the stream, and waits for it.
  void download(void* to, const void* from, std::int64_t bytes) {
    AFFLUX_CUDA(cudaMemcpyAsync(to, from, static_cast<std::size_t>(bytes), cudaMemcpyDeviceToHost, stream_));
    wait();
  }
  // The piece is in use until all work before this call is done.
  void mark(DevicePiece& piece) const { piece.mark(stream_); }
  void wait(DevicePiece& piece) const { piece.wait(); }
  // Returns true if the device reads this memory of the host itself, as it does pinned memory.
  static bool reads_itself(const void* data, std::int64_t bytes) {
    const auto is_pinned = [](const void* address) {
      cudaPointerAttributes attributes{};
      if (cudaPointerGetAttributes(&attributes, address) != cudaSuccess) cudaGetLastError();
      return attributes.type == cudaMemoryTypeHost;
    };
    return is_pinned(data) && is_pinned(static_cast<const char*>(data) + bytes - 1);
  }
  // Copies on the device.
  void copy(void* to, const void* from, std::int64_t bytes) {
    AFFLUX_CUDA(cudaMemcpyAsync(to, from, static_cast<std::size_t>(bytes), cudaMemcpyDeviceToDevice, stream_));
  }
  // Returns memory for results: of the host, which the last kernel writes itself, or of the device if they are many.
  void* results(std::int64_t bytes) {
    const std::int64_t place = place_in_page(bytes, used_of_host_);
    return place < 0 ? allocate(bytes) : page().host + place;
  }
  // Waits for the stream, and copies the results.
  void fetch(void* to, const void* results, std::int64_t bytes) {
    if (page_ == nullptr) return download(to, results, bytes);
    const auto offset = reinterpret_cast<std::uintptr_t>(results) - reinterpret_cast<std::uintptr_t>(page_->host);
    if (offset >= static_cast<std::uintptr_t>(DevicePage::kBytes)) return download(to, results, bytes);
    wait();
    std::memcpy(to, results, static_cast<std::size_t>(bytes));
  }
  // Returns a flag that is 1, which kernels of this call may set to 0.
  std::int32_t* flag() {
    const auto flag = reinterpret_cast<std::int32_t*>(page().host);
    *flag = 1;
    return flag;
  }
  // Waits for the stream. Returns true if the flag is still 1.
  bool flag_holds() {
    wait();
    return *reinterpret_cast<const std::int32_t*>(page_->host) != 0;
  }
  template <class Body>
  void run(std::int64_t blocks, const Body& body) {
    if (blocks == 0) return;
    kernel<<<static_cast<unsigned>(blocks), Body::kThreads, 0, stream_>>>(body);
    AFFLUX_CUDA(cudaGetLastError());
  }

  static std::string why_not(std::int32_t device) {
    static std::atomic<int> known_count{0};  // every vector of a call is checked
    static const int told = pthread_atfork(nullptr, nullptr, [] { known_count = 0; });  // a child has no GPU
    static_cast<void>(told);
    int count = known_count;
    const cudaError_t error = count > 0 ? cudaSuccess : cudaGetDeviceCount(&count);
    known_count = error == cudaSuccess ? count : 0;
    if (error != cudaSuccess) {
      cudaGetLastError();
      return std::string("this machine has no GPU that CUDA can use: ") + cudaGetErrorString(error);
    }
    if (device >= 0 && device < count) return "";
    return "this machine has " + std::to_string(count) + " GPU" + (count == 1 ? "" : "s");
  }

 private:
  void wait() {
    AFFLUX_CUDA(cudaStreamSynchronize(stream_));
    waited_ = true;
  }
  // Returns the page of this call, which may then be used by its kernels and copies.
  DevicePage& page() {
    if (page_ == nullptr) {
      auto page = PieceStore<DevicePage>::of(where_.device).take(true);
      page->wait();  // a page that cannot be waited for is freed
      page_ = std::move(page);
    }
    waited_ = false;
    return *page_;
  }
  // Returns an offset in the page of as many bytes that are not in use yet; -1: there are none.
  static std::int64_t place_in_page(std::int64_t bytes, std::int64_t& used) {
    constexpr std::int64_t kAlignment = 256;
    const std::int64_t place = (used + kAlignment - 1) / kAlignment * kAlignment;
    if (bytes > DevicePage::kBytes - place) return -1;
    used = place + bytes;
    return place;
  }
  void give_back_page() {
    try {
      if (!waited_) page_->mark(stream_);
    } catch (...) {  // the device has failed; the next call says so
    }
    PieceStore<DevicePage>::of(where_.device).give_back(std::move(page_));
  }

  Where where_;
  cudaStream_t stream_;
  int before_ = 0;
  std::vector<void*> allocated_;
  std::unique_ptr<DevicePage> page_;
  std::int64_t used_of_host_ = sizeof(std::int32_t), used_of_device_ = 0;  // of the page, which begins with the flag
  bool waited_ = true;                                                     // false: the device may be using the page
};

}  // namespace afflux::cuda
