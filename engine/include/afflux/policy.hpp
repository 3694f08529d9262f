// How sweeps on the CPU use memory. The fastest settings differ between processors; no bit of a result depends on them.
// The defaults were measured on AMD's Zen 3, 4 and 5, and those for all other processors on one Xeon (bench/NOTES.md).
#pragma once
#include <cstdint>
#include <string>

namespace afflux {

struct Policy {
  static constexpr std::int64_t kNever = INT64_MAX, kMostPrefetch = 1 << 16;

  // The distance in bytes at which `ingest` and `apply` prefetch vectors, at most kMostPrefetch; 0: only the processor
  // prefetches. Sweeps that are bound by computation (encoded rows, bfloat16 or replaced rule vectors in tiles) always
  // use 2 KiB, except for encoded rows that are `direct`.
  std::int64_t prefetch = 1024;
  // Sweeps over at least this number of bytes write past the caches (non-temporal stores): `ingest` into slots that
  // begin on a cache line; and fused rounds without rows and without checksums, for results that are not in place.
  std::int64_t stream = kNever;
  // Whether the stages of common rounds are fused in registers: float32 params, updates of float32 or bfloat16 (at most
  // 32, or 16 with rows), plain rows or none, no rule vectors or, without rows, one beside a step without states;
  // `inner` of at most 16 vectors, all float32 or all bfloat16. All others go from stage to stage tile by tile.
  bool fused = true;
  // Whether affine rows are encoded from the updates in place, which are prefetched into L1; otherwise from copies in
  // L1, for processors whose L1 has few ways.
  bool direct = false;
};

// The policy of this process's calls: as last chosen, else AFFLUX_POLICY from the environment, else the processor's.
// Throws Error if AFFLUX_POLICY is not a policy.
Policy policy();
// Sets the policy of all later calls. Throws Error for a prefetch that is out of range, or a negative stream.
void choose_policy(const Policy& policy);

// The text of a policy, as in AFFLUX_POLICY: "prefetch=256,stream=16777216,stages=fused,rows=direct", or
// "stream=never", or
// "stages=tiled", or "rows=copied".
std::string text(const Policy& policy);
// Parses such a text; missing settings have the processor's default. Throws Error, which names `asked_by`.
Policy policy_of(const std::string& text, const std::string& asked_by);

// The processor family whose default is used here: "AMD family 26".
std::string processor_family();

}  // namespace afflux
