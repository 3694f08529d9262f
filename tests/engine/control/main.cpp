// What tests/engine/test_control.py runs: control in C++ alone. Reads a schedule, a command a line, and prints for each
// command its result and the whole state. With `faults` each decision is tried without memory first: at its first
// allocation, at its second, ..., and each time nothing may have changed.
#include <any>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <iostream>
#include <map>
#include <memory>
#include <new>
#include <sstream>
#include <stdexcept>
#include <string>

#include "control/control.hpp"
#include "control/slots.hpp"

using namespace afflux::control;

namespace {

long allocations_left = -1;  // until one fails; negative: none fails

void require(bool fact, const char* what) {
  if (fact) return;
  std::fprintf(stderr, "failed: %s\n", what);
  std::_Exit(1);
}

const char* const kNames[] = {"joined", "replaced", "superseded", "rejected", "dropped",
                              "empty",  "expired",  "faulty",     "refused"};
const char* name_of(Status status) { return kNames[static_cast<std::size_t>(status)]; }

Id id_of_text(const std::string& text) {
  if (text[0] == 't') return text.substr(1);
  return std::int64_t{std::stoll(text.substr(1))};
}
std::string text_of(const Id& id) {
  if (const auto* text = std::get_if<std::string>(&id)) return "t" + *text;
  return "i" + std::to_string(std::get<std::int64_t>(id));
}

template <class... Cases>
struct Overloaded : Cases... {
  using Cases::operator()...;
};
template <class... Cases>
Overloaded(Cases...) -> Overloaded<Cases...>;

std::string text_of(const Entry& entry) {
  static const char* const kCuts[] = {"flush", "discard", "end_pass"};
  static const char* const kWhys[] = {"pushed", "expired", "cancelled"};
  std::ostringstream text;
  std::visit(
      Overloaded{[&](const Join& e) {
                   text << "join," << e.number << ',' << name_of(e.status) << ',' << text_of(e.client.id()) << ','
                        << e.version << ',' << e.staleness;
                 },
                 [&](const Cut& e) { text << kCuts[static_cast<int>(e.kind)]; },
                 [&](const Opened& e) { text << "open," << text_of(e.client.id()); },
                 [&](const Closed& e) { text << "close," << e.task << ',' << kWhys[static_cast<int>(e.why)]; },
                 [&](const Handed& e) { text << "handed," << e.name; }, [&](const NewParams&) { text << "params"; },
                 [&](const Replaced& e) { text << "rule," << e.config; }},
      entry);
  return text.str();
}

class Host {
 public:
  Host(const Settings& settings, bool faults, bool lazy, bool drafted)
      : control_(settings), faults_(faults), lazy_(lazy), drafted_(drafted) {}

  void run(const std::string& command, std::istream& in) {
    if (command == "wait") {
      double seconds;
      in >> seconds;
      now_ += seconds;
      result("waited");
    } else if (command == "push") {
      std::string client;
      std::int64_t back, examples;
      in >> client >> back >> examples;
      Push push;
      push.client = id_of_text(client);
      push.version = back < 0 ? 1000000 : std::max<std::int64_t>(0, control_.state().version - back);
      push.examples = examples;
      pushed(push);
    } else if (command == "late") {  // with its staleness
      std::string client;
      Push push;
      in >> client >> push.staleness;
      push.client = id_of_text(client);
      pushed(push);
    } else if (command == "task") {
      Push push;
      std::uint64_t task;
      in >> task >> push.examples;
      push.task = task;
      pushed(push);
    } else if (command == "checkout") {
      expire();
      std::string client;
      double lease;
      in >> client >> lease;
      const Client known = control_.clients().of(id_of_text(client));
      if (control_.blocks(known)) return result("blocked");
      const double deadline = lease < 0 ? HUGE_VAL : now_ + lease;
      tried([&] {
        control_.open_task({std::to_string(opened_), known, control_.state().version, true, {}, {}}, deadline);
      });
      result(std::to_string(opened_++) + ',' + std::to_string(control_.state().version));
    } else if (command == "cancel") {
      std::uint64_t task;
      in >> task;
      tried([&] { control_.close_task(task, Why::cancelled); });
      result("");
    } else if (command == "step") {
      step(in);
    } else if (command == "flush") {
      commit();
      if (!control_.state().buffer.empty()) {
        tried([&] { made(control_.flush({})); });
        if (!lazy_) commit();
      }
      result("");
    } else if (command == "end_pass") {
      commit();
      tried([&] { made(control_.end_pass({})); });
      if (!lazy_) commit();
      result("");
    } else if (command == "discard") {
      std::size_t count = 0;
      tried([&] {
        auto arrivals = control_.discard();
        count = arrivals.size();
        made(std::move(arrivals));
      });
      result(std::to_string(count));
    } else if (command == "commit") {
      commit();
      result("");
    } else if (command == "reload") {
      commit();
      std::map<std::string, std::any> archive;
      const Saved saved = control_.save();
      for_each_field(saved, [&](const char* name, const auto& field) { archive[name] = field; });
      tried([&] {
        Saved loaded;
        for_each_field(loaded, [&](const char* name, auto& field) {
          field = std::any_cast<std::decay_t<decltype(field)>>(archive.at(name));
        });
        control_.load(std::move(loaded), now_);
      });
      result("");
    } else {
      require(false, "a known command");
    }
  }

 private:
  // Makes the change; with faults, after it was tried without memory.
  template <class Change>
  void tried(const Change& change) {
    for (long at = 0; faults_; ++at) {
      const std::string before = dump();
      allocations_left = at;
      try {
        change();
        allocations_left = -1;
        return;
      } catch (const std::bad_alloc&) {
        allocations_left = -1;
      }
      require(dump() == before, "nothing changes without memory");
    }
    change();
  }

  void expire() {
    if (faults_)  // one by one: each is a change of its own
      while (const auto task = control_.tasks().next_overdue(now_))
        tried([&] { control_.close_task(*task, Why::expired); });
    else
      control_.close_overdue(now_);
  }

  void made(std::vector<Arrival> arrivals) noexcept {
    for (std::size_t i = 0; i + 1 < arrivals.size(); ++i)
      require(arrivals[i].slot != arrivals[i + 1].slot, "a slot of its own");
    for (const Arrival& arrival : arrivals) slots_.release(arrival.slot);
  }

  void commit() {
    if (control_.state().round_pending) tried([&] { control_.commit(); });
  }

  void pushed(Push push) {
    expire();
    push.slot = slots_.take();
    require(push.slot >= 0, "a free slot");
    if (control_.decide(push).completes) commit();
    Decision decision;
    const Decision before = control_.decide(push);
    bool is_round = false;
    if (drafted_ && before.completes) {
      tried([&] {
        Draft draft = control_.draft(true);
        decision = control_.admit(draft, push, now_);
        require(decision.completes && draft.buffer.filled() == draft.round_size(), "a round");
        auto arrivals = control_.decide_round(draft, {});
        control_.adopt(std::move(draft));
        slots_.join(push.slot);
        made(std::move(arrivals));
      });
    } else {
      tried([&] {
        decision = control_.admit(push, now_);
        if (is_accepted(decision.status)) slots_.join(push.slot);
        slots_.release(decision.freed);
      });
      is_round = decision.completes;
    }
    if (is_round) {
      const auto order = control_.state().buffer.canonical();
      for (std::size_t i = 0; i + 1 < order.size(); ++i) require(precedes(*order[i], *order[i + 1]), "the order");
      tried([&] { made(control_.decide_round({})); });
    }
    slots_.give_back(push.slot);
    slots_.give_back(push.slot);
    if (!lazy_) commit();
    require(before.status == decision.status && before.staleness == decision.staleness &&
                before.completes == decision.completes,
            "admit decides as decide");
    std::ostringstream text;
    text << name_of(decision.status) << ',' << decision.staleness.value_or(-1) << ','
         << (push.task ? -1 : push.version.value_or(-1)) << ',' << decision.join << ',' << decision.step;
    result(text.str());
  }

  void step(std::istream& in) {
    expire();
    commit();
    std::vector<Push> pushes;
    for (std::string client; in >> client;) {
      Push push;
      push.client = id_of_text(client);
      push.version = control_.state().version;
      push.slot = slots_.take();
      require(push.slot >= 0, "a free slot");
      pushes.push_back(push);
    }
    std::string text;
    tried([&] {
      std::string statuses;
      const std::string before = faults_ ? "" : decisions();
      Draft draft = control_.draft();
      std::vector<bool> accepted(pushes.size());
      for (std::size_t i = 0; i < pushes.size(); ++i) {
        const Decision decision = control_.admit(draft, pushes[i], now_);
        if (decision.status == Status::refused) {  // the step raises an error
          text = "refused";
          return;
        }
        accepted[i] = is_accepted(decision.status);
        statuses += std::string(name_of(decision.status)) + ',';
      }
      std::vector<Arrival> arrivals;
      if (!draft.buffer.empty()) arrivals = control_.flush(draft, {});
      require(faults_ || decisions() == before, "a draft changes nothing");
      if (!faults_) {  // amid the step another push is refused
        control_.count(Status::refused);
        --uncounted_;
      }
      const std::vector<std::int64_t> freed = control_.adopt(std::move(draft));
      for (std::size_t i = 0; i < pushes.size(); ++i)
        if (accepted[i]) slots_.join(pushes[i].slot);
      for (const std::int64_t slot : freed) slots_.release(slot);
      made(std::move(arrivals));
      text = std::move(statuses);
    });
    for (const Push& push : pushes) slots_.give_back(push.slot);
    if (!lazy_) commit();
    result(text);
  }

  void result(const std::string& text) { std::cout << text << '\t' << dump() << '\n'; }

  std::string decisions() const {
    const State& state = control_.state();
    std::ostringstream text;
    for (std::size_t i = 0; i < kStatuses; ++i)
      text << state.counts[static_cast<Status>(i)] + (i + 1 == kStatuses ? uncounted_ : 0) << ' ';
    const Counts since = state.counts.since(state.counts_at_round);
    text << '\t' << since[Status::joined] << '\t' << state.number << '\t' << state.decided_version() << '\t';
    for (const Arrival& arrival : state.buffer.arrivals()) {
      text << text_of(arrival.client.id()) << ',' << arrival.version << ',' << arrival.join << ' ';
      if (state.buffer.waiting(arrival.client) != nullptr)
        require(state.buffer.waiting(arrival.client) == &arrival, "the arrival of a client");
    }
    text << '\t';
    if (state.pass)
      for (const Client& client : state.pass->order()) text << text_of(client.id()) << ' ';
    for (const Client& client : state.participants) text << text_of(client.id()) << ' ';
    text << '\t';
    for (const auto& [number, task] : control_.tasks().open()) text << number << ' ';
    text << '\t';
    for (const Entry& entry : state.log) text << text_of(entry) << ' ';
    text << '\t' << state.version << '\t' << control_.tasks().bases();
    return text.str();
  }
  std::string dump() const { return decisions() + '\t' + std::to_string(control_.clients().size()); }

  Control control_;
  Slots slots_{64};
  bool faults_, lazy_, drafted_;
  double now_ = 0;
  int opened_ = 0;
  std::int64_t uncounted_ = 0;  // refused pushes that are not of the schedule

 public:
  std::int64_t slots_in_use() const { return slots_.in_use(); }
  std::int64_t filled() const { return control_.state().buffer.filled(); }
};

}  // namespace

// Not inlined: GCC would warn of free() on memory of operator new.
[[gnu::noinline]] void* operator new(std::size_t size) {
  if (allocations_left == 0) throw std::bad_alloc();
  if (allocations_left > 0) --allocations_left;
  if (void* memory = std::malloc(size == 0 ? 1 : size)) return memory;
  throw std::bad_alloc();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

// Returns the versions that tasks hold no longer, since the last call.
static std::vector<std::int64_t> released(Control& control) {
  std::vector<std::int64_t> versions;
  control.take_released([&](std::int64_t version) { versions.push_back(version); });
  return versions;
}

static Settings settings_of(std::int64_t buffer_size) {
  Settings settings;
  settings.buffer_size = buffer_size;
  return settings;
}

// What the schedules do not reach.
static void check_details() {
  const auto fails = [](const auto& call) {
    try {
      call();
    } catch (const std::invalid_argument&) {
      return true;
    }
    return false;
  };
  const auto push_of = [](Id client, std::int64_t version = 0) {
    Push push;
    push.client = std::move(client);
    push.version = version;
    return push;
  };
  require(fails([] { Control control(settings_of(0)); }), "a buffer size of 0");
  {  // ids, and numbers that are used again
    require(Id(-1) < Id(2) && Id(2) < id_of(UINT64_MAX) && id_of(UINT64_MAX) < Id("a") && Id("z") < Id("\xc3\xa9") &&
                id_of(7) == Id(std::int64_t{7}),
            "the order of ids");
    Clients clients;
    Client first = clients.of(Id(1)), second = clients.of(Id("1"));
    require(first.number() == 0 && second.number() == 1 && clients.of(Id(1)).number() == 0, "numbers");
    first = Client();
    require(clients.size() == 1 && !clients.find(Id(1)) && clients.of(Id(9)).number() == 0, "a number is used again");
  }
  {  // rows
    Settings settings = settings_of(2);
    settings.max_rows = 3;
    settings.rules.duplicates = Duplicates::latest;
    Control control(settings);
    control.admit(push_of(Id(1)), 0);
    control.admit(push_of(Id(2)), 0);
    std::vector<Client> clients{control.clients().of(Id(1)), control.clients().of(Id(2))};
    control.decide_round({true, clients});
    require(control.admit(push_of(Id(3)), 0).status == Status::joined, "room for a third client");
    require(control.admit(push_of(Id(4)), 0).refusal == Refusal::too_many_clients, "no room for a fourth one");
    require(control.admit(push_of(Id(3)), 0).status == Status::replaced, "a client that is known");
    require(control.admit(push_of(Id(3), 1), 0).refusal == Refusal::no_such_version, "a version that is not made yet");
    control.commit();
    clients.clear();
    require(control.rows().size() == 2 && control.admit(push_of(Id(4)), 0).status == Status::refused, "rows are kept");
    const Decision decision = control.admit(push_of(Id(1), 1), 0);
    require(decision.completes && decision.step == 2 && decision.staleness == 0, "a client with a row");
    require(control.clients().size() == 3 && control.state().counts[Status::refused] == 3,
            "refused ids are no clients");
    require(fails([&] { control.admit(push_of(Id(1), 1), 0); }), "a buffer that is a round");
  }
  {  // passes
    Settings settings = settings_of(2);
    settings.by_flush = settings.records_faults = true;
    settings.pass_clients = 1;
    Control control(settings);
    control.admit(push_of(Id(1)), 0);
    require(control.admit(push_of(Id(2)), 0).refusal == Refusal::pass_is_full, "a full pass");
    require(control.admit(push_of(Id(1)), 0).status == Status::rejected, "has entered");
    require(control.state().counts[Status::faulty] == 1 && control.state().counts[Status::refused] == 0, "faults");
    require(control.state().round_size() == 1, "the last round of a pass");
    const auto arrivals = control.decide_round({false});  // the rule skips it
    require(arrivals.size() == 1 && control.state().version == 0 && !control.state().round_pending &&
                control.state().pass->entered() == 0,
            "a round without a step");
    require(fails([&] { control.commit(); }) && control.end_pass({}).empty(), "no round");
  }
  {  // participations
    Settings settings = settings_of(1);
    settings.participations = 2;
    require(fails([&] { Control control(settings); }), "a client that may be in a buffer twice");
    settings.rules.duplicates = Duplicates::latest;
    settings.participations = 0;
    require(fails([&] { Control control(settings); }), "no rounds");
    settings.participations = 2;
    Control control(settings);
    const auto joins = [&](Id client) {
      const Decision decision = control.admit(push_of(std::move(client), control.state().version), 0);
      require(decision.is_blocked == (decision.status == Status::rejected), "the reason");
      return decision.completes;
    };
    require(joins(Id(1)), "a first round");
    control.decide_round({false});  // the rule skips it
    require(joins(Id(1)), "a second round");
    control.decide_round({});
    control.abandon();
    require(!joins(Id(1)) && control.blocks(control.clients().find(Id(1))), "rounds that are skipped or fail count");
    require(joins(Id(2)), "another client");
    control.discard();
    require(control.state().participants.size() == 2, "an arrival that is discarded does not");
    {
      Draft draft = control.draft();
      for (int round = 0; round < 2; ++round) {
        require(control.admit(draft, push_of(Id(2)), 0).status == Status::joined, "in a draft");
        control.flush(draft, {false});
      }
      require(control.decide(draft, push_of(Id(2))).is_blocked && !control.decide(push_of(Id(2))).is_blocked,
              "rounds of a draft count there");
    }
    control.load(control.save(), 0);
    require(control.state().participants.size() == 2 && control.clients().find(Id(1)).rounds() == 2, "a state");
    Control other(settings_of(1));
    Saved saved = other.save();
    saved.participants.push_back(other.clients().of(Id(1)));
    require(fails([&] { other.load(std::move(saved), 0); }), "a state with counts, without a limit");
  }
  {  // leases
    Control control(settings_of(3));
    Push push;
    for (push.task = 0; *push.task < 2; ++*push.task)
      control.open_task({std::to_string(*push.task), control.clients().of(Id(1)), 0, true, {}, {}}, 5);
    push.task = 0;
    control.close_overdue(4);
    require(control.decide(push).status == Status::joined && control.tasks().size() == 2,
            "a decision that is not made");
    require(control.admit(push, 4).status == Status::joined && control.tasks().size() == 1, "in time");
    push.task = 1;
    control.close_overdue(5);
    require(control.tasks().size() == 0 && control.decide(push).status == Status::expired &&
                control.admit(push, 5).status == Status::expired,
            "too late");
    require(control.state().buffer.filled() == 1 && !control.tasks().holds(0), "its version is not held");
    control.admit(push_of(Id(2)), 6);
    require(control.state().since == 4, "when the first arrival has joined");
  }
  {  // changes by the caller, and tasks
    Settings settings = settings_of(3);
    settings.keeps_log = true;
    settings.max_bases = 2;
    settings.rules.max_staleness = 2;
    Control control(settings);
    for (std::int64_t version = 0; version < 3; ++version) {
      control.open_task({std::to_string(version), control.clients().of(Id(1)), version, true, {}, {}}, HUGE_VAL);
      control.set_params();
    }
    require(released(control) == std::vector<std::int64_t>{0} && released(control).empty(), "most bases");
    control.set_params();  // version 4: 1 is too old
    require(released(control) == std::vector<std::int64_t>{1} && control.tasks().holds(2), "old bases");
    require(fails([&] { control.open_task({"2", control.clients().of(Id(1)), 0, true, {}, {}}, 1); }), "an id twice");
    {
      Draft draft = control.draft();
      control.count(draft, Status::faulty, 2);
      Push push;
      push.task = 2;
      require(control.admit(draft, push, 0).status == Status::expired && control.tasks().find(2) != nullptr &&
                  control.decide(push).status == Status::joined,
              "a task that a draft closes");
    }
    require(fails([&] { control.count(Status::joined); }), "a decision");
    control.count(Status::expired, 2);
    require(released(control) == std::vector<std::int64_t>{2} && control.state().counts[Status::expired] == 1,
            "a push whose task is closed");
    require(control.replace_rule(2, "a"), "at once");
    Draft draft = control.draft();
    control.admit(push_of(Id(1), 4), 0);
    require(fails([&] { control.adopt(std::move(draft)); }) && fails([&] { control.set_params(); }) &&
                !control.replace_rule(1, "b") && control.state().buffer_size == 2,
            "a draft of an earlier state, arrivals that wait");
    control.hand_in("h");
    require(control.admit(push_of(Id(2), 4), 0).completes, "the buffer of the rule before");
    control.decide_round({});
    require(fails([&] { control.admit(push_of(Id(2), 4), 0); }) && fails([&] { control.flush({}); }),
            "one round after the other");
    control.commit();
    require(control.state().buffer_size == 1 && control.admit(push_of(Id(2), 4), 0).completes, "the new rule");
    std::string log;
    for (const Entry& entry : control.state().log) log += text_of(entry) + ' ';
    require(log.find("close,2,pushed rule,a join,0,joined,i1,4,0 rule,b handed,h join,1,joined") != std::string::npos,
            "the log");
  }
  std::puts("done");
}

int main(int argc, char**) {
  if (argc > 1) {
    check_details();
    return 0;
  }
  std::unique_ptr<Host> host;
  for (std::string line; std::getline(std::cin, line);) {
    std::istringstream in(line);
    std::string command;
    in >> command;
    if (command == "new") {
      Settings settings;
      std::string duplicates;
      std::int64_t max_staleness, pass_clients, participations;
      bool faults, lazy, drafted;
      in >> settings.buffer_size >> duplicates >> max_staleness >> pass_clients >> participations >>
          settings.by_flush >> faults >> lazy >> drafted;
      settings.rules.duplicates = duplicates == "both"     ? Duplicates::both
                                  : duplicates == "latest" ? Duplicates::latest
                                                           : Duplicates::reject;
      if (max_staleness >= 0) settings.rules.max_staleness = max_staleness;
      if (pass_clients >= 0) settings.pass_clients = pass_clients;
      if (participations >= 0) settings.participations = participations;
      settings.keeps_log = true;
      host = std::make_unique<Host>(settings, faults, lazy, drafted);
      continue;
    }
    host->run(command, in);
    require(host->slots_in_use() == host->filled(), "slots are those of the buffer");
  }
}
