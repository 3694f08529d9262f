// A pass of which some vectors are in parts: `apply` runs its kernels chunk by chunk, on copies of the pass.
#pragma once
#include <memory>
#include <vector>

#include "afflux/pass.hpp"
#include "api/parts.hpp"
#include "cpu/parallel_for.hpp"

namespace afflux {

// A copy of a pass, with copies of its lists of vectors.
class PassCopy {
 public:
  explicit PassCopy(const Pass& pass)
      : pass_(pass),
        updates_(copied(pass.combine.updates)),
        states_(copied(pass.step.states)),
        states_out_(copied(pass.step.outs)),
        vectors_(copied(pass.rule_vectors.vectors)),
        vectors_out_(copied(pass.rule_vectors.outs)) {
    pass_.combine.updates.data = updates_.data();
    pass_.step.states.data = states_.data();
    pass_.step.outs.data = states_out_.data();
    pass_.rule_vectors.vectors.data = vectors_.data();
    pass_.rule_vectors.outs.data = vectors_out_.data();
  }
  PassCopy(const PassCopy&) = delete;
  PassCopy& operator=(const PassCopy&) = delete;

  const Pass& pass() const { return pass_; }
  // Calls read(view) for all vectors that the kernels read, and write(view, written) for those that they may write.
  template <class Read, class Write>
  void each_vector(const Read& read, const Write& write) {
    read(pass_.params);
    write(pass_.out, true);
    for (auto& view : updates_) read(view);
    for (auto* const list : {&states_, &vectors_})
      for (auto& view : *list) read(view);
    for (auto& view : states_out_) write(view, true);
    for (auto& view : vectors_out_) write(view, pass_.rule_vectors.next.size > 0);
  }

 private:
  template <class View>
  static std::vector<View> copied(const List<View>& list) {
    return {list.data, list.data + list.size};
  }

  Pass pass_;
  std::vector<View<const void>> updates_;
  std::vector<View<void>> states_, states_out_, vectors_, vectors_out_;
};

// A pass with vectors in parts, and the copies whose views the threads move.
class CutPass {
 public:
  CutPass(const Pass& pass, const Parts& parts, int threads)
      : size_(pass.params.size),
        cut_(cut_of(pass, parts)),
        copies_(threads, [&] { return std::make_unique<Moved>(pass, cut_); }) {}

  // Calls body(pass, begin, end) for chunks of [begin, end).
  template <class Body>
  void each_chunk(std::int64_t begin, std::int64_t end, const Body& body) {
    copies_.with([&](Moved& moved) {
      cut_.each_chunk(begin, end, kSuperblock, [&](const Chunk& chunk) { moved.with(chunk, body); });
    });
  }
  // Does the same for all elements, on up to `threads` threads. Chunks inside a part are counted from its beginning, so
  // that they are aligned as the part is.
  template <class Body>
  void each_chunk(int threads, const Body& body) {
    std::vector<Chunk> chunks;
    cut_.each_chunk(0, size_, piece_size(size_, threads), [&](const Chunk& chunk) { chunks.push_back(chunk); });
    parallel_for(static_cast<std::int64_t>(chunks.size()), threads, [&](std::int64_t i) {
      copies_.with([&](Moved& moved) { moved.with(chunks[static_cast<std::size_t>(i)], body); });
    });
  }

 private:
  class Moved {
   public:
    Moved(const Pass& pass, const Cut& cut) : copy_(pass), views_(cut) {
      copy_.each_vector([&](auto& view) { views_.add(view); },
                        [&](View<void>& view, bool written) { views_.add_output(view, written); });
    }
    template <class Body>
    void with(const Chunk& chunk, const Body& body) {
      views_.enter(chunk);
      body(copy_.pass(), chunk.begin, chunk.end);
      views_.leave(chunk);
    }

   private:
    PassCopy copy_;
    MovedViews views_;
  };

  static Cut cut_of(const Pass& pass, const Parts& parts) {
    const bool encoded = pass.calibrate.kind != Calibration::none &&
                         pass.calibrate.codec != exact_codec(Type::float32) &&
                         pass.calibrate.codec != exact_codec(Type::float64);
    Cut cut(parts, encoded);
    const auto add = [&](const View<const void>& view, bool = false) { cut.add(view); };
    PassCopy(pass).each_vector(add, add);
    return cut;
  }

  const std::int64_t size_;
  const Cut cut_;
  PerThread<Moved> copies_;
};

}  // namespace afflux
