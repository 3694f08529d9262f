// How a kernel is written here: once, as phases of a block of threads, and run by two kinds of Block.
//
//   on the device (device.hpp)    each(body) is body(own thread) and a barrier; an Each<T> is a register
//   on the host (emulated.hpp)    each(body) is a loop over the block's threads; an Each<T> is an array
//
// So the tests run the very bodies of the kernels, block by block in their own order, where there is no GPU. A body is
// a struct with the kernel's arguments, `kThreads`, the block's memory `Shared`, and
//
//   template <class Block> AFFLUX_DEVICE void operator()(const Block& block, Shared& shared) const
//
//   block.index              which block of the grid
//   block.each(body)         body(thread) for all threads; what one has written the others may read afterwards
//   block.each_in_warp(body) the same, but only threads of one warp may read
//   block.butterfly(x, offset, join)    x[t] = join(x[t], x[t ^ offset]) within each warp
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

// An address of the device's memory, as every vector's is. The compiler cannot know it of one that a kernel finds in a
// list, and would make its accesses of the kind that look first which memory is meant.
template <class T>
AFFLUX_DEVICE const T* on_device(const void* address) {
#if defined(__CUDA_ARCH__)
  __builtin_assume(__isGlobal(address));
#endif
  return static_cast<const T*>(address);
}

}  // namespace afflux::cuda
