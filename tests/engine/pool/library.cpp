// A library that carries the engine's threads and may be unloaded.
#include <atomic>

#include "cpu/parallel_for.hpp"

extern "C" __attribute__((visibility("default"))) bool run() {
  std::atomic<int> total{0};
  afflux::parallel_for(100, 3, [&](std::int64_t) { ++total; });
  return total == 100;
}
