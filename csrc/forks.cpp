#include "forks.hpp"

#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <mutex>
#include <vector>

namespace py = pybind11;

namespace afflux::python {

std::uint64_t forks = 0;

namespace {

// The number of forks by this process.
std::uint64_t children = 0;

// A fork holds this mutex, so that a child never sees a table that changes. It is never waited for with Python code.
std::mutex table_mutex;
std::vector<int> table;

void close_all_in_child() {
  ++forks;
  for (const int descriptor : table) ::close(descriptor);
  table.clear();
  table_mutex.unlock();
}

void close_in_children(int descriptor) {
  const std::lock_guard<std::mutex> lock(table_mutex);
  table.push_back(descriptor);
}

// Does nothing if the descriptor is not in the table, as in a child: another file may have its number now.
void close_descriptor(int descriptor) {
  const std::lock_guard<std::mutex> lock(table_mutex);
  const auto place = std::find(table.begin(), table.end(), descriptor);
  if (place == table.end()) return;
  table.erase(place);
  ::close(descriptor);
}

}  // namespace

void bind_forks(py::module_& module) {
  pthread_atfork([] { table_mutex.lock(); },
                 [] {
                   ++children;
                   table_mutex.unlock();
                 },
                 close_all_in_child);
  module.attr("forks") = py::memoryview::from_buffer(&forks, {1}, {sizeof forks}, true);
  module.attr("children") = py::memoryview::from_buffer(&children, {1}, {sizeof children}, true);
  module.def("close_in_children", close_in_children, py::arg("descriptor"));
  module.def("close_descriptor", close_descriptor, py::arg("descriptor"));
}

}  // namespace afflux::python
