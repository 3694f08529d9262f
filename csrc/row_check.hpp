// A row in a mapped file, checked beside other work.
#pragma once
#include <pybind11/pybind11.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>

namespace afflux::python {

// Compares a row with its checksums while other work is done, which hides the reading. Made with the GIL held.
class RowCheck {
 public:
  // `memory` is the row, `checksums` what crc32c() of it with this `block` and `head` must give.
  RowCheck(pybind11::buffer memory, std::int64_t block, std::int64_t head, const std::string& checksums,
           int num_threads);

  // Does `work`, and compares the row beside it on a helper that spins for work if num_threads > 1, else after it;
  // what is on disk only is asked for before. Without the GIL.
  void beside(const std::function<void()>& work);
  // Whether the row could be read, and has these checksums; false before `beside`.
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
