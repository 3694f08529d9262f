#include "cpu/pool.hpp"

#include <pthread.h>
#include <signal.h>
#include <unistd.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "cpu/affinity.hpp"
#include "cpu/environment.hpp"

#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace afflux {
namespace {

using Lock = std::unique_lock<std::mutex>;
using Microseconds = std::chrono::microseconds;

void pause() {
#if defined(__SSE2__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("isb" : : : "memory");
#endif
}

// Waits actively until ready() is true or the time is over; returns the last ready(). Yields the CPU regularly to other
// threads.
template <class Ready>
bool spin(Microseconds time, const Ready& ready) {
  if (time.count() == 0) return ready();
  const auto end = std::chrono::steady_clock::now() + time;
  do {
    for (int i = 0; i < 64; ++i) {
      if (ready()) return true;
      pause();
    }
    std::this_thread::yield();
  } while (std::chrono::steady_clock::now() < end);
  return ready();
}

// A scope in which new threads inherit a mask that blocks all signals except those of their own faults and system
// calls. Handlers, and signals for which the program calls sigwait, belong to the program's threads.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS}) sigdelset(&all, fault);
    pthread_sigmask(SIG_SETMASK, &all, &saved_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &saved_, nullptr); }

 private:
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;
  sigset_t saved_;
};

const std::atomic<bool> never{false};  // a caller never stops its own work

// The work of one call. It is on the stack of the caller.
struct Job {
  const Work& work;
  int wanted;                   // helpers that may still join
  Job* next = nullptr;          // the job of another caller
  std::atomic<int> helpers{0};  // helpers that have joined and not ended
};

struct Helper {
  std::thread thread;
  std::condition_variable woken;
  bool asleep = false;
  AvoidedCpu avoided_cpu;
};

class Pool {
 public:
  explicit Pool(Microseconds spin_time) : requested_spin_time_(spin_time) {}

  void run(const Work& work, int helpers, bool wake_some) {
    Job job{work, helpers};
    const auto [spin_time, missing] = post(job, wake_some);
    if (wake_some) wake(missing);
    work(never);
    withdraw(job);
    const auto ended = [&] { return job.helpers.load(std::memory_order_acquire) == 0; };
    if (spin(spin_time, ended)) return;
    Lock lock(mutex_);
    ended_.wait(lock, ended);
  }

  int awake() const { return spinning_.load(std::memory_order_relaxed); }

  // Returns false in a child that was forked by the bare system call: there the fork handlers did not run, and none of
  // the threads exist.
  bool in_this_process() const { return process_ == getpid(); }

  // Ends the threads. Later calls run without helpers.
  void end() {
    {
      const Lock lock(mutex_);
      ending_ = true;
    }
    wake(static_cast<int>(helpers_.size()));
    for (const auto& helper : helpers_) helper->thread.join();
  }

 private:
  struct Posted {
    Microseconds spin_time;
    int missing;  // helpers beyond those that spin for work
  };

  Posted post(Job& job, bool new_ones) {
    const Lock lock(mutex_);
    if (new_ones) grow(static_cast<std::size_t>(job.wanted));
    job.next = jobs_;
    jobs_ = &job;
    wanted_.fetch_add(job.wanted, std::memory_order_relaxed);
    return {spin_time_, job.wanted - spinning_};
  }

  void withdraw(Job& job) {
    const Lock lock(mutex_);
    Job** at = &jobs_;
    while (*at != &job) at = &(*at)->next;
    *at = job.next;
    wanted_.fetch_sub(job.wanted, std::memory_order_relaxed);
  }

  void grow(std::size_t size) {
    if (ending_ || helpers_.size() >= size) return;
    const SignalsBlocked blocked;
    try {
      helpers_.reserve(size);
      while (helpers_.size() < size) {
        auto made = std::make_unique<Helper>();
        Helper& helper = *made;
        helper.thread = std::thread([this, &helper] { serve(helper); });
        use_all(helper.thread.native_handle());
        helper.avoided_cpu.narrow(helper.thread.native_handle());
        helpers_.push_back(std::move(made));
      }
    } catch (...) {  // no more threads or memory: the running threads do all the work, with the same result
    }
    spin_time_ = usable_cpus() > helpers_.size() ? requested_spin_time_ : Microseconds(0);
  }

  void wake(int most) {
    for (; most > 0; --most) {
      Helper* const helper = take_sleeping();
      if (helper == nullptr) return;
      helper->woken.notify_one();  // without the lock, which the helper takes first
    }
  }

  Helper* take_sleeping() {
    const Lock lock(mutex_);
    for (const auto& helper : helpers_) {
      if (!helper->asleep) continue;
      helper->asleep = false;
      helper->avoided_cpu.narrow(helper->thread.native_handle());
      return helper.get();
    }
    return nullptr;
  }

  // Runs a helper until the pool ends.
  void serve(Helper& self) {
    Lock lock(mutex_);
    while (!ending_) {
      self.avoided_cpu.widen(pthread_self());
      if (Job* const job = unfilled()) {
        help(*job, lock);
      } else if (!spin_for_work(lock)) {
        self.asleep = true;
        self.woken.wait(lock, [&] { return !self.asleep; });
      }
    }
  }

  Job* unfilled() const {
    Job* job = jobs_;
    while (job != nullptr && job->wanted == 0) job = job->next;
    return job;
  }

  void help(Job& job, Lock& lock) {
    --job.wanted;
    wanted_.fetch_sub(1, std::memory_order_relaxed);
    job.helpers.fetch_add(1, std::memory_order_relaxed);
    lock.unlock();
    job.work(ending_);
    lock.lock();
    // After the next line the caller may return, and its job no longer exists.
    if (job.helpers.fetch_sub(1, std::memory_order_release) == 1) ended_.notify_all();
  }

  // Waits actively for work or for the end of the pool. Returns false if it is time to sleep.
  bool spin_for_work(Lock& lock) {
    const auto ready_to_work = [this] { return wanted_.load(std::memory_order_relaxed) > 0 || ending_; };
    const Microseconds spin_time = spin_time_;
    ++spinning_;
    lock.unlock();
    // try_lock: the thread that posts a job may still hold the mutex.
    if (!spin(spin_time, [&] { return ready_to_work() && lock.try_lock(); })) lock.lock();
    --spinning_;
    return ready_to_work();
  }

  const Microseconds requested_spin_time_;
  const pid_t process_ = getpid();
  std::mutex mutex_;  // guards all that follows and all jobs; the atomics are also read without it
  std::condition_variable ended_;
  std::vector<std::unique_ptr<Helper>> helpers_;
  Microseconds spin_time_{0};
  Job* jobs_ = nullptr;
  std::atomic<int> spinning_{0};
  std::atomic<int> wanted_{0};  // of all jobs
  std::atomic<bool> ending_{false};
};

std::atomic<Pool*> pool{nullptr};

// The handlers of a fork and of the end. In a forked child the parent's pool has no threads, and its locks may be
// taken: the child never uses it. At the end of the process, or when the library is unloaded, the threads must have
// left the library's code. But the pool is not destroyed, because other threads may still be in a call.
struct Lifetime {
  Lifetime() {
    pthread_atfork(nullptr, nullptr, [] { pool.store(nullptr, std::memory_order_relaxed); });
  }
  ~Lifetime() {
    Pool* const made = pool.load(std::memory_order_acquire);
    if (made != nullptr && made->in_this_process()) made->end();
  }
} lifetime;

Pool& shared_pool() {
  Pool* made = pool.load(std::memory_order_acquire);
  if (made != nullptr) return *made;
  // No static local: after a fork during its initialization, the child would wait for it for ever.
  auto fresh =
      std::make_unique<Pool>(Microseconds(from_environment("AFFLUX_SPIN_US", "microseconds", 0, 10000000, 1000)));
  if (pool.compare_exchange_strong(made, fresh.get(), std::memory_order_acq_rel)) return *fresh.release();
  return *made;  // another thread was first
}

}  // namespace

void with_helpers(int helpers, const Work& work) {
  if (helpers < 1) return work(never);
  shared_pool().run(work, helpers, true);
}

void prepare_pool() { shared_pool(); }

void with_awake_helpers(int helpers, const Work& work) {
  Pool* const made = pool.load(std::memory_order_acquire);
  if (helpers < 1 || made == nullptr) return work(never);
  made->run(work, helpers, false);
}

int awake_helpers() {
  const Pool* const made = pool.load(std::memory_order_acquire);
  return made == nullptr ? 0 : made->awake();
}

}  // namespace afflux
