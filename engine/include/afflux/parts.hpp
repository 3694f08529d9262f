// Vectors in parts: one piece of memory for each array of a model. `gram`, `inner` and `apply` read and write them
// where they are, on the CPU, and the results have the bits of flat vectors. On a GPU `ingest` copies parts into a flat
// slot.
#pragma once
#include "afflux/view.hpp"

namespace afflux {

struct Conversion;

// One part of a vector. As with POSIX's iovec, its memory is written only if the vector is.
struct PartView {
  void* data = nullptr;
  std::int64_t size = 0;
  Type type = Type::float32;
};

// The parts of a vector (View::parts). `borders` are the indices at which the parts begin, from 0 on, and then the size
// of the vector: one number more than there are parts. All vectors of a call that are in parts have the same borders.
// Parts may be empty.
//
// The parts of a vector that is written, and those of params and states, have the type of the view. Those of an update
// of `apply`, and of the vectors of `gram` and `inner`, may have any types: they are rounded to the type of the view,
// as `ingest` does for a slot of that type. With a conversion, the vector is what `ingest` would write into such a
// slot; the base of the conversion may be in parts too.
//
// Cost: parts are processed in place. Up to kBlock elements at a time are copied into the caches first if they are in
// neighbouring parts of fewer than 512 elements, in a block across borders (in `gram`, `inner`, and `apply` with
// encoded rows), or in a part that is converted. Scratch memory for each thread is kBlock elements of each vector in
// parts.
struct Parts {
  List<std::int64_t> borders{};
  List<PartView> list{};
  const Conversion* conversion = nullptr;
};

}  // namespace afflux
