// ingest and gram on a Machine: a device (device.hpp) or the host in its place (emulated.hpp).
#pragma once
#include "cuda/gram.hpp"
#include "cuda/ingest.hpp"
#include "cuda/staging.hpp"
#include "cuda/tree.hpp"

namespace afflux::cuda {

inline std::int64_t superblocks_of(std::int64_t size) { return (size + kSuperblock - 1) / kSuperblock; }

template <class Machine, class T>
IngestSums ingest_into(Machine& machine, const Part* first, const Part* last, const View<void>& slot) {
  const std::int64_t count = superblocks_of(slot.size);
  Staging staging;
  const std::int64_t parts = staging.add(first, last - first + 1);
  const auto nodes = static_cast<IngestSums*>(machine.allocate(count * static_cast<std::int64_t>(sizeof(IngestSums))));
  staging.upload(machine);
  machine.run(count,
              IngestBody<T>{staging.at<const Part>(parts), last - first, static_cast<T*>(slot.data), slot.size, nodes});
  machine.run(1, TreeBody<IngestSums>{nodes, count, nodes});
  IngestSums root;
  machine.download(&root, nodes, sizeof root);
  return root;
}

template <class Machine>
IngestSums ingest(const Where& where, const Part* first, const Part* last, const View<void>& slot) {
  Machine machine(where);
  if (slot.type == Type::float64) return ingest_into<Machine, double>(machine, first, last, slot);
  if (slot.type == Type::bfloat16) return ingest_into<Machine, Bfloat16>(machine, first, last, slot);
  return ingest_into<Machine, float>(machine, first, last, slot);
}

template <class Machine, class T>
void gram_of(const Where& where, const GramPanels& panels, double* sums) {
  Machine machine(where);
  const std::int64_t size = panels.left[0].size, superblocks = superblocks_of(size);
  const std::int64_t pairs = panels.left_count * panels.right_count, bytes = pairs * 8;
  Staging staging;
  const std::int64_t left = staging.add(panels.left, panels.left_count);
  const std::int64_t right = panels.left == panels.right ? left : staging.add(panels.right, panels.right_count);
  const auto nodes = static_cast<double*>(machine.allocate(bytes * superblocks));
  const auto roots = static_cast<double*>(machine.allocate(bytes));
  staging.upload(machine);
  const GramPanels staged{staging.at<const View<const void>>(left), staging.at<const View<const void>>(right),
                          panels.left_count, panels.right_count};
  const GramTiles tiles(panels);
  machine.run(superblocks * tiles.groups, GramBody<T>{staged, tiles, size, superblocks, nodes});
  machine.run(pairs, TreeBody<double>{nodes, superblocks, roots});
  machine.download(sums, roots, bytes);
}

template <class Machine>
void gram(const Where& where, const GramPanels& panels, double* sums) {
  const Type type = panels.left[0].type;
  bool mixed = false;
  for (std::int64_t i = 0; i < panels.left_count; ++i) mixed = mixed || panels.left[i].type != type;
  for (std::int64_t i = 0; i < panels.right_count; ++i) mixed = mixed || panels.right[i].type != type;
  if (mixed) return gram_of<Machine, Mixed>(where, panels, sums);
  if (type == Type::float64) return gram_of<Machine, double>(where, panels, sums);
  if (type == Type::bfloat16) return gram_of<Machine, Bfloat16>(where, panels, sums);
  gram_of<Machine, float>(where, panels, sums);
}

}  // namespace afflux::cuda
