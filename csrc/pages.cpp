#include "pages.hpp"

#include <pybind11/stl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdint>
#include <cstring>
#include <new>
#include <string>
#include <tuple>
#include <vector>

#include "release.hpp"

namespace py = pybind11;

namespace afflux::python {
namespace {

// Bytes of one read-ahead request. Of a larger request, Linux may read only the beginning.
constexpr std::size_t kPiece = 512 << 10;

#if defined(__linux__)
// Constants of Linux 5.14; older C libraries lack their names.
constexpr int kPopulateRead = 22, kPopulateWrite = 23;

// Memory that begins at the beginning of a page.
struct Pages {
  char* begin;
  std::size_t size;
};

std::size_t page_size() { return static_cast<std::size_t>(sysconf(_SC_PAGESIZE)); }

Pages pages_of(void* memory, std::size_t size) {
  const std::uintptr_t before = reinterpret_cast<std::uintptr_t>(memory) % page_size();
  return {static_cast<char*>(memory) - before, size + before};
}

// Replaces pages by a private copy at the same address. One system call swaps them: a reader on another thread sees the
// old or the new ones. Returns false, and changes nothing, if memory is short.
bool replace(void* pages, std::size_t size) {
  void* const copy = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (copy == MAP_FAILED) return false;
  std::memcpy(copy, pages, size);
  if (mremap(copy, size, size, MREMAP_MAYMOVE | MREMAP_FIXED, pages) != MAP_FAILED) return true;
  munmap(copy, size);
  return false;
}
#else
bool replace(void*, std::size_t) { return true; }  // nothing is mapped there
#endif

// Calls a function with the beginning of the memory and its bytes, without the GIL.
template <class Function, class... Arguments>
auto with_memory(const py::buffer& memory, const Function& function, Arguments... arguments) {
  const py::buffer_info info = memory.request();
  const GilRelease release;
  return function(info.ptr, static_cast<std::size_t>(info.size * info.itemsize), arguments...);
}

// Copies the pages of a mapped file, so that later writes to the file do not change existing views.
void detach_(const py::buffer& memory) {
  if (!with_memory(memory, replace)) throw std::bad_alloc();
}
void prefetch_(const py::buffer& memory) { with_memory(memory, prefetch); }
int populate_(const py::buffer& memory, bool write) { return with_memory(memory, populate, write); }

// Returns the index of the first of the files (path, inode, bytes) that was deleted, was replaced, or is shorter; -1 if
// there is none.
std::ptrdiff_t first_changed(const std::vector<std::tuple<std::string, std::uint64_t, std::int64_t>>& files) {
  const GilRelease release;
  for (std::size_t i = 0; i < files.size(); ++i) {
    const auto& [path, inode, bytes] = files[i];
    struct stat now{};
    if (lstat(path.c_str(), &now) != 0 || now.st_ino != inode || now.st_size < bytes)
      return static_cast<std::ptrdiff_t>(i);
  }
  return -1;
}

// Returns the address of contiguous memory, several times faster than NumPy does.
std::uintptr_t address_(py::handle memory) {
  Py_buffer view;
  if (PyObject_GetBuffer(memory.ptr(), &view, PyBUF_SIMPLE) != 0) throw py::error_already_set();
  const auto address = reinterpret_cast<std::uintptr_t>(view.buf);
  PyBuffer_Release(&view);
  return address;
}

}  // namespace

#if defined(__linux__)
void prefetch(void* memory, std::size_t size) {
  const Pages pages = pages_of(memory, size);
  for (std::size_t at = 0; at < pages.size; at += kPiece)
    madvise(pages.begin + at, std::min(kPiece, pages.size - at), MADV_WILLNEED);
}

int populate(void* memory, std::size_t size, bool write) {
  const Pages pages = pages_of(memory, size);
  if (madvise(pages.begin, pages.size, write ? kPopulateWrite : kPopulateRead) == 0 || errno == EINVAL) return 0;
  return errno;
}

bool copy_pages(void* memory, std::size_t size, bool readable) {
  const Pages pages = pages_of(memory, size);
  const std::size_t whole = (pages.size + page_size() - 1) / page_size() * page_size();
  if (readable && populate(pages.begin, pages.size, false) == 0 && replace(pages.begin, whole)) return true;
  mprotect(pages.begin, whole, PROT_NONE);
  return false;
}
#else
void prefetch(void*, std::size_t) {}
int populate(void*, std::size_t, bool) { return 0; }
bool copy_pages(void*, std::size_t, bool) { return true; }
#endif

void bind_pages(py::module_& module) {
  module.attr("PIECE") = kPiece;
  module.def("address", address_, py::arg("memory"));
  module.def("prefetch", prefetch_, py::arg("memory"));
  module.def("populate", populate_, py::arg("memory"), py::arg("write"));
  module.def("first_changed", first_changed, py::arg("files"));
  module.def("detach", detach_, py::arg("memory"));
}

}  // namespace afflux::python
