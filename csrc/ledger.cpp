#include "ledger.hpp"

#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace py = pybind11;

namespace afflux::python {

// A fixed time in place of the monotonic clock, for tests.
std::optional<double> fixed_time;

double now() {
  return fixed_time ? *fixed_time
                    : std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

namespace {

template <class Value>
std::optional<Value> optional_of(py::handle value) {
  return is_none(value) ? std::nullopt : std::optional<Value>(value.cast<Value>());
}
py::object object_of(const std::optional<std::int64_t>& value) { return value ? integer(*value) : py::none(); }

Py_ssize_t length_of(py::handle list) { return is_none(list) ? 0 : PyList_GET_SIZE(list.ptr()); }

std::string text_of_id(py::handle id) {
  Py_ssize_t size = 0;
  const char* const text = PyUnicode_AsUTF8AndSize(id.ptr(), &size);
  if (text == nullptr) throw py::error_already_set();
  return {text, static_cast<std::size_t>(size)};
}

control::Duplicates duplicates_of(const std::string& name) {
  return name == "both"     ? control::Duplicates::both
         : name == "latest" ? control::Duplicates::latest
                            : control::Duplicates::reject;
}

// Returns the attribute of an object of the server's own.
py::object attribute(const char* name, py::handle owner) { return owned(PyObject_GetAttrString(owner.ptr(), name)); }

std::int64_t size_of(py::handle sized) {
  const Py_ssize_t size = PyObject_Size(sized.ptr());
  if (size < 0) throw py::error_already_set();
  return size;
}

// References that a decision drops beside those of arrivals and versions.
constexpr std::size_t kFewReferences = 8;

py::object object_of(const control::Id& id) {
  if (const auto* const number = std::get_if<std::int64_t>(&id)) return integer(*number);
  if (const auto* const number = std::get_if<std::uint64_t>(&id)) return owned(PyLong_FromUnsignedLongLong(*number));
  const auto& text = std::get<std::string>(id);
  return owned(PyUnicode_DecodeUTF8(text.data(), static_cast<Py_ssize_t>(text.size()), nullptr));
}

}  // namespace

control::Id id_of(py::handle client) {
  if (const auto number = plain_int(client)) return *number;
  if (PyLong_CheckExact(client.ptr())) {
    const std::uint64_t number = PyLong_AsUnsignedLongLong(client.ptr());
    if (PyErr_Occurred() != nullptr) throw py::error_already_set();
    return control::id_of(number);
  }
  return text_of_id(client);
}

Pushed pushed_in(py::handle tuple) {
  check_tuple(tuple, kFacts, "a push");
  Pushed pushed;
  for (std::size_t i = 0; i < kFacts; ++i) pushed[i] = item(tuple, i);
  return pushed;
}

// Entries that a decision appends to lists. They are taken back unless the decision is made.
class Ledger::Entries {
 public:
  ~Entries() {
    const py::error_scope error;  // keeps an exception that is being raised
    for (std::size_t i = count_; i-- > 0;) {
      const Py_ssize_t size = PyList_GET_SIZE(lists_[i].ptr());
      if (PyList_SetSlice(lists_[i].ptr(), size - 1, size, nullptr) != 0) PyErr_Clear();
    }
  }
  void append(py::handle list, py::handle entry) {
    if (is_none(list) || is_none(entry)) return;
    if (!PyList_CheckExact(list.ptr())) throw py::type_error("[Ledger] a list is needed");
    if (PyList_Append(list.ptr(), entry.ptr()) != 0) throw py::error_already_set();
    lists_.at(count_++) = list;
  }
  void keep() { count_ = 0; }

 private:
  std::array<py::handle, 6> lists_;
  std::size_t count_ = 0;
};

Ledger::Decided::Decided(py::handle decided) : round(held(decided)) {
  static const Name names[] = {Name("scalars"), Name("norms"),   Name("report"),     Name("stepped"),
                               Name("moves"),   Name("numbers"), Name("noise_nonce")};
  scalars = names[0].of(decided);
  norms = names[1].of(decided);
  report = names[2].of(decided);
  stepped = is_set(names[3].of(report));
  const py::object moves = names[4].of(decided);
  if (!is_none(moves)) coming = size_of(names[5].of(moves));
  noise_nonce = names[6].of(decided);
}

Ledger::Ledger(const py::tuple& classes, const std::string& duplicates, std::optional<std::int64_t> max_staleness,
               std::optional<double> flush_after, bool by_flush, bool log, bool reporting, bool accumulates,
               std::int64_t max_bases)
    : classes_(classes),
      reporting_(reporting),
      accumulates_(accumulates),
      flush_after_(flush_after),
      mutex_(py::cast(std::make_unique<Mutex>())),
      lock_(mutex_.cast<Mutex*>()) {
  control::Settings settings;
  settings.rules = {duplicates_of(duplicates), max_staleness};
  settings.by_flush = by_flush;
  settings.max_bases = max_bases;
  control_ = std::make_shared<control::Control>(settings);
  if (log) now_.log = py::list();
}

Ledger::Ledger(Ledger& begun)
    : classes_(begun.classes_),
      reporting_(begun.reporting_),
      accumulates_(begun.accumulates_),
      flush_after_(begun.flush_after_),
      replaying_(begun.replaying_),
      stored_(begun.stored_),
      commit_every_(begun.commit_every_),
      mutex_(begun.mutex_),
      lock_(begun.lock_),
      failure_(begun.failure_),
      control_(begun.control_),
      now_(begun.now_),
      rounds_(begun.rounds_),
      unreported_(begun.unreported_),
      begun_(&begun) {
  if (begun.begun_ != nullptr) throw py::type_error("[Ledger] a draft of a draft");
  draft_ = control_->draft();
  if (!is_none(now_.log)) now_.log = py::list();
  now_.task_events = py::list();
}

int Ledger::traverse(visitproc visit, void* argument) const {
  int stopped = 0;
  const auto each = [&](const py::object& reference) {
    if (stopped == 0 && reference) stopped = visit(reference.ptr(), argument);
  };
  for (const py::object* reference : {&classes_.arrival, &classes_.receipt, &classes_.join, &classes_.closed,
                                      &classes_.state, &classes_.participation, &mutex_, &failure_})
    each(*reference);
  if (intake_)
    for (const py::object* reference :
         std::initializer_list<const py::object*>{&intake_->table, &intake_->parts, &intake_->pulled, &intake_->task})
      each(*reference);
  now_.for_each(each);
  if (decided_) decided_->objects.for_each(each);
  for (const py::object& report : unreported_) each(report);
  for (const py::object& fault : faults_) each(fault);
  for (const auto& [_, entry] : opened_) each(entry);
  for (const auto& [_, version] : bases_) each(version);
  return stopped;
}

void Ledger::clear() {
  closed_ = true;
  const Objects dropped = std::exchange(now_, Objects());
  const std::unique_ptr<Kept> decided = std::move(decided_);
  const auto reports = std::exchange(unreported_, {}), faults = std::exchange(faults_, {});
  const auto opened = std::exchange(opened_, {});
  const auto bases = std::exchange(bases_, {});
}

// Values of Python

py::object Ledger::counts_of(const Counts& counts) {
  py::dict all;
  for (std::size_t i = 0; i < kStatuses; ++i) all[texts->statuses[i]] = integer(counts[static_cast<Status>(i)]);
  return std::move(all);
}

Status Ledger::status_of(py::handle text) {
  for (std::size_t i = 0; i < kStatuses && PyUnicode_CheckExact(text.ptr()); ++i)
    if (PyUnicode_Compare(text.ptr(), texts->statuses[i].ptr()) == 0) return static_cast<Status>(i);
  throw py::type_error("[Ledger] an unknown status");
}

py::object Ledger::last_slot() const {
  return now_.waiting.empty() ? py::none() : held(item(now_.waiting.back(), kSlot));
}

py::object Ledger::counts_since_round() const { return counts_of(state().counts.since(state().counts_at_round)); }

py::object Ledger::pass_clients() const { return in_passes() ? integer(state().pass->num_clients()) : py::none(); }

// Returns the clients that have entered in the pass, in order; or, of a rule that limits participations, those of all
// rounds, once for each round.
const std::vector<control::Client>& Ledger::clients_that_entered() const {
  return in_passes() ? state().pass->order() : state().participants;
}

// Returns a list that begins with the ids of the first `count` of them. It grows with them.
py::object Ledger::ids_that_entered(std::int64_t count) const {
  if (!entered_) entered_ = py::list();
  for (Py_ssize_t i = length_of(entered_); i < count; ++i) {
    const py::object client = object_of(clients_that_entered().at(static_cast<std::size_t>(i)).id());
    if (PyList_Append(entered_.ptr(), client.ptr()) != 0) throw py::error_already_set();
  }
  return entered_;
}

// Forgets the clients of a pass that has ended, or that a discard has taken out.
void Ledger::forget_clients() {
  if (entered_ && in_passes() && length_of(entered_) > state().pass->entered()) entered_ = py::object();
}

// Returns the ids of the clients that `blocks` holds for.
py::object Ledger::entered() const {
  py::list ids;
  for (const control::Client& client : clients_that_entered())
    if (in_passes() || control_->blocks(client)) ids.append(object_of(client.id()));
  return std::move(ids);
}

bool Ledger::blocks(py::handle client) const {
  return counts_clients() && control_->blocks(control_->clients().find(id_of(client)));
}

py::object Ledger::max_staleness() const { return object_of(control_->settings().rules.max_staleness); }

py::object Ledger::faults() const { return py::tuple(py::cast(faults_)); }

Kept Ledger::kept() const {
  return {now_,
          number(),
          state().counts,
          static_cast<std::int64_t>(clients_that_entered().size()),
          length_of(now_.log),
          length_of(now_.task_events)};
}

// Later decisions append to the clients that have entered, and take none of them out.
py::object Ledger::snapshot(const Kept& state) const {
  const Objects& objects = state.objects;
  py::object entered = py::none();
  if (counts_clients())
    entered =
        tuple_of<3>(classes_.participation, {pass_clients(), ids_that_entered(state.entered), integer(state.entered)});
  const std::pair<const char*, py::object> fields[] = {{"current", objects.current},
                                                       {"rule", objects.rule},
                                                       {"rows", objects.rows.cache},
                                                       {"waiting", py::cast(objects.waiting)},
                                                       {"round", objects.round},
                                                       {"number", integer(state.number)},
                                                       {"counts", counts_of(state.counts)},
                                                       {"log", objects.log},
                                                       {"logged", integer(state.logged)},
                                                       {"task_events", objects.task_events},
                                                       {"events", integer(state.events)},
                                                       {"rule_vectors", objects.rule_vectors},
                                                       {"handed", objects.handed},
                                                       {"scalars", objects.scalars},
                                                       {"participation", entered},
                                                       {"next_rule", objects.next_rule},
                                                       {"norms", objects.norms}};
  static PyObject* const names = [&] {  // never freed
    py::tuple all(std::size(fields));
    for (std::size_t i = 0; i < all.size(); ++i) all[i] = held(Name(fields[i].first).text());
    return all.release().ptr();
  }();
  std::array<PyObject*, std::size(fields)> values;
  for (std::size_t i = 0; i < values.size(); ++i) values[i] = fields[i].second.ptr();
  return owned(PyObject_Vectorcall(classes_.state.ptr(), values.data(), 0, names));
}

py::object Ledger::snapshot() const { return snapshot(kept()); }

py::object Ledger::durable(std::int64_t version) const {
  if (!commit_every_) return py::none();
  return integer((version + *commit_every_ - 1) / *commit_every_ * *commit_every_);
}

py::object Ledger::receipt(const control::Decision& decision) const {
  const py::str& reason = !decision.is_blocked ? texts->nothing : in_passes() ? texts->entered : texts->spent;
  return tuple_of<8>(
      classes_.receipt,
      {text_of(decision.status), integer(*decision.staleness), integer(decision.version), integer(decision.join),
       decision.step < 0 ? py::none() : integer(decision.step), py::none(), durable(decided_version() + 1), reason});
}

// Deciding

bool Ledger::late() const { return flush_after_ && filled() > 0 && now() - state().since > *flush_after_; }

bool Ledger::has_room() const {
  if (in_passes() && left_in_pass() == 0) return false;
  return is_none(now_.rows.cache) || now_.rows.clients + now_.rows.coming + filled() < now_.rows.most;
}

// Returns the push of a client, or of its open task. A negative version -1 - s says that the push has the staleness s.
control::Push Ledger::push_of(py::handle client, std::int64_t version, py::handle task) const {
  control::Push push;
  push.client = id_of(client);
  if (version < 0)
    push.staleness = -1 - version;
  else
    push.version = version;
  if (!is_none(task)) push.task = control_->tasks().number_of(text_of_id(task));
  if (!is_none(task) && !push.task) throw py::type_error("[Ledger] a task that is not open");
  return push;
}

control::Decision Ledger::decided_by(const control::Push& push) const {
  return draft_ ? control_->decide(*draft_, push) : control_->decide(push);
}

py::object Ledger::decide(py::handle client, py::handle version) const {
  const control::Decision decision = decided_by(push_of(client, count_of(version), py::none()));
  if (decision.refusal == control::Refusal::no_such_version) return py::make_tuple(py::none(), 0, false);
  const bool is_refused = decision.refusal != control::Refusal::none;  // it would join if there were room
  return py::make_tuple(text_of(is_refused ? Status::joined : decision.status), *decision.staleness,
                        decision.completes);
}

py::object Ledger::log_entry(Status status, py::handle arrival) const {
  const auto fact = [arrival](Fact which) { return item(arrival, which); };
  return tuple_of<9>(classes_.join, {fact(kJoin), text_of(status), fact(kClient), fact(kVersion), fact(kStaleness),
                                     fact(kExamples), fact(kLoss), fact(kLocalSteps), fact(kOwnFacts)});
}

// Returns the event that a push has closed its task; None if it has none.
py::object Ledger::closed_event(py::handle task) const {
  return is_none(task) ? py::none() : tuple_of<2>(classes_.closed, {task, texts->pushed});
}

// Appends an entry to the log, and an event of a task to the log and to the list of tasks.
void Ledger::note(Entries& entries, py::handle entry, py::handle event) const {
  entries.append(now_.log, entry);
  entries.append(now_.log, event);
  entries.append(now_.task_events, event);
}

// Makes room for `count` references, and for all that closed tasks and released versions drop.
void Ledger::make_room(Dropped& dropped, std::size_t count) const {
  dropped.reserve(dropped.size() + count + bases_.size() + kFewReferences);
}

// Drops what control holds no longer for the task of a push; a draft does so when it is adopted.
void Ledger::drop_closed(const std::optional<control::TaskNumber>& task, Dropped& dropped) {
  const auto place = task && !draft_ ? opened_.find(*task) : opened_.end();
  if (place == opened_.end()) return;
  dropped.push_back(std::move(place->second));
  opened_.erase(place);
  drop_released(dropped);
}

void Ledger::drop_released(Dropped& dropped) {
  control_->take_released([&](std::int64_t version) {
    const auto place = bases_.find(version);
    if (place == bases_.end()) return;
    dropped.push_back(std::move(place->second));
    bases_.erase(place);
  });
}

void Ledger::drop_old_faults(Dropped& dropped) {
  while (begun_ == nullptr && faults_.size() > kMostFaults) {
    dropped.push_back(std::move(faults_.front()));
    faults_.pop_front();
  }
}

// Empties the buffer. `decided` is its round; null: there is none.
void Ledger::start_round(const Decided* decided, Dropped& dropped) {
  for (py::object& arrival : now_.waiting) dropped.push_back(std::move(arrival));
  now_.waiting.clear();
  forget_clients();
  if (!is_none(now_.next_rule)) dropped.push_back(std::exchange(now_.rule, std::exchange(now_.next_rule, py::none())));
  if (decided == nullptr) return;
  ++rounds_;
  if (decided->stepped) {
    dropped.push_back(std::exchange(now_.round, decided->round));
    now_.rows.coming = decided->coming;
    keep_decided();
  } else {
    dropped.push_back(std::exchange(now_.scalars, decided->scalars));
    dropped.push_back(std::exchange(now_.norms, decided->norms));
    if (reporting_) unreported_.push_back(decided->report);
  }
}

void Ledger::keep_decided() {
  if (stored_ && begun_ == nullptr) decided_ = std::make_unique<Kept>(kept());
}

// Makes the decision about a push, and returns its receipt. `round` is the one that it completes, or null.
py::object Ledger::admit(const Pushed& pushed, control::Push& push, const control::Decision& decision,
                         py::handle staged_row, py::handle task, const Decided* round, py::handle decided,
                         Dropped& dropped) {
  std::array<py::handle, kArrival> facts;
  std::copy(pushed.begin(), pushed.end(), facts.begin());
  const py::object join = integer(decision.join), staleness = integer(*decision.staleness),
                   receipt = this->receipt(decision), version = integer(decided_version() - *decision.staleness),
                   event = closed_event(task);
  facts[kVersion] = version;
  facts[kJoin] = join;
  facts[kStaleness] = staleness;
  facts[kStagedRow] = staged_row;
  const py::object arrival = tuple_of<kArrival>(classes_.arrival, facts);
  const py::object entry = is_none(now_.log) ? py::none() : log_entry(decision.status, arrival);
  if (round != nullptr || push.task || decision.status == Status::replaced) make_room(dropped, now_.waiting.size());
  control::make_room(now_.waiting, 1);
  const bool replaces = decision.status == Status::replaced;
  push.slot = replaces ? decision.freed : filled();
  Entries entries;
  entries.append(decided, receipt);
  // The caller releases it, without the mutex.
  if (replaces) entries.append(decided, now_.waiting.at(static_cast<std::size_t>(decision.freed)));
  if (round != nullptr) entries.append(now_.log, round->noise_nonce);
  note(entries, entry, event);
  const double time = flush_after_ ? now() : 0.0;  // of the first arrival in a buffer
  if (draft_)
    control_->admit(*draft_, push, decision, time);
  else
    control_->admit(push, decision, time);
  if (round != nullptr) control_->decide_round({round->stepped});
  entries.keep();
  drop_closed(push.task, dropped);
  if (replaces)
    dropped.push_back(std::exchange(now_.waiting[static_cast<std::size_t>(decision.freed)], arrival));
  else if (round != nullptr)
    start_round(round, dropped);
  else if (decision.status == Status::joined)
    now_.waiting.push_back(arrival);
  return receipt;
}

py::object Ledger::record(py::handle facts, py::handle staged_row, py::handle task, py::handle round,
                          py::handle decided) {
  const Pushed pushed = pushed_in(facts);
  std::optional<Decided> completed;
  if (!is_none(round)) completed.emplace(round);
  control::Push push = push_of(pushed[kClient], count_of(pushed[kVersion]), task);
  const control::Decision decision = decided_by(push);
  if (!control::is_decision(decision.status) || decision.completes != completed.has_value())
    throw py::type_error("[Ledger] a push that makes no arrival, or whose round is not given");
  Dropped dropped;
  return admit(pushed, push, decision, staged_row, task, completed ? &*completed : nullptr, decided, dropped);
}

// Decides about an arrival, if it needs no look by Python; returns its receipt, or None.
py::object Ledger::joined(const Pushed& pushed, py::handle staged_row, py::handle task, py::handle decided,
                          bool any_status) {
  if (accumulates_) return py::none();                     // its slot becomes a term
  Dropped dropped;                                         // released without the mutex
  std::unique_lock<Mutex> mutex(*lock_, std::defer_lock);  // the caller of a draft holds it
  if (begun_ == nullptr && (!mutex.try_lock() || !lock_->is_quiet() || closed_)) return py::none();
  if (!is_none(failure_) || (!is_none(task) && !is_open(task))) return py::none();
  control::Push push = push_of(pushed[kClient], count_of(pushed[kVersion]), task);
  const control::Decision decision = decided_by(push);
  if (!control::is_decision(decision.status) || decision.completes) return py::none();
  if (decision.status != Status::joined && !any_status) return py::none();
  if (decision.status == Status::joined && !has_room() && !now_.rows.slots.contains(pushed[kClient])) return py::none();
  return admit(pushed, push, decision, staged_row, task, nullptr, decided, dropped);
}

// Decides about all pushes that were taken for a step, in a draft; returns their receipts. Returns None if one of them
// needs a look by Python: then the draft is void.
py::object Ledger::join_all(py::handle pushes) {
  py::list receipts;
  for (const py::handle push : pushes) {
    check_tuple(push, 2, "a push of a step");
    const py::object receipt =
        joined(pushed_in(item(push, 0)), py::none(), item(push, 1), py::none(), /*any_status=*/true);
    if (is_none(receipt)) return py::none();
    receipts.append(receipt);
  }
  return std::move(receipts);
}

void Ledger::count_push(py::handle status, py::handle task, py::handle fault, py::handle receipt, py::handle decided) {
  const Status counted = status_of(status);
  const py::object event = closed_event(task);
  const auto number = is_none(task) ? std::nullopt : control_->tasks().number_of(text_of_id(task));
  Dropped dropped;
  if (number) make_room(dropped, 0);
  dropped.reserve(dropped.size() + kFewReferences);
  Entries entries;
  entries.append(decided, receipt);
  note(entries, py::none(), event);
  if (!is_none(fault)) faults_.push_back(held(fault));
  try {
    if (draft_)
      control_->count(*draft_, counted, number);
    else
      control_->count(counted, number);
  } catch (...) {
    if (!is_none(fault)) faults_.pop_back();
    throw;
  }
  entries.keep();
  drop_closed(number, dropped);
  drop_old_faults(dropped);
}

py::object Ledger::cut(py::handle round, py::handle entry, py::handle ends_pass) {
  std::optional<Decided> decided;
  if (!is_none(round)) decided.emplace(round);
  Dropped dropped;
  dropped.reserve(now_.waiting.size() + kFewReferences);
  py::list discarded;
  Entries entries;
  if (decided) entries.append(now_.log, decided->noise_nonce);
  note(entries, entry, py::none());
  if (!decided) discarded = py::cast(now_.waiting);
  const control::Round steps{decided && decided->stepped};
  if (is_set(ends_pass))
    control_->end_pass(steps);
  else if (!decided)
    control_->discard();
  else if (draft_)
    control_->flush(*draft_, steps);
  else
    control_->flush(steps);
  entries.keep();
  cut_ = true;
  start_round(decided ? &*decided : nullptr, dropped);
  return std::move(discarded);
}

void Ledger::adopt(py::handle draft_object) {
  auto& draft = draft_object.cast<Ledger&>();
  if (draft.begun_ != this) throw py::type_error("[Ledger] a draft of another one");
  Dropped dropped;
  make_room(dropped, draft.draft_->closed.size() + draft.faults_.size());
  const py::object log = now_.log;
  const py::list events = now_.task_events;
  const auto extend = [](py::handle list, py::handle more) {
    const Py_ssize_t size = length_of(list);
    if (!is_none(list) && PyList_SetSlice(list.ptr(), size, size, more.ptr()) != 0) throw py::error_already_set();
  };
  const Py_ssize_t logged = length_of(log), noted = length_of(events);
  try {
    extend(log, draft.now_.log);
    extend(events, draft.now_.task_events);
    control_->adopt(std::move(*draft.draft_));
  } catch (...) {
    const py::error_scope error;
    if (!is_none(log) && PyList_SetSlice(log.ptr(), logged, length_of(log), nullptr) != 0) PyErr_Clear();
    if (PyList_SetSlice(events.ptr(), noted, length_of(events), nullptr) != 0) PyErr_Clear();
    throw;
  }
  std::swap(now_, draft.now_);  // the old objects are released with the draft
  now_.log = log;
  now_.task_events = events;
  rounds_ = draft.rounds_;
  std::swap(unreported_, draft.unreported_);
  for (py::object& fault : draft.faults_) faults_.push_back(std::move(fault));
  draft.faults_.clear();
  drop_old_faults(dropped);
  for (const control::TaskNumber task : draft.draft_->closed) drop_closed(task, dropped);
  forget_clients();
  if (draft.cut_ && !is_none(now_.round)) keep_decided();
}

void Ledger::commit(py::handle current, py::handle rule_vectors, py::handle round_object) {
  const Decided round(round_object);
  const std::int64_t clients = is_none(now_.rows.cache) ? 0 : size_of(now_.rows.cache);
  Dropped dropped;
  make_room(dropped, 0);
  if (reporting_) unreported_.push_back(round.report);
  control_->commit();
  dropped.push_back(std::exchange(now_.current, held(current)));
  dropped.push_back(std::exchange(now_.rule_vectors, held(rule_vectors)));
  dropped.push_back(std::exchange(now_.scalars, round.scalars));
  dropped.push_back(std::exchange(now_.norms, round.norms));
  dropped.push_back(std::exchange(now_.round, py::none()));
  now_.rows.clients = clients;
  now_.rows.coming = 0;
  const std::unique_ptr<Kept> decided = std::move(decided_);
  drop_released(dropped);
}

void Ledger::abandon_round(py::handle why) {
  control_->abandon();
  const py::object round = std::exchange(now_.round, py::none()), failure = std::exchange(failure_, held(why));
  const std::unique_ptr<Kept> decided = std::move(decided_);
}

// Changes by the caller

void Ledger::hand_in(py::handle rule_vectors, py::handle handed, py::handle entry) {
  Entries entries;
  note(entries, entry, py::none());
  control_->hand_in({});
  entries.keep();
  const py::object vectors = std::exchange(now_.rule_vectors, held(rule_vectors)),
                   names = std::exchange(now_.handed, held(handed));
}

void Ledger::set_params(py::handle current, py::handle entry) {
  Dropped dropped;
  make_room(dropped, 0);
  Entries entries;
  note(entries, entry, py::none());
  control_->set_params();
  entries.keep();
  dropped.push_back(std::exchange(now_.current, held(current)));
  drop_released(dropped);
}

bool Ledger::replace_rule(py::handle rule, py::handle buffer_size, py::handle entry) {
  const std::int64_t size = count_of(buffer_size);
  Entries entries;
  note(entries, entry, py::none());
  const bool at_once = control_->replace_rule(size, {});
  entries.keep();
  const py::object next = std::exchange(now_.next_rule, at_once ? py::none() : held(rule));
  const py::object before = at_once ? std::exchange(now_.rule, held(rule)) : py::none();
  return at_once;
}

py::object Ledger::next_report() {
  if (unreported_.empty()) return py::none();
  py::object report = std::move(unreported_.front());
  unreported_.pop_front();
  return report;
}

py::object Ledger::load(py::handle state) {
  control::Settings settings = control_->settings();
  control::Saved saved;
  Objects objects;
  objects.current = attribute("current", state);
  saved.version = count_of(attribute("version", objects.current));
  objects.rule = attribute("rule", state);
  settings.buffer_size = saved.buffer_size = count_of(attribute("buffer_size", objects.rule));
  settings.participations = optional_of<std::int64_t>(attribute("participations", attribute("needs", objects.rule)));
  objects.next_rule = attribute("next_rule", state);
  if (!is_none(objects.next_rule)) saved.next_buffer_size = count_of(attribute("buffer_size", objects.next_rule));
  const py::object entered = attribute("participation", state), rows = attribute("rows", state);
  if (!is_none(entered) && !settings.participations) {
    settings.pass_clients = count_of(attribute("num_clients", entered));
    saved.entered.emplace();
  }
  const auto control = std::make_shared<control::Control>(settings);
  if (!is_none(entered)) {
    const py::list order(attribute("order", entered));
    const auto count = static_cast<std::size_t>(count_of(attribute("entered", entered)));
    auto& clients = saved.entered ? *saved.entered : saved.participants;
    for (std::size_t i = 0; i < count; ++i) clients.push_back(control->clients().of(id_of(py::object(order[i]))));
  }
  if (!is_none(rows)) {
    objects.rows.cache = rows;
    objects.rows.slots = py::dict(attribute("slots", rows));
    objects.rows.clients = size_of(rows);
    objects.rows.most = count_of(attribute("num_clients", rows));
    objects.rows.reads_ahead = is_set(attribute("reads_ahead", rows));
  }
  for (const py::handle entry : attribute("waiting", state)) {
    check_tuple(entry, kArrival, "an arrival");
    control::Arrival arrival;
    arrival.slot = static_cast<std::int64_t>(objects.waiting.size());
    arrival.client = control->clients().of(id_of(item(entry, kClient)));
    arrival.version = count_of(item(entry, kVersion));
    arrival.staleness = count_of(item(entry, kStaleness));
    arrival.join = count_of(item(entry, kJoin));
    saved.waiting.push_back(std::move(arrival));
    objects.waiting.push_back(held(entry));
  }
  saved.number = count_of(attribute("number", state));
  const py::object counts = attribute("counts", state);
  for (std::size_t i = 0; i < kStatuses; ++i)
    saved.counts[static_cast<Status>(i)] = count_of(counts[texts->statuses[i]]);
  if (!is_none(now_.log)) objects.log = attribute("log", state);
  objects.rule_vectors = attribute("rule_vectors", state);
  objects.handed = attribute("handed", state);
  objects.scalars = attribute("scalars", state);
  objects.norms = attribute("norms", state);
  control->load(std::move(saved), now());
  py::object before = py::cast(now_.waiting);
  // From here on nothing fails.
  const auto old_control = std::exchange(control_, control);
  const py::object old_clients = std::exchange(entered_, py::object());
  const Objects old = std::exchange(now_, std::move(objects));
  const py::object failure = std::exchange(failure_, py::none());
  const std::unique_ptr<Kept> decided = std::move(decided_);
  const auto opened = std::exchange(opened_, {});
  const auto bases = std::exchange(bases_, {});
  ++rounds_;
  return before;
}

void Ledger::attach(py::handle commit_every) {
  commit_every_ = optional_of<std::int64_t>(commit_every);
  stored_ = true;
}

void Ledger::replay(py::handle replaying, py::handle by_flush) {
  replaying_ = is_set(replaying);
  control_->set_by_flush(is_set(by_flush));
}

// Tasks

const control::Tasks::Task* Ledger::find_task(py::handle id) const {
  if (!PyUnicode_CheckExact(id.ptr()) || PyUnicode_AsUTF8(id.ptr()) == nullptr) {  // no id has a lone surrogate
    PyErr_Clear();
    return nullptr;
  }
  const auto number = control_->tasks().number_of(text_of_id(id));
  return number ? control_->find_task(*number, draft_ ? &*draft_ : nullptr) : nullptr;
}

void Ledger::open_task(py::handle opened, py::handle id, py::handle version, py::handle holds, py::handle deadline,
                       py::handle base) {
  if (is_none(now_.round) && length_of(now_.task_events) > 1000 + 8 * task_count()) compact_task_events();
  Entries entries;
  note(entries, py::none(), opened);
  restore_task(opened, id, version, holds, deadline, base);
  entries.keep();
}

void Ledger::restore_task(py::handle opened, py::handle id, py::handle version, py::handle holds, py::handle deadline,
                          py::handle base) {
  const bool hold = is_set(holds) && !is_none(base);
  const std::int64_t pulled = count_of(version);
  control::Opened facts{text_of_id(id), {}, pulled, hold, {}, {}};
  static const Name client_id("client_id");
  facts.client = control_->clients().of(id_of(client_id.of(opened)));
  Dropped dropped;
  make_room(dropped, 1);
  const control::TaskNumber number = control_->open_task(std::move(facts), number_of(deadline));
  try {
    opened_.emplace(number, held(opened));
    if (hold) bases_.try_emplace(pulled, held(base));
  } catch (...) {
    control_->close_task(number, control::Why::cancelled);
    opened_.erase(number);
    drop_released(dropped);
    throw;
  }
  drop_released(dropped);  // at most max_bases are held
}

bool Ledger::close_task(py::handle id, py::handle why) {
  const auto number = control_->tasks().number_of(text_of_id(id));
  if (!number) return false;
  const py::object event = tuple_of<2>(classes_.closed, {id, why});
  Dropped dropped;
  make_room(dropped, 0);
  Entries entries;
  note(entries, py::none(), event);
  control_->close_task(*number, control::Why::cancelled);
  entries.keep();
  drop_closed(number, dropped);
  return true;
}

void Ledger::compact_task_events() {
  const py::list before = std::exchange(now_.task_events, py::list(opened_tasks()));
}

py::object Ledger::opened(py::handle id) const {
  const auto* const task = find_task(id);
  if (task == nullptr) return py::none();
  const Ledger& owner = begun_ == nullptr ? *this : *begun_;
  return owner.opened_.at(*control_->tasks().number_of(task->opened.task));
}

py::object Ledger::opened_tasks() const {
  py::list entries;
  for (const auto& [_, entry] : opened_) entries.append(entry);
  return std::move(entries);
}

py::object Ledger::next_overdue() const {
  const auto task = control_->tasks().next_overdue(now());
  return task ? object_of(control_->find_task(*task)->opened.task) : py::none();
}

py::object Ledger::base(py::handle version) const {
  const auto place = bases_.find(count_of(version));
  return place == bases_.end() ? py::none() : place->second;
}

py::object Ledger::base_of(py::handle id) const {
  const auto* const task = find_task(id);
  return task == nullptr || !task->opened.hold ? py::none() : base(integer(task->opened.version));
}

py::object Ledger::bases() const {
  py::dict all;
  for (const auto& [version, base] : bases_)
    if (!is_none(base)) all[integer(version)] = base;
  return std::move(all);
}

// Returns the version of this number, and holds it no longer, until `put_back_base`.
py::object Ledger::take_base(py::handle version) {
  const auto place = bases_.find(count_of(version));
  return place == bases_.end() ? py::none() : std::exchange(place->second, py::none());
}

// Holds the version for its tasks again; None: no longer.
void Ledger::put_back_base(py::handle version, py::handle base) {
  const auto place = bases_.find(count_of(version));
  if (place == bases_.end()) return;
  place->second = held(base);
  Dropped dropped;
  make_room(dropped, 0);
  if (is_none(base)) control_->release_base(place->first);
  drop_released(dropped);
}

}  // namespace afflux::python
