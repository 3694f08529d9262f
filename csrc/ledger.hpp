// The decisions of a server, which control makes, and the objects of Python that they are about: versions, slots,
// entries of the log. A decision is one call, which runs no code of Python; it is made whole or not at all.
#pragma once
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstdint>
#include <deque>
#include <initializer_list>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "buffers.hpp"
#include "control/control.hpp"
#include "mutex.hpp"
#include "shared_memory.hpp"
#include "values.hpp"

namespace afflux::python {

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

// Seconds, by the monotonic clock; `fixed_time` stands in for it in tests.
extern std::optional<double> fixed_time;
double now();

// Returns the id of a client: an int of 64 bits, signed or unsigned, or a str.
control::Id id_of(pybind11::handle client);

using control::Counts, control::Status, control::kStatuses;  // see aggregation.reports.Status
// The number of newest faults that are kept.
constexpr std::size_t kMostFaults = 1000;

// The texts that decisions contain. Created with the module, never freed.
struct Texts {
  std::array<pybind11::str, kStatuses> statuses{"joined", "replaced", "superseded", "rejected", "dropped",
                                                "empty",  "expired",  "faulty",     "refused"};
  pybind11::str pushed{"pushed"}, nothing{""}, entered{"has entered in this pass"},
      spent{"was in as many rounds as the rule allows"};
  pybind11::tuple empty;  // no reports, and no facts
  pybind11::int_ zero{0}, one{1};
  pybind11::object nan = pybind11::module_::import("math").attr("nan");  // one object: entries of logs are compared
};
inline const Texts* texts = nullptr;

// The classes of the objects that decisions create: NamedTuples, and the Struct of a snapshot.
struct Classes {
  explicit Classes(const pybind11::tuple& classes)
      : arrival(classes[0]),
        receipt(classes[1]),
        join(classes[2]),
        closed(classes[3]),
        state(classes[4]),
        participation(classes[5]) {}
  pybind11::object arrival, receipt, join, closed, state, participation;
};

// The rows of clients, as far as a decision needs them.
struct Rows {
  pybind11::object cache = pybind11::none();
  pybind11::dict slots;      // the clients that are known to have a row
  std::int64_t clients = 0;  // that have a row
  std::int64_t most = 0;     // clients that may have one
  std::int64_t coming = 0;   // clients that get their first row in the decided round
  bool reads_ahead = false;  // whether a push reads its client's row
};

// The facts of a push, as references that are not counted: the caller holds the objects.
using Pushed = std::array<pybind11::handle, kFacts>;
Pushed pushed_in(pybind11::handle tuple);

using Arrivals = std::vector<pybind11::object>;  // each an aggregation.arrivals.PendingArrival
// References that a decision drops. They are released after it, because that may run any code.
using Dropped = std::vector<pybind11::object>;

// The objects that the state of control is about. A copy shares the lists that grow.
struct Objects {
  pybind11::object current = pybind11::none();  // the newest version
  pybind11::object rule = pybind11::none(), next_rule = pybind11::none();
  Rows rows;
  Arrivals waiting;                           // the buffer; an arrival's slot in control is its place here
  pybind11::object round = pybind11::none();  // the round that is decided, and not committed
  pybind11::object log = pybind11::none();    // a list, or None
  pybind11::list task_events;                 // since the last compaction
  pybind11::object rule_vectors = pybind11::none(), handed = pybind11::none(), scalars = pybind11::none(),
                   norms = pybind11::none();

  // Calls `visit` with each reference.
  template <class Visit>
  void for_each(const Visit& visit) const {
    for (const pybind11::object* reference :
         std::initializer_list<const pybind11::object*>{&current, &rule, &next_rule, &rows.cache, &rows.slots, &round,
                                                        &log, &task_events, &rule_vectors, &handed, &scalars, &norms})
      visit(*reference);
    for (const pybind11::object& arrival : waiting) visit(arrival);
  }
};

// What a snapshot contains: lists that grow, with their lengths.
struct Kept {
  Objects objects;
  std::int64_t number;  // of the next decision
  Counts counts;
  std::int64_t entered;  // entries of Ledger::clients_that_entered
  std::int64_t logged, events;
};

using Pools = std::vector<std::shared_ptr<Pool>>;

// What is read of plain pushes, and the sweep that copies a vector or a tree into a slot.
struct Intake {
  std::size_t wanted;  // which of update, gradient and model the rule takes
  std::int64_t size;
  int num_threads;
  double max_abs, max_norm;
  double most_squares;            // the largest sum of squares for which inner products cannot overflow
  Pools pools;                    // of slots
  pybind11::object table;         // the ArrayTable of trees, or None: they are left to Python
  pybind11::object parts;         // without arrays: those of vectors that a step reads in place; None: it reads none
  pybind11::object pulled, task;  // the classes of versions and of tasks

  static constexpr std::size_t kModel = 2;
  pybind11::object arrays_of(pybind11::handle tree, bool is_model) const;
  pybind11::handle shapes() const;  // of the arrays of a tree
};

struct NumpyArray;
using Vectors = std::array<pybind11::object, 3>;  // update, gradient and model

// The arguments of a push.
struct Given {
  // Reads an entry of a step.
  static std::optional<Given> in(pybind11::handle entry, std::size_t wanted);

  pybind11::object task = pybind11::none(), client = pybind11::none(), version = pybind11::none(),
                   num_examples = texts->one, loss = pybind11::none();
  Vectors vectors{pybind11::none(), pybind11::none(), pybind11::none()};
};

// What is known of the pushes of a step that were taken.
struct StepPushes {
  bool in_place;  // whether their arrays are read where they are
  pybind11::object base = pybind11::none(), conversion = pybind11::none();  // of the last push
  std::vector<std::vector<Memory>> memory{};                                // of each push
};

class Ledger {
 public:
  // `duplicates` is "both", "latest" or "reject". `max_bases` versions are held for tasks at once.
  Ledger(const pybind11::tuple& classes, const std::string& duplicates, std::optional<std::int64_t> max_staleness,
         std::optional<double> flush_after, bool by_flush, bool log, bool reporting, bool accumulates,
         std::int64_t max_bases);
  // Makes a draft: decisions about pushes that `begun` has not made yet, of which none completes the buffer.
  explicit Ledger(Ledger& begun);

  // For the collector of reference cycles: a rule may refer to the server.
  int traverse(visitproc visit, void* argument) const;
  void clear();

  // The methods of Python, see afflux/_engine.pyi.
  pybind11::object push(pybind11::handle task, pybind11::handle client, pybind11::handle version,
                        pybind11::handle update, pybind11::handle gradient, pybind11::handle model,
                        pybind11::handle num_examples, pybind11::handle loss, pybind11::handle decided);
  pybind11::object take_all(pybind11::handle entries, pybind11::handle in_place) const;
  pybind11::object join(pybind11::handle pushed, pybind11::handle staged_row, pybind11::handle task,
                        pybind11::handle decided) {
    return joined(pushed_in(pushed), staged_row, task, decided, /*any_status=*/true);
  }
  pybind11::object join_all(pybind11::handle pushes);
  pybind11::object decide(pybind11::handle client, pybind11::handle version) const;
  pybind11::object record(pybind11::handle pushed, pybind11::handle staged_row, pybind11::handle task,
                          pybind11::handle round, pybind11::handle decided);
  void count_push(pybind11::handle status, pybind11::handle task, pybind11::handle fault, pybind11::handle receipt,
                  pybind11::handle decided);
  pybind11::object cut(pybind11::handle round, pybind11::handle entry, pybind11::handle ends_pass);
  void adopt(pybind11::handle draft);
  void commit(pybind11::handle current, pybind11::handle rule_vectors, pybind11::handle round);
  void abandon_round(pybind11::handle why);
  pybind11::object load(pybind11::handle state);
  void hand_in(pybind11::handle rule_vectors, pybind11::handle handed, pybind11::handle entry);
  void set_params(pybind11::handle current, pybind11::handle entry);
  bool replace_rule(pybind11::handle rule, pybind11::handle buffer_size, pybind11::handle entry);
  pybind11::object next_report();
  void attach(pybind11::handle commit_every);
  void take_vectors(pybind11::handle intake);
  void use_slots(pybind11::handle pools) {
    if (intake_) intake_->pools = pools.cast<Pools>();
  }
  void replay(pybind11::handle replaying, pybind11::handle by_flush);
  void close() { closed_ = true; }

  void open_task(pybind11::handle opened, pybind11::handle id, pybind11::handle version, pybind11::handle holds,
                 pybind11::handle deadline, pybind11::handle base);
  void restore_task(pybind11::handle opened, pybind11::handle id, pybind11::handle version, pybind11::handle holds,
                    pybind11::handle deadline, pybind11::handle base);
  bool close_task(pybind11::handle id, pybind11::handle why);
  void compact_task_events();
  bool is_open(pybind11::handle id) const { return find_task(id) != nullptr; }
  pybind11::object opened(pybind11::handle id) const;
  pybind11::object opened_tasks() const;
  pybind11::object next_overdue() const;
  pybind11::object base(pybind11::handle version) const;
  pybind11::object base_of(pybind11::handle id) const;
  pybind11::object bases() const;
  pybind11::object take_base(pybind11::handle version);
  void put_back_base(pybind11::handle version, pybind11::handle base);

  pybind11::object snapshot() const;
  pybind11::object decided_snapshot() const { return decided_ ? snapshot(*decided_) : pybind11::none(); }
  pybind11::object arrivals() const { return pybind11::cast(now_.waiting); }
  bool has_room() const;

  // The attributes of Python.
  pybind11::object mutex() const { return mutex_; }
  pybind11::object current() const { return now_.current; }
  std::int64_t version() const { return state().version; }
  std::int64_t decided_version() const { return state().decided_version(); }
  pybind11::object rule() const { return now_.rule; }
  pybind11::object next_rule() const { return now_.next_rule; }
  pybind11::object rows() const { return now_.rows.cache; }
  std::int64_t filled() const { return state().buffer.filled(); }
  std::int64_t round_size() const { return state().round_size(); }
  pybind11::object last_slot() const;
  pybind11::object round() const { return now_.round; }
  std::int64_t number() const { return state().number; }
  pybind11::object counts() const { return counts_of(state().counts); }
  pybind11::object counts_since_round() const;
  std::int64_t rounds_counted() const { return rounds_; }
  pybind11::object growing_log() const { return now_.log; }
  pybind11::object rule_vectors() const { return now_.rule_vectors; }
  pybind11::object handed() const { return now_.handed; }
  pybind11::object scalars() const { return now_.scalars; }
  pybind11::object norms() const { return now_.norms; }
  bool in_passes() const { return state().pass.has_value(); }
  bool blocks(pybind11::handle client) const;
  std::int64_t left_in_pass() const { return in_passes() ? state().pass->left() : 0; }
  pybind11::object pass_clients() const;
  pybind11::object entered() const;
  bool late() const;
  bool replaying() const { return replaying_; }
  bool by_flush() const { return draft_ ? draft_->by_flush : control_->settings().by_flush; }
  pybind11::object max_staleness() const;
  bool unreported() const { return !unreported_.empty(); }
  pybind11::object faults() const;
  bool closed() const { return closed_; }
  pybind11::object failure() const { return failure_; }
  std::int64_t task_count() const { return control_->tasks().size(); }
  double next_deadline() const { return control_->tasks().next_deadline(); }
  bool has_overdue_task() const { return next_deadline() <= now(); }

 private:
  // The facts about a decided round.
  struct Decided {
    explicit Decided(pybind11::handle decided);  // an aggregation.round.Round
    pybind11::object round, scalars, norms, report;
    pybind11::object noise_nonce;  // an entry of the log, or None
    bool stepped;
    std::int64_t coming = 0;  // clients that get their first row
  };
  class Entries;
  struct Taken;
  struct Received;

  static pybind11::object counts_of(const Counts& counts);
  static Status status_of(pybind11::handle text);
  static const pybind11::str& text_of(Status status) { return texts->statuses[static_cast<std::size_t>(status)]; }

  bool may_take_in() const;
  bool is_plain(pybind11::handle client, pybind11::handle version, pybind11::handle num_examples,
                pybind11::handle loss) const;
  static pybind11::handle vector_of(std::size_t kind, const Vectors& vectors);
  std::optional<Taken> copied(const NumpyArray* array, const pybind11::object& arrays,
                              std::vector<Memory>* memory) const;
  std::optional<Taken> lent(const pybind11::object& arrays, const pybind11::object& conversion, bool is_flat,
                            std::vector<Memory>& memory) const;
  pybind11::object pulled_by(const Given& given) const;
  std::optional<Received> taken(Given given, pybind11::object& task, StepPushes* step) const;
  const control::State& state() const { return draft_ ? *draft_ : control_->state(); }
  const control::Tasks::Task* find_task(pybind11::handle id) const;
  control::Push push_of(pybind11::handle client, std::int64_t version, pybind11::handle task) const;
  control::Decision decided_by(const control::Push& push) const;
  pybind11::object joined(const Pushed& pushed, pybind11::handle staged_row, pybind11::handle task,
                          pybind11::handle decided, bool any_status);
  pybind11::object log_entry(Status status, pybind11::handle arrival) const;
  pybind11::object closed_event(pybind11::handle task) const;
  void note(Entries& entries, pybind11::handle entry, pybind11::handle event) const;
  void make_room(Dropped& dropped, std::size_t count) const;
  void drop_closed(const std::optional<control::TaskNumber>& task, Dropped& dropped);
  void drop_released(Dropped& dropped);
  void drop_old_faults(Dropped& dropped);
  pybind11::object admit(const Pushed& pushed, control::Push& push, const control::Decision& decision,
                         pybind11::handle staged_row, pybind11::handle task, const Decided* round,
                         pybind11::handle decided, Dropped& dropped);
  void start_round(const Decided* decided, Dropped& dropped);
  const std::vector<control::Client>& clients_that_entered() const;
  bool counts_clients() const { return in_passes() || control_->settings().participations; }
  pybind11::object ids_that_entered(std::int64_t count) const;
  void forget_clients();
  Kept kept() const;
  pybind11::object snapshot(const Kept& state) const;
  pybind11::object durable(std::int64_t version) const;
  pybind11::object receipt(const control::Decision& decision) const;
  void keep_decided();

  const Classes classes_;
  const bool reporting_, accumulates_;
  std::optional<double> flush_after_;
  bool replaying_ = false;
  bool stored_ = false;
  std::optional<std::int64_t> commit_every_;
  std::optional<Intake> intake_;
  pybind11::object mutex_;
  Mutex* lock_;
  bool closed_ = false;
  pybind11::object failure_ = pybind11::none();

  std::shared_ptr<control::Control> control_;  // that of `begun_`, for a draft
  Objects now_;
  std::unique_ptr<Kept> decided_;  // the state when the round was decided, if there is a store
  std::int64_t rounds_ = 0;        // how often counts_since_round began anew
  std::deque<pybind11::object> unreported_, faults_;
  std::map<control::TaskNumber, pybind11::object> opened_;  // the entries of the log that have opened the open tasks
  std::map<std::int64_t, pybind11::object> bases_;          // the versions that tasks hold
  mutable pybind11::object entered_;  // a list: ids of `clients_that_entered`, as far as snapshots have them; or null
  // Of a draft:
  Ledger* begun_ = nullptr;
  std::optional<control::Draft> draft_;
  bool cut_ = false;
};

void bind_ledger(pybind11::module_& module);

}  // namespace afflux::python
