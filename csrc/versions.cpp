#include "versions.hpp"

#include <sys/mman.h>

#include <cstdlib>
#include <new>
#include <string>

#include "afflux/afflux.hpp"

namespace py = pybind11;

namespace afflux::python {
namespace {

constexpr std::size_t kHugePage = std::size_t{1} << 21;

// Large vectors start on a huge page and ask for more of them: a sweep over many streams otherwise waits for the TLB.
float* allocate(std::int64_t size) {
  const std::size_t bytes = static_cast<std::size_t>(size) * sizeof(float);
  const std::size_t alignment = bytes >= kHugePage ? kHugePage : 64;
  const std::size_t rounded = (bytes + alignment - 1) / alignment * alignment;
  void* const data = std::aligned_alloc(alignment, rounded == 0 ? alignment : rounded);
  if (data == nullptr) throw std::bad_alloc();
#if defined(MADV_HUGEPAGE)
  if (alignment == kHugePage) madvise(data, rounded, MADV_HUGEPAGE);  // a wish: failure changes nothing but speed
#endif
  return static_cast<float*>(data);
}

}  // namespace

VersionPool::VersionPool(std::int64_t size, std::int64_t max_versions) : size_(size), max_versions_(max_versions) {
  if (size < 0 || max_versions < 0) throw Error("[VersionPool] size and max_versions must not be negative");
}

VersionPool::~VersionPool() {
  for (float* const data : free_) std::free(data);
}

float* VersionPool::take() {
  const std::lock_guard<std::mutex> lock(mutex_);
  if (!free_.empty()) {
    float* const data = free_.back();
    free_.pop_back();
    return data;
  }
  if (max_versions_ > 0 && allocated_ == max_versions_)
    throw Error("[pull] all " + std::to_string(max_versions_) +
                " versions of max_versions are held: release pulled params, or raise max_versions");
  free_.reserve(static_cast<std::size_t>(allocated_) + 1);  // so that give_back never allocates
  float* const data = allocate(size_);
  ++allocated_;
  return data;
}

void VersionPool::give_back(float* data) noexcept {
  const std::lock_guard<std::mutex> lock(mutex_);
  free_.push_back(data);
}

std::int64_t VersionPool::held() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return allocated_ - static_cast<std::int64_t>(free_.size());
}

std::int64_t VersionPool::allocated() const {
  const std::lock_guard<std::mutex> lock(mutex_);
  return allocated_;
}

void bind_versions(py::module_& module) {
  py::class_<VersionPool, std::shared_ptr<VersionPool>>(module, "VersionPool")
      .def(py::init<std::int64_t, std::int64_t>(), py::arg("size"), py::arg("max_versions"))
      .def_property_readonly("held", &VersionPool::held)
      .def_property_readonly("allocated", &VersionPool::allocated);
  py::class_<Version>(module, "Version", py::buffer_protocol())
      .def(py::init<std::shared_ptr<VersionPool>>(), py::arg("pool"))
      .def("freeze", &Version::freeze)
      .def_buffer(&Version::buffer);
}

}  // namespace afflux::python
