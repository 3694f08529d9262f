// The CPUs that the engine's threads may use, on systems that report them.
#pragma once
#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <thread>

#include "cpu/quota.hpp"

#if defined(__linux__)
#include <sched.h>
#include <unistd.h>
#endif

namespace afflux {

#if defined(__linux__)

// Returns the quota of the process as it was at the first call; 0 without one.
inline std::size_t own_quota() noexcept {
  // No static local: after a fork during its initialization, the child would wait for it for ever.
  static std::atomic<int> cached{-1};
  int quota = cached.load(std::memory_order_relaxed);
  if (quota < 0) {
    try {
      quota = cpu_quota();
    } catch (...) {  // no memory: the next call looks again
      return 0;
    }
    cached.store(quota, std::memory_order_relaxed);
  }
  return static_cast<std::size_t>(quota);
}

// Returns the number of CPUs that the process (its first thread) may use, by its affinity and its quota.
inline std::size_t usable_cpus() {
  const std::size_t quota = own_quota();
  cpu_set_t set;
  const bool known = sched_getaffinity(getpid(), sizeof set, &set) == 0;
  const std::size_t cpus = known ? static_cast<std::size_t>(CPU_COUNT(&set)) : std::thread::hardware_concurrency();
  return quota == 0 ? cpus : std::min(cpus, quota);
}

// Lets a thread use these CPUs, whatever CPUs its creator may use.
inline void use_all(pthread_t thread) {
  cpu_set_t set;
  if (sched_getaffinity(getpid(), sizeof set, &set) == 0) pthread_setaffinity_np(thread, sizeof set, &set);
}

// A restriction that keeps a thread off its caller's CPU while the thread wakes. The kernel may place the thread on
// that CPU (because of its warm cache, or to let other virtual CPUs sleep). There the thread would wait until the
// caller ends or until the next tick: 1 to 5 ms were measured. Both functions are called alternately, under one lock.
// They change nothing if the system forbids it, or if other code has changed the thread's CPUs meanwhile.
class AvoidedCpu {
 public:
  // Excludes the CPU of the calling thread from the CPUs of `thread`.
  void narrow(pthread_t thread) {
    const int here = sched_getcpu();
    if (here < 0 || here >= CPU_SETSIZE || pthread_getaffinity_np(thread, sizeof own_, &own_) != 0) return;
    others_ = own_;
    CPU_CLR(here, &others_);
    narrowed_ = CPU_COUNT(&others_) > 0 && pthread_setaffinity_np(thread, sizeof others_, &others_) == 0;
  }
  // Lets `thread` use all its CPUs again.
  void widen(pthread_t thread) {
    cpu_set_t now;
    if (narrowed_ && pthread_getaffinity_np(thread, sizeof now, &now) == 0 && CPU_EQUAL(&now, &others_))
      pthread_setaffinity_np(thread, sizeof own_, &own_);
    narrowed_ = false;
  }

 private:
  cpu_set_t own_, others_;
  bool narrowed_ = false;
};

#else

inline std::size_t usable_cpus() { return std::thread::hardware_concurrency(); }  // 0 if unknown
inline void use_all(pthread_t) {}

class AvoidedCpu {
 public:
  void narrow(pthread_t) {}
  void widen(pthread_t) {}
};

#endif

}  // namespace afflux
