#include "ledger.hpp"

#include <pybind11/stl.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <memory>
#include <string>
#include <vector>

#include "afflux/afflux.hpp"
#include "descriptors.hpp"
#include "numpy_array.hpp"
#include "parts.hpp"
#include "release.hpp"

namespace py = pybind11;

namespace afflux::python {
namespace {

// The facts of a push before it joins: the fields of aggregation.arrivals.Pushed, with which an arrival begins.
enum Fact : std::size_t {
  kClient,
  kVersion,
  kExamples,
  kLoss,
  kNorm,
  kSlot,
  kBuffers,
  kExtremes,
  kLocalSteps,
  kOwnFacts,
  kFacts,
  kJoin = kFacts,
  kStaleness,
  kStagedRow,
  kArrival
};

// A fixed time in place of the monotonic clock, for tests.
std::optional<double> fixed_time;

// Seconds, by the monotonic clock.
double now() {
  return fixed_time ? *fixed_time
                    : std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

py::object held(py::handle object) { return py::reinterpret_borrow<py::object>(object); }
py::handle item(py::handle tuple, std::size_t place) {
  return PyTuple_GET_ITEM(tuple.ptr(), static_cast<Py_ssize_t>(place));
}
void check_tuple(py::handle tuple, std::size_t size, const char* what) {
  if (!PyTuple_Check(tuple.ptr()) || PyTuple_GET_SIZE(tuple.ptr()) != static_cast<Py_ssize_t>(size))
    throw py::type_error(std::string("[Ledger] ") + what + " is no tuple of " + std::to_string(size));
}
template <class Value>
std::optional<Value> optional_of(py::handle value) {
  return is_none(value) ? std::nullopt : std::optional<Value>(value.cast<Value>());
}
py::object object_of(const std::optional<std::int64_t>& value) { return value ? integer(*value) : py::none(); }

// Entries that a decision appends to lists. They are taken back unless the decision is made.
class Entries {
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
  std::array<py::handle, 4> lists_;
  std::size_t count_ = 0;
};

Py_ssize_t length_of(py::handle list) { return is_none(list) ? 0 : PyList_GET_SIZE(list.ptr()); }

// Returns a pass whose changes do not change `pass` before `merge`.
Pass overlay(const Pass& pass) { return {pass.num_clients, py::list(), pass.entered, pass.queue, py::dict(), &pass}; }

// Makes an overlay the pass.
void merge(Pass& pass, Pass&& other) {
  if (other.begun == &pass) {
    for (const py::handle client : other.order) pass.enter(client);
    pass.queue = std::move(other.queue);
  } else {
    pass = std::move(other);
  }
}

}  // namespace

// The state of a pass, and the buffer, after a round.
struct Ledger::Opening {
  Arrivals entering, dropped;
  std::optional<Pass> pass;
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
               std::optional<std::int64_t> max_deferred, std::optional<double> flush_after, bool by_flush, bool log,
               bool reporting, bool accumulates, std::int64_t max_bases)
    : classes_(classes),
      both_count_(duplicates == "both"),
      latest_counts_(duplicates == "latest"),
      max_staleness_(max_staleness),
      max_deferred_(max_deferred),
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
      both_count_(begun.both_count_),
      latest_counts_(begun.latest_counts_),
      max_staleness_(begun.max_staleness_),
      max_deferred_(begun.max_deferred_),
      reporting_(begun.reporting_),
      accumulates_(begun.accumulates_),
      flush_after_(begun.flush_after_),
      by_flush_(true),
      replaying_(begun.replaying_),
      least_overdue_(begun.least_overdue_),
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
  if (intake_) each(intake_->pools);
  each(places_);
  now_.for_each(each);
  if (decided_) decided_->for_each(each);
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
  const std::unique_ptr<State> decided = std::move(decided_);
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

py::object Ledger::list_of(const Arrivals& arrivals, std::size_t first) {
  py::list all(arrivals.size() - std::min(first, arrivals.size()));
  for (std::size_t i = first; i < arrivals.size(); ++i)
    PyList_SET_ITEM(all.ptr(), static_cast<Py_ssize_t>(i - first), arrivals[i].inc_ref().ptr());
  return std::move(all);
}

py::object Ledger::pools_of(py::handle pools) {
  if (!PyTuple_CheckExact(pools.ptr())) throw py::type_error("[Ledger] pools is no tuple");
  for (const py::handle pool : held(pools)) (void)pool.cast<std::shared_ptr<Pool>>();
  return held(pools);
}

py::object Ledger::counts_of(const Counts& counts) {
  py::dict all;
  for (std::size_t i = 0; i < kStatuses; ++i) put(all, texts->statuses[i], integer(counts[i]));
  return std::move(all);
}

Status Ledger::status_of(py::handle text) {
  for (std::size_t i = 0; i < kStatuses; ++i)
    if (text.ptr() == texts->statuses[i].ptr()) return static_cast<Status>(i);
  for (std::size_t i = 0; i < kStatuses && PyUnicode_CheckExact(text.ptr()); ++i)
    if (PyUnicode_Compare(text.ptr(), texts->statuses[i].ptr()) == 0) return static_cast<Status>(i);
  throw py::type_error("[Ledger] an unknown status");
}

py::object Ledger::first_slot() const {
  return now_.waiting.empty() ? py::none() : held(item(now_.waiting.front(), kSlot));
}

py::object Ledger::counts_since_round() const {
  Counts since{};
  for (std::size_t i = 0; i < kStatuses; ++i) since[i] = now_.counts[i] - now_.round_counts[i];
  return counts_of(since);
}

py::object Ledger::pass_clients() const { return now_.passes ? integer(now_.passes->num_clients) : py::none(); }

py::object Ledger::entered() const {
  if (!now_.passes) return py::list();
  return owned(PyList_GetSlice(now_.passes->order.ptr(), 0, PyList_GET_SIZE(now_.passes->order.ptr())));
}

py::object Ledger::flush_after() const { return flush_after_ ? real(*flush_after_) : py::none(); }
py::object Ledger::max_staleness() const { return object_of(max_staleness_); }
py::object Ledger::max_deferred() const { return object_of(max_deferred_); }

py::object Ledger::faults() const {
  py::tuple all(faults_.size());
  for (std::size_t i = 0; i < faults_.size(); ++i) all[i] = faults_[i];
  return std::move(all);
}

std::int64_t Ledger::own_slots() const {
  std::int64_t own = 0;
  for (const py::object& arrival : now_.waiting) own += !is_lent(item(arrival, kSlot));
  if (now_.passes)
    for (const py::object& arrival : now_.passes->queue) own += !is_lent(item(arrival, kSlot));
  return own;
}

py::object Ledger::snapshot(const State& state) const {
  py::object passes = py::none();
  if (state.passes)
    passes = tuple_of<4>(classes_.passes, {integer(state.passes->num_clients), state.passes->order,
                                           integer(state.passes->entered), list_of(state.passes->queue)});
  const std::array<py::object, 17> values = {state.current,
                                             state.rule,
                                             state.rows.cache,
                                             list_of(state.waiting),
                                             state.round,
                                             integer(state.number),
                                             counts_of(state.counts),
                                             state.log,
                                             integer(state.logged),
                                             state.task_events,
                                             integer(state.events),
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

py::object Ledger::receipt(Status status, std::int64_t staleness, std::int64_t version, std::int64_t number,
                           std::int64_t makes) const {
  const std::int64_t every = commit_every_.value_or(1);
  const py::object durable = commit_every_ ? integer((makes + every - 1) / every * every) : py::none();
  return tuple_of<9>(classes_.receipt, {texts->statuses[status], integer(staleness), integer(version), integer(number),
                                        integer(makes), py::none(), texts->empty, durable, texts->nothing});
}

// Deciding

bool Ledger::late() const { return flush_after_ && filled() > 0 && now() - now_.since > *flush_after_; }

std::int64_t Ledger::target() const {
  return now_.passes ? std::min(now_.buffer_size, now_.passes->left() + filled()) : now_.buffer_size;
}

bool Ledger::fills(py::handle status) const { return status_of(status) == kJoined && fills_buffer(); }

std::int64_t Ledger::overdue() const {
  if (by_flush_ || !now_.passes || filled() == 0 || filled() != target()) return 0;
  return filled() + now_.passes->queued();
}

bool Ledger::has_row(py::handle client) const { return now_.rows.slots && contains(py::dict(now_.rows.slots), client); }

bool Ledger::has_room() const {
  return is_none(now_.rows.cache) || now_.rows.clients + now_.rows.coming + filled() < now_.rows.most;
}

std::optional<std::pair<Status, std::int64_t>> Ledger::outcome(py::handle client, std::int64_t version) const {
  // A decided round counts even before its sweep is made, so that the decisions alone determine the staleness.
  const std::int64_t staleness = decided_version() - version;
  const auto as = [staleness](Status status) { return std::pair(status, staleness); };
  if (staleness < 0) return {};
  if (max_staleness_ && staleness > *max_staleness_) return as(kDropped);
  if (now_.passes && (now_.passes->has(client) || now_.passes->left() == 0))
    return as(max_deferred_ && now_.passes->queued() >= *max_deferred_ ? kRejected : kDeferred);
  if (both_count_ || !contains(places_, client)) return as(kJoined);
  if (!latest_counts_) return as(kRejected);
  const auto place = static_cast<std::size_t>(count(PyDict_GetItem(places_.ptr(), client.ptr())));
  return as(version_of(now_.waiting.at(place)) > version ? kSuperseded : kReplaced);
}

py::object Ledger::decide(py::handle client, py::handle version) const {
  const std::int64_t pulled = count_of(version);
  const auto found = outcome(client, pulled);
  const py::object status = found ? py::object(texts->statuses[found->first]) : py::none();
  return py::make_tuple(status, decided_version() - pulled);
}

bool Ledger::is_open(py::handle id) const {
  for (const py::object& closing : closing_)
    if (closing.equal(id)) return false;
  return tasks().is_open(id);
}

py::object Ledger::log_entry(Status status, py::handle arrival) const {
  const auto fact = [arrival](Fact which) { return item(arrival, which); };
  const py::bool_ lent(is_lent(fact(kSlot)));
  return tuple_of<10>(classes_.join,
                      {fact(kJoin), texts->statuses[status], fact(kClient), fact(kVersion), fact(kStaleness),
                       fact(kExamples), fact(kLoss), lent, fact(kLocalSteps), fact(kOwnFacts)});
}

Ledger::Opening Ledger::opening(const Decided& decided, py::handle joining) const {
  Opening opening;
  if (!now_.passes) return opening;
  opening.pass = overlay(*now_.passes);
  if (joining) opening.pass->enter(joining);
  const std::int64_t size = is_none(now_.next_rule) ? now_.buffer_size : now_.next_buffer_size;
  const std::int64_t oldest = max_staleness_ ? decided.version - *max_staleness_ : 0;
  opening.entering = open_buffer(*opening.pass, size, oldest, opening.dropped);
  return opening;
}

// Empties the buffer. `decided` is its round; null: there is none.
void Ledger::start_round(Opening&& opening, const Decided* decided, Dropped& dropped) {
  if (opening.pass) merge(*now_.passes, std::move(*opening.pass));
  const auto late = static_cast<std::int64_t>(opening.dropped.size());
  now_.counts[kDeferred] -= late;
  now_.counts[kDropped] += late;
  std::swap(now_.waiting, opening.entering);
  for (Arrivals* arrivals : {&opening.entering, &opening.dropped})
    for (py::object& arrival : *arrivals) dropped.push_back(std::move(arrival));
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
  if (stored_ && begun_ == nullptr) decided_ = std::make_unique<State>(now_);
}

void Ledger::record(py::handle status_text, py::handle arrival, py::handle round, py::handle task, py::handle decision,
                    py::handle decided) {
  const Status status = status_of(status_text);
  check_tuple(arrival, kArrival, "an arrival");
  const py::handle client = item(arrival, kClient);
  std::optional<Decided> made;
  if (!is_none(round)) made.emplace(round);
  const py::object entry = is_none(now_.log) ? py::none() : log_entry(status, arrival);
  const py::object event = is_none(task) ? py::none() : tuple_of<2>(classes_.closed, {task, texts->pushed});
  Opening next;
  if (made) next = opening(*made, client);
  Dropped dropped;
  dropped.reserve(2 * now_.waiting.size() + 8);
  now_.waiting.reserve(now_.waiting.size() + 1);
  if (now_.passes) now_.passes->queue.reserve(now_.passes->queue.size() + 1);
  closing_.reserve(closing_.size() + 1);
  Entries entries;
  entries.append(decided, decision);
  entries.append(now_.log, entry);
  entries.append(now_.log, event);
  entries.append(now_.task_events, event);
  if (status == kJoined && !made) {
    if (now_.passes) now_.passes->enter(client);
    if (!both_count_) put(places_, client, integer(filled()));
  }
  py::object replaced;
  if (status == kReplaced) {
    auto& place = now_.waiting.at(static_cast<std::size_t>(count(PyDict_GetItem(places_.ptr(), client.ptr()))));
    replaced = std::exchange(place, held(arrival));
  }
  entries.keep();
  ++now_.counts[status];
  ++now_.number;
  now_.logged = length_of(now_.log);
  now_.events = length_of(now_.task_events);
  if (status == kDeferred) now_.passes->queue.push_back(held(arrival));
  if (!is_none(task)) {
    if (begun_ == nullptr)
      tasks_.close(task, dropped);
    else
      closing_.push_back(held(task));
  }
  if (made) {
    start_round(std::move(next), &*made, dropped);
  } else if (status == kJoined) {
    if (filled() == 0) now_.since = now();
    now_.waiting.push_back(held(arrival));
  }
  // The caller releases the replaced arrival, without the mutex.
  if (replaced && !is_none(decided) && PyList_Append(decided.ptr(), replaced.ptr()) != 0) PyErr_Clear();
}

py::object Ledger::join(py::handle pushed, py::handle staged_row, py::handle task, py::handle decided) {
  check_tuple(pushed, kFacts, "a push");
  if (accumulates_ || begun_ != nullptr) return py::none();
  const py::handle client = item(pushed, kClient);
  const std::int64_t pulled = count_of(item(pushed, kVersion));
  std::int64_t staleness, number, version, makes;
  Dropped dropped;
  {
    const Held mutex(*lock_);
    if (!mutex || !lock_->is_quiet() || closed_ || !is_none(failure_) || pulled < 0 || overdue() != 0)
      return py::none();
    const auto found = outcome(client, pulled);
    if (!found || found->first != kJoined || (!by_flush_ && fills_buffer())) return py::none();
    if (!has_room() && !has_row(client)) return py::none();
    if (!is_none(task) && !tasks_.is_open(task)) return py::none();
    staleness = found->second;
    number = now_.number;
    version = now_.version;
    makes = decided_version() + 1;
    const py::object late = integer(staleness), join = integer(number);
    const py::object arrival =
        tuple_of<kArrival>(classes_.arrival, {item(pushed, 0), item(pushed, 1), item(pushed, 2), item(pushed, 3),
                                              item(pushed, 4), item(pushed, 5), item(pushed, 6), item(pushed, 7),
                                              item(pushed, 8), item(pushed, 9), join, late, staged_row});
    const py::object entry = is_none(now_.log) ? py::none() : log_entry(kJoined, arrival);
    py::object event = py::none(), decision = py::none();
    if (!is_none(task)) {
      event = tuple_of<2>(classes_.closed, {task, texts->pushed});
      dropped.reserve(8);
    }
    if (!is_none(decided))
      decision = tuple_of<5>(reinterpret_cast<PyObject*>(&PyTuple_Type),
                             {texts->statuses[kJoined], late, join, py::none(), py::none()});
    if (now_.waiting.size() == now_.waiting.capacity()) now_.waiting.reserve(2 * now_.waiting.size() + 8);
    Entries entries;
    entries.append(decided, decision);
    entries.append(now_.log, entry);
    entries.append(now_.log, event);
    entries.append(now_.task_events, event);
    if (now_.passes) now_.passes->enter(client);
    if (!both_count_) put(places_, client, integer(filled()));
    entries.keep();
    ++now_.counts[kJoined];
    ++now_.number;
    now_.logged = length_of(now_.log);
    now_.events = length_of(now_.task_events);
    if (filled() == 0) now_.since = now();
    now_.waiting.push_back(arrival);
    if (!is_none(task)) tasks_.close(task, dropped);
  }
  return receipt(kJoined, staleness, version, number, makes);
}

void Ledger::count_push(py::handle status, py::handle task, py::handle fault, py::handle receipt, py::handle decided) {
  const Status counted = status_of(status);
  const py::object event = is_none(task) ? py::none() : tuple_of<2>(classes_.closed, {task, texts->pushed});
  Dropped dropped;
  dropped.reserve(8);
  closing_.reserve(closing_.size() + 1);
  Entries entries;
  entries.append(decided, receipt);
  entries.append(now_.log, event);
  entries.append(now_.task_events, event);
  if (!is_none(fault)) faults_.push_back(held(fault));
  entries.keep();
  ++now_.counts[counted];
  now_.logged = length_of(now_.log);
  now_.events = length_of(now_.task_events);
  if (!is_none(task)) {
    if (begun_ == nullptr)
      tasks_.close(task, dropped);
    else
      closing_.push_back(held(task));
  }
  while (begun_ == nullptr && faults_.size() > kMostFaults) {
    dropped.push_back(std::move(faults_.front()));
    faults_.pop_front();
  }
}

py::object Ledger::cut(py::handle round, py::handle entry) {
  std::optional<Decided> made;
  if (!is_none(round)) made.emplace(round);
  if (begun_ != nullptr) now_.counts[kRefused] = begun_->now_.counts[kRefused];  // calls of the rule's weigh part
  Opening next;
  if (made) next = opening(*made, py::handle());
  Dropped dropped;
  dropped.reserve(2 * now_.waiting.size() + (now_.passes ? now_.passes->queue.size() : 0) + 8);
  py::list removed;
  Entries entries;
  entries.append(now_.log, entry);
  if (!made) {
    removed = py::list(list_of(now_.waiting));
    if (now_.passes) {
      for (const py::object& arrival : now_.passes->queue) removed.append(arrival);
      now_.passes->leave(filled());
      std::swap(now_.passes->queue, next.dropped);
    }
  }
  entries.keep();
  now_.logged = length_of(now_.log);
  cut_ = true;
  if (!made) {  // those that waited for the next pass were counted, and stay so
    for (py::object& arrival : next.dropped) dropped.push_back(std::move(arrival));
    next.dropped.clear();
  }
  start_round(std::move(next), made ? &*made : nullptr, dropped);
  return std::move(removed);
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
  const std::int64_t refused = now_.counts[kRefused];
  std::swap(now_, draft.now_);  // the old state is released with the draft
  now_.log = log;
  now_.task_events = events;
  now_.logged = length_of(log);
  now_.events = length_of(events);
  now_.passes = std::move(pass);
  draft.now_.passes.reset();
  now_.counts[kRefused] = refused;
  if (draft.cut_ && rounds_ != draft.rounds_) now_.round_counts[kRefused] = refused;
  rounds_ = draft.rounds_;
  std::swap(places_, draft.places_);
  std::swap(unreported_, draft.unreported_);
  for (py::object& fault : draft.faults_) faults_.push_back(std::move(fault));
  draft.faults_.clear();
  while (faults_.size() > kMostFaults) {
    dropped.push_back(std::move(faults_.front()));
    faults_.pop_front();
  }
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
  const std::unique_ptr<State> decided = std::move(decided_);
  if (max_staleness_) tasks_.release_before(number - *max_staleness_, dropped);
}

void Ledger::abandon_round(py::handle why) {
  const py::object round = std::exchange(now_.round, py::none()), failure = std::exchange(failure_, held(why));
  const std::unique_ptr<State> decided = std::move(decided_);
}

// Changes by the caller

void Ledger::hand_in(py::handle rule_vectors, py::handle handed, py::handle entry) {
  Entries entries;
  entries.append(now_.log, entry);
  entries.keep();
  now_.logged = length_of(now_.log);
  const py::object vectors = std::exchange(now_.rule_vectors, held(rule_vectors)),
                   names = std::exchange(now_.handed, held(handed));
}

void Ledger::set_params(py::handle current, py::handle version, py::handle entry) {
  const std::int64_t number = count_of(version);
  Dropped dropped;
  dropped.reserve(8 + static_cast<std::size_t>(tasks_.size()));
  Entries entries;
  entries.append(now_.log, entry);
  entries.keep();
  now_.logged = length_of(now_.log);
  dropped.push_back(std::exchange(now_.current, held(current)));
  now_.version = number;
  if (max_staleness_) tasks_.release_before(number - *max_staleness_, dropped);
}

bool Ledger::replace_rule(py::handle rule, py::handle buffer_size, py::handle entry) {
  const std::int64_t size = count_of(buffer_size);
  const bool at_once = now_.waiting.empty();
  Entries entries;
  entries.append(now_.log, entry);
  entries.keep();
  now_.logged = length_of(now_.log);
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
    state.rows.slots = held(item(rows, 1));
    if (!PyDict_CheckExact(state.rows.slots.ptr())) throw py::type_error("[Ledger] the slots of rows are no dict");
    state.rows.clients = count_of(item(rows, 2));
    state.rows.most = count_of(item(rows, 3));
    state.rows.reads_ahead = is_set(item(rows, 4));
  }
  state.waiting = arrivals_of(waiting);
  state.number = count_of(item(counted, 0));
  for (std::size_t i = 0; i < kStatuses; ++i) state.counts[i] = count_of(item(counted, 1)[texts->statuses[i]]);
  state.round_counts = state.counts;
  if (!is_none(now_.log)) state.log = held(log);
  state.logged = length_of(state.log);
  state.rule_vectors = held(item(vectors, 0));
  state.handed = held(item(vectors, 1));
  state.scalars = held(item(vectors, 2));
  state.norms = held(item(vectors, 3));
  if (!is_none(passed)) {
    check_tuple(passed, 3, "a pass");
    Pass pass{count_of(item(passed, 0)), py::list(), 0, arrivals_of(item(passed, 2)), py::dict(), nullptr};
    for (const py::handle client : held(item(passed, 1))) pass.enter(client);
    state.passes = std::move(pass);
  }
  state.since = now();
  py::dict places;
  for (std::size_t i = 0; i < state.waiting.size() && !both_count_; ++i)
    put(places, client_of(state.waiting[i]), integer(static_cast<std::int64_t>(i)));
  py::object before = list_of(now_.waiting);
  Dropped dropped;
  dropped.reserve(8 + 4 * static_cast<std::size_t>(tasks_.size()));
  const State old = std::exchange(now_, std::move(state));
  const py::object failure = std::exchange(failure_, py::none());
  const std::unique_ptr<State> decided = std::move(decided_);
  std::swap(places_, places);
  ++rounds_;
  tasks_.clear(dropped);
  return before;
}

void Ledger::attach(py::handle commit_every) {
  commit_every_ = optional_of<std::int64_t>(commit_every);
  stored_ = true;
}

void Ledger::replay(py::handle replaying, py::handle flush_after, py::handle by_flush) {
  const std::optional<double> seconds = optional_of<double>(flush_after);
  replaying_ = is_set(replaying);
  flush_after_ = seconds;
  by_flush_ = is_set(by_flush);
}

// Tasks

void Ledger::open_task(py::handle opened, py::handle id, py::handle version, py::handle holds, py::handle deadline,
                       py::handle base) {
  if (is_none(now_.round) && now_.events > 1000 + 8 * tasks_.size()) compact_task_events();
  Dropped dropped;
  dropped.reserve(static_cast<std::size_t>(tasks_.size()) + 8);
  Entries entries;
  entries.append(now_.log, opened);
  entries.append(now_.task_events, opened);
  tasks_.open(opened, id, count_of(version), is_set(holds), PyFloat_AsDouble(deadline.ptr()), base, dropped);
  entries.keep();
  now_.logged = length_of(now_.log);
  now_.events = length_of(now_.task_events);
}

void Ledger::restore_task(py::handle opened, py::handle id, py::handle version, py::handle holds, py::handle deadline,
                          py::handle base) {
  Dropped dropped;
  tasks_.open(opened, id, count_of(version), is_set(holds), PyFloat_AsDouble(deadline.ptr()), base, dropped);
}

bool Ledger::close_task(py::handle id, py::handle why) {
  if (!tasks_.is_open(id)) return false;
  const py::object event = tuple_of<2>(classes_.closed, {id, why});
  Dropped dropped;
  dropped.reserve(8);
  Entries entries;
  entries.append(now_.log, event);
  entries.append(now_.task_events, event);
  entries.keep();
  now_.logged = length_of(now_.log);
  now_.events = length_of(now_.task_events);
  tasks_.close(id, dropped);
  return true;
}

void Ledger::compact_task_events() {
  const py::list before = std::exchange(now_.task_events, tasks_.all_opened());
  now_.events = length_of(now_.task_events);
}

bool Ledger::has_overdue_task() const { return next_deadline() <= now(); }

py::object Ledger::next_overdue() const { return tasks_.next_overdue(now()); }

// Taking in

bool Ledger::may_take_in() const {
  return intake_ && lock_->may_enter() && !closed_ && is_none(failure_) && tasks_.next_deadline() == HUGE_VAL &&
         !late() && !now_.rows.reads_ahead;
}

// Copies the vector of a push into a slot, and returns the facts of the push. Returns None for a push that is left to
// Python.
py::object Ledger::taken_in(py::handle client, py::handle version, py::handle vector, py::handle num_examples,
                            py::handle loss) const {
  const auto array = numpy_array(vector, false);
  const std::optional<std::int64_t> pulled = plain_int(version), examples = plain_int(num_examples);
  if (!array || array->dimensions != 1 || array->shape[0] != intake_->size || !is_plain_id(client) || !pulled ||
      !examples || *examples < 1 || *pulled < 0 || *pulled > now_.version)
    return py::none();
  if (!is_none(loss) && (!PyFloat_CheckExact(loss.ptr()) || !std::isfinite(PyFloat_AS_DOUBLE(loss.ptr()))))
    return py::none();
  std::unique_ptr<Buffer> slot;
  for (const py::handle each : intake_->pools) {
    if (const auto pool = each.cast<std::shared_ptr<Pool>>(); !pool->full()) {
      slot = std::make_unique<Buffer>(pool);
      break;
    }
  }
  if (!slot) return py::none();
  const py::object vector_held = held(vector);  // while other threads run
  const View<const void> source{array->data, intake_->size, {}, array->type};
  const double max_abs = intake_->max_abs, max_norm = intake_->max_norm, most_squares = intake_->most_squares;
  const auto sweep = [&, threads = intake_->num_threads] {
    return ingest(source, slot->view(), threads, nullptr, slot->until_read());
  };
  constexpr std::int64_t kShort = 4096;  // elements; the copy takes less time than releasing the GIL and taking it
  Statistics found;
  if (source.size <= kShort) {
    found = sweep();
  } else {
    const GilRelease release;
    found = sweep();
  }
  const double norm = std::sqrt(found.sum_of_squares);
  if (found.first_nonfinite >= 0 || -max_abs > found.min || found.max > max_abs || norm > max_norm ||
      found.sum_of_squares > most_squares)
    return py::none();
  const py::object own = py::cast(std::move(slot)), low = real(found.min), high = real(found.max);
  const py::object extremes = owned(PyTuple_Pack(2, low.ptr(), high.ptr()));
  return tuple_of<kFacts>(reinterpret_cast<PyObject*>(&PyTuple_Type),
                          {client, version, num_examples, is_none(loss) ? py::handle(texts->nan) : loss, real(norm),
                           own, py::none(), extremes, texts->zero, texts->empty});
}

py::object Ledger::push(py::handle client, py::handle version, py::handle update, py::handle gradient, py::handle model,
                        py::handle num_examples, py::handle loss) {
  if (!may_take_in()) return py::none();
  const std::array<py::handle, 3> vectors{update, gradient, model};
  for (std::size_t i = 0; i < vectors.size(); ++i)
    if (i != intake_->wanted && !is_none(vectors[i])) return py::none();
  py::object pushed = taken_in(client, version, vectors[intake_->wanted], num_examples, loss);
  if (is_none(pushed)) return pushed;
  py::object receipt = join(pushed, py::none(), py::none(), py::none());
  return is_none(receipt) ? pushed : receipt;
}

void Ledger::take_vectors(py::handle intake) {
  check_tuple(intake, 7, "an intake");
  const auto kind = item(intake, 0).cast<std::string>();
  intake_ = Intake{kind == "update"     ? std::size_t{0}
                   : kind == "gradient" ? std::size_t{1}
                                        : std::size_t{2},
                   count_of(item(intake, 1)),
                   item(intake, 2).cast<int>(),
                   item(intake, 3).cast<double>(),
                   item(intake, 4).cast<double>(),
                   item(intake, 5).cast<double>(),
                   py::tuple(pools_of(item(intake, 6)))};
}

namespace {

void bind_mutex(py::module_& module) {
  py::class_<Mutex> type(module, "Mutex", py::is_final(), py::module_local());
  type.def(py::init<>());
  add_method<&Mutex::take>(type, "__enter__");
  add_method<&Mutex::exit>(type, "__exit__");
  add_method<&Mutex::acquire>(type, "acquire");
  add_method<&Mutex::give_back>(type, "release");
  add_method<&Mutex::is_held>(type, "locked");
  add_attribute<&Mutex::owner>(type, "owner");
  add_attribute<&Mutex::is_mine>(type, "is_mine");
  add_attribute<&Mutex::handed_out, &Mutex::set_handed_out>(type, "handed_out");
  add_attribute<&Mutex::driver, &Mutex::set_driver>(type, "driver");
  add_attribute<&Mutex::awaited, &Mutex::set_awaited>(type, "awaited");
  add_attribute<&Mutex::fork, &Mutex::set_fork>(type, "fork");
}

}  // namespace

void bind_ledger(py::module_& module) {
  texts = new Texts();
  bind_mutex(module);
  const py::custom_type_setup collected([](PyHeapTypeObject* heap_type) {
    PyTypeObject& type = heap_type->ht_type;
    type.tp_flags |= Py_TPFLAGS_HAVE_GC;
    type.tp_traverse = [](PyObject* self, visitproc visit, void* arg) -> int {
      Py_VISIT(Py_TYPE(self));
      return py::detail::is_holder_constructed(self) ? self_of<Ledger>(self).traverse(visit, arg) : 0;
    };
    type.tp_clear = [](PyObject* self) -> int {
      if (py::detail::is_holder_constructed(self)) self_of<Ledger>(self).clear();
      return 0;
    };
  });
  py::class_<Ledger> type(module, "Ledger", py::module_local(), collected);
  type.def(py::init<const py::tuple&, const std::string&, std::optional<std::int64_t>, std::optional<std::int64_t>,
                    std::optional<double>, bool, bool, bool, bool, std::int64_t>(),
           py::arg("classes"), py::arg("duplicates"), py::arg("max_staleness"), py::arg("max_deferred"),
           py::arg("flush_after"), py::arg("by_flush"), py::arg("log"), py::arg("reporting"), py::arg("accumulates"),
           py::arg("max_bases"));
  type.def(py::init<Ledger&>(), py::arg("begun"), py::keep_alive<1, 2>());
  add_method<&Ledger::push>(type, "push");
  add_method<&Ledger::join>(type, "join");
  add_method<&Ledger::decide>(type, "decide");
  add_method<&Ledger::record>(type, "record_decision");
  add_method<&Ledger::count_push>(type, "count_push");
  add_method<&Ledger::cut>(type, "cut_buffer");
  add_method<&Ledger::adopt>(type, "adopt");
  add_method<&Ledger::commit>(type, "commit_round");
  add_method<&Ledger::abandon_round>(type, "abandon_round");
  add_method<&Ledger::load>(type, "load_state");
  add_method<&Ledger::hand_in>(type, "set_rule_vectors");
  add_method<&Ledger::set_params>(type, "set_version");
  add_method<&Ledger::replace_rule>(type, "set_rule");
  add_method<&Ledger::next_report>(type, "next_report");
  add_method<&Ledger::attach>(type, "attach");
  add_method<&Ledger::take_vectors>(type, "take_vectors");
  add_method<&Ledger::use_slots>(type, "use_slots");
  add_method<&Ledger::replay>(type, "set_replay");
  add_method<&Ledger::expect_overdue>(type, "expect_overdue");
  add_method<&Ledger::close>(type, "close");
  add_method<&Ledger::open_task>(type, "open_task");
  add_method<&Ledger::restore_task>(type, "restore_task");
  add_method<&Ledger::close_task>(type, "close_task");
  add_method<&Ledger::compact_task_events>(type, "compact_task_events");
  add_method<&Ledger::is_open>(type, "is_open");
  add_method<&Ledger::opened>(type, "opened");
  add_method<&Ledger::opened_tasks>(type, "opened_tasks");
  add_method<&Ledger::next_overdue>(type, "next_overdue");
  add_method<&Ledger::base>(type, "base");
  add_method<&Ledger::base_of>(type, "base_of");
  add_method<&Ledger::bases>(type, "bases");
  add_method<&Ledger::take_base>(type, "take_base");
  add_method<&Ledger::put_back_base>(type, "put_back_base");
  add_method<&Ledger::arrivals>(type, "arrivals");
  add_method<&Ledger::arrivals_from>(type, "arrivals_from");
  add_method<&Ledger::deferred>(type, "deferred");
  add_method<&Ledger::fills>(type, "fills");
  add_attribute<static_cast<py::object (Ledger::*)() const>(&Ledger::snapshot)>(type, "state");
  add_attribute<&Ledger::decided_snapshot>(type, "decided_state");
  add_attribute<&Ledger::has_room>(type, "has_room");
  add_attribute<&Ledger::mutex>(type, "mutex");
  add_attribute<&Ledger::current>(type, "current");
  add_attribute<&Ledger::version>(type, "version");
  add_attribute<&Ledger::decided_version>(type, "decided_version");
  add_attribute<&Ledger::rule>(type, "rule");
  add_attribute<&Ledger::next_rule>(type, "next_rule");
  add_attribute<&Ledger::rows>(type, "rows");
  add_attribute<&Ledger::filled>(type, "filled");
  add_attribute<&Ledger::first_slot>(type, "first_slot");
  add_attribute<&Ledger::round>(type, "round");
  add_attribute<&Ledger::number>(type, "number");
  add_attribute<&Ledger::counts>(type, "counts");
  add_attribute<&Ledger::counts_since_round>(type, "counts_since_round");
  add_attribute<&Ledger::steps_counted>(type, "rounds_counted");
  add_attribute<&Ledger::growing_log>(type, "growing_log");
  add_attribute<&Ledger::rule_vectors>(type, "rule_vectors");
  add_attribute<&Ledger::handed>(type, "handed");
  add_attribute<&Ledger::scalars>(type, "scalars");
  add_attribute<&Ledger::norms>(type, "norms");
  add_attribute<&Ledger::in_passes>(type, "in_passes");
  add_attribute<&Ledger::left_in_pass>(type, "left_in_pass");
  add_attribute<&Ledger::pass_clients>(type, "pass_clients");
  add_attribute<&Ledger::entered>(type, "entered");
  add_attribute<&Ledger::deferred_count>(type, "deferred_count");
  add_attribute<&Ledger::dropped_count>(type, "dropped_count");
  add_attribute<&Ledger::since>(type, "since");
  add_attribute<&Ledger::late>(type, "late");
  add_attribute<&Ledger::overdue>(type, "overdue");
  add_attribute<&Ledger::least_overdue>(type, "least_overdue");
  add_attribute<&Ledger::replaying>(type, "replaying");
  add_attribute<&Ledger::by_flush>(type, "by_flush");
  add_attribute<&Ledger::flush_after>(type, "flush_after");
  add_attribute<&Ledger::max_staleness>(type, "max_staleness");
  add_attribute<&Ledger::max_deferred>(type, "max_deferred");
  add_attribute<&Ledger::unreported>(type, "unreported");
  add_attribute<&Ledger::faults>(type, "faults");
  add_attribute<&Ledger::closed>(type, "closed");
  add_attribute<&Ledger::failure>(type, "failure");
  add_attribute<&Ledger::task_count>(type, "task_count");
  add_attribute<&Ledger::next_deadline>(type, "next_deadline");
  add_attribute<&Ledger::has_overdue_task>(type, "has_overdue_task");
  add_attribute<&Ledger::own_slots>(type, "own_slots");
  module.def("clock", now);
  module.def("set_clock", [](std::optional<double> seconds) { fixed_time = seconds; }, py::arg("seconds"));
}

}  // namespace afflux::python
