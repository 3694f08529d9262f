// The order of every sum over the d elements of a vector. The order and the formulas fix each result bit for bit.
//
//   lane        element i of a block is added to partial sum i mod kLanes, in increasing i, from +0.0
//   block       its kLanes partial sums are added by halves: l += l+16, l += l+8, ... l += l+1
//   superblock  its blocks are added in order, from +0.0
//   vector      its superblocks are added by a binary tree over their global index; a missing right child adds nothing
//
// Threads, shards and devices compute aligned subtrees, so the division of the work changes no bit. Codec, rotation and
// checksum blocks must divide the superblock. The numbers must not change: files contain kOrderVersion.
//
// Measured on a sum of squares: 8 to 32 lanes and blocks of 1024 to 4096 are equally fast on SSE2, AVX2 and AVX-512; 64
// lanes are slower on SSE2. 32 lanes are one CUDA warp; on a GPU nothing was measured.
#pragma once
#include <cstdint>

namespace afflux {

constexpr int kOrderVersion = 1;
constexpr std::int64_t kLanes = 32;
constexpr std::int64_t kBlock = 2048;
constexpr std::int64_t kSuperblock = 65536;

static_assert(kBlock % kLanes == 0 && kSuperblock % kBlock == 0, "the order must nest");

}  // namespace afflux
