#include "row_check.hpp"

#include <cstring>
#include <utility>
#include <vector>

#include "afflux/afflux.hpp"
#include "cpu/parallel_for.hpp"
#include "cpu/pool.hpp"
#include "pages.hpp"

namespace py = pybind11;

namespace afflux::python {

RowCheck::RowCheck(py::buffer memory, std::int64_t block, std::int64_t head, const std::string& checksums,
                   int num_threads)
    : memory_(memory.request()), block_(block), head_(head), checksums_(checksums), num_threads_(num_threads) {
  if (PyBuffer_IsContiguous(memory_.view(), 'C') == 0) throw Error("[RowCheck] memory is not C-contiguous");
}

bool RowCheck::compare() const {
  const std::int64_t size = memory_.size * memory_.itemsize;
  if (populate(memory_.ptr, static_cast<std::size_t>(size), false) != 0) return false;
  const auto computed = crc32c({static_cast<const unsigned char*>(memory_.ptr), size, {}}, block_, head_, 1);
  const std::size_t bytes = computed.size() * sizeof computed[0];
  return bytes == checksums_.size() && std::memcmp(computed.data(), checksums_.data(), bytes) == 0;
}

void RowCheck::beside(const std::function<void()>& work) {
  // Bytes from which on a helper is used: shorter rows are compared in less time than a helper needs to begin.
  constexpr std::int64_t kLong = 8192;
  const std::int64_t size = memory_.size * memory_.itemsize;
  const bool alone = num_threads_ < 2 || size < kLong || awake_helpers() == 0;
  if (alone) prefetch(memory_.ptr, static_cast<std::size_t>(size));
  parallel_for_awake(2, alone ? 1 : 2, [&](std::int64_t i) {
    if (i == 0)
      work();
    else
      sound_ = compare();
  });
}

void bind_row_check(py::module_& module) {
  py::class_<RowCheck>(module, "RowCheck", py::is_final(), py::module_local())
      .def(py::init<py::buffer, std::int64_t, std::int64_t, const std::string&, int>(), py::arg("memory"),
           py::arg("block"), py::arg("head"), py::arg("checksums"), py::arg("num_threads"))
      .def_property_readonly("sound", &RowCheck::sound);
}

}  // namespace afflux::python
