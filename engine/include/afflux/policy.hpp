// The settings by which sweeps on the CPU use memory. The fastest settings differ between processors; no bit of a
// result depends on them. The defaults were measured on AMD's Zen 3, 4 and 5, and those for all other processors on one
// Xeon (bench/NOTES.md).
#pragma once
#include <cstdint>
#include <string>

namespace afflux {

struct Policy {
  static constexpr std::int64_t kNever = INT64_MAX, kMostPrefetch = 1 << 16;

  // The distance in bytes at which `ingest`, `inner` and `apply` prefetch vectors, from 0 to kMostPrefetch; 0: only the
  // processor prefetches. Exceptions: `inner` uses at least 1 KiB if it is not 0; `ingest` past the caches uses 4 KiB;
  // tiles with bfloat16 updates or replaced rule vectors use 2 KiB if it is not 0. Updates of encoded rows are
  // prefetched at a distance of their own, which depends on it only if affine rows are `direct`.
  std::int64_t prefetch = 1024;
  // Sweeps over at least this number of bytes write past the caches (non-temporal stores), with AVX. This applies to
  // slots of `ingest` that begin on a cache line, and, in fused rounds without rows and without checksums, to results
  // that begin on a cache line and are not written in place.
  std::int64_t stream = kNever;
  // True: common rounds keep the direction in registers through all stages, and others go from stage to stage tile by
  // tile. False: all rounds go tile by tile. Common rounds have float32 params, updates of float32 or bfloat16 (at most
  // 32, or 16 with rows), plain rows or none, and no rule vectors; or no rows, the step sgd and one rule vector. The
  // same holds for `inner` with an e of at most 16 vectors, all float32 or all bfloat16.
  bool fused = true;
  // True: affine rows are encoded from the updates in place, which are prefetched into L1. False: from copies in L1,
  // for processors whose L1 has few ways.
  bool direct = false;
};

// Returns the policy of this process: the one chosen last, else that of the environment variable AFFLUX_POLICY, else
// the processor's default. Throws Error if AFFLUX_POLICY is not a policy.
Policy policy();
// Sets the policy of all later calls of this process. Throws Error for a prefetch that is out of range, and for a
// negative stream.
void choose_policy(const Policy& policy);

// Returns a policy as text, in the form of AFFLUX_POLICY: "prefetch=256,stream=16777216,stages=fused,rows=direct". The
// other values are "stream=never", "stages=tiled" and "rows=copied".
std::string text(const Policy& policy);
// Parses such a text; a missing setting has the processor's default. Throws Error for any other text; the message names
// `asked_by`.
Policy policy_of(const std::string& text, const std::string& asked_by);

// Returns the processor family whose default is used here: "AMD family 26".
std::string processor_family();

}  // namespace afflux
