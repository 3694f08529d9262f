#include "afflux/policy.hpp"

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <mutex>

#include "afflux/afflux.hpp"
#include "cpu/environment.hpp"
#include "cpu/processor.hpp"

namespace afflux {
namespace {

// Returns true for the models of AMD's family 25 that are Zen 4; the others are Zen 3.
bool zen4(int model) {
  return (model >= 0x10 && model < 0x20) || (model >= 0x60 && model < 0x80) || (model >= 0xA0 && model < 0xB0);
}

// Returns the processor's default. The defaults were measured on Zen 3 (model 1 of family 25), Zen 4 (model 17) and Zen
// 5 (family 26): bench/NOTES.md, "Stages in registers".
Policy default_policy() {
  const Processor here = processor();
  if (here.vendor != "AMD" || (here.family != 25 && here.family != 26)) return {};
  const bool zen3 = here.family == 25 && !zen4(here.model);
  return {zen3 ? 512 : 256, std::int64_t{16} << 20, true, !zen3};
}

// The chosen policy; a prefetch below 0 means that none is chosen yet. A reader may see some fields of a new policy and
// some of the old one: together they are a valid policy, and no bit of a result depends on it.
std::atomic<std::int64_t> chosen_prefetch{-1}, chosen_stream{0};
std::atomic<bool> chosen_fused{true}, chosen_direct{false};
std::mutex choosing;  // held to store

void store(const Policy& policy) {
  chosen_fused.store(policy.fused, std::memory_order_relaxed);
  chosen_direct.store(policy.direct, std::memory_order_relaxed);
  chosen_stream.store(policy.stream, std::memory_order_relaxed);
  chosen_prefetch.store(policy.prefetch, std::memory_order_release);
}

// Returns `number` as a count of bytes from 0 to `most`, or -1 if it is none.
std::int64_t bytes_of(const std::string& number, std::int64_t most) {
  if (number.empty() || number.find_first_not_of("0123456789") != std::string::npos) return -1;
  errno = 0;
  const long long value = std::strtoll(number.c_str(), nullptr, 10);
  return errno == ERANGE || value > most ? -1 : value;
}

// Returns true if `value` is one of two words, and sets `is_first`.
bool either(const std::string& value, const char* first, const char* second, bool& is_first) {
  is_first = value == first;
  return is_first || value == second;
}

// Sets the field `key` of the policy. Returns false if `key` or `value` is invalid.
bool set(Policy& policy, const std::string& key, const std::string& value) {
  if (key == "stages") return either(value, "fused", "tiled", policy.fused);
  if (key == "rows") return either(value, "direct", "copied", policy.direct);
  if (key == "prefetch") return (policy.prefetch = bytes_of(value, Policy::kMostPrefetch)) >= 0;
  if (key != "stream") return false;
  policy.stream = value == "never" ? Policy::kNever : bytes_of(value, Policy::kNever);
  return policy.stream >= 0;
}

// Reads the policy that was stored last. Returns false if none was stored.
bool load(Policy& policy) {
  policy.prefetch = chosen_prefetch.load(std::memory_order_acquire);
  policy.stream = chosen_stream.load(std::memory_order_relaxed);
  policy.fused = chosen_fused.load(std::memory_order_relaxed);
  policy.direct = chosen_direct.load(std::memory_order_relaxed);
  return policy.prefetch >= 0;
}

}  // namespace

Policy policy() {
  Policy now;
  if (load(now)) return now;
  const std::lock_guard<std::mutex> lock(choosing);
  if (load(now)) return now;  // another thread was first
  const char* const wanted = std::getenv("AFFLUX_POLICY");
  now = wanted == nullptr ? default_policy() : policy_of(wanted, "AFFLUX_POLICY");
  store(now);
  return now;
}

void choose_policy(const Policy& policy) {
  if (policy.prefetch < 0 || policy.prefetch > Policy::kMostPrefetch)
    throw Error("[choose_policy] prefetch is " + std::to_string(policy.prefetch) + ", must be from 0 to " +
                std::to_string(Policy::kMostPrefetch) + " bytes");
  if (policy.stream < 0)
    throw Error("[choose_policy] stream is " + std::to_string(policy.stream) + ", must be at least 0 bytes");
  const std::lock_guard<std::mutex> lock(choosing);
  store(policy);
}

std::string text(const Policy& policy) {
  return "prefetch=" + std::to_string(policy.prefetch) +
         ",stream=" + (policy.stream == Policy::kNever ? "never" : std::to_string(policy.stream)) +
         ",stages=" + (policy.fused ? "fused" : "tiled") + ",rows=" + (policy.direct ? "direct" : "copied");
}

Policy policy_of(const std::string& text, const std::string& asked_by) {
  Policy found = default_policy();
  if (text.empty()) return found;
  std::string keys = ",";  // those that were set
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t comma = std::min(text.find(',', begin), text.size());
    const std::string item = text.substr(begin, comma - begin);
    const std::size_t equals = std::min(item.find('='), item.size());
    const std::string key = item.substr(0, equals);
    if (equals == item.size() || !set(found, key, item.substr(equals + 1)))
      throw Error(asked_by + " has '" + printable(item) + "', expected prefetch=BYTES (0 to " +
                  std::to_string(Policy::kMostPrefetch) + "), stream=BYTES or never, stages=fused or tiled, " +
                  "rows=direct or copied, separated by commas");
    if (keys.find("," + key + ",") != std::string::npos) throw Error(asked_by + " has " + key + " twice");
    keys += key + ",";
    begin = comma + 1;
  }
  return found;
}

std::string processor_family() {
  const Processor here = processor();
  return here.vendor + (here.family == 0 ? " processor" : " family " + std::to_string(here.family));
}

}  // namespace afflux
