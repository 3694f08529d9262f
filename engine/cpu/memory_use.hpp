// The settings of one sweep, from the policy.
#pragma once
#include "afflux/policy.hpp"
#include "api/kernels.hpp"

namespace afflux {

// Returns the settings of a sweep over this number of bytes. `may_stream`: its output is not read soon after.
inline MemoryUse memory_use(std::int64_t bytes, bool may_stream = true) {
  const Policy now = policy();
  return {now.prefetch, may_stream && bytes >= now.stream, now.fused, now.direct};
}

}  // namespace afflux
