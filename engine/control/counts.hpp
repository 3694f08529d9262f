// Numbers of pushes by status.
#pragma once
#include <array>
#include <cstdint>

#include "control/decision.hpp"

namespace afflux::control {

class Counts {
 public:
  std::int64_t operator[](Status status) const { return counts_[static_cast<std::size_t>(status)]; }
  std::int64_t& operator[](Status status) { return counts_[static_cast<std::size_t>(status)]; }
  Counts since(const Counts& earlier) const {
    Counts difference;
    for (std::size_t i = 0; i < kStatuses; ++i) difference.counts_[i] = counts_[i] - earlier.counts_[i];
    return difference;
  }

 private:
  std::array<std::int64_t, kStatuses> counts_{};
};

}  // namespace afflux::control
