#include "ledger.hpp"

#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>
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

control::Duplicates duplicates_of(const std::string& name) {
  return name == "both"     ? control::Duplicates::both
         : name == "latest" ? control::Duplicates::latest
                            : control::Duplicates::reject;
}

// References that a decision drops beside those of arrivals.
constexpr std::size_t kFewReferences = 8;

// Makes room for another arrival, so that adding it cannot fail.
void make_room(Arrivals& arrivals) {
  if (arrivals.size() == arrivals.capacity()) arrivals.reserve(2 * arrivals.size() + 8);
}

// Returns a pass whose changes do not change `pass` before `merge`.
Pass overlay(const Pass& pass) { return {pass.num_clients, py::list(), pass.entered, py::dict(), &pass}; }

// Makes an overlay the pass.
void merge(Pass& pass, Pass&& other) {
  if (other.begun == &pass) {
    for (const py::handle client : other.order) pass.enter(client);
  } else {
    pass = std::move(other);
  }
}

}  // namespace

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
  std::array<py::handle, 5> lists_;
  std::size_t count_ = 0;
};

Ledger::Decided::Decided(py::handle facts) {
  check_tuple(facts, 7, "a round");
  round = held(item(facts, 0));
  stepped = is_set(item(facts, 1));
  version = count_of(item(facts, 2));
  scalars = held(item(facts, 3));
  norms = held(item(facts, 4));
  report = held(item(facts, 5));
  coming = count_of(item(facts, 6));
}

Ledger::Ledger(const py::tuple& classes, const std::string& duplicates, std::optional<std::int64_t> max_staleness,
               std::optional<double> flush_after, bool by_flush, bool log, bool reporting, bool accumulates,
               std::int64_t max_bases)
    : classes_(classes),
      rules_{duplicates_of(duplicates), max_staleness},
      reporting_(reporting),
      accumulates_(accumulates),
      flush_after_(flush_after),
      by_flush_(by_flush),
      mutex_(py::cast(std::make_unique<Mutex>())),
      lock_(mutex_.cast<Mutex*>()),
      tasks_(max_bases) {
  if (log) now_.log = py::list();
}

Ledger::Ledger(Ledger& begun)
    : classes_(begun.classes_),
      rules_(begun.rules_),
      reporting_(begun.reporting_),
      accumulates_(begun.accumulates_),
      flush_after_(begun.flush_after_),
      by_flush_(true),
      replaying_(begun.replaying_),
      stored_(begun.stored_),
      commit_every_(begun.commit_every_),
      mutex_(begun.mutex_),
      lock_(begun.lock_),
      failure_(begun.failure_),
      now_(begun.now_),
      places_(owned(PyDict_Copy(begun.places_.ptr()))),
      rounds_(begun.rounds_),
      unreported_(begun.unreported_),
      tasks_(0),
      begun_(&begun) {
  if (begun.begun_ != nullptr) throw py::type_error("[Ledger] a draft of a draft");
  if (!is_none(now_.log)) now_.log = py::list();
  now_.task_events = py::list();
  if (now_.passes) now_.passes = overlay(*begun.now_.passes);
}

int Ledger::traverse(visitproc visit, void* argument) const {
  int stopped = 0;
  const auto each = [&](const py::object& reference) {
    if (stopped == 0 && reference) stopped = visit(reference.ptr(), argument);
  };
  for (const py::object* reference : {&classes_.arrival, &classes_.receipt, &classes_.join, &classes_.closed,
                                      &classes_.state, &classes_.passes, &mutex_, &failure_})
    each(*reference);
  if (intake_)
    for (const py::object* reference :
         std::initializer_list<const py::object*>{&intake_->pools, &intake_->table, &intake_->borders, &intake_->dtype})
      each(*reference);
  each(places_);
  now_.for_each(each);
  if (decided_) decided_->state.for_each(each);
  for (const py::object& report : unreported_) each(report);
  for (const py::object& fault : faults_) each(fault);
  for (const py::object& task : closing_) each(task);
  tasks_.for_each(each);
  return stopped;
}

void Ledger::clear() {
  closed_ = true;
  State dropped;
  std::swap(now_.rule, dropped.rule);
  std::swap(now_.next_rule, dropped.next_rule);
  std::swap(now_.rows, dropped.rows);
  std::swap(now_.round, dropped.round);
  std::swap(now_.waiting, dropped.waiting);
  std::swap(now_.current, dropped.current);
  std::swap(now_.rule_vectors, dropped.rule_vectors);
  const std::unique_ptr<Kept> decided = std::move(decided_);
  const std::optional<Pass> passes = std::exchange(now_.passes, std::nullopt);
  const auto reports = std::exchange(unreported_, {}), faults = std::exchange(faults_, {});
  Dropped tasks;
  tasks_.clear(tasks);
}

// Values of Python

std::int64_t Ledger::count_of(py::handle number) {
  const auto value = plain_int(number);
  if (!value) throw py::type_error("[Ledger] a number is no int of 64 bits");
  return *value;
}

py::object Ledger::list_of(const Arrivals& arrivals) {
  py::list all(arrivals.size());
  for (std::size_t i = 0; i < arrivals.size(); ++i)
    PyList_SET_ITEM(all.ptr(), static_cast<Py_ssize_t>(i), arrivals[i].inc_ref().ptr());
  return std::move(all);
}

py::object Ledger::pools_of(py::handle pools) {
  if (!PyTuple_CheckExact(pools.ptr())) throw py::type_error("[Ledger] pools is no tuple");
  for (const py::handle pool : held(pools)) (void)pool.cast<std::shared_ptr<Pool>>();
  return held(pools);
}

py::object Ledger::counts_of(const Counts& counts) {
  py::dict all;
  for (std::size_t i = 0; i < kStatuses; ++i) put(all, texts->statuses[i], integer(counts[static_cast<Status>(i)]));
  return std::move(all);
}

Status Ledger::status_of(py::handle text) {
  for (std::size_t i = 0; i < kStatuses; ++i)
    if (text.ptr() == texts->statuses[i].ptr()) return static_cast<Status>(i);
  for (std::size_t i = 0; i < kStatuses && PyUnicode_CheckExact(text.ptr()); ++i)
    if (PyUnicode_Compare(text.ptr(), texts->statuses[i].ptr()) == 0) return static_cast<Status>(i);
  throw py::type_error("[Ledger] an unknown status");
}

py::object Ledger::last_slot() const {
  return now_.waiting.empty() ? py::none() : held(item(now_.waiting.back(), kSlot));
}

py::object Ledger::counts_since_round() const { return counts_of(now_.counts.since(now_.round_counts)); }

py::object Ledger::pass_clients() const { return now_.passes ? integer(now_.passes->num_clients) : py::none(); }

py::object Ledger::entered() const {
  if (!now_.passes) return py::list();
  return owned(PyList_GetSlice(now_.passes->order.ptr(), 0, PyList_GET_SIZE(now_.passes->order.ptr())));
}

py::object Ledger::max_staleness() const { return object_of(rules_.max_staleness); }

py::object Ledger::faults() const {
  py::tuple all(faults_.size());
  for (std::size_t i = 0; i < faults_.size(); ++i) all[i] = faults_[i];
  return std::move(all);
}

py::object Ledger::snapshot(const State& state, std::int64_t logged, std::int64_t events) const {
  py::object passes = py::none();
  if (state.passes)
    passes = tuple_of<3>(classes_.passes,
                         {integer(state.passes->num_clients), state.passes->order, integer(state.passes->entered)});
  const std::array<py::object, 17> values = {state.current,
                                             state.rule,
                                             state.rows.cache,
                                             list_of(state.waiting),
                                             state.round,
                                             integer(state.number),
                                             counts_of(state.counts),
                                             state.log,
                                             integer(logged),
                                             state.task_events,
                                             integer(events),
                                             state.rule_vectors,
                                             state.handed,
                                             state.scalars,
                                             passes,
                                             state.next_rule,
                                             state.norms};
  std::array<PyObject*, values.size()> items;
  for (std::size_t i = 0; i < values.size(); ++i) items[i] = values[i].ptr();
  return owned(PyObject_Vectorcall(classes_.state.ptr(), items.data(), items.size(), nullptr));
}

py::object Ledger::snapshot() const { return snapshot(now_, length_of(now_.log), length_of(now_.task_events)); }

py::object Ledger::durable(std::int64_t version) const {
  if (!commit_every_) return py::none();
  return integer((version + *commit_every_ - 1) / *commit_every_ * *commit_every_);
}

py::object Ledger::receipt(Status status, std::int64_t staleness, std::int64_t version, std::int64_t number,
                           std::int64_t makes) const {
  return tuple_of<8>(classes_.receipt, {text_of(status), integer(staleness), integer(version), integer(number),
                                        integer(makes), py::none(), durable(makes), texts->nothing});
}

// Deciding

bool Ledger::late() const { return flush_after_ && filled() > 0 && now() - now_.since > *flush_after_; }

std::int64_t Ledger::target() const {
  return control::round_size(now_.buffer_size, filled(),
                             now_.passes ? std::optional(now_.passes->left()) : std::nullopt);
}

bool Ledger::fills(py::handle status) const { return fills_buffer(status_of(status)); }

bool Ledger::has_room() const {
  if (now_.passes && now_.passes->left() == 0) return false;
  return is_none(now_.rows.cache) || now_.rows.clients + now_.rows.coming + filled() < now_.rows.most;
}

std::optional<std::pair<Status, std::int64_t>> Ledger::outcome(py::handle client, std::int64_t version) const {
  const std::int64_t staleness = decided_version() - version;
  if (staleness < 0) return {};
  const auto has_entered = [&] { return now_.passes->has(client); };
  const auto waiting = [&]() -> std::optional<std::int64_t> {
    if (!contains(places_, client)) return {};
    return version_of(now_.waiting.at(place_of(client)));
  };
  return std::pair(control::status_of(rules_, version, staleness, now_.passes.has_value(), has_entered, waiting),
                   staleness);
}

py::object Ledger::decide(py::handle client, py::handle version) const {
  const std::int64_t pulled = count_of(version);
  const auto found = outcome(client, pulled);
  const py::object status = found ? py::object(text_of(found->first)) : py::none();
  return py::make_tuple(status, decided_version() - pulled);
}

bool Ledger::is_open(py::handle id) const {
  for (const py::object& closing : closing_)
    if (closing.equal(id)) return false;
  return tasks().is_open(id);
}

py::object Ledger::log_entry(Status status, py::handle arrival) const {
  const auto fact = [arrival](Fact which) { return item(arrival, which); };
  return tuple_of<9>(classes_.join, {fact(kJoin), text_of(status), fact(kClient), fact(kVersion), fact(kStaleness),
                                     fact(kExamples), fact(kLoss), fact(kLocalSteps), fact(kOwnFacts)});
}

// Returns the event that a push has closed its task, and makes room for `close_pushed`; None if it has none.
py::object Ledger::closed_event(py::handle task, Dropped& dropped) {
  if (is_none(task)) return py::none();
  make_room(closing_);
  make_room(dropped);
  return tuple_of<2>(classes_.closed, {task, texts->pushed});
}

// Appends an entry to the log, and an event of a task to the log and to the list of tasks.
void Ledger::note(Entries& entries, py::handle entry, py::handle event) const {
  entries.append(now_.log, entry);
  entries.append(now_.log, event);
  entries.append(now_.task_events, event);
}

// Closes the task of a push; a draft does so when it is adopted.
void Ledger::close_pushed(py::handle task, Dropped& dropped) {
  if (is_none(task)) return;
  if (begun_ == nullptr)
    tasks_.close(task, dropped);
  else
    closing_.push_back(held(task));
}

void Ledger::drop_old_faults(Dropped& dropped) {
  while (begun_ == nullptr && faults_.size() > kMostFaults) {
    dropped.push_back(std::move(faults_.front()));
    faults_.pop_front();
  }
}

std::size_t Ledger::place_of(py::handle client) const {
  return static_cast<std::size_t>(count(PyDict_GetItem(places_.ptr(), client.ptr())));
}

// Empties the buffer. `decided` is its round; null: there is none.
void Ledger::start_round(const Decided* decided, Dropped& dropped) {
  for (py::object& arrival : now_.waiting) dropped.push_back(std::move(arrival));
  now_.waiting.clear();
  PyDict_Clear(places_.ptr());
  if (!is_none(now_.next_rule)) {
    dropped.push_back(std::exchange(now_.rule, std::exchange(now_.next_rule, py::none())));
    now_.buffer_size = now_.next_buffer_size;
  }
  now_.since = now();
  if (decided == nullptr) return;
  now_.round_counts = now_.counts;
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
  if (stored_ && begun_ == nullptr)
    decided_ = std::make_unique<Kept>(Kept{now_, length_of(now_.log), length_of(now_.task_events)});
}

// Makes the decision about an arrival. `made` is the round that it completes, or null.
void Ledger::admit(Status status, const py::object& arrival, const Decided* made, py::handle task, py::handle decision,
                   py::handle decided, Dropped& dropped) {
  const py::handle client = client_of(arrival);
  const py::object entry = is_none(now_.log) ? py::none() : log_entry(status, arrival),
                   event = closed_event(task, dropped);
  std::optional<Pass> next;  // if the round ends the pass
  if (made != nullptr) {
    if (now_.passes && now_.passes->left() == 1) next = now_.passes->next();
    dropped.reserve(now_.waiting.size() + kFewReferences);
  }
  make_room(now_.waiting);
  py::object* const replaced = status == Status::replaced ? &now_.waiting.at(place_of(client)) : nullptr;
  Entries entries;
  entries.append(decided, decision);
  if (replaced != nullptr) entries.append(decided, *replaced);  // the caller releases it, without the mutex
  note(entries, entry, event);
  if (status == Status::joined) {
    if (now_.passes && !next) now_.passes->enter(client);
    if (rules_.duplicates != control::Duplicates::both && made == nullptr) put(places_, client, integer(filled()));
  }
  entries.keep();
  ++now_.counts[status];
  ++now_.number;
  close_pushed(task, dropped);
  if (replaced != nullptr) {
    dropped.push_back(std::exchange(*replaced, arrival));
  } else if (made != nullptr) {
    if (next) now_.passes = std::move(next);
    start_round(made, dropped);
  } else if (status == Status::joined) {
    if (filled() == 0) now_.since = now();
    now_.waiting.push_back(arrival);
  }
}

void Ledger::record(py::handle status, py::handle arrival, py::handle round, py::handle task, py::handle decision,
                    py::handle decided) {
  check_tuple(arrival, kArrival, "an arrival");
  std::optional<Decided> made;
  if (!is_none(round)) made.emplace(round);
  Dropped dropped;
  admit(status_of(status), held(arrival), made ? &*made : nullptr, task, decision, decided, dropped);
}

py::object Ledger::join(py::handle pushed, py::handle staged_row, py::handle task, py::handle decided) {
  check_tuple(pushed, kFacts, "a push");
  if (accumulates_) return py::none();
  const py::handle client = item(pushed, kClient);
  const std::int64_t pulled = count_of(item(pushed, kVersion));
  std::int64_t staleness, number, version, makes;
  Dropped dropped;  // released without the mutex
  {
    std::optional<Held> mutex;  // the caller of a draft holds it
    if (begun_ == nullptr && (!mutex.emplace(*lock_) || !lock_->is_quiet() || closed_)) return py::none();
    if (!is_none(failure_) || pulled < 0) return py::none();
    const auto found = outcome(client, pulled);
    if (!found || found->first != Status::joined || (!by_flush_ && fills_buffer(Status::joined))) return py::none();
    if (!has_room() && !contains(now_.rows.slots, client)) return py::none();
    if (!is_none(task) && !is_open(task)) return py::none();
    staleness = found->second;
    number = now_.number;
    version = now_.version;
    makes = decided_version() + 1;
    const py::object late = integer(staleness), join = integer(number);
    const py::object arrival =
        tuple_of<kArrival>(classes_.arrival, {item(pushed, 0), item(pushed, 1), item(pushed, 2), item(pushed, 3),
                                              item(pushed, 4), item(pushed, 5), item(pushed, 6), item(pushed, 7),
                                              item(pushed, 8), item(pushed, 9), join, late, staged_row});
    py::object decision = py::none();
    if (!is_none(decided))
      decision = tuple_of<5>(reinterpret_cast<PyObject*>(&PyTuple_Type),
                             {text_of(Status::joined), late, join, py::none(), py::none()});
    admit(Status::joined, arrival, nullptr, task, decision, decided, dropped);
  }
  return receipt(Status::joined, staleness, version, number, makes);
}

void Ledger::count_push(py::handle status, py::handle task, py::handle fault, py::handle receipt, py::handle decided) {
  const Status counted = status_of(status);
  Dropped dropped;
  const py::object event = closed_event(task, dropped);
  Entries entries;
  entries.append(decided, receipt);
  note(entries, py::none(), event);
  if (!is_none(fault)) faults_.push_back(held(fault));
  entries.keep();
  ++now_.counts[counted];
  close_pushed(task, dropped);
  drop_old_faults(dropped);
}

py::object Ledger::cut(py::handle round, py::handle entry, py::handle ends_pass) {
  std::optional<Decided> made;
  if (!is_none(round)) made.emplace(round);
  if (begun_ != nullptr)
    now_.counts[Status::refused] = begun_->now_.counts[Status::refused];  // calls of the rule's weigh part
  std::optional<Pass> next;
  if (now_.passes && (is_set(ends_pass) || (made && now_.passes->left() == 0))) next = now_.passes->next();
  Dropped dropped;
  dropped.reserve(now_.waiting.size() + kFewReferences);
  py::list discarded;
  Entries entries;
  note(entries, entry, py::none());
  if (!made) {
    discarded = list_of(now_.waiting);
    if (now_.passes) now_.passes->leave(filled());
  }
  entries.keep();
  cut_ = true;
  if (next) now_.passes = std::move(next);
  start_round(made ? &*made : nullptr, dropped);
  return std::move(discarded);
}

void Ledger::adopt(py::handle draft_object) {
  auto& draft = draft_object.cast<Ledger&>();
  if (draft.begun_ != this) throw py::type_error("[Ledger] a draft of another one");
  Dropped dropped;
  dropped.reserve(8 * draft.closing_.size() + draft.faults_.size() + 8);
  const py::object log = now_.log;
  const py::list events = now_.task_events;
  const auto extend = [](py::handle list, py::handle more) {
    const Py_ssize_t size = length_of(list);
    if (!is_none(list) && PyList_SetSlice(list.ptr(), size, size, more.ptr()) != 0) throw py::error_already_set();
    return size;
  };
  const Py_ssize_t logged = extend(log, draft.now_.log);
  try {
    extend(events, draft.now_.task_events);
  } catch (...) {
    const py::error_scope error;
    if (!is_none(log) && PyList_SetSlice(log.ptr(), logged, length_of(log), nullptr) != 0) PyErr_Clear();
    throw;
  }
  std::optional<Pass> pass = std::move(now_.passes);
  if (pass) {
    if (draft.now_.passes->begun == &*now_.passes) draft.now_.passes->begun = &*pass;
    merge(*pass, std::move(*draft.now_.passes));
  }
  const std::int64_t refused = now_.counts[Status::refused];
  std::swap(now_, draft.now_);  // the old state is released with the draft
  now_.log = log;
  now_.task_events = events;
  now_.passes = std::move(pass);
  draft.now_.passes.reset();
  now_.counts[Status::refused] = refused;
  if (draft.cut_ && rounds_ != draft.rounds_) now_.round_counts[Status::refused] = refused;
  rounds_ = draft.rounds_;
  std::swap(places_, draft.places_);
  std::swap(unreported_, draft.unreported_);
  for (py::object& fault : draft.faults_) faults_.push_back(std::move(fault));
  draft.faults_.clear();
  drop_old_faults(dropped);
  for (const py::object& task : draft.closing_) tasks_.close(task, dropped);
  draft.closing_.clear();
  if (draft.cut_ && !is_none(now_.round)) keep_decided();
}

void Ledger::commit(py::handle current, py::handle version, py::handle rule_vectors, py::handle scalars,
                    py::handle norms, py::handle report, py::handle row_clients) {
  const std::int64_t number = count_of(version), clients = count_of(row_clients);
  Dropped dropped;
  dropped.reserve(8 + static_cast<std::size_t>(tasks_.size()));
  if (reporting_) unreported_.push_back(held(report));
  dropped.push_back(std::exchange(now_.current, held(current)));
  dropped.push_back(std::exchange(now_.rule_vectors, held(rule_vectors)));
  dropped.push_back(std::exchange(now_.scalars, held(scalars)));
  dropped.push_back(std::exchange(now_.norms, held(norms)));
  dropped.push_back(std::exchange(now_.round, py::none()));
  now_.version = number;
  now_.rows.clients = clients;
  now_.rows.coming = 0;
  const std::unique_ptr<Kept> decided = std::move(decided_);
  if (rules_.max_staleness) tasks_.release_before(number - *rules_.max_staleness, dropped);
}

void Ledger::abandon_round(py::handle why) {
  const py::object round = std::exchange(now_.round, py::none()), failure = std::exchange(failure_, held(why));
  const std::unique_ptr<Kept> decided = std::move(decided_);
}

// Changes by the caller

void Ledger::hand_in(py::handle rule_vectors, py::handle handed, py::handle entry) {
  Entries entries;
  note(entries, entry, py::none());
  entries.keep();
  const py::object vectors = std::exchange(now_.rule_vectors, held(rule_vectors)),
                   names = std::exchange(now_.handed, held(handed));
}

void Ledger::set_params(py::handle current, py::handle version, py::handle entry) {
  const std::int64_t number = count_of(version);
  Dropped dropped;
  dropped.reserve(8 + static_cast<std::size_t>(tasks_.size()));
  Entries entries;
  note(entries, entry, py::none());
  entries.keep();
  dropped.push_back(std::exchange(now_.current, held(current)));
  now_.version = number;
  if (rules_.max_staleness) tasks_.release_before(number - *rules_.max_staleness, dropped);
}

bool Ledger::replace_rule(py::handle rule, py::handle buffer_size, py::handle entry) {
  const std::int64_t size = count_of(buffer_size);
  const bool at_once = now_.waiting.empty();
  Entries entries;
  note(entries, entry, py::none());
  entries.keep();
  const py::object next = std::exchange(now_.next_rule, at_once ? py::none() : held(rule));
  const py::object before = at_once ? std::exchange(now_.rule, held(rule)) : py::none();
  (at_once ? now_.buffer_size : now_.next_buffer_size) = size;
  return at_once;
}

py::object Ledger::next_report() {
  if (unreported_.empty()) return py::none();
  py::object report = std::move(unreported_.front());
  unreported_.pop_front();
  return report;
}

py::object Ledger::load(py::handle versions, py::handle rules, py::handle rows, py::handle waiting, py::handle counted,
                        py::handle log, py::handle vectors, py::handle passed) {
  const auto arrivals_of = [](py::handle list) {
    Arrivals arrivals;
    for (const py::handle arrival : held(list)) {
      check_tuple(arrival, kArrival, "an arrival");
      arrivals.push_back(held(arrival));
    }
    return arrivals;
  };
  check_tuple(versions, 2, "a version");
  check_tuple(rules, 4, "rules");
  check_tuple(counted, 2, "counts");
  check_tuple(vectors, 4, "vectors");
  State state;
  state.current = held(item(versions, 0));
  state.version = count_of(item(versions, 1));
  state.rule = held(item(rules, 0));
  state.buffer_size = count_of(item(rules, 1));
  state.next_rule = held(item(rules, 2));
  state.next_buffer_size = count_of(item(rules, 3));
  if (!is_none(rows)) {
    check_tuple(rows, 5, "rows");
    state.rows.cache = held(item(rows, 0));
    if (!PyDict_CheckExact(item(rows, 1).ptr())) throw py::type_error("[Ledger] the slots of rows are no dict");
    state.rows.slots = py::dict(held(item(rows, 1)));
    state.rows.clients = count_of(item(rows, 2));
    state.rows.most = count_of(item(rows, 3));
    state.rows.reads_ahead = is_set(item(rows, 4));
  }
  state.waiting = arrivals_of(waiting);
  state.number = count_of(item(counted, 0));
  for (std::size_t i = 0; i < kStatuses; ++i)
    state.counts[static_cast<Status>(i)] = count_of(item(counted, 1)[texts->statuses[i]]);
  state.round_counts = state.counts;
  if (!is_none(now_.log)) state.log = held(log);
  state.rule_vectors = held(item(vectors, 0));
  state.handed = held(item(vectors, 1));
  state.scalars = held(item(vectors, 2));
  state.norms = held(item(vectors, 3));
  if (!is_none(passed)) {
    check_tuple(passed, 2, "a pass");
    Pass pass{count_of(item(passed, 0)), py::list(), 0, py::dict()};
    for (const py::handle client : held(item(passed, 1))) pass.enter(client);
    state.passes = std::move(pass);
  }
  state.since = now();
  py::dict places;
  for (std::size_t i = 0; i < state.waiting.size() && rules_.duplicates != control::Duplicates::both; ++i)
    put(places, client_of(state.waiting[i]), integer(static_cast<std::int64_t>(i)));
  py::object before = list_of(now_.waiting);
  Dropped dropped;
  dropped.reserve(8 + 4 * static_cast<std::size_t>(tasks_.size()));
  const State old = std::exchange(now_, std::move(state));
  const py::object failure = std::exchange(failure_, py::none());
  const std::unique_ptr<Kept> decided = std::move(decided_);
  std::swap(places_, places);
  ++rounds_;
  tasks_.clear(dropped);
  return before;
}

void Ledger::attach(py::handle commit_every) {
  commit_every_ = optional_of<std::int64_t>(commit_every);
  stored_ = true;
}

void Ledger::replay(py::handle replaying, py::handle by_flush) {
  replaying_ = is_set(replaying);
  by_flush_ = is_set(by_flush);
}

// Tasks

void Ledger::open_task(py::handle opened, py::handle id, py::handle version, py::handle holds, py::handle deadline,
                       py::handle base) {
  if (is_none(now_.round) && length_of(now_.task_events) > 1000 + 8 * tasks_.size()) compact_task_events();
  Entries entries;
  note(entries, py::none(), opened);
  restore_task(opened, id, version, holds, deadline, base);
  entries.keep();
}

void Ledger::restore_task(py::handle opened, py::handle id, py::handle version, py::handle holds, py::handle deadline,
                          py::handle base) {
  Dropped dropped;
  tasks_.open(opened, id, count_of(version), is_set(holds), number_of(deadline), base, dropped);
}

bool Ledger::close_task(py::handle id, py::handle why) {
  if (!tasks_.is_open(id)) return false;
  const py::object event = tuple_of<2>(classes_.closed, {id, why});
  Dropped dropped;
  Entries entries;
  note(entries, py::none(), event);
  entries.keep();
  tasks_.close(id, dropped);
  return true;
}

void Ledger::compact_task_events() { const py::list before = std::exchange(now_.task_events, tasks_.all_opened()); }

bool Ledger::has_overdue_task() const { return next_deadline() <= now(); }

py::object Ledger::next_overdue() const { return tasks_.next_overdue(now()); }

}  // namespace afflux::python
