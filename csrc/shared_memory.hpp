// A search for memory that arrays of different entries share, as replies of clients that are views of one model.
#pragma once
#include <pybind11/pybind11.h>

#include <cstddef>
#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

namespace afflux::python {

// Returns two arrays that have an element in common and are in different lists: for each its list and its index there;
// nothing, if there are none. Two arrays on a GPU share memory if they begin at one address, and two of a library
// without addresses if they are one object. O(n log n) in the number of arrays, O(n^2) for columns of one matrix.
std::optional<std::tuple<std::size_t, std::size_t, std::size_t, std::size_t>> shared_memory(
    const pybind11::list& lists);

// A contiguous array.
struct Memory {
  const void* data;
  std::int64_t bytes;
};
// Returns whether arrays of different lists share memory.
bool share_memory(const std::vector<std::vector<Memory>>& lists);

}  // namespace afflux::python
