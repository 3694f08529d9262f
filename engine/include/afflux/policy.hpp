// How sweeps on the CPU use memory. Processors differ in what is fastest; no bit of a result depends on it. Defaults
// were measured on AMD's Zen 3, 4 and 5 and, those of all other processors, on one Xeon (bench/NOTES.md).
#pragma once
#include <cstdint>
#include <string>

namespace afflux {

struct Policy {
  static constexpr std::int64_t kNever = INT64_MAX, kMostPrefetch = 1 << 16;

  // How many bytes ahead of what is read `ingest` and `apply` prefetch vectors, at most kMostPrefetch; 0: by the
  // processor alone. Where more is computed than read (encoded rows, bfloat16 or renewed rule vectors in tiles) the
  // distance is 2 KiB whatever it is here, but for encoded rows that are `direct`.
  std::int64_t prefetch = 1024;
  // Sweeps over at least so many bytes write past the caches (non-temporal stores): `ingest` into slots that begin on
  // a cache line; fused rounds without rows, and without checksums, what does not go where it came from.
  std::int64_t stream = kNever;
  // Whether the stages of common rounds are fused in registers: float32 params, updates of float32 or bfloat16 (at most
  // 32, or 16 with rows), plain rows or none, no rule vectors or, without rows, one beside a step without states;
  // `inner` of at most 16 vectors, all float32 or all bfloat16. All others go from stage to stage tile by tile.
  bool fused = true;
  // Whether affine rows are encoded from updates where they lie, which are prefetched into L1; otherwise from copies in
  // L1, for processors whose L1 has few ways.
  bool direct = false;
};

// The policy of this process's calls: as last chosen, else AFFLUX_POLICY from the environment, else the processor's.
// Throws Error if AFFLUX_POLICY is no policy.
Policy policy();
// For all later calls. Throws Error for a prefetch that is out of range, or a negative stream.
void choose_policy(const Policy& policy);

// As AFFLUX_POLICY spells it: "prefetch=256,stream=16777216,stages=fused,rows=direct", or "stream=never", or
// "stages=tiled", or "rows=copied".
std::string text(const Policy& policy);
// Parses such a text; missing settings have the processor's default. Throws Error, which names `asked_by`.
Policy policy_of(const std::string& text, const std::string& asked_by);

// The processor family whose default is used here: "AMD family 26".
std::string processor_family();

}  // namespace afflux
