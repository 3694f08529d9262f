// The release of Python's global interpreter lock (GIL) for a scope.
#pragma once
#include <Python.h>

#include <chrono>
#include <thread>

namespace afflux::python {

// A scope in which other threads may use Python. At the end of the process, Python may not give the GIL back. Before
// Python 3.14, it then ends the thread by unwinding its stack: py::gil_scoped_release would terminate the process, and
// the destructors of arrays would use Python without the GIL. Here such a thread sleeps for ever instead, as it does in
// Python 3.14 and later.
class GilRelease {
 public:
  GilRelease() : state_(PyEval_SaveThread()) {}
  ~GilRelease() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {  // the unwinding, which must neither continue nor end
      for (;;) std::this_thread::sleep_for(std::chrono::hours(1));
    }
  }

 private:
  GilRelease(const GilRelease&) = delete;
  GilRelease& operator=(const GilRelease&) = delete;
  PyThreadState* const state_;
};

}  // namespace afflux::python
