// The binary tree over superblocks (order.hpp), level by level; each block of threads processes one list of nodes.
#pragma once
#include "afflux/order.hpp"
#include "api/kernels.hpp"
#include "cuda/block.hpp"
#include "formula/reduce.hpp"

namespace afflux::cuda {

inline std::int64_t superblocks_of(std::int64_t size) { return (size + kSuperblock - 1) / kSuperblock; }

AFFLUX_DEVICE void join(double& left, double right) { left = left + right; }
AFFLUX_DEVICE void join(IngestSums& left, const IngestSums& right) { add_to(left, right); }

// The kernel that sets roots[k] to the root of list k; the nodes are overwritten.
template <class Node>
struct TreeBody {
  static constexpr int kThreads = 256;
  struct Shared {};

  Node* nodes;  // [list][count]
  std::int64_t count;
  Node* roots;

  template <class Block>
  AFFLUX_DEVICE void operator()(const Block& block, Shared&) const {
    Node* const list = nodes + block.index * count;
    for (std::int64_t apart = 1; apart < count; apart *= 2)
      block.each([&](int thread) {
        for (std::int64_t i = 2 * apart * thread; i + apart < count; i += 2 * apart * kThreads)
          join(list[i], list[i + apart]);
      });
    block.each([&](int thread) {
      if (thread == 0) roots[block.index] = list[0];
    });
  }
};

}  // namespace afflux::cuda
