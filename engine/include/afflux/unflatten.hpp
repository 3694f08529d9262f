// The arrays of a model, which `unflatten` writes.
#pragma once
#include "afflux/view.hpp"

namespace afflux {

// The element types of a model's arrays: those of vectors, with the numbers of Type, and others for counters and masks.
enum class Number : std::int32_t {
  float32 = 0,
  float64 = 1,
  float16 = 2,
  bfloat16 = 3,
  boolean = 4,
  int8 = 5,
  uint8 = 6,
  int16 = 7,
  uint16 = 8,
  int32 = 9,
  uint32 = 10,
  int64 = 11,
  uint64 = 12
};

// A contiguous array on the host, aligned to the size of an element.
struct Target {
  void* data = nullptr;
  std::int64_t size = 0;
  Number type = Number::float32;
};

// A flat vector of float32 or float64 on the host, and the arrays that get its elements, one array after the other.
struct Unflattened {
  View<const void> vector;
  List<Target> arrays;
};

// Copies each vector into its arrays, which have as many elements as the vector. Values are rounded to nearest, ties to
// even; float64 is rounded to float32 before it is rounded to a type of 16 bits. Arrays of integers get the nearest
// integers, ties to even. The arrays must overlap neither each other nor a vector. Throws Error, too, for a value that
// an array of integers or booleans cannot hold.
//
// `dry`: checks the arguments and the values, and writes nothing.
//
// Cost: each byte of a vector is read once (twice for arrays of integers), and each byte of an array is written once.
void unflatten(List<Unflattened> vectors, int num_threads = 1, bool dry = false);

}  // namespace afflux
