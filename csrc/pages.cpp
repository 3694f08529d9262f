#include "pages.hpp"

#include <sys/mman.h>
#include <unistd.h>

#include <cerrno>
#include <cstdint>
#include <cstring>
#include <new>

#include "release.hpp"

namespace py = pybind11;

namespace afflux::python {
namespace {

// Linux 5.14; C libraries know the names later.
constexpr int kPopulateRead = 22, kPopulateWrite = 23;

// Returns 0, or the error number; EFAULT: an access would have been a SIGBUS. Systems that cannot tell do nothing.
int populate_(const py::buffer& memory, bool write) {
  const py::buffer_info info = memory.request();
#if defined(__linux__)
  const auto page = static_cast<std::uintptr_t>(sysconf(_SC_PAGESIZE));
  const auto begin = reinterpret_cast<std::uintptr_t>(info.ptr) / page * page;
  const auto end = reinterpret_cast<std::uintptr_t>(info.ptr) + static_cast<std::uintptr_t>(info.size * info.itemsize);
  const Release release;
  void* const from = reinterpret_cast<void*>(begin);
  if (!write) madvise(from, end - begin, MADV_WILLNEED);  // reads ahead in large pieces
  if (madvise(from, end - begin, write ? kPopulateWrite : kPopulateRead) == 0 || errno == EINVAL) return 0;
  return errno;
#else
  return 0;
#endif
}

#if defined(__linux__)
// The pages of a mapped file become a copy of this process's own, where they are: whoever writes to the file later does
// not change what holders of a view see. One system call swaps them, so that a reader on another thread sees either.
void detach_(const py::buffer& memory) {
  const py::buffer_info info = memory.request();
  const auto size = static_cast<std::size_t>(info.size * info.itemsize);
  const Release release;
  void* const copy = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (copy == MAP_FAILED) throw std::bad_alloc();
  std::memcpy(copy, info.ptr, size);
  if (mremap(copy, size, size, MREMAP_MAYMOVE | MREMAP_FIXED, info.ptr) == MAP_FAILED) {
    munmap(copy, size);
    throw std::bad_alloc();
  }
}
#else
void detach_(const py::buffer&) {}  // nothing is mapped there
#endif

}  // namespace

void bind_pages(py::module_& module) {
  module.def("populate", populate_, py::arg("memory"), py::arg("write"));
  module.def("detach", detach_, py::arg("memory"));
}

}  // namespace afflux::python
