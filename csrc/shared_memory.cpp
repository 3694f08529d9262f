#include "shared_memory.hpp"

#include <pybind11/numpy.h>

#include <algorithm>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "attributes.hpp"
#include "exchange.hpp"
#include "formats.hpp"

namespace py = pybind11;

namespace afflux::python {
namespace {

// The addresses from the first to the last byte of an array. Between them may lie bytes of others.
struct Range {
  std::uintptr_t begin, end;
  bool is_whole;  // no other byte lies between
  std::size_t list, index;
};

// Returns the address of an array on a GPU or of a tensor that `described` does not know, or else that of the object.
std::uintptr_t address_of(py::handle array) {
  static const Attribute data_ptr("data_ptr"), interface("__cuda_array_interface__");
  try {
    if (const py::object address = data_ptr.call_any(array)) return address.cast<std::uintptr_t>();
    if (const py::object facts = interface.of_any(array))
      return facts["data"].attr("__getitem__")(0).cast<std::uintptr_t>();
  } catch (const py::error_already_set& error) {
    if (!error.matches(PyExc_Exception)) throw;
  } catch (const py::cast_error&) {
  }
  return reinterpret_cast<std::uintptr_t>(array.ptr());
}

// Returns a NumPy view of the bytes of an array on the host; null for other arrays.
py::array bytes_of(py::handle array) {
  dlpack::Tensor tensor{};
  if (py::isinstance<py::array>(array)) return py::reinterpret_borrow<py::array>(array);
  if (!described(array, &tensor)) return py::reinterpret_steal<py::array>(py::handle());
  const auto item = static_cast<py::ssize_t>((tensor.dtype.bits * tensor.dtype.lanes + 7U) / 8U);
  std::vector<py::ssize_t> shape(tensor.shape, tensor.shape + tensor.ndim), strides(shape.size(), item);
  for (std::size_t i = shape.size(); i-- > 0;)
    if (tensor.strides != nullptr)
      strides[i] = static_cast<py::ssize_t>(tensor.strides[i]) * item;
    else if (i + 1 < shape.size())
      strides[i] = strides[i + 1] * shape[i + 1];
  auto* const begin = static_cast<char*>(tensor.data) + tensor.byte_offset;
  return py::array(py::dtype("V" + std::to_string(item)), std::move(shape), std::move(strides), begin, array);
}

// Returns the range of elements of `item` bytes with these strides, in units of `unit` bytes.
template <class Int>
Range range_of(const void* data, std::int64_t dimensions, const Int* shape, const Int* strides, std::int64_t unit,
               std::int64_t item) {
  auto begin = reinterpret_cast<std::uintptr_t>(data), end = begin + static_cast<std::uintptr_t>(item);
  std::int64_t bytes = data == nullptr ? 0 : item;
  for (std::int64_t i = 0; i < dimensions && bytes > 0; ++i) {
    bytes *= shape[i];
    const std::int64_t reach = (shape[i] - 1) * strides[i] * unit;
    (reach < 0 ? begin : end) += static_cast<std::uintptr_t>(reach);
  }
  if (bytes <= 0) return {begin, begin, true, 0, 0};
  return {begin, end, end - begin == static_cast<std::uintptr_t>(bytes), 0, 0};
}

Range range_of(py::handle array) {
  dlpack::Tensor tensor{};
  if (py::isinstance<py::array>(array)) {
    const auto view = py::reinterpret_borrow<py::array>(array);
    return range_of(view.data(), view.ndim(), view.shape(), view.strides(), 1, view.itemsize());
  }
  if (described(array, &tensor)) {
    const char* const begin = static_cast<char*>(tensor.data) + tensor.byte_offset;
    const std::int64_t item = (tensor.dtype.bits * tensor.dtype.lanes + 7U) / 8U;
    const std::int64_t size = elements(tensor.ndim, tensor.shape);
    constexpr std::int64_t kNext = 1;
    if (tensor.strides == nullptr) return range_of(begin, 1, &size, &kNext, item, item);
    return range_of(begin, tensor.ndim, tensor.shape, tensor.strides, item, item);
  }
  const std::uintptr_t address = address_of(array);
  return {address, address + (address == 0 ? 0 : 1), true, 0, 0};
}

// Returns whether two arrays have an element in common, if their ranges overlap. True where that is too hard to say.
bool overlap(py::handle array, py::handle other) {
  static const std::int64_t kMostWork = 1'000'000;
  const py::object numpy = py::module_::import("numpy");
  try {
    return numpy.attr("shares_memory")(bytes_of(array), bytes_of(other), kMostWork).cast<bool>();
  } catch (const py::error_already_set& error) {
    if (!error.matches(PyExc_RuntimeError)) throw;
    return true;
  }
}

// Returns two ranges of different lists that overlap; nothing, if there are none. `overlap` says whether two arrays do
// whose ranges overlap, if other bytes lie between their own.
template <class Overlap>
std::optional<std::pair<Range, Range>> overlapping(std::vector<Range> ranges, const Overlap& overlap) {
  std::sort(ranges.begin(), ranges.end(),
            [](const Range& a, const Range& b) { return a.begin != b.begin ? a.begin < b.begin : a.list < b.list; });
  std::vector<const Range*> open;  // the earlier ranges that end after this one begins
  for (const Range& range : ranges) {
    const auto has_ended = [&](const Range* earlier) { return earlier->end <= range.begin; };
    open.erase(std::remove_if(open.begin(), open.end(), has_ended), open.end());
    for (const Range* earlier : open)
      if (earlier->list != range.list && ((earlier->is_whole && range.is_whole) || overlap(*earlier, range)))
        return std::minmax(*earlier, range, [](const Range& a, const Range& b) { return a.list < b.list; });
    open.push_back(&range);
  }
  return {};
}

}  // namespace

bool share_memory(const std::vector<std::vector<Memory>>& lists) {
  std::vector<Range> ranges;
  for (std::size_t i = 0; i < lists.size(); ++i)
    for (const Memory& array : lists[i]) {
      const auto begin = reinterpret_cast<std::uintptr_t>(array.data);
      if (array.bytes > 0) ranges.push_back({begin, begin + static_cast<std::uintptr_t>(array.bytes), true, i, 0});
    }
  return overlapping(std::move(ranges), [](const Range&, const Range&) { return true; }).has_value();
}

std::optional<std::tuple<std::size_t, std::size_t, std::size_t, std::size_t>> shared_memory(const py::list& lists) {
  std::vector<Range> ranges;
  for (std::size_t list = 0; list < lists.size(); ++list) {
    const py::list arrays = lists[list];
    for (std::size_t i = 0; i < arrays.size(); ++i) {
      Range range = range_of(PyList_GET_ITEM(arrays.ptr(), static_cast<Py_ssize_t>(i)));
      if (range.begin == range.end) continue;
      range.list = list;
      range.index = i;
      ranges.push_back(range);
    }
  }
  const auto array_of = [&](const Range& range) {
    return py::handle(PyList_GET_ITEM(lists[range.list].ptr(), static_cast<Py_ssize_t>(range.index)));
  };
  const auto pair = overlapping(std::move(ranges), [&](const Range& first, const Range& second) {
    return overlap(array_of(first), array_of(second));
  });
  if (!pair) return {};
  const auto& [first, second] = *pair;
  return std::tuple{first.list, first.index, second.list, second.index};
}

}  // namespace afflux::python
