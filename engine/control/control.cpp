#include "control/control.hpp"

#include <algorithm>
#include <stdexcept>
#include <unordered_set>

namespace afflux::control {
namespace {

void require(bool fact, const char* message) {
  if (!fact) throw std::invalid_argument(message);
}

}  // namespace

Control::Control(const Settings& settings)
    : settings_(settings), keeps_log_(settings.keeps_log), tasks_(settings.max_bases) {
  require(settings.buffer_size >= 1, "[control] buffer_size must be at least 1");
  require(settings.rules.max_staleness.value_or(0) >= 0, "[control] max_staleness must be at least 0");
  require(settings.pass_clients.value_or(1) >= 1, "[control] the clients of a pass must be at least 1");
  require(settings.max_rows.value_or(1) >= 1, "[control] max_rows must be at least 1");
  const std::int64_t most_rounds = settings.participations.value_or(1);
  require(most_rounds >= 1 && most_rounds <= INT32_MAX, "[control] participations must be from 1 to 2^31 - 1");
  require(!settings.participations || (!settings.pass_clients && settings.rules.duplicates != Duplicates::both),
          "[control] participations are of rules without passes, with a client in a buffer once");
  state_.buffer_size = settings.buffer_size;
  state_.buffer = Buffer(settings.rules.duplicates != Duplicates::both);
  if (settings.pass_clients) state_.pass.emplace(*settings.pass_clients);
}

// Deciding

const Tasks::Task* Control::find_task(TaskNumber task, const Draft* draft) const {
  if (draft != nullptr && std::count(draft->closed.begin(), draft->closed.end(), task) != 0) return nullptr;
  return tasks_.find(task);
}

// Returns why an arrival that would join cannot.
Refusal Control::refusal_of(const State& state, const Client& client) const {
  if (state.pass && state.pass->left() == 0) return Refusal::pass_is_full;
  if (!settings_.max_rows || (client && client.has_row())) return Refusal::none;
  const auto rows = static_cast<std::int64_t>(rows_.size() + state.first_rows.size());
  if (rows + state.buffer.filled() < *settings_.max_rows) return Refusal::none;
  std::unordered_set<std::int64_t> coming;  // numbers of clients that have no row yet
  for (const Client& other : state.first_rows) coming.insert(other.number());
  for (const Arrival& arrival : state.buffer.arrivals())
    if (!arrival.client.has_row()) coming.insert(arrival.client.number());
  if (client && coming.count(client.number()) != 0) return Refusal::none;
  const auto clients = static_cast<std::int64_t>(rows_.size() + coming.size());
  return clients < *settings_.max_rows ? Refusal::none : Refusal::too_many_clients;
}

bool Control::is_blocked(const State& state, const Draft* draft, const Client& client) const {
  if (state.pass) return state.pass->has(client);
  if (!settings_.participations || !client) return false;
  std::int64_t rounds = client.rounds();
  if (draft != nullptr)
    for (const Client& other : draft->participants) rounds += other.number() == client.number();
  return rounds >= *settings_.participations;
}

Decision Control::decide(const State& state, const Draft* draft, const Push& push) const {
  Decision decision;
  decision.version = state.version;
  const Tasks::Task* const task = push.task ? find_task(*push.task, draft) : nullptr;
  if (push.task && task == nullptr) {
    decision.status = Status::expired;
    return decision;
  }
  const auto refuse = [&](Refusal refusal) {
    decision.status = settings_.records_faults ? Status::faulty : Status::refused;
    decision.refusal = refusal;
    return decision;
  };
  const std::int64_t decided = state.decided_version();
  const bool is_counted = task == nullptr && !push.version;  // the push says the staleness
  const std::int64_t version = task != nullptr ? task->opened.version
                               : is_counted    ? decided - push.staleness
                                               : *push.version;
  if (version < 0 || version > (is_counted ? decided : state.version)) return refuse(Refusal::no_such_version);
  decision.staleness = decided - version;
  if (push.examples == 0) {
    decision.status = Status::empty;
    return decision;
  }
  const auto client = [&] { return task != nullptr ? task->opened.client : clients_.find(push.client); };
  const auto blocked = [&] {
    decision.is_blocked = (state.pass || settings_.participations) && is_blocked(state, draft, client());
    return decision.is_blocked;
  };
  const auto waiting = [&]() -> std::optional<std::int64_t> {
    const Arrival* const arrival = state.buffer.waiting(client());
    return arrival == nullptr ? std::nullopt : std::optional(arrival->version);
  };
  decision.status = status_of(settings_.rules, version, *decision.staleness, state.pass.has_value(), blocked, waiting);
  if (decision.status == Status::joined && (state.pass || settings_.max_rows)) {
    if (const Refusal refusal = refusal_of(state, client()); refusal != Refusal::none) return refuse(refusal);
  }
  decision.join = state.number;
  if (is_accepted(decision.status)) decision.step = decided + 1;
  if (decision.status == Status::replaced) decision.freed = state.buffer.waiting(client())->slot;
  const bool by_flush = draft == nullptr ? settings_.by_flush : draft->by_flush;
  decision.completes = !by_flush && fills(decision.status, state.buffer.filled(), state.round_size());
  return decision;
}

Decision Control::admit(const Push& push, double now) {
  const Decision decision = decide(push);
  admit(push, decision, now);
  return decision;
}

Decision Control::admit(Draft& draft, const Push& push, double now) {
  const Decision decision = decide(draft, push);
  admit(draft, push, decision, now);
  return decision;
}

// Throws unless a draft is of the state as it is.
void Control::check(const Draft* draft) const {
  require(draft == nullptr || draft->changes == changes_, "[control] the state has changed since the draft");
}

void Control::admit(State& state, Draft* draft, const Push& push, const Decision& decision, double now) {
  check(draft);
  require(push.examples >= 0, "[control] a number of examples must be at least 0");
  const Status status = decision.status;
  const bool by_flush = draft == nullptr ? settings_.by_flush : draft->by_flush;
  require(by_flush || state.buffer.empty() || state.buffer.filled() < state.round_size(),
          "[control] the buffer is a round, which must be decided first");
  require(!decision.completes || !state.round_pending,
          "[control] a round is decided, which must be committed before a push completes another one");
  // First all that may fail: entries of the log, a number of the client, room.
  const Tasks::Task* const task = push.task ? find_task(*push.task, draft) : nullptr;
  const bool closes = task != nullptr && status != Status::refused;
  Log entries;
  Arrival arrival;
  if (is_decision(status)) {
    static_cast<PushFacts&>(arrival) = push;
    arrival.client = task != nullptr ? task->opened.client : clients_.of(push.client);
    arrival.staleness = *decision.staleness;
    arrival.version = state.decided_version() - arrival.staleness;
    arrival.join = decision.join;
    if (keeps_log_)
      entries.push_back(Join{arrival.join, status, arrival.client, arrival.version, arrival.staleness, push.examples,
                             push.loss, push.local_steps, push.facts});
  }
  if (closes && keeps_log_) entries.push_back(Closed{task->opened.task, Why::pushed});
  make_room(state.log, entries.size());
  if (draft != nullptr) {
    make_room(draft->closed, 1);
    make_room(draft->freed, 1);
  }
  if (status == Status::joined) {
    const bool enters = state.pass.has_value();
    if (enters) state.pass->enter(arrival.client);
    try {
      state.buffer.join(std::move(arrival));
    } catch (...) {
      if (enters) state.pass->leave(1);
      throw;
    }
    if (state.buffer.filled() == 1) state.since = now;
  }
  // From here on nothing fails.
  if (status == Status::replaced) {
    state.buffer.replace(std::move(arrival));
    if (draft != nullptr) draft->freed.push_back(decision.freed);
  }
  for (Entry& entry : entries) state.log.push_back(std::move(entry));
  ++state.counts[status];
  if (is_decision(status)) ++state.number;
  if (closes) close(draft, *push.task);
  if (draft == nullptr && status != Status::refused) ++changes_;
}

void Control::count(State& state, Draft* draft, Status status, std::optional<TaskNumber> task) {
  check(draft);
  require(!is_decision(status), "[control] a decision about an arrival is counted when it is made");
  const Tasks::Task* const open = task && status != Status::refused ? find_task(*task, draft) : nullptr;
  if (open != nullptr) {
    if (draft != nullptr) make_room(draft->closed, 1);
    note(state, Closed{open->opened.task, Why::pushed});
    close(draft, *task);
  }
  ++state.counts[status];
  if (draft == nullptr && status != Status::refused) ++changes_;
}

// Closes the task of a push. For a draft, `adopt` does so; it has room for one task.
void Control::close(Draft* draft, TaskNumber task) noexcept {
  if (draft != nullptr)
    draft->closed.push_back(task);
  else
    tasks_.close(task);
}

// Rounds

std::vector<Arrival> Control::discard() {
  if (state_.buffer.empty()) return {};
  return cut(state_, nullptr, {}, Cut{CutKind::discard, 0});
}
std::vector<Arrival> Control::end_pass(Round round) {
  require(state_.pass.has_value(), "[control] this server has no passes");
  if (state_.pass->entered() == 0) return {};
  return cut(state_, nullptr, std::move(round), Cut{CutKind::end_pass, 0});
}

std::vector<Arrival> Control::cut(State& state, Draft* draft, std::optional<Round> round,
                                  const std::optional<Cut>& entry) {
  check(draft);
  const bool ends_pass = entry && entry->kind == CutKind::end_pass;
  const std::int64_t filled = state.buffer.filled();
  if (filled == 0 && ends_pass) round.reset();  // the pass ends without one
  require(filled > 0 || ends_pass, "[control] the buffer is empty");
  require(!round || !state.round_pending, "[control] a round is decided, which must be committed before the next one");
  require(entry || filled == state.round_size(), "[control] the buffer is no round yet");
  if (round && settings_.participations) make_room(state.participants, static_cast<std::size_t>(filled));
  if (entry) note(state, *entry);
  // From here on nothing fails.
  std::vector<Arrival> arrivals = state.buffer.take();
  if (round && settings_.participations) {
    for (const Arrival& arrival : arrivals) {
      state.participants.push_back(arrival.client);
      if (draft == nullptr) arrival.client.set_rounds(arrival.client.rounds() + 1);
    }
  }
  if (state.pass) {
    if (ends_pass || (round && state.pass->left() == 0))
      state.pass = Participation(state.pass->num_clients());
    else if (!round)
      state.pass->leave(filled);
  }
  if (state.next_buffer_size) {
    state.buffer_size = *state.next_buffer_size;
    state.next_buffer_size.reset();
  }
  if (round) {
    state.counts_at_round = state.counts;
    state.round_pending = round->steps;
    if (round->steps) state.first_rows = std::move(round->first_rows);
    if (draft != nullptr) draft->has_round = true;
  }
  if (draft == nullptr) ++changes_;
  return arrivals;
}

void Control::commit() {
  require(state_.round_pending, "[control] no round is decided");
  make_room(rows_, state_.first_rows.size());
  for (Client& client : state_.first_rows) {
    client.set_row(true);
    rows_.push_back(std::move(client));
  }
  state_.first_rows.clear();
  state_.round_pending = false;
  ++state_.version;
  if (settings_.rules.max_staleness) tasks_.release_before(state_.version - *settings_.rules.max_staleness);
  ++changes_;
}

void Control::abandon() {
  require(state_.round_pending, "[control] no round is decided");
  state_.first_rows.clear();
  state_.round_pending = false;
  ++changes_;
}

// Drafts

Draft Control::draft(bool completes) const {
  Draft draft;
  static_cast<StateNumbers&>(draft) = state_;
  draft.buffer = state_.buffer;
  draft.round_pending = state_.round_pending;
  draft.first_rows = state_.first_rows;
  if (state_.pass) draft.pass = Participation::draft(*state_.pass);
  draft.counts_at_round = state_.counts_at_round;
  draft.since = state_.since;
  draft.by_flush = settings_.by_flush || !completes;
  draft.changes = changes_;
  return draft;
}

std::vector<std::int64_t> Control::adopt(Draft&& draft) {
  check(&draft);
  make_room(state_.log, draft.log.size());
  make_room(state_.participants, draft.participants.size());
  const bool extends = state_.pass && draft.pass->extends(*state_.pass);
  if (extends) state_.pass->reserve(*draft.pass);
  // From here on nothing fails.
  if (extends) {
    state_.pass->append(std::move(*draft.pass));
    draft.pass = std::move(state_.pass);
  }
  for (Entry& entry : draft.log) state_.log.push_back(std::move(entry));
  draft.log = std::move(state_.log);
  for (Client& client : draft.participants) {
    client.set_rounds(client.rounds() + 1);
    state_.participants.push_back(std::move(client));
  }
  draft.participants = std::move(state_.participants);
  draft.counts[Status::refused] = state_.counts[Status::refused];  // counted meanwhile
  if (draft.has_round) draft.counts_at_round[Status::refused] = state_.counts[Status::refused];
  std::swap(state_, static_cast<State&>(draft));
  for (const TaskNumber task : draft.closed) tasks_.close(task);
  ++changes_;
  return std::move(draft.freed);
}

// Tasks

TaskNumber Control::open_task(Opened opened, double deadline) {
  require(!tasks_.number_of(opened.task), "[control] an open task has this id");
  require(opened.version >= 0 && opened.version <= state_.version, "[control] the version of a task was never made");
  Entry entry = keeps_log_ ? Entry(opened) : Entry();
  make_room(state_.log, 1);
  const TaskNumber task = tasks_.open({std::move(opened), deadline});
  if (keeps_log_) state_.log.push_back(std::move(entry));
  ++changes_;
  return task;
}

bool Control::close_task(TaskNumber task, Why why) {
  const Tasks::Task* const open = tasks_.find(task);
  if (open == nullptr) return false;
  note(state_, Closed{open->opened.task, why});
  tasks_.close(task);
  ++changes_;
  return true;
}

void Control::release_base(std::int64_t version) {
  tasks_.release(version);
  ++changes_;
}

void Control::close_overdue(double now) {
  while (const std::optional<TaskNumber> task = tasks_.next_overdue(now)) close_task(*task, Why::expired);
}

// Changes by the caller

void Control::note(State& state, Entry&& entry) const {
  if (!keeps_log_) return;
  make_room(state.log, 1);
  state.log.push_back(std::move(entry));
}

void Control::hand_in(const std::string& name) {
  note(state_, Handed{name});
  ++changes_;
}

void Control::set_params() {
  require(state_.buffer.empty() && !state_.round_pending, "[control] arrivals wait, or a round is decided");
  note(state_, NewParams{});
  ++state_.version;
  if (settings_.rules.max_staleness) tasks_.release_before(state_.version - *settings_.rules.max_staleness);
  ++changes_;
}

bool Control::replace_rule(std::int64_t buffer_size, const std::string& config) {
  require(buffer_size >= 1, "[control] buffer_size must be at least 1");
  note(state_, Replaced{config});
  const bool at_once = state_.buffer.empty();
  if (at_once)
    state_.buffer_size = buffer_size;
  else
    state_.next_buffer_size = buffer_size;
  ++changes_;
  return at_once;
}

void Control::set_by_flush(bool by_flush) {
  settings_.by_flush = by_flush;
  ++changes_;
}

// The saved state

Saved Control::save() const {
  Saved saved;
  static_cast<StateNumbers&>(saved) = state_;
  saved.waiting = state_.buffer.arrivals();
  saved.rows = rows_;
  if (state_.pass) saved.entered = state_.pass->order();
  saved.participants = state_.participants;
  if (keeps_log_) saved.log = state_.log;
  return saved;
}

void Control::load(Saved saved, double now) {
  require(saved.entered.has_value() == settings_.pass_clients.has_value(), "[control] only one of both has passes");
  const auto entered = static_cast<std::int64_t>(saved.entered ? saved.entered->size() : 0);
  require(!saved.entered || entered <= *settings_.pass_clients, "[control] too many clients have entered");
  require(saved.participants.empty() || settings_.participations, "[control] participations are not limited");
  State state;
  static_cast<StateNumbers&>(state) = saved;
  state.buffer = Buffer(settings_.rules.duplicates != Duplicates::both);
  for (Arrival& arrival : saved.waiting) state.buffer.join(std::move(arrival));
  if (saved.entered) {
    state.pass.emplace(*settings_.pass_clients);
    for (const Client& client : *saved.entered) state.pass->enter(client);
  }
  state.counts_at_round = saved.counts;
  state.since = now;
  const bool keeps_log = keeps_log_ && saved.log;
  if (keeps_log) state.log = std::move(*saved.log);
  // From here on nothing fails.
  for (const Client& client : rows_) client.set_row(false);
  for (const Client& client : saved.rows) client.set_row(true);
  for (const Client& client : state_.participants) client.set_rounds(0);
  for (const Client& client : saved.participants) client.set_rounds(client.rounds() + 1);
  state.participants = std::move(saved.participants);
  std::swap(rows_, saved.rows);
  std::swap(state_, state);
  keeps_log_ = keeps_log;
  tasks_.clear();
  ++changes_;
}

}  // namespace afflux::control
