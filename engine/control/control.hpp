// Control: all that a server decides about pushes, with numbers in the place of vectors. It decides which arrivals
// wait, which make a round, how stale they are, which tasks are open, what is counted and logged.
//
//     Decision decision = control.admit(push, now);         // a push, whose vector is in a slot
//     if (decision.completes) {                             // the buffer is a round
//       for (const Arrival* arrival : control.state().buffer.canonical()) ...   // weights by their facts
//       auto arrivals = control.decide_round({/*steps=*/true});                 // pushes may go on
//       ...                                                 // the sweep over their slots
//       control.commit();                                   // its version is the newest
//     }
//
// A draft is a copy of the state. Decisions change the draft, and nothing else, until `adopt` makes it the state: the
// pushes of a step are one decision, and so are the push that completes a round and that round, if the caller's weights
// may fail.
//
// An exception (std::bad_alloc, or std::invalid_argument for a wrong call) changes nothing. Not for several threads at
// once. Handles of clients, and drafts, must not outlive the object.
#pragma once
#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "control/buffer.hpp"
#include "control/clients.hpp"
#include "control/counts.hpp"
#include "control/decision.hpp"
#include "control/log.hpp"
#include "control/participation.hpp"
#include "control/push.hpp"
#include "control/tasks.hpp"

namespace afflux::control {

struct Settings {
  std::int64_t buffer_size = 1;  // arrivals of a round
  AdmissionRules rules;
  bool by_flush = false;        // no push completes a round
  bool records_faults = false;  // an invalid push is faulty, and closes its task; else it is refused
  bool keeps_log = false;
  std::optional<std::int64_t> pass_clients;  // rules that take every client once per pass: the clients of a pass
  std::optional<std::int64_t> max_rows;      // clients that may have a row
  // Rounds that a client may be in; nullopt: any number, and none is counted. Of a rule that has each client in a
  // buffer once.
  std::optional<std::int64_t> participations;
  std::int64_t max_bases = 64;  // versions that are held for tasks
};

// Why a push is refused or faulty.
enum class Refusal : std::uint8_t { none, no_such_version, pass_is_full, too_many_clients };

// The decision about a push.
struct Decision {
  Status status = Status::joined;
  Refusal refusal = Refusal::none;
  std::optional<std::int64_t> staleness;  // unknown if the task is closed, or the version was never made
  std::int64_t version = 0;               // the newest one
  std::int64_t join = -1;                 // the number of the decision; -1: it is not about an arrival
  std::int64_t step = -1;                 // the version that the arrival's round makes; -1: it is in no buffer
  bool completes = false;                 // whether the buffer is a round now
  bool is_blocked = false;                // it is rejected whatever waits, see Control::blocks
  std::int64_t freed = -1;                // the slot of the arrival that this one has replaced
};

// The numbers of a state, which a draft and a saved state have, too.
struct StateNumbers {
  std::int64_t version = 0;  // the newest one
  std::int64_t number = 0;   // of the next decision
  std::int64_t buffer_size = 1;
  std::optional<std::int64_t> next_buffer_size;  // that of the rule that replaces this one after the buffer's round
  Counts counts;
};

// What pushes change.
struct State : StateNumbers {
  Buffer buffer;
  bool round_pending = false;      // a round is decided, and not committed
  std::vector<Client> first_rows;  // the clients that get their first row in that round
  std::optional<Participation> pass;
  // The clients of all rounds that were decided, once for each round, if participations are limited; of a draft those
  // of its own rounds.
  std::vector<Client> participants;
  Counts counts_at_round;  // when the last round was decided
  double since = 0;        // when the first arrival in the buffer has joined
  Log log;                 // of a draft: its own entries

  std::int64_t decided_version() const { return control::decided_version(version, round_pending); }
  std::int64_t round_size() const {
    return control::round_size(buffer_size, buffer.filled(), pass ? std::optional(pass->left()) : std::nullopt);
  }
};

// A copy of the state, for decisions that are made together. Made by Control::draft.
struct Draft : State {
  bool by_flush;
  std::int64_t changes;             // of the state before it
  std::vector<TaskNumber> closed;   // by its pushes
  std::vector<std::int64_t> freed;  // slots of arrivals that its pushes have replaced
  bool has_round = false;
};

// A round: whether it makes a version, and who gets a first row. Without a step its arrivals are dropped.
struct Round {
  bool steps = true;
  std::vector<Client> first_rows = {};
};

// What is saved, as data with names. Clients are handles of the Control that saves or loads it.
struct Saved : StateNumbers {
  std::vector<Arrival> waiting;
  std::vector<Client> rows;
  std::optional<std::vector<Client>> entered;  // in the pass; nullopt: no passes
  std::vector<Client> participants;            // see State
  std::optional<Log> log;                      // nullopt: the server keeps none
};
// Calls visit(name, field) with each field of a saved state.
template <class SavedState, class Visit>
void for_each_field(SavedState& saved, const Visit& visit) {
  visit("version", saved.version);
  visit("number", saved.number);
  visit("buffer_size", saved.buffer_size);
  visit("next_buffer_size", saved.next_buffer_size);
  visit("waiting", saved.waiting);
  visit("rows", saved.rows);
  visit("entered", saved.entered);
  visit("participants", saved.participants);
  visit("counts", saved.counts);
  visit("log", saved.log);
}

class Control {
 public:
  explicit Control(const Settings& settings);
  Control(const Control&) = delete;
  Control& operator=(const Control&) = delete;

  const Settings& settings() const { return settings_; }
  const State& state() const { return state_; }
  const Tasks& tasks() const { return tasks_; }
  const std::vector<Client>& rows() const { return rows_; }  // the clients that have a row
  Clients& clients() { return clients_; }
  const Clients& clients() const { return clients_; }

  // Pushes. `now` is the caller's monotonic clock. A task is open until `close_overdue`, also if its lease has ended.
  Decision admit(const Push& push, double now);
  // Makes the decision that `decide` has returned about this push; nothing has changed since.
  void admit(const Push& push, const Decision& decision, double now) { admit(state_, nullptr, push, decision, now); }
  // Returns the decision that `admit` would make; nothing changes.
  Decision decide(const Push& push) const { return decide(state_, nullptr, push); }
  Decision decide(const Draft& draft, const Push& push) const { return decide(draft, &draft, push); }
  // Returns whether an arrival of a client would be rejected because it has entered in the pass, or was in as many
  // rounds as it may.
  bool blocks(const Client& client) const { return is_blocked(state_, nullptr, client); }
  // Counts a push about which the caller has decided: it is empty, expired, faulty or refused. Closes its task, unless
  // the push is refused.
  void count(Status status, std::optional<TaskNumber> task = {}) { count(state_, nullptr, status, task); }

  // Rounds. All return the arrivals that leave the buffer, oldest first: their slots are the caller's.
  // Of a buffer that a push has completed, after which it cannot fail.
  std::vector<Arrival> decide_round(Round round) { return cut(state_, nullptr, std::move(round), {}); }
  // Of any buffer with arrivals. `joins` is that of the log's entry.
  std::vector<Arrival> flush(Round round, std::int64_t joins = 0) {
    return cut(state_, nullptr, std::move(round), Cut{CutKind::flush, joins});
  }
  std::vector<Arrival> discard();
  // Of the buffer's arrivals, if there are any; then a new pass begins.
  std::vector<Arrival> end_pass(Round round);
  void commit();   // the decided round was made
  void abandon();  // it cannot be made: its version is not the newest one, and its arrivals are lost

  // Drafts. No push of a draft completes a round, unless it `completes`.
  Draft draft(bool completes = false) const;
  Decision admit(Draft& draft, const Push& push, double now);
  void admit(Draft& draft, const Push& push, const Decision& decision, double now) {
    admit(draft, &draft, push, decision, now);
  }
  void count(Draft& draft, Status status, std::optional<TaskNumber> task = {}) { count(draft, &draft, status, task); }
  std::vector<Arrival> decide_round(Draft& draft, Round round) { return cut(draft, &draft, std::move(round), {}); }
  std::vector<Arrival> flush(Draft& draft, Round round, std::int64_t joins = 0) {
    return cut(draft, &draft, std::move(round), Cut{CutKind::flush, joins});
  }
  // Makes the draft the state. Nothing may have changed since `draft()`, except for numbers of refused pushes.
  // Returns the slots of the arrivals that were replaced.
  std::vector<std::int64_t> adopt(Draft&& draft);

  // Tasks
  TaskNumber open_task(Opened opened, double deadline);
  bool close_task(TaskNumber task, Why why);
  void close_overdue(double now);
  // Returns the task, if it is open after the decisions of the draft (null: so far); else null.
  const Tasks::Task* find_task(TaskNumber task, const Draft* draft = nullptr) const;
  void release_base(std::int64_t version);  // tasks hold it no longer
  // Calls visit(version) for each version that no task holds any more, since the last call.
  template <class Visit>
  void take_released(const Visit& visit) noexcept {
    tasks_.take_released(visit);
  }

  // Changes by the caller
  void hand_in(const std::string& name);  // a rule vector
  void set_params();                      // makes a version; only while the buffer is empty
  // Returns whether the rule is replaced at once, because the buffer is empty.
  bool replace_rule(std::int64_t buffer_size, const std::string& config);
  void set_by_flush(bool by_flush);

  Saved save() const;
  // Makes a saved state the state, and closes all tasks. The log is kept if it was kept before and was saved: it never
  // begins in the middle.
  void load(Saved saved, double now);

 private:
  Decision decide(const State& state, const Draft* draft, const Push& push) const;
  Refusal refusal_of(const State& state, const Client& client) const;
  bool is_blocked(const State& state, const Draft* draft, const Client& client) const;
  void admit(State& state, Draft* draft, const Push& push, const Decision& decision, double now);
  std::vector<Arrival> cut(State& state, Draft* draft, std::optional<Round> round, const std::optional<Cut>& entry);
  void count(State& state, Draft* draft, Status status, std::optional<TaskNumber> task);
  void check(const Draft* draft) const;
  void close(Draft* draft, TaskNumber task) noexcept;
  void note(State& state, Entry&& entry) const;

  Settings settings_;
  mutable Clients clients_;  // `find` gives handles, which count
  bool keeps_log_;
  State state_;
  Tasks tasks_;
  std::vector<Client> rows_;
  std::int64_t changes_ = 0;  // so far; a draft is of the state before the next one
};

}  // namespace afflux::control
