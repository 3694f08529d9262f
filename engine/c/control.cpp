// The C functions of control.
#include "control/control.hpp"

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "c/guard.hpp"

using afflux::failed;
using afflux::guarded;
namespace control = afflux::control;
using control::Status;

// Control and the arrays of afflux_control_arrivals.
struct afflux_control {
  explicit afflux_control(const control::Settings& settings) : decisions(settings) {}
  control::Control decisions;
  std::vector<std::int64_t> integers;
  std::vector<double> numbers;
};

namespace {

constexpr double kNow = 0;  // no task has a lease here

static_assert(static_cast<int>(control::Duplicates::reject) == AFFLUX_REJECT);
static_assert(static_cast<int>(Status::empty) == AFFLUX_EMPTY && static_cast<int>(Status::refused) == AFFLUX_REFUSED);
static_assert(control::kStatuses == AFFLUX_STATUSES);

void require(bool fact, const std::string& message) {
  if (!fact) throw afflux::Error("[afflux.h] " + message);
}

control::Id id_of(const afflux_client& client) {
  if (client.text != nullptr) return std::string(client.text);
  if (client.is_unsigned != 0) return control::id_of(static_cast<std::uint64_t>(client.number));
  return client.number;
}

const char* text_of(control::Refusal refusal) {
  switch (refusal) {
    case control::Refusal::no_such_version:
      return "[afflux.h] the version of a push was never made";
    case control::Refusal::pass_is_full:
      return "[afflux.h] pass_clients other clients have entered in this pass";
    default:
      return "[afflux.h] there are too many clients";
  }
}

}  // namespace

extern "C" {

int afflux_control_create(const afflux_control_settings* settings, afflux_control** control) {
  return guarded([&] {
    require(settings->duplicates >= AFFLUX_BOTH && settings->duplicates <= AFFLUX_REJECT,
            "duplicates is " + std::to_string(settings->duplicates) + ", must be from 0 to 2");
    control::Settings own;
    own.buffer_size = settings->buffer_size;
    own.rules.duplicates = static_cast<control::Duplicates>(settings->duplicates);
    if (settings->limits_staleness != 0) own.rules.max_staleness = settings->max_staleness;
    own.by_flush = settings->by_flush != 0;
    if (settings->pass_clients != 0) own.pass_clients = settings->pass_clients;
    if (settings->participations != 0) own.participations = settings->participations;
    *control = new afflux_control(own);
  });
}

void afflux_control_destroy(afflux_control* control) { delete control; }

int afflux_control_push(afflux_control* control, const afflux_push* push, afflux_decision* decision) {
  control::Refusal refusal = control::Refusal::none;
  const int status = guarded([&] {
    control::Push facts;
    facts.client = id_of(push->client);
    if (push->version >= 0)
      facts.version = push->version;
    else
      facts.staleness = -1 - push->version;
    facts.examples = push->examples;
    facts.local_steps = push->local_steps;
    facts.loss = push->loss;
    facts.norm = push->norm;
    facts.slot = push->slot;
    const control::Decision made = control->decisions.admit(facts, kNow);
    refusal = made.refusal;
    *decision = {static_cast<std::int32_t>(made.status),
                 made.completes,
                 made.staleness.value_or(-1),
                 made.version,
                 made.join,
                 made.step,
                 made.freed};
  });
  return refusal == control::Refusal::none ? status : failed(AFFLUX_INVALID, text_of(refusal));
}

int afflux_control_arrivals(afflux_control* control, afflux_arrivals* arrivals) {
  return guarded([&] {
    const auto order = control->decisions.state().buffer.canonical();
    std::vector<std::int64_t> integers(6 * order.size());
    std::vector<double> numbers(2 * order.size());
    for (std::size_t i = 0; i < order.size(); ++i) {
      const control::Arrival& arrival = *order[i];
      const std::int64_t facts[] = {arrival.slot, arrival.version,  arrival.staleness,
                                    arrival.join, arrival.examples, arrival.local_steps};
      for (std::size_t k = 0; k < 6; ++k) integers[k * order.size() + i] = facts[k];
      numbers[i] = arrival.loss;
      numbers[order.size() + i] = arrival.norm;
    }
    control->integers = std::move(integers);
    control->numbers = std::move(numbers);
    const auto column = [&](std::size_t k) { return control->integers.data() + k * order.size(); };
    *arrivals = {static_cast<std::int64_t>(order.size()),
                 column(0),
                 column(1),
                 column(2),
                 column(3),
                 column(4),
                 column(5),
                 control->numbers.data(),
                 control->numbers.data() + order.size()};
  });
}

int afflux_control_decide_round(afflux_control* control, int steps) {
  return guarded([&] { control->decisions.flush({steps != 0}); });
}

int afflux_control_end_pass(afflux_control* control, int steps, int* decided) {
  return guarded([&] { *decided = !control->decisions.end_pass({steps != 0}).empty(); });
}

int afflux_control_discard(afflux_control* control, int64_t* count) {
  return guarded([&] { *count = static_cast<std::int64_t>(control->decisions.discard().size()); });
}

int afflux_control_commit(afflux_control* control) {
  return guarded([&] { control->decisions.commit(); });
}

int afflux_control_counts(const afflux_control* control, int64_t* counts, int64_t* since_round) {
  return guarded([&] {
    const control::State& state = control->decisions.state();
    const control::Counts since = state.counts.since(state.counts_at_round);
    for (std::size_t i = 0; i < control::kStatuses; ++i) {
      if (counts != nullptr) counts[i] = state.counts[static_cast<Status>(i)];
      if (since_round != nullptr) since_round[i] = since[static_cast<Status>(i)];
    }
  });
}

int64_t afflux_control_version(const afflux_control* control) { return control->decisions.state().version; }

}  // extern "C"
