// What is known about a push before the decision, and about an arrival after it.
#pragma once
#include <cmath>
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "control/clients.hpp"

namespace afflux::control {

using Facts = std::vector<std::pair<std::string, double>>;  // names and values, sorted by name
using TaskNumber = std::uint64_t;

// What a push reports. The vector itself is in a slot, of which control has only the number.
struct PushFacts {
  std::int64_t examples = 1;     // 0: the client has trained on none
  double loss = NAN;             // NaN: unknown
  double norm = NAN;             // of the vector; NaN: no push has checked it
  std::int64_t local_steps = 0;  // 0: unknown
  Facts facts;
  std::int64_t slot = -1;
};

// A push is that of an open task, or of a client and either the version that it pulled or the staleness.
struct Push : PushFacts {
  std::optional<TaskNumber> task;
  Id client;
  std::optional<std::int64_t> version;
  std::int64_t staleness = 0;
};

// An arrival in the buffer.
struct Arrival : PushFacts {
  Client client;
  std::int64_t version = 0;  // that the client pulled
  std::int64_t staleness = 0;
  std::int64_t join = 0;  // the number of its decision
};

}  // namespace afflux::control
