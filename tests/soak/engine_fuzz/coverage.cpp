// What a call has run of the engine: gcc's -fsanitize-coverage=trace-pc calls this at each edge. Compiled without it.
#include "coverage.hpp"

#include <cstring>

namespace coverage {

unsigned char seen[kPlaces], hit[kPlaces];

void begin() { std::memset(hit, 0, sizeof hit); }

// Counts are compared by their highest bit, as AFL does: a loop of 8 turns is new after one of 4, not after one of 7.
int new_places() {
  int found = 0;
  for (int i = 0; i < kPlaces; ++i) {
    if (hit[i] == 0) continue;
    unsigned char size = 0x80;
    while ((hit[i] & size) == 0) size = static_cast<unsigned char>(size >> 1);
    found += (seen[i] & size) == 0;
    seen[i] = static_cast<unsigned char>(seen[i] | size);
  }
  return found;
}

int places() {
  int count = 0;
  for (const unsigned char one : seen) count += one != 0;
  return count;
}

}  // namespace coverage

extern "C" void __sanitizer_cov_trace_pc() {
  const auto place = reinterpret_cast<unsigned long>(__builtin_return_address(0)) % coverage::kPlaces;
  unsigned char& count = coverage::hit[place];
  if (count != 0xFF) ++count;
}
