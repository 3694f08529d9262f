#include "cpu/parallel_for.hpp"

#include <algorithm>
#include <atomic>
#include <exception>
#include <mutex>
#include <thread>
#include <vector>

#include "afflux/order.hpp"

#if defined(__SSE2__)
#include <xmmintrin.h>
#endif

namespace afflux {
namespace {

class DefaultFloatingPoint {
 public:
#if defined(__SSE2__)
  DefaultFloatingPoint() : saved_(_mm_getcsr()) { _mm_setcsr(0x1F80); }
  ~DefaultFloatingPoint() { _mm_setcsr(saved_); }

 private:
  unsigned saved_;
#elif defined(__aarch64__)
  DefaultFloatingPoint() {
    asm volatile("mrs %0, fpcr" : "=r"(saved_));
    asm volatile("msr fpcr, %0" : : "r"(0UL));
  }
  ~DefaultFloatingPoint() { asm volatile("msr fpcr, %0" : : "r"(saved_)); }

 private:
  unsigned long saved_;
#else
#error "set the floating-point mode here: round to nearest, subnormals kept"
#endif
  DefaultFloatingPoint(const DefaultFloatingPoint&) = delete;
  DefaultFloatingPoint& operator=(const DefaultFloatingPoint&) = delete;
};

}  // namespace

void parallel_for(std::int64_t count, int num_threads, const std::function<void(std::int64_t)>& body) {
  std::atomic<std::int64_t> next{0};
  std::exception_ptr failure;
  std::mutex failure_mutex;
  const auto work = [&] {
    const DefaultFloatingPoint mode;
    try {
      for (std::int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) body(i);
    } catch (...) {
      const std::lock_guard<std::mutex> lock(failure_mutex);
      failure = std::current_exception();
    }
  };
  std::vector<std::thread> helpers;
  const std::int64_t wanted = std::min<std::int64_t>(num_threads, count) - 1;
  if (wanted > 0) helpers.reserve(static_cast<std::size_t>(wanted));
  for (std::int64_t i = 0; i < wanted; ++i) {
    try {
      helpers.emplace_back(work);
    } catch (...) {
      break;  // no more threads or memory: those that run take all the work, with the same result
    }
  }
  work();
  for (std::thread& helper : helpers) helper.join();
  if (failure) std::rethrow_exception(failure);
}

void for_each_superblock(std::int64_t d, int num_threads, const std::function<void(std::int64_t, std::int64_t)>& body) {
  parallel_for((d + kSuperblock - 1) / kSuperblock, num_threads, [&](std::int64_t superblock) {
    const std::int64_t begin = superblock * kSuperblock;
    body(begin, std::min(begin + kSuperblock, d));
  });
}

}  // namespace afflux
