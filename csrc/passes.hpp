// Gradient scheduling: the clients that have entered in the current pass.
#pragma once
#include <pybind11/pybind11.h>

#include <cstdint>
#include <vector>

#include "values.hpp"

namespace afflux::python {

using Arrivals = std::vector<pybind11::object>;  // each an aggregation.arrivals.PendingArrival

// Ids are of the classes int and str themselves, so that their hashes and comparisons run no code of Python.
inline pybind11::handle client_of(const pybind11::object& arrival) { return PyTuple_GET_ITEM(arrival.ptr(), 0); }
inline std::int64_t version_of(const pybind11::object& arrival) { return count(PyTuple_GET_ITEM(arrival.ptr(), 1)); }

inline bool contains(const pybind11::dict& ids, pybind11::handle client) {
  const int found = PyDict_Contains(ids.ptr(), client.ptr());
  if (found < 0) throw pybind11::error_already_set();
  return found == 1;
}

// The pass over all clients. Copies share `order`, in which their first `entered` clients do not change.
struct Pass {
  std::int64_t num_clients;
  pybind11::list order;  // the clients that have entered; those in the buffer are last
  std::int64_t entered;
  pybind11::dict clients;       // those of `order`, as a set
  const Pass* begun = nullptr;  // of a draft: the pass whose clients have entered too, but in `order`

  std::int64_t left() const { return num_clients - entered; }
  bool has(pybind11::handle client) const {
    return contains(clients, client) || (begun != nullptr && begun->has(client));
  }
  // Calls `visit` with each reference.
  template <class Visit>
  void for_each(const Visit& visit) const {
    visit(order);
    visit(clients);
  }
  // Returns the next pass.
  Pass next() const { return {num_clients, pybind11::list(), 0, pybind11::dict()}; }
  // The client must not have entered before.
  void enter(pybind11::handle client) {
    put(clients, client, pybind11::none());
    if (PyList_Append(order.ptr(), client.ptr()) != 0) throw pybind11::error_already_set();
    ++entered;
  }
  // Takes the last `arrivals` clients out again.
  void leave(std::int64_t arrivals) {
    const Py_ssize_t end = PyList_GET_SIZE(order.ptr()), first = end - arrivals;
    for (Py_ssize_t i = first; i < end; ++i)
      if (PyDict_DelItem(clients.ptr(), PyList_GET_ITEM(order.ptr(), i)) != 0) throw pybind11::error_already_set();
    if (PyList_SetSlice(order.ptr(), first, end, nullptr) != 0) throw pybind11::error_already_set();
    entered -= arrivals;
  }
};

}  // namespace afflux::python
