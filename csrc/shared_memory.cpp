#include "shared_memory.hpp"

#include <pybind11/numpy.h>

#include <algorithm>
#include <cstdint>
#include <vector>

#include "attributes.hpp"
#include "exchange.hpp"
#include "formats.hpp"

namespace py = pybind11;

namespace afflux::python {
namespace {

struct Range {
  std::uintptr_t begin, end;
  std::size_t list, index;
};

// Returns the address of a tensor that `described` does not know, or else that of the object itself.
std::uintptr_t address_of(py::handle array) {
  static const Attribute data_ptr("data_ptr");
  try {
    const py::object address = data_ptr.call_any(array);
    if (address) return address.cast<std::uintptr_t>();
  } catch (const py::error_already_set& error) {
    if (!error.matches(PyExc_Exception)) throw;
  } catch (const py::cast_error&) {
  }
  return reinterpret_cast<std::uintptr_t>(array.ptr());
}

// Returns the memory of an array: all of it if it is contiguous, else its first byte.
Range memory_of(py::handle array) {
  std::uintptr_t begin = 0;
  std::size_t bytes = 1;
  dlpack::Tensor tensor{};
  if (py::isinstance<py::array>(array)) {
    const auto view = py::reinterpret_borrow<py::array>(array);
    begin = reinterpret_cast<std::uintptr_t>(view.data());
    if ((view.flags() & py::array::c_style) != 0) bytes = static_cast<std::size_t>(view.nbytes());
  } else if (described(array, &tensor)) {
    begin = reinterpret_cast<std::uintptr_t>(tensor.data) + tensor.byte_offset;
    const std::int64_t size = elements(tensor.ndim, tensor.shape);
    if (size >= 0 && is_contiguous(tensor.ndim, tensor.shape, tensor.strides, 1))
      bytes = static_cast<std::size_t>(size) * ((tensor.dtype.bits * tensor.dtype.lanes + 7U) / 8U);
  } else {
    begin = address_of(array);
  }
  return {begin, begin + (begin == 0 ? 0 : bytes), 0, 0};
}

}  // namespace

std::optional<std::tuple<std::size_t, std::size_t, std::size_t, std::size_t>> shared_memory(const py::list& lists) {
  std::vector<Range> ranges;
  for (std::size_t list = 0; list < lists.size(); ++list) {
    const py::list arrays = lists[list];
    for (std::size_t i = 0; i < arrays.size(); ++i) {
      Range range = memory_of(PyList_GET_ITEM(arrays.ptr(), static_cast<Py_ssize_t>(i)));
      if (range.begin == range.end) continue;
      range.list = list;
      range.index = i;
      ranges.push_back(range);
    }
  }
  std::sort(ranges.begin(), ranges.end(),
            [](const Range& a, const Range& b) { return a.begin != b.begin ? a.begin < b.begin : a.list < b.list; });
  // The earlier range with the largest end. It suffices: an earlier range of another list that overlaps this one also
  // overlaps `last`, and was reported there.
  const Range* last = nullptr;
  for (const Range& range : ranges) {
    if (last != nullptr && range.begin < last->end && range.list != last->list) {
      const auto [first, second] =
          std::minmax(*last, range, [](const Range& a, const Range& b) { return a.list < b.list; });
      return std::tuple{first.list, first.index, second.list, second.index};
    }
    if (last == nullptr || range.end > last->end) last = &range;
  }
  return {};
}

}  // namespace afflux::python
