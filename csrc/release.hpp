// Python's global interpreter lock, released for a scope.
#pragma once
#include <Python.h>

#include <chrono>
#include <thread>

namespace afflux::python {

// In its scope other threads may use Python. At the end of the process Python may not give its lock back, and then
// ends the thread by unwinding its stack (before 3.14), where py::gil_scoped_release terminates the process and the
// destructors of arrays would use Python without its lock. Such a thread stays here instead, as from 3.14 on.
class GilRelease {
 public:
  GilRelease() : state_(PyEval_SaveThread()) {}
  ~GilRelease() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {  // the unwinding; it must not go on, and must not be ended either
      for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
    }
  }

 private:
  GilRelease(const GilRelease&) = delete;
  GilRelease& operator=(const GilRelease&) = delete;
  PyThreadState* const state_;
};

}  // namespace afflux::python
