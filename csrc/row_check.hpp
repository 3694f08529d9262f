// The check of a row in a mapped file, beside other work.
#pragma once
#include <pybind11/pybind11.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>

namespace afflux::python {

// A comparison of a row with its checksums during other work, which hides the time of reading. Create it with the GIL
// held.
class RowCheck {
 public:
  // `memory` is the row; `checksums` are the CRCs that crc32c() of the row must return with this `block` and `head`, as
  // bytes of uint32. Throws Error if the memory is not C-contiguous.
  RowCheck(pybind11::buffer memory, std::int64_t block, std::int64_t head, const std::string& checksums,
           int num_threads);

  // Runs `work` and compares the row. If num_threads > 1, the row is long and a helper spins for work, the helper
  // compares the row meanwhile; else this thread does so after `work`, and pages that are only on disk are requested
  // before. Called without the GIL.
  void beside(const std::function<void()>& work);
  // Returns true if the row could be read and has these checksums; false before `beside`.
  bool sound() const { return sound_; }

 private:
  bool compare() const;

  pybind11::buffer_info memory_;
  std::int64_t block_, head_;
  std::string checksums_;
  int num_threads_;
  std::atomic<bool> sound_{false};
};

void bind_row_check(pybind11::module_& module);

}  // namespace afflux::python
