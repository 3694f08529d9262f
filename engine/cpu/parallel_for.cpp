#include "cpu/parallel_for.hpp"

#include <algorithm>
#include <atomic>
#include <exception>
#include <limits>
#include <mutex>

#include "cpu/environment.hpp"
#include "cpu/pool.hpp"

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

std::atomic<std::int64_t> thread_bytes{0};  // 0: not read yet

using WithHelpers = void (*)(int helpers, const Work& work);

void share(std::int64_t count, int num_threads, const std::function<void(std::int64_t)>& body, WithHelpers run) {
  std::atomic<std::int64_t> next{0};
  std::exception_ptr failure;
  std::mutex failure_mutex;
  const auto work = [&](const std::atomic<bool>& stop) {
    const DefaultFloatingPoint mode;
    try {
      for (std::int64_t i; !stop && (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) body(i);
    } catch (...) {
      const std::lock_guard<std::mutex> lock(failure_mutex);
      failure = std::current_exception();
    }
  };
  run(static_cast<int>(std::min<std::int64_t>(num_threads, count) - 1), work);
  if (failure) std::rethrow_exception(failure);
}

}  // namespace

void parallel_for(std::int64_t count, int num_threads, const std::function<void(std::int64_t)>& body) {
  share(count, num_threads, body, with_helpers);
}

void parallel_for_awake(std::int64_t count, int num_threads, const std::function<void(std::int64_t)>& body) {
  share(count, num_threads, body, with_awake_helpers);
}

std::int64_t piece_size(std::int64_t d, int num_threads) {
  // There should be enough pieces for all threads to end at about the same time, and each should be long enough for the
  // prefetchers of the hardware.
  constexpr std::int64_t kPieces = 8, kLeast = 4 * kBlock;
  std::int64_t piece = kSuperblock;
  while (piece > kLeast && d < kPieces * num_threads * piece) piece /= 2;
  return piece;
}

void for_each_piece(std::int64_t d, int num_threads, const std::function<void(std::int64_t, std::int64_t)>& body) {
  const std::int64_t piece = piece_size(d, num_threads);
  parallel_for((d + piece - 1) / piece, num_threads, [&](std::int64_t i) {
    const std::int64_t begin = i * piece;
    body(begin, std::min(begin + piece, d));
  });
}

int threads_worth(std::int64_t bytes, int num_threads) {
  // No static local: after a fork during its initialization, the child would wait for it for ever.
  std::int64_t each = thread_bytes.load(std::memory_order_relaxed);
  if (each == 0) {
    constexpr long long kMost = std::numeric_limits<long long>::max();
    each = from_environment("AFFLUX_THREAD_BYTES", "bytes", 1, kMost, std::int64_t{1} << 19);
    thread_bytes.store(each, std::memory_order_relaxed);
  }
  const int threads = static_cast<int>(std::clamp<std::int64_t>(bytes / each, 1, num_threads));
  if (threads > 1) prepare_pool();
  return threads;
}

}  // namespace afflux
