// The executor of kernels on a device: blocks of threads (block.hpp), memory and stream, by the CUDA runtime.
#pragma once
#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <mutex>
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
  template <class T, class Join>
  __device__ __forceinline__ void butterfly(Each<T>& x, int offset, const Join& join) const {
    x.value = join(x.value, __shfl_xor_sync(0xFFFFFFFFu, x.value, offset));
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

// Pages of pinned memory of the host, which every device can write. A page is kept for later calls.
class Pages {
 public:
  static constexpr std::int64_t kBytes = 4096;

  static Pages& all() {
    static Pages* const pages = new Pages;  // never deleted: the driver may end before static objects do
    return *pages;
  }
  void* take() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      if (!free_.empty()) {
        void* const page = free_.back();
        free_.pop_back();
        return page;
      }
    }
    void* page = nullptr;
    AFFLUX_CUDA(cudaHostAlloc(&page, kBytes, cudaHostAllocPortable | cudaHostAllocMapped));
    return page;
  }
  void give_back(void* page) {
    const std::lock_guard<std::mutex> lock(mutex_);
    free_.push_back(page);
  }

 private:
  std::mutex mutex_;
  std::vector<void*> free_;
};

// Pinned memory of the host, and as much of the current device.
class DevicePiece {
 public:
  DevicePiece() : DevicePiece(nullptr) {  // so that an exception frees what is allocated
    AFFLUX_CUDA(cudaEventCreateWithFlags(&read, cudaEventDisableTiming));
    AFFLUX_CUDA(cudaMalloc(&device, static_cast<std::size_t>(kPieceBytes)));
    AFFLUX_CUDA(cudaHostAlloc(&host, static_cast<std::size_t>(kPieceBytes), cudaHostAllocPortable));
  }
  ~DevicePiece() {
    if (host != nullptr) cudaFreeHost(host);
    if (device != nullptr) cudaFree(device);
    if (read != nullptr) cudaEventDestroy(read);
  }
  DevicePiece(const DevicePiece&) = delete;
  DevicePiece& operator=(const DevicePiece&) = delete;

  unsigned char *host = nullptr, *device = nullptr;
  cudaEvent_t read = nullptr;  // after it, the host may write the piece

 private:
  explicit DevicePiece(std::nullptr_t) {}
};

// One call's work on a stream. The destructor frees the allocated memory, in the order of the stream.
class DeviceExecutor {
 public:
  using Piece = DevicePiece;

  explicit DeviceExecutor(const Where& where) : where_(where), stream_(static_cast<cudaStream_t>(where.stream)) {
    AFFLUX_CUDA(cudaGetDevice(&before_));
    AFFLUX_CUDA(cudaSetDevice(where.device));
  }
  ~DeviceExecutor() {
    for (void* const memory : allocated_) cudaFreeAsync(memory, stream_);
    cudaSetDevice(before_);
  }
  DeviceExecutor(const DeviceExecutor&) = delete;
  DeviceExecutor& operator=(const DeviceExecutor&) = delete;

  void* allocate(std::int64_t bytes) {
    void* memory = nullptr;
    if (bytes == 0) return memory;  // CUDA refuses it
    allocated_.reserve(allocated_.size() + 1);
    AFFLUX_CUDA(
        cudaMallocFromPoolAsync(&memory, static_cast<std::size_t>(bytes), scratch_pool(where_.device), stream_));
    allocated_.push_back(memory);
    return memory;
  }
  // Copies from the host to the device. The memory `from` may be freed as soon as this returns.
  void upload(void* to, const void* from, std::int64_t bytes) {
    AFFLUX_CUDA(cudaMemcpyAsync(to, from, static_cast<std::size_t>(bytes), cudaMemcpyHostToDevice, stream_));
  }
  // Copies from the device to the host, after all earlier work of the stream, and waits for it.
  void download(void* to, const void* from, std::int64_t bytes) {
    AFFLUX_CUDA(cudaMemcpyAsync(to, from, static_cast<std::size_t>(bytes), cudaMemcpyDeviceToHost, stream_));
    AFFLUX_CUDA(cudaStreamSynchronize(stream_));
  }
  // Copies from memory of the host that the device reads itself, and does not wait.
  void send(void* to, const void* from, std::int64_t bytes) { upload(to, from, bytes); }
  // The piece is in use until all work before this call is done.
  void mark(DevicePiece& piece) { AFFLUX_CUDA(cudaEventRecord(piece.read, stream_)); }
  void wait(DevicePiece& piece) { AFFLUX_CUDA(cudaEventSynchronize(piece.read)); }
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
  // Returns memory for the results of this call, at most once: a page of the host, which the last kernel writes itself,
  // or memory of the device if they are larger.
  void* results(std::int64_t bytes) {
    if (bytes > Pages::kBytes) return allocate(bytes);
    return page_ = Pages::all().take();
  }
  // Waits for the stream, and copies the results. A page that was not waited for is not used again.
  void fetch(void* to, const void* results, std::int64_t bytes) {
    if (page_ == nullptr) return download(to, results, bytes);
    AFFLUX_CUDA(cudaStreamSynchronize(stream_));
    std::memcpy(to, page_, static_cast<std::size_t>(bytes));
    Pages::all().give_back(page_);
  }
  // Returns a flag that is 1, which kernels of this call may set to 0.
  std::int32_t* flag() {
    const auto flag = static_cast<std::int32_t*>(results(sizeof(std::int32_t)));
    *flag = 1;
    return flag;
  }
  // Waits for the stream. Returns true if the flag is still 1.
  bool flag_holds() {
    std::int32_t flag = 0;
    fetch(&flag, page_, sizeof flag);
    return flag != 0;
  }
  template <class Body>
  void run(std::int64_t blocks, const Body& body) {
    if (blocks == 0) return;
    kernel<<<static_cast<unsigned>(blocks), Body::kThreads, 0, stream_>>>(body);
    AFFLUX_CUDA(cudaGetLastError());
  }

  static std::string why_not(std::int32_t device) {
    int count = 0;
    const cudaError_t error = cudaGetDeviceCount(&count);
    if (error != cudaSuccess) {
      cudaGetLastError();
      return std::string("this machine has no GPU that CUDA can use: ") + cudaGetErrorString(error);
    }
    if (device >= 0 && device < count) return "";
    return "this machine has " + std::to_string(count) + " GPU" + (count == 1 ? "" : "s");
  }

 private:
  Where where_;
  cudaStream_t stream_;
  int before_ = 0;
  std::vector<void*> allocated_;
  void* page_ = nullptr;
};

}  // namespace afflux::cuda
