// The binary tree over superblocks (see order.hpp), cut into aligned subtrees that threads take one at a time.
#pragma once
#include <cstdint>
#include <vector>

#include "afflux/order.hpp"
#include "cpu/parallel_for.hpp"

namespace afflux {

// Returns the largest power of two below count (count >= 2): a node's left subtree is complete.
inline std::int64_t left_part(std::int64_t count) {
  std::int64_t left = 1;
  while (left * 2 < count) left *= 2;
  return left;
}

// Computes the subtree of `count` superblocks from `first` on. leaf(superblock, out) fills a node, and join(left,
// right) adds right to left. The recursion has depth log2(count).
template <class Node, class Leaf, class Join>
void subtree(std::int64_t first, std::int64_t count, const Leaf& leaf, const Join& join, Node& out) {
  if (count == 1) return leaf(first, out);
  const std::int64_t left = left_part(count);
  subtree(first, left, leaf, join, out);
  Node right = out;
  subtree(first + left, count - left, leaf, join, right);
  join(out, right);
}

// Returns the root of the tree over d elements. `node` is the value for d = 0, and the initial value of every node.
template <class Node, class Leaf, class Join>
Node tree(std::int64_t d, int num_threads, const Node& node, const Leaf& leaf, const Join& join) {
  constexpr std::int64_t kMostChunks = 64;
  const std::int64_t superblocks = (d + kSuperblock - 1) / kSuperblock;
  if (superblocks == 0) return node;
  std::int64_t chunk = 1;
  while (chunk * kMostChunks < superblocks) chunk *= 2;
  const std::int64_t chunks = (superblocks + chunk - 1) / chunk;
  std::vector<Node> nodes(static_cast<std::size_t>(chunks), node);
  parallel_for(chunks, num_threads, [&](std::int64_t i) {
    const std::int64_t first = i * chunk;
    const std::int64_t count = first + chunk < superblocks ? chunk : superblocks - first;
    subtree(first, count, leaf, join, nodes[static_cast<std::size_t>(i)]);
  });
  if (chunks == 1) return nodes.front();
  Node root = node;
  const auto leaf_of_chunk = [&](std::int64_t i, Node& out) { out = nodes[static_cast<std::size_t>(i)]; };
  // In the engine's floating-point mode, as the nodes.
  parallel_for(1, 1, [&](std::int64_t) { subtree(0, chunks, leaf_of_chunk, join, root); });
  return root;
}

}  // namespace afflux
