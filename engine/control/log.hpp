// The entries of the log: all that was decided, in its order.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "control/decision.hpp"
#include "control/push.hpp"

namespace afflux::control {

// One push, and the decision about it.
struct Join {
  std::int64_t number;
  Status status;
  Client client;
  std::int64_t version, staleness, examples;
  double loss;
  std::int64_t local_steps;
  Facts facts;
};

enum class CutKind : std::uint8_t { flush, discard, end_pass };
// The emptying of a buffer without a push.
struct Cut {
  CutKind kind;
  std::int64_t joins;  // the last joins before it that belong to the same step, if they filled the buffer; else 0
};
// The replacement of a rule vector.
struct Handed {
  std::string name;
};
// A version that the caller has set.
struct NewParams {};
// The replacement of the rule, by a rule with this configuration.
struct Replaced {
  std::string config;
};
struct Opened {
  std::string task;
  Client client;
  std::int64_t version;
  bool hold;                    // whether the version is held for the task
  std::optional<double> until;  // Unix time at which the task is closed
  std::optional<double> lease;  // seconds from its opening until then
};
enum class Why : std::uint8_t { pushed, expired, cancelled };
struct Closed {
  std::string task;
  Why why;
};

using Entry = std::variant<Join, Cut, Handed, NewParams, Replaced, Opened, Closed>;
using Log = std::vector<Entry>;

}  // namespace afflux::control
