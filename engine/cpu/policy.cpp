#include "afflux/policy.hpp"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>

#include "afflux/afflux.hpp"
#include "cpu/processor.hpp"

namespace afflux {
namespace {

// Measured (bench/NOTES.md, "Stages in registers").
Policy default_policy() {
  const Processor here = processor();
  if (here.vendor == "AMD" && here.family == 26) return {256, std::int64_t{16} << 20, true};
  return {};  // of a Xeon with 25 GB/s
}

// A reader may see a half of a new policy and a half of the old one: still a policy, and no bit depends on it. A
// prefetch below 0: none is chosen yet.
std::atomic<std::int64_t> chosen_prefetch{-1}, chosen_stream{0};
std::atomic<bool> chosen_fused{true};

void store(const Policy& policy) {
  chosen_fused.store(policy.fused, std::memory_order_relaxed);
  chosen_stream.store(policy.stream, std::memory_order_relaxed);
  chosen_prefetch.store(policy.prefetch, std::memory_order_release);
}

// The bytes that `number` spells, from 0 to `most`; -1 if it spells none.
std::int64_t bytes_of(const std::string& number, std::int64_t most) {
  if (number.empty() || number.find_first_not_of("0123456789") != std::string::npos) return -1;
  errno = 0;
  const long long value = std::strtoll(number.c_str(), nullptr, 10);
  return errno == ERANGE || value > most ? -1 : value;
}

// Whether `item`, such as "prefetch=256", is one of a policy's; then it is set.
bool set(Policy& policy, const std::string& item) {
  const std::size_t equals = item.find('=');
  if (equals == std::string::npos) return false;
  const std::string key = item.substr(0, equals), value = item.substr(equals + 1);
  if (key == "stages") {
    policy.fused = value == "fused";
    return policy.fused || value == "tiled";
  }
  if (key == "prefetch") return (policy.prefetch = bytes_of(value, Policy::kMostPrefetch)) >= 0;
  if (key != "stream") return false;
  policy.stream = value == "never" ? Policy::kNever : bytes_of(value, Policy::kNever);
  return policy.stream >= 0;
}

}  // namespace

Policy policy() {
  const std::int64_t prefetch = chosen_prefetch.load(std::memory_order_acquire);
  if (prefetch >= 0)
    return {prefetch, chosen_stream.load(std::memory_order_relaxed), chosen_fused.load(std::memory_order_relaxed)};
  const char* const wanted = std::getenv("AFFLUX_POLICY");
  const Policy initial = wanted == nullptr ? default_policy() : policy_of(wanted, "AFFLUX_POLICY");
  store(initial);
  return initial;
}

void choose_policy(const Policy& policy) {
  if (policy.prefetch < 0 || policy.prefetch > Policy::kMostPrefetch)
    throw Error("[choose_policy] prefetch is " + std::to_string(policy.prefetch) + ", must be from 0 to " +
                std::to_string(Policy::kMostPrefetch) + " bytes");
  if (policy.stream < 0)
    throw Error("[choose_policy] stream is " + std::to_string(policy.stream) + ", must be at least 0 bytes");
  store(policy);
}

std::string text(const Policy& policy) {
  return "prefetch=" + std::to_string(policy.prefetch) +
         ",stream=" + (policy.stream == Policy::kNever ? "never" : std::to_string(policy.stream)) +
         ",stages=" + (policy.fused ? "fused" : "tiled");
}

Policy policy_of(const std::string& text, const std::string& asked_by) {
  Policy found = default_policy();
  for (std::size_t begin = 0; begin < text.size();) {
    const std::size_t comma = std::min(text.find(',', begin), text.size());
    const std::string item = text.substr(begin, comma - begin);
    if (!set(found, item))
      throw Error(asked_by + " has '" + item + "', expected prefetch=BYTES (0 to " +
                  std::to_string(Policy::kMostPrefetch) + "), stream=BYTES, stream=never, stages=fused or " +
                  "stages=tiled, separated by commas");
    begin = comma + 1;
  }
  return found;
}

std::string processor_family() {
  const Processor here = processor();
  return here.vendor + (here.family == 0 ? " processor" : " family " + std::to_string(here.family));
}

}  // namespace afflux
