#include "cpu/pool.hpp"

#include <pthread.h>
#include <signal.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "cpu/environment.hpp"

#if defined(__linux__)
#include <sched.h>
#endif
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

namespace afflux {
namespace {

using Microseconds = std::chrono::microseconds;

void pause() {
#if defined(__SSE2__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("isb" : : : "memory");
#endif
}

// Whether ready() has become true before the time was over. Yields now and then: someone may need the CPU more.
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

std::size_t usable_cpus() {
#if defined(__linux__)
  cpu_set_t set;
  if (sched_getaffinity(0, sizeof set, &set) == 0) return static_cast<std::size_t>(CPU_COUNT(&set));
#endif
  return std::thread::hardware_concurrency();  // 0 if unknown
}

// Threads that are started meanwhile take no signals but those of their own faults: a handler, or a signal that waits
// for its sigwait, belongs to the program's threads.
class SignalsBlocked {
 public:
  SignalsBlocked() {
    sigset_t all;
    sigfillset(&all);
    for (const int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP}) sigdelset(&all, fault);
    pthread_sigmask(SIG_SETMASK, &all, &saved_);
  }
  ~SignalsBlocked() { pthread_sigmask(SIG_SETMASK, &saved_, nullptr); }

 private:
  SignalsBlocked(const SignalsBlocked&) = delete;
  SignalsBlocked& operator=(const SignalsBlocked&) = delete;
  sigset_t saved_;
};

// One call's work, on its caller's stack; all but `helpers` is guarded by the pool's mutex.
struct Job {
  const std::function<void()>& work;
  int vacancies;                // helpers that may still join
  Job* next = nullptr;          // another caller's
  std::atomic<int> helpers{0};  // that have joined and not ended
};

class Pool {
 public:
  explicit Pool(Microseconds patience) : asked_(patience) {}

  void run(const std::function<void()>& work, int helpers) {
    Job job{work, helpers};
    const auto [patience, asleep] = post(job);
    for (int i = 0; i < asleep; ++i) posted_.notify_one();
    work();
    withdraw(job);
    const auto ended = [&] { return job.helpers.load(std::memory_order_acquire) == 0; };
    if (spin(patience, ended)) return;
    std::unique_lock<std::mutex> lock(mutex_);
    ended_.wait(lock, ended);
  }

  // Ends the threads. The pool goes on to serve calls, which then have no helpers.
  void end() {
    {
      const std::lock_guard<std::mutex> lock(mutex_);
      ending_ = true;
    }
    posted_.notify_all();
    for (std::thread& thread : threads_) thread.join();
  }

 private:
  struct Posted {
    Microseconds patience;
    int asleep;  // how many helpers have to be woken
  };

  Posted post(Job& job) {
    const std::lock_guard<std::mutex> lock(mutex_);
    grow(static_cast<std::size_t>(job.vacancies));
    job.next = jobs_;
    jobs_ = &job;
    vacancies_.fetch_add(job.vacancies, std::memory_order_relaxed);
    return {patience_, job.vacancies - spinning_};
  }

  void withdraw(Job& job) {
    const std::lock_guard<std::mutex> lock(mutex_);
    Job** at = &jobs_;
    while (*at != &job) at = &(*at)->next;
    *at = job.next;
    vacancies_.fetch_sub(job.vacancies, std::memory_order_relaxed);
  }

  void grow(std::size_t helpers) {
    if (ending_ || threads_.size() >= helpers) return;
    const SignalsBlocked blocked;
    try {
      while (threads_.size() < helpers) threads_.emplace_back([this] { serve(); });
    } catch (...) {  // no more threads or memory: those that run take all the work, with the same result
    }
    patience_ = usable_cpus() > threads_.size() ? asked_ : Microseconds(0);
  }

  // What a thread of the pool does all its life.
  void serve() {
    std::unique_lock<std::mutex> lock(mutex_);
    const auto news = [this] { return vacancies_.load(std::memory_order_relaxed) > 0 || ending_; };
    while (!ending_) {
      while (Job* const job = vacant()) help(*job, lock);
      ++spinning_;
      const Microseconds patience = patience_;
      lock.unlock();
      // Nobody sleeps for the mutex: who posts a job may still hold it.
      if (!spin(patience, [&] { return news() && lock.try_lock(); })) lock.lock();
      --spinning_;
      posted_.wait(lock, news);
    }
  }

  Job* vacant() const {
    Job* job = jobs_;
    while (job != nullptr && job->vacancies == 0) job = job->next;
    return job;
  }

  void help(Job& job, std::unique_lock<std::mutex>& lock) {
    --job.vacancies;
    vacancies_.fetch_sub(1, std::memory_order_relaxed);
    job.helpers.fetch_add(1, std::memory_order_relaxed);
    lock.unlock();
    job.work();
    lock.lock();
    // The caller may go on from here, and the job is gone.
    if (job.helpers.fetch_sub(1, std::memory_order_release) == 1) ended_.notify_all();
  }

  const Microseconds asked_;
  std::mutex mutex_;  // guards what follows; the atomics are also read without it
  std::condition_variable posted_, ended_;
  std::vector<std::thread> threads_;
  Microseconds patience_{0};
  Job* jobs_ = nullptr;
  int spinning_ = 0;
  std::atomic<int> vacancies_{0};  // of all jobs
  std::atomic<bool> ending_{false};
};

std::atomic<Pool*> pool{nullptr};

// In a forked child the parent's pool has no threads, and its locks may be taken: it is never touched again. At the end
// of the process, or when the library is unloaded, the threads must have left its code; but the pool stays, because
// other threads may still be amid a call.
struct Lifetime {
  Lifetime() {
    pthread_atfork(nullptr, nullptr, [] { pool.store(nullptr, std::memory_order_relaxed); });
  }
  ~Lifetime() {
    if (Pool* const ours = pool.load(std::memory_order_acquire)) ours->end();
  }
} lifetime;

Pool& the_pool() {
  Pool* made = pool.load(std::memory_order_acquire);
  if (made != nullptr) return *made;
  // No static local: if a fork hit its initialization, the child would wait for it for ever.
  auto fresh =
      std::make_unique<Pool>(Microseconds(from_environment("AFFLUX_SPIN_US", "microseconds", 0, 1000000, 1000)));
  if (pool.compare_exchange_strong(made, fresh.get(), std::memory_order_acq_rel)) return *fresh.release();
  return *made;  // another thread was first
}

}  // namespace

void with_helpers(int helpers, const std::function<void()>& work) {
  if (helpers < 1) return work();
  the_pool().run(work, helpers);
}

}  // namespace afflux
