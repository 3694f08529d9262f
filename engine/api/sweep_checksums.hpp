// The checksums of the memory that a sweep writes, computed while it is in the cache of the thread that has written it.
#pragma once
#include <vector>

#include "afflux/afflux.hpp"

namespace afflux {

class SweepChecksums {
 public:
  // Elements that are swept before their checksums go on: what they are written to stays in L2.
  static constexpr std::int64_t kStrip = 4 * kBlock;

  // Every place that the pass writes to is spelled out, and heads of rows are written. The sweep goes by pieces of so
  // many elements, which divide a superblock, or are one.
  SweepChecksums(const Pass& pass, std::int64_t piece, Checksums& checksums);
  // The sweep has written elements begin to end, which belong to one piece, whose earlier ones were taken.
  void extend(std::int64_t begin, std::int64_t end);
  // All pieces were taken.
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
