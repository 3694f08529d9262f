// A mutex for threads of Python that knows its owner.
#pragma once
#include <pybind11/pybind11.h>
#include <pythread.h>

#include <cstdint>
#include <new>
#include <stdexcept>

#include "forks.hpp"
#include "release.hpp"
#include "values.hpp"

namespace afflux::python {

// A mutex, and what a thread must know that decides without waiting for it. All methods run with the GIL held. Taking
// the mutex and noting its owner is one step for signals.
class Mutex {
 public:
  Mutex() : lock_(PyThread_allocate_lock()) {
    if (lock_ == nullptr) throw std::bad_alloc();
  }
  ~Mutex() { PyThread_free_lock(lock_); }
  Mutex(const Mutex&) = delete;
  Mutex& operator=(const Mutex&) = delete;

  bool try_lock() {
    if (PyThread_acquire_lock(lock_, NOWAIT_LOCK) == 0) return false;
    owner_ = PyThread_get_thread_ident();
    return true;
  }
  // Waits. Handlers of signals run meanwhile; if one raises an exception, the mutex is not taken.
  void lock() {
    if (try_lock()) return;
    for (;;) {
      PyLockStatus status;
      {
        const GilRelease release;
        status = PyThread_acquire_lock_timed(lock_, -1, 1);
      }
      if (status == PY_LOCK_ACQUIRED) break;
      if (Py_MakePendingCalls() < 0) throw pybind11::error_already_set();
    }
    owner_ = PyThread_get_thread_ident();
  }
  void unlock() {
    if (owner_ == 0) throw std::runtime_error("[Mutex] it is not held");
    owner_ = 0;
    PyThread_release_lock(lock_);
  }

  bool is_held() const { return owner_ != 0; }
  bool is_mine() const { return owner_ == PyThread_get_thread_ident(); }
  pybind11::object owner() const { return owner_ == 0 ? pybind11::none() : owned(PyLong_FromUnsignedLong(owner_)); }

  // Methods of Python.
  bool acquire(pybind11::handle waits) {
    if (!is_set(waits)) return try_lock();
    lock();
    return true;
  }
  void exit(pybind11::handle, pybind11::handle, pybind11::handle) { unlock(); }

  // Whether there are jobs whose results may be unpublished.
  bool handed_out() const { return handed_out_; }
  void set_handed_out(pybind11::handle value) { handed_out_ = is_set(value); }
  // The thread that has claimed the last job; None: no job was claimed.
  pybind11::object driver() const { return driver_ == 0 ? pybind11::none() : owned(PyLong_FromUnsignedLong(driver_)); }
  void set_driver(pybind11::handle thread) {
    const unsigned long driver = PyLong_AsUnsignedLong(thread.ptr());
    if (PyErr_Occurred() != nullptr) throw pybind11::error_already_set();
    driver_ = driver;
  }
  // Whether threads wait to be told that something has changed.
  bool awaited() const { return awaited_; }
  void set_awaited(pybind11::handle value) { awaited_ = is_set(value); }
  // The fork counter of the process that may use what the mutex guards.
  std::int64_t fork() const { return static_cast<std::int64_t>(forks_); }
  void set_fork(pybind11::handle value) { forks_ = static_cast<std::uint64_t>(count_of(value)); }

  // Returns true if this thread may use what the mutex guards, and is not amid a call that does.
  bool may_enter() const {
    return forks_ == forks && !is_mine() && !(handed_out_ && driver_ == PyThread_get_thread_ident());
  }
  // Returns true if a thread that has the mutex need not publish, or tell others.
  bool is_quiet() const { return !handed_out_ && !awaited_; }

 private:
  const PyThread_type_lock lock_;
  unsigned long owner_ = 0, driver_ = 0;
  bool handed_out_ = false, awaited_ = false;
  std::uint64_t forks_ = forks;
};

}  // namespace afflux::python
