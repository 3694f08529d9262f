// The rules by which pushes are admitted, as functions of numbers: Control applies them, and so do the Python bindings.
#pragma once
#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>

namespace afflux::control {

// The outcomes of a push. The first five are decisions about arrivals, which are numbered and in the log.
enum class Status : std::uint8_t {
  joined,      // it is in the buffer
  replaced,    // as joined, in the place of an earlier arrival of its client
  superseded,  // the buffer holds an arrival of its client from a newer version
  rejected,    // the buffer holds an arrival of its client, or the client has entered in this pass, or was in as many
               // rounds as it may
  dropped,     // older than max_staleness
  empty,       // trained on no examples
  expired,     // its task is closed
  faulty,      // an argument from the client is invalid, and the server records faults
  refused      // the same, and the push raises an error
};
constexpr std::size_t kStatuses = 9;
constexpr bool is_decision(Status status) { return status <= Status::dropped; }
constexpr bool is_accepted(Status status) { return status <= Status::replaced; }

// Which of a client's arrivals in one buffer count.
enum class Duplicates : std::uint8_t { both, latest, reject };

struct AdmissionRules {
  Duplicates duplicates = Duplicates::both;
  std::optional<std::int64_t> max_staleness;
};

// Returns the version from which staleness is counted. A decided round counts before it is made, so that the decisions
// alone determine the staleness.
constexpr std::int64_t decided_version(std::int64_t version, bool round_pending) { return version + round_pending; }

// Returns whether an arrival joins. `blocked()` says whether its client has entered in the pass, or was in as many
// rounds as it may, `waiting()` from which version the client's arrival in the buffer is, if there is one. They are
// called only if the decision depends on them.
template <class Blocked, class Waiting>
Status status_of(const AdmissionRules& rules, std::int64_t version, std::int64_t staleness, bool in_passes,
                 const Blocked& blocked, const Waiting& waiting) {
  if (rules.max_staleness && staleness > *rules.max_staleness) return Status::dropped;
  if (blocked()) return Status::rejected;
  if (in_passes || rules.duplicates == Duplicates::both) return Status::joined;
  const std::optional<std::int64_t> earlier = waiting();
  if (!earlier) return Status::joined;
  if (rules.duplicates == Duplicates::reject) return Status::rejected;
  return *earlier > version ? Status::superseded : Status::replaced;
}

// Returns the number of arrivals that make a round: the last round of a pass may have fewer. `left_in_pass` is the
// number of clients that have not entered in the pass.
inline std::int64_t round_size(std::int64_t buffer_size, std::int64_t filled,
                               std::optional<std::int64_t> left_in_pass) {
  return left_in_pass ? std::min(buffer_size, *left_in_pass + filled) : buffer_size;
}

// Returns whether an arrival makes the buffer a round of this size.
constexpr bool fills(Status status, std::int64_t filled, std::int64_t size) {
  return status == Status::joined && filled + 1 == size;
}

}  // namespace afflux::control
