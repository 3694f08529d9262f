// What tests/engine/test_pool.py runs: parallel_for where Python cannot reach it. Prints "done" if all went well.
#include <dlfcn.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "cpu/affinity.hpp"
#include "cpu/parallel_for.hpp"

namespace {

void require(bool fact, const char* what) {
  if (fact) return;
  std::fprintf(stderr, "failed: %s\n", what);
  std::_Exit(1);
}

// Every index once, whatever the number of threads.
void sweep(std::int64_t count, int num_threads) {
  std::vector<int> times(static_cast<std::size_t>(count), 0);  // plain: a sanitizer sees if two threads share one
  afflux::parallel_for(count, num_threads, [&](std::int64_t i) { ++times[static_cast<std::size_t>(i)]; });
  for (const int each : times) require(each == 1, "each index once");
}

template <class Work>
void on_threads(int count, const Work& work) {
  std::vector<std::thread> threads;
  for (int i = 0; i < count; ++i) threads.emplace_back(work);
  for (std::thread& thread : threads) thread.join();
}

void counts() {
  for (const std::int64_t count : {0, 1, 2, 3, 100})
    for (const int num_threads : {1, 2, 3, 7}) sweep(count, num_threads);
}

void nested() {
  for (int round = 0; round < 200; ++round) {
    std::atomic<int> total{0};
    afflux::parallel_for(6, 3, [&](std::int64_t) {
      afflux::parallel_for(5, 3, [&](std::int64_t) {
        total.fetch_add(1, std::memory_order_relaxed);
        sweep(3, 2);
      });
    });
    require(total == 30, "30 bodies");
  }
}

void throwing() {
  for (int round = 0; round < 200; ++round) {
    try {
      afflux::parallel_for(50, 3, [&](std::int64_t i) {
        if (i % 10 == 7) throw std::runtime_error("seven");
      });
      require(false, "an exception");
    } catch (const std::runtime_error& error) {
      require(std::strcmp(error.what(), "seven") == 0, "its own exception");
    }
    sweep(20, 3);
  }
}

// Only helpers that spin take part, and each index comes once, also while other calls wake or hold them.
void awake() {
  const std::thread::id own = std::this_thread::get_id();
  afflux::parallel_for_awake(3, 4, [&](std::int64_t) { require(std::this_thread::get_id() == own, "no helper yet"); });
  on_threads(3, [] {
    for (int round = 0; round < 300; ++round) {
      std::vector<int> times(4, 0);
      afflux::parallel_for_awake(4, 3, [&](std::int64_t i) { ++times[static_cast<std::size_t>(i)]; });
      for (const int each : times) require(each == 1, "each index once");
      if (round % 3 == 0) sweep(5, 3);
      try {
        afflux::parallel_for_awake(2, 2, [](std::int64_t i) {
          if (i == 1) throw std::runtime_error("one");
        });
        require(false, "an exception");
      } catch (const std::runtime_error&) {
      }
    }
  });
}

// More callers than helpers, of different sizes.
void callers() {
  std::atomic<int> next{0};
  on_threads(5, [&] {
    const int mine = next.fetch_add(1);
    for (int round = 0; round < 2000; ++round) {
      sweep(1 + (round + mine) % 40, 1 + (round + mine) % 4);
      if (round % 500 == 0) usleep(3000);  // until helpers sleep
    }
  });
}

// Kills a child that does not end: no alarm reaches a thread that creates helpers, since it blocks all signals.
void ends_well(pid_t child) {
  int status = -1;
  pid_t ended = 0;
  for (int i = 0; i < 20000 && (ended = waitpid(child, &status, WNOHANG)) == 0; ++i) usleep(1000);
  if (ended == 0) kill(child, SIGKILL);
  require(ended == child && status == 0, "a child that ends well");
}

void one_child(int depth) {
  const pid_t child = fork();
  if (child == 0) {
    sweep(30, 3);
    if (depth > 0) one_child(depth - 1);
    sweep(30, 3);
    std::exit(0);  // with everything that runs at a process's end
  }
  ends_well(child);
}

void forks() {
  std::atomic<bool> stop{false};
  std::vector<std::thread> others;
  for (int i = 0; i < 2; ++i)
    others.emplace_back([&] {
      while (!stop) sweep(20, 3);
    });
  for (int i = 0; i < 60; ++i) one_child(i % 3);
  stop = true;
  for (std::thread& other : others) other.join();
}

// The fork hits another thread amid its first look at the system, which slow_looks.cpp makes long.
template <class Look>
void fork_amid(const Look& look) {
  std::thread other([&] { look(); });
  usleep(100000);
  const pid_t child = fork();
  if (child == 0) _exit(!look());
  ends_well(child);
  other.join();
}

void asks() {
  fork_amid([] { return afflux::threads_worth(std::int64_t{1} << 40, 2) == 2; });
}

void looks_for_its_quota() {
  fork_amid([] {
    sweep(30, 3);
    return true;
  });
}

void signals() {
  sweep(10, 3);  // the pool's threads are there, and would take what this one blocks from now on
  sigset_t ours;
  sigemptyset(&ours);
  sigaddset(&ours, SIGUSR1);
  pthread_sigmask(SIG_BLOCK, &ours, nullptr);
  kill(getpid(), SIGUSR1);
  int taken = 0;
  require(sigwait(&ours, &taken) == 0 && taken == SIGUSR1, "the signal waits for us");
}

// A helper's own faults and system calls can be handled.
void own_signals() {
  const auto caller = std::this_thread::get_id();
  std::atomic<bool> helped{false};
  const auto body = [&](std::int64_t) {
    usleep(1000);
    if (std::this_thread::get_id() == caller) return;
    sigset_t blocked;
    pthread_sigmask(SIG_SETMASK, nullptr, &blocked);
    for (const int own : {SIGSEGV, SIGBUS, SIGFPE, SIGILL, SIGTRAP, SIGSYS})
      require(sigismember(&blocked, own) == 0, "its own signals");
    require(sigismember(&blocked, SIGTERM) == 1, "no other's signals");
    helped = true;
  };
  for (int i = 0; i < 100 && !helped; ++i) afflux::parallel_for(20, 2, body);
  require(helped, "a helper");
}

// No memory for a thread's stack.
void no_threads() {
  const rlimit none{1 << 20, 1 << 20};  // less than there is
  setrlimit(RLIMIT_AS, &none);
  sweep(100, 8);
}

// The process ends while others are amid calls.
void leave() {
  for (int i = 0; i < 3; ++i)
    std::thread([] {
      for (;;) sweep(50, 3);
    }).detach();
  usleep(20000);
}

// The process ends while another's call has 20 s to go: helpers leave it after the piece they are at.
void leave_soon() {
  std::thread([] { afflux::parallel_for(40000, 3, [](std::int64_t) { usleep(1000); }); }).detach();
  usleep(50000);
  alarm(5);
}

#if defined(__linux__)
cpu_set_t mask(pid_t thread) {
  cpu_set_t set;
  CPU_ZERO(&set);
  require(sched_getaffinity(thread, sizeof set, &set) == 0, "sched_getaffinity");
  return set;
}

void pin(const cpu_set_t& set) { require(sched_setaffinity(0, sizeof set, &set) == 0, "sched_setaffinity"); }

bool helpers_have(const cpu_set_t& wanted) {
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    const cpu_set_t set = mask(std::atoi(task.path().filename().c_str()));
    if (!CPU_EQUAL(&set, &wanted)) return false;
  }
  return true;
}

// Whether they soon have it, without another call.
bool helpers_get(const cpu_set_t& wanted) {
  for (int i = 0; i < 20000 && !helpers_have(wanted); ++i) usleep(1000);
  return helpers_have(wanted);
}

// Whether all other threads sleep in the kernel, where a helper that waits for work holds no lock.
bool others_sleep() {
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    if (std::atoi(task.path().filename().c_str()) == static_cast<int>(syscall(SYS_gettid))) continue;
    std::string stat;
    std::getline(std::ifstream(task.path() / "stat"), stat);
    if (stat.compare(stat.rfind(')') + 1, 3, " S ") != 0) return false;
  }
  return true;
}

// A helper that wakes too late may still use every CPU when it sleeps again.
void late() {
  const cpu_set_t all = mask(0);
  for (int i = 0; i < 200; ++i) {
    sweep(2, 2);
    if (i % 8 == 0) require(helpers_get(all), "the CPUs they had");
  }
}

// What the user sets while a thread is kept off is what it keeps.
void moved() {
  const cpu_set_t all = mask(0);
  afflux::AvoidedCpu kept;
  const auto is = [](const cpu_set_t& wanted) {
    const cpu_set_t set = mask(0);
    return CPU_EQUAL(&set, &wanted);
  };
  kept.narrow(pthread_self());
  require(CPU_COUNT(&all) == 1 || !is(all), "kept off");
  kept.widen(pthread_self());
  require(is(all), "its own again");
  if (CPU_COUNT(&all) == 1) return;
  kept.narrow(pthread_self());
  cpu_set_t one = mask(0);
  CPU_XOR(&one, &one, &all);  // the CPU it is kept off
  pin(one);
  kept.widen(pthread_self());
  require(is(one), "what the user has set");
  kept.narrow(pthread_self());
  require(is(one), "a thread's only CPU");
}

// The pool is the process's, not its first caller's.
void pinned_caller() {
  const cpu_set_t all = mask(0);
  std::thread([&] {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(sched_getcpu(), &one);
    pin(one);
    sweep(20, 3);
  }).join();
  require(helpers_get(all), "the first thread's CPUs");
}
// A child that is made without the handlers of a fork still has its parent's pool, and no thread of it.
void bare_fork() {
  sweep(100, 3);
  for (int i = 0; i < 20000 && !others_sleep(); ++i) usleep(1000);
  const auto child = static_cast<pid_t>(syscall(SYS_clone, SIGCHLD, nullptr, nullptr, nullptr, nullptr));
  if (child == 0) {
    sweep(30, 3);
    std::exit(0);
  }
  ends_well(child);
}
#else
void bare_fork() {}
void late() {}
void moved() {}
void pinned_caller() {}
#endif

void unload(const char* path) {
  for (int i = 0; i < 20; ++i) {
    void* const library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    require(library != nullptr, "dlopen");
    auto* const run = reinterpret_cast<bool (*)()>(dlsym(library, "run"));
    require(run != nullptr && run(), "a sweep in the library");
    if (i % 2 == 0) usleep(3000);  // helpers asleep, helpers awake
    require(dlclose(library) == 0, "dlclose");
    require(dlopen(path, RTLD_NOW | RTLD_NOLOAD) == nullptr, "it is unloaded");
  }
}

}  // namespace

int main(int count, char** words) {
  const char* const what = count > 1 ? words[1] : "";
  const struct {
    const char* name;
    void (*run)();
  } cases[] = {{"counts", counts},
               {"nested", nested},
               {"throwing", throwing},
               {"callers", callers},
               {"awake", awake},
               {"forks", forks},
               {"signals", signals},
               {"no_threads", no_threads},
               {"leave", leave},
               {"late", late},
               {"moved", moved},
               {"pinned_caller", pinned_caller},
               {"asks", asks},
               {"own_signals", own_signals},
               {"bare_fork", bare_fork},
               {"leave_soon", leave_soon},
               {"looks_for_its_quota", looks_for_its_quota}};
  bool known = false;
  for (const auto& each : cases)
    if (std::strcmp(each.name, what) == 0) known = true, each.run();
  if (std::strcmp(what, "unload") == 0 && count > 2) known = true, unload(words[2]);
  require(known, what);
  std::puts("done");
  return 0;
}
