#include "columns.hpp"

#include <pybind11/numpy.h>

#include <algorithm>
#include <cstdint>
#include <tuple>
#include <vector>

#include "ledger.hpp"
#include "values.hpp"

namespace py = pybind11;

namespace afflux::python {
namespace {

// Returns a read-only NumPy vector with element(tuple) for each tuple of the list.
template <class T, class Element>
py::array column(const py::list& tuples, const Element& element) {
  py::array_t<T> out(static_cast<py::ssize_t>(tuples.size()));
  T* const elements = out.mutable_data();
  for (std::size_t i = 0; i < tuples.size(); ++i) elements[i] = element(PyList_GET_ITEM(tuples.ptr(), i));
  py::detail::array_proxy(out.ptr())->flags &= ~py::detail::npy_api::NPY_ARRAY_WRITEABLE_;
  return out;
}

// Returns the arrivals in canonical order: by client (integers before texts), version pulled, and join.
py::list ordered(const py::list& waiting) {
  struct Place {
    control::Id client;
    std::int64_t version, join;
    py::handle arrival;
    bool operator<(const Place& other) const {
      return std::tie(client, version, join) < std::tie(other.client, other.version, other.join);
    }
  };
  std::vector<Place> places;
  for (const py::handle arrival : waiting) {
    check_tuple(arrival, kArrival, "an arrival");
    places.push_back(
        {id_of(item(arrival, kClient)), count_of(item(arrival, kVersion)), count_of(item(arrival, kJoin)), arrival});
  }
  std::sort(places.begin(), places.end());
  py::list arrivals(places.size());
  for (std::size_t i = 0; i < places.size(); ++i) arrivals[i] = places[i].arrival;
  return arrivals;
}

// Returns the columns of afflux/_engine.pyi.
py::tuple columns(const py::list& waiting, std::int64_t version) {
  const py::list arrivals = ordered(waiting);
  py::tuple clients(arrivals.size());
  py::list slots(arrivals.size());
  for (std::size_t i = 0; i < arrivals.size(); ++i) {
    const py::handle arrival = PyList_GET_ITEM(arrivals.ptr(), static_cast<Py_ssize_t>(i));
    clients[i] = item(arrival, kClient);
    slots[i] = item(arrival, kSlot);
  }
  const auto integers = [&](Fact fact) {
    return column<std::int64_t>(arrivals, [fact](py::handle arrival) { return count_of(item(arrival, fact)); });
  };
  const auto reals = [&](Fact fact) {
    return column<double>(arrivals, [fact](py::handle arrival) { return number_of(item(arrival, fact)); });
  };
  const auto staleness = [version](py::handle arrival) { return version - count_of(item(arrival, kVersion)); };
  return py::make_tuple(arrivals, slots, clients, integers(kVersion), column<std::int64_t>(arrivals, staleness),
                        integers(kExamples), reals(kLoss), reals(kNorm), integers(kLocalSteps), integers(kJoin));
}

}  // namespace

void bind_columns(py::module_& module) { module.def("columns", columns, py::arg("arrivals"), py::arg("version")); }

}  // namespace afflux::python
