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

// The kernel that sets roots[k] to the root of list k; the nodes are overwritten. Each thread first joins the nodes of
// a subtree of its own, whose root it puts into shared memory.
template <class Node>
struct TreeBody {
  static constexpr int kThreads = 256;
  struct Shared {
    Node nodes[kThreads];
  };

  Node* nodes;  // [list][count]
  std::int64_t count;
  std::int64_t leaves;  // of the subtree of a thread: a power of 2, and at least count / kThreads
  Node* roots;

  template <class Block>
  AFFLUX_DEVICE void operator()(const Block& block, Shared& shared) const {
    block.each([&](int thread) {
      const std::int64_t first = leaves * thread, rest = count - first, size = rest < leaves ? rest : leaves;
      if (size <= 0) return;
      Node* const list = nodes + block.index * count + first;
      for (std::int64_t apart = 1; apart < size; apart *= 2)
        for (std::int64_t i = 0; i + apart < size; i += 2 * apart) join(list[i], list[i + apart]);
      shared.nodes[thread] = list[0];
    });
    const int subtrees = static_cast<int>((count + leaves - 1) / leaves);
    for (int apart = 1; apart < subtrees; apart *= 2)
      block.each([&](int thread) {
        if (thread % (2 * apart) == 0 && thread + apart < subtrees)
          join(shared.nodes[thread], shared.nodes[thread + apart]);
      });
    block.each_in_warp([&](int thread) {
      if (thread == 0) roots[block.index] = shared.nodes[0];
    });
  }
};

// Sets roots[k] to the root of list k, of `count` nodes each.
template <class Executor, class Node>
void join_lists(Executor& executor, Node* nodes, std::int64_t lists, std::int64_t count, Node* roots) {
  std::int64_t leaves = 1;
  while (leaves * TreeBody<Node>::kThreads < count) leaves *= 2;
  executor.run(lists, TreeBody<Node>{nodes, count, leaves, roots});
}

}  // namespace afflux::cuda
