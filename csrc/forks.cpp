#include "forks.hpp"

#include <fcntl.h>
#include <pthread.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <mutex>
#include <vector>

#include "pages.hpp"

namespace py = pybind11;

namespace afflux::python {

std::uint64_t forks = 0;

namespace {

// The number of forks by this process.
std::uint64_t children = 0;
// The number of `CopiedInChildren` that could not be copied for this process: reading their memory ends the process.
std::uint64_t uncopied = 0;

// A fork holds this mutex, so that a child never sees a table that changes. It is never waited for with Python code.
std::mutex table_mutex;
std::vector<int> table;

// Memory of a mapped file that its process may write to later. A child gets a private copy of it, as of its other
// memory.
class CopiedInChildren {
 public:
  explicit CopiedInChildren(const py::buffer& memory) : memory_(memory.request()) {
    const std::lock_guard<std::mutex> lock(table_mutex);
    all().push_back(this);
  }
  ~CopiedInChildren() {
    const std::lock_guard<std::mutex> lock(table_mutex);
    const auto place = std::find(all().begin(), all().end(), this);
    if (place != all().end()) all().erase(place);
  }
  CopiedInChildren(const CopiedInChildren&) = delete;
  CopiedInChildren& operator=(const CopiedInChildren&) = delete;

  // If the parent does not wait, the pages may change while they are copied: they cannot be read. Returns whether they
  // can.
  bool copy(bool parent_waits) const {
    return copy_pages(memory_.ptr, static_cast<std::size_t>(memory_.size * memory_.itemsize), parent_waits);
  }

  static std::vector<CopiedInChildren*>& all() {
    static std::vector<CopiedInChildren*> objects;
    return objects;
  }

 private:
  const py::buffer_info memory_;  // it keeps the file mapped
};

// While a child copies memory, its parent waits for the end of this pipe, and so does whatever would write there: a
// process forks with the GIL.
int copying[2] = {-1, -1};

void before_fork() {
  table_mutex.lock();
  copying[0] = copying[1] = -1;
#if defined(__linux__)  // elsewhere no file is mapped
  if (!CopiedInChildren::all().empty() && pipe2(copying, O_CLOEXEC) != 0) copying[0] = copying[1] = -1;
#endif
}

void after_fork_in_parent() {
  ++children;
  if (copying[0] >= 0) {
    ::close(copying[1]);
    char none;
    while (::read(copying[0], &none, 1) < 0 && errno == EINTR) continue;
    ::close(copying[0]);
  }
  table_mutex.unlock();
}

void after_fork_in_child() {
  ++forks;
  for (const int descriptor : table) ::close(descriptor);
  table.clear();
  for (const CopiedInChildren* const memory : CopiedInChildren::all()) uncopied += !memory->copy(copying[0] >= 0);
  CopiedInChildren::all().clear();
  if (copying[0] >= 0) {
    ::close(copying[0]);
    ::close(copying[1]);
  }
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
  pthread_atfork(before_fork, after_fork_in_parent, after_fork_in_child);
  module.attr("forks") = py::memoryview::from_buffer(&forks, {1}, {sizeof forks}, true);
  module.attr("children") = py::memoryview::from_buffer(&children, {1}, {sizeof children}, true);
  module.attr("uncopied") = py::memoryview::from_buffer(&uncopied, {1}, {sizeof uncopied}, true);
  module.def("close_in_children", close_in_children, py::arg("descriptor"));
  module.def("close_descriptor", close_descriptor, py::arg("descriptor"));
  py::class_<CopiedInChildren>(module, "CopiedInChildren").def(py::init<const py::buffer&>(), py::arg("memory"));
}

}  // namespace afflux::python
