// The checksums of the memory that a sweep writes, computed while the memory is in the cache of the thread that wrote
// it.
#pragma once
#include <vector>

#include "afflux/afflux.hpp"

namespace afflux {

// The checksums of one sweep. Threads extend different pieces at the same time.
class SweepChecksums {
 public:
  // The number of elements that are swept between two extensions of the checksums: the written memory stays in L2.
  static constexpr std::int64_t kStrip = 4 * kBlock;

  // Takes a pass whose outs are all set, and whose rows already have their new heads. `piece` is the number of elements
  // of each piece of the sweep: a superblock, or a divisor of it.
  SweepChecksums(const Pass& pass, std::int64_t piece, Checksums& checksums);
  // Adds the bytes of elements [begin, end) to the checksums, after the sweep has written them. They belong to one
  // piece, all of whose earlier elements were added.
  void extend(std::int64_t begin, std::int64_t end);
  // Joins the checksums of the pieces to those of the superblocks, after all elements were added.
  void finish() const;

 private:
  struct Vector {
    const unsigned char* data;
    Codec codec;
    std::uint32_t* crcs;  // of the superblocks
    std::vector<std::uint32_t> pieces;
  };

  void add(std::vector<std::uint32_t>& crcs, const void* data, Codec codec);
  std::int64_t offset(Codec codec, std::int64_t element) const;

  std::int64_t size_, piece_;
  std::vector<Vector> vectors_;
};

}  // namespace afflux
