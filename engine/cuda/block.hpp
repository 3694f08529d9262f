// The form of a kernel. Each kernel is written once, as phases of a block of threads, and runs on two kinds of Block:
//
//   on the device (device.hpp)    each(body) is body(own thread) and a barrier; an Each<T> is a register
//   on the host (emulated.hpp)    each(body) is a loop over the block's threads; an Each<T> is an array
//
// So the tests run the same bodies of kernels on machines without a GPU, one block after the other. A body is a struct
// with the kernel's arguments, `kThreads`, the block's shared memory `Shared`, perhaps `kBlocksTogether`, and
//
//   template <class Block> AFFLUX_DEVICE void operator()(const Block& block, Shared& shared) const
//
//   block.index                         the index of the block in the grid
//   block.each(body)                    calls body(thread) for all threads; then all threads may read what one wrote
//   block.each_in_warp(body)            the same, but then only the threads of one warp may read what one of them wrote
//   block.each_alone(body)              the same, but then no other thread may read what one wrote
//   block.butterfly(x, offset, join)    sets x[t] = join(x[t], x[t ^ offset]) within each warp
//   block.hadamard(x, offset)           sets x[t] = x[t] + x[t ^ offset], or x[t ^ offset] - x[t] if t has that bit
//   block.least(x), block.most(x)       set x[t] to the least or the largest float32 in the warp, none of them a NaN;
//                                       of zeros, -0.0 may count as the lesser
#pragma once
#include "formula/fn.hpp"

#if defined(__CUDACC__)
#define AFFLUX_DEVICE __device__ __forceinline__
#define AFFLUX_UNROLL_ON_DEVICE _Pragma("unroll")
#else
#define AFFLUX_DEVICE inline
#define AFFLUX_UNROLL_ON_DEVICE
#endif

namespace afflux::cuda {

constexpr int kWarp = 32;

// Tells the compiler that an address is in the global memory of the device, as every vector's address is. For an
// address that a kernel reads from a list, the compiler cannot know this, and would use generic accesses, which are
// slower.
template <class T>
AFFLUX_DEVICE const T* on_device(const void* address) {
#if defined(__CUDA_ARCH__)
  __builtin_assume(__isGlobal(address));
#endif
  return static_cast<const T*>(address);
}
template <class T>
AFFLUX_DEVICE T* on_device(void* address) {
#if defined(__CUDA_ARCH__)
  __builtin_assume(__isGlobal(address));
#endif
  return static_cast<T*>(address);
}

}  // namespace afflux::cuda
