// Vectors in parts (afflux/parts.hpp): their checks, and sweeps over them by the kernels for flat vectors. A sweep goes
// from chunk to chunk. For a chunk inside a part, the view of the vector points so far before the part that the index
// of each element stays that of the whole vector. Any other chunk is copied into scratch memory, and back if it is
// written.
#pragma once
#include <algorithm>
#include <deque>
#include <memory>
#include <mutex>
#include <vector>

#include "api/kernels.hpp"
#include "api/overlap.hpp"

namespace afflux {
namespace check {

// The types that parts may have: that of their view (`exact`), or `any`, also with a conversion.
enum class PartTypes { exact, any };

// Checks a vector in parts.
void parts(const char* op, Name name, const View<const void>& vector, std::int64_t size, Overlaps& overlaps,
           PartTypes types);

// Check a vector that may be in parts, and add its memory to `overlaps`.
template <class T>
void read(const char* op, Name name, const View<T>& vector, std::int64_t size, Overlaps& overlaps,
          PartTypes types = PartTypes::exact) {
  vector.parts == nullptr ? view(op, name, vector, size, bytes(vector.type))
                          : parts(op, name, vector, size, overlaps, types);
  overlaps.read(name, vector);
}
inline void write(const char* op, Name name, const View<void>& vector, std::int64_t size, Overlaps& overlaps) {
  vector.parts == nullptr ? view(op, name, vector, size, bytes(vector.type))
                          : parts(op, name, vector, size, overlaps, PartTypes::exact);
  overlaps.write(name, vector);
}

}  // namespace check

// A range of elements that a kernel processes in one call.
struct Chunk {
  std::int64_t begin, end;
  std::int64_t part;  // of the first element
  bool inside;        // false: the range is in several parts
};

// A checked vector in parts.
class CutVector {
 public:
  explicit CutVector(const View<const void>& vector);

  Type type() const { return type_; }
  // Returns true if the vector is not the memory of its part.
  bool converts(std::int64_t part) const { return conversion_ != nullptr || parts_[index(part)].type != type_; }
  // Returns true if the vector lies in one piece of memory in the chunk.
  bool in_place(const Chunk& chunk) const { return chunk.inside && !converts(chunk.part); }
  // Returns the address that the vector would have if the part were a piece of a flat vector.
  std::uintptr_t base(std::int64_t part) const;
  // Copies the elements of the chunk to or from flat memory.
  void gather(const Chunk& chunk, void* to) const;
  void scatter(const Chunk& chunk, const void* from) const;

 private:
  template <class Body>
  void each_part(const Chunk& chunk, const Body& body) const;
  void copy(std::uintptr_t from, std::uintptr_t to, std::int64_t begin, std::int64_t end) const;
  static std::size_t index(std::int64_t part) { return static_cast<std::size_t>(part); }

  const Type type_;
  std::vector<Part> parts_;  // and the end
  const Conversion* const conversion_;
};

// The vectors in parts of a sweep; perhaps none, if a panel of `gram` has only flat ones.
class Cut {
 public:
  // `whole_blocks`: chunks begin at the beginnings of blocks.
  Cut(const Parts& parts, bool whole_blocks)
      : borders_(parts.borders),
        whole_blocks_(whole_blocks),
        converts_(static_cast<std::size_t>(parts.list.size), false) {}

  // Adds a vector; does nothing if it is flat.
  void add(const View<const void>& vector);
  const CutVector& operator[](std::size_t i) const { return vectors_[i]; }

  // Calls body(chunk) for the chunks of [begin, end), in order, each of at most `longest` elements.
  template <class Body>
  void each_chunk(std::int64_t begin, std::int64_t end, std::int64_t longest, const Body& body) const {
    std::int64_t part = part_of(begin);
    while (begin < end) {
      while (borders_.data[part + 1] <= begin) ++part;
      const Chunk chunk = next(begin, part, std::min(end, begin + longest));
      body(chunk);
      begin = chunk.end;
    }
  }

 private:
  std::int64_t part_of(std::int64_t element) const;
  Chunk next(std::int64_t begin, std::int64_t part, std::int64_t end) const;
  bool is_short(std::int64_t part) const { return borders_.data[part + 1] - borders_.data[part] < kShort; }

  // Shorter parts are copied together, which then costs less than a call of the kernel for each of them: measured with
  // 13 vectors on a Xeon.
  static constexpr std::int64_t kShort = 512;

  const List<std::int64_t> borders_;
  const bool whole_blocks_;
  std::deque<CutVector> vectors_;
  std::vector<bool> converts_;  // for each part: true if some vector is converted there
};

// The views of one thread, which are moved from chunk to chunk, with the scratch memory.
class MovedViews {
 public:
  explicit MovedViews(const Cut& cut) : cut_(cut) {}
  MovedViews(const MovedViews&) = delete;
  MovedViews& operator=(const MovedViews&) = delete;

  // Add the views in the order of Cut::add. `reads`, `writes`: false if the kernel leaves the vector alone.
  void add(View<const void>& view, bool reads = true);
  void add(View<void>& view);
  void add_output(View<void>& view, bool writes);
  // Moves the views to the chunk.
  void enter(const Chunk& chunk);
  // Writes back after the kernel.
  void leave(const Chunk& chunk);

 private:
  struct Moved {
    const CutVector* vector;
    const void** read;  // the pointer in the view; null: `written` is
    void** written;
    bool reads, writes;
    std::unique_ptr<unsigned char[]> memory;
    unsigned char* scratch;  // aligned, in `memory`
  };

  void add(const View<const void>& view, const void** read, void** written, bool reads, bool writes);

  const Cut& cut_;
  std::vector<Moved> moved_;
};

// One object for each thread of a sweep, all made before it.
template <class T>
class PerThread {
 public:
  template <class Make>
  PerThread(int threads, const Make& make) {
    for (int i = 0; i < threads; ++i) free_.push_back(make());
  }
  // Calls body with an object that no other thread uses meanwhile.
  template <class Body>
  void with(const Body& body) {
    std::unique_ptr<T> mine;
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      mine = std::move(free_.back());
      free_.pop_back();
    }
    body(*mine);
    const std::lock_guard<std::mutex> lock(mutex_);
    free_.push_back(std::move(mine));
  }

 private:
  std::mutex mutex_;
  std::vector<std::unique_ptr<T>> free_;
};

}  // namespace afflux
