// How sweeps on the CPU use memory. Processors differ in what is fastest; no bit of a result depends on it.
#pragma once
#include <cstdint>
#include <string>

namespace afflux {

struct Policy {
  static constexpr std::int64_t kNever = INT64_MAX, kMostPrefetch = 1 << 16;

  // How many bytes ahead of what is read vectors are prefetched, at most kMostPrefetch; 0: by the processor alone.
  std::int64_t prefetch = 1024;
  // Sweeps over at least so many bytes write what they do not read past the caches (non-temporal stores).
  std::int64_t stream = kNever;
  // Whether the stages of common rounds are fused in registers, or all rounds go from stage to stage tile by tile.
  bool fused = true;
};

// The policy of this process's calls: as last chosen, else AFFLUX_POLICY from the environment, else the processor's.
// Throws Error if AFFLUX_POLICY is no policy.
Policy policy();
// For all later calls. Throws Error for a prefetch that is out of range, or a negative stream.
void choose_policy(const Policy& policy);

// As AFFLUX_POLICY spells it: "prefetch=256,stream=16777216,stages=fused", or "stream=never", or "stages=tiled".
std::string text(const Policy& policy);
// From such a text; what is not in it has the processor's default. Throws Error, which names `asked_by`.
Policy policy_of(const std::string& text, const std::string& asked_by);

// The family of processors whose default holds here: "AMD family 26".
std::string processor_family();

}  // namespace afflux
