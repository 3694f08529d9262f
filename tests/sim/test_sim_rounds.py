"""Anarchic FL's protocol of rounds: who takes part, on which model, and how it goes with every rule."""

from dataclasses import replace

import numpy as np
import pytest

from afflux.ops.errors import ConfigError
from afflux.rules.specs import parse_rule
from afflux.sim.clients.schedule import Arrival, Dispatch, Draws, make_schedule, schedule_events, schedule_rounds
from afflux.sim.workload.config import SAMPLING, SimConfig
from afflux.sim.workload.delays import delay_law
from afflux.sim.workload.selection import Population
from conftest import check_refused, generator
from made_runs import run

SMALL = SimConfig(
    model="logreg",
    num_clients=10,
    arrivals=200,
    eval_every=50,
    local_steps=1,
    protocol="rounds",
    partition="iid",
    delays="exponential",
)


def events_of(cohort, arrivals, *, num_clients=10, stale_models=5, seed=0, delay=None, probabilities=None):
    delay = delay or delay_law("exponential")(num_clients, generator(seed))
    draws, ages = Draws(delay, generator(seed + 1), generator(seed + 3)), generator(seed + 2)
    limits = {"cohort": cohort, "arrivals": arrivals, "stale_models": stale_models}
    return list(schedule_rounds(range(num_clients), draws, ages, probabilities=probabilities, **limits))


def cohorts(events):
    chosen = [event.client for event in events if isinstance(event, Dispatch)]
    return np.array(chosen).reshape(-1, 5)


def test_a_round_is_dispatches_then_arrivals_in_the_order_of_time():
    events = events_of(3, 9, num_clients=5, delay=lambda client, times: 1.0 + client)
    assert [type(event) for event in events] == ([Dispatch] * 3 + [Arrival] * 3) * 3
    now = 0.0
    for start in (0, 6, 12):
        sent, came = events[start : start + 3], events[start + 3 : start + 6]
        assert {event.time for event in sent} == {now}
        assert sorted(event.client for event in sent) == [event.client for event in came]
        assert [event.time for event in came] == [now + 1.0 + event.client for event in came]
        by_number = {event.sequence: event.client for event in sent}
        assert by_number == {event.sequence: event.client for event in came}
        now = came[-1].time
    assert [event.sequence for event in events if isinstance(event, Dispatch)] == list(range(9))


def test_the_last_round_may_be_short():
    events = events_of(4, 10)
    assert sum(isinstance(event, Arrival) for event in events) == 10


def test_uniform_participation_is_without_replacement_and_uniform():
    drawn = cohorts(events_of(5, 5 * 4000))
    assert all(len(set(row)) == 5 for row in drawn)
    pairs = np.zeros((10, 10))
    for row in drawn:
        pairs[np.ix_(row, row)] += 1
    # Each client is in with probability 1/2, each pair with 5/10 * 4/9.
    own, both = np.diag(pairs), pairs[np.triu_indices(10, 1)]
    for counts, chance in ((own, 1 / 2), (both, 2 / 9)):
        assert np.abs(counts - 4000 * chance).max() < 5 * np.sqrt(4000 * chance * (1 - chance))


def test_biased_participation_draws_in_proportion_without_replacement():
    shares = SAMPLING["biased"]
    assert sum(shares) == pytest.approx(1)
    drawn = cohorts(events_of(5, 5 * 4000, probabilities=shares))
    assert all(len(set(row)) == 5 for row in drawn)
    first = np.bincount(drawn[:, 0], minlength=10)
    for count, share in zip(first, shares, strict=True):
        assert abs(count - 4000 * share) < 5 * np.sqrt(4000 * share)
    # The second, given that client 0 was first, in proportion to the others' shares.
    second = np.bincount(drawn[drawn[:, 0] == 0][:, 1], minlength=10)
    for count, share in zip(second[1:], shares[1:], strict=True):
        expected = second.sum() * share / (1 - shares[0])
        assert abs(count - expected) < 5 * np.sqrt(max(expected, 1))
    assert second[0] == 0


def test_the_models_that_clients_start_from_are_uniform_over_the_last_ones():
    sent = [event for event in events_of(5, 5 * 4000) if isinstance(event, Dispatch)]
    for number in range(6):
        ages = {event.age for event in sent[5 * number : 5 * number + 5]}
        assert max(ages) <= min(number, 4)
    counts = np.bincount([event.age for event in sent[50:]], minlength=5)
    expected = len(sent[50:]) / 5
    assert len(counts) == 5
    assert np.abs(counts - expected).max() < 5 * np.sqrt(expected)
    assert {event.age for event in events_of(5, 100, stale_models=1) if isinstance(event, Dispatch)} == {0}


@pytest.mark.parametrize("rule", ["fedbuff:buffer_size=5", "ca2fl:buffer_size=5", "fedasync"])
def test_staleness_is_the_age_of_the_model(rule):
    result = run(parse_rule(rule), 3, SMALL)
    size = parse_rule(rule).build().buffer_size
    ages, came = {}, []
    for event in events_of_run(size, 3, SMALL):
        if isinstance(event, Dispatch):
            ages[event.sequence] = event.age
        else:
            came.append(ages[event.sequence])
    assert result.staleness.tolist() == came
    assert result.max_staleness == 4
    assert len(result.round_staleness) == 200 // size
    assert result.final_accuracy > 0.5


def events_of_run(cohort, seed, config):
    return make_schedule(
        parse_rule(f"fedbuff:buffer_size={cohort}"),
        seed,
        config,
        Population(config.num_clients, range(config.num_clients)),
    )


def test_one_stale_model_is_synchronous_and_so_are_synchronous_rules():
    for rule, config in (("fedbuff:buffer_size=5", replace(SMALL, stale_models=1)), ("fedavg:buffer_size=5", SMALL)):
        assert run(parse_rule(rule), 0, config).max_staleness == 0


def test_rounds_repeat_bit_for_bit_and_rules_are_paired():
    first, again, other = (run(parse_rule(rule), 1, SMALL) for rule in ("fedbuff", "fedbuff", "ca2fl"))
    assert first.digest == again.digest != other.digest
    assert first.staleness.tolist() == other.staleness.tolist()
    assert [row.virtual_time for row in first.evaluations] == [row.virtual_time for row in other.evaluations]


def test_biased_runs_need_ten_clients():
    biased = replace(SMALL, sampling="biased")
    assert (
        run(parse_rule("fedbuff:buffer_size=5"), 0, biased).digest
        != run(parse_rule("fedbuff:buffer_size=5"), 0, SMALL).digest
    )
    with pytest.raises(ConfigError, match="sampling 'biased' is for 10 clients, not 12"):
        run(parse_rule("fedbuff:buffer_size=5"), 0, replace(biased, num_clients=12))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"protocol": "x"}, "unknown protocol 'x'; known: events, rounds"),
        ({"sampling": "x"}, "unknown sampling"),
        ({"stale_models": 0}, "stale_models is 0"),
    ],
)
def test_impossible_settings_are_refused(change, message):
    check_refused(message, replace, SMALL, **change)


def test_a_cohort_beyond_the_clients_is_refused():
    check_refused("concurrency is 11, but only 10 of 10", run, parse_rule("fedbuff:buffer_size=11"), 0, SMALL)


def test_k_async_is_refill_k_with_all_clients_at_once():
    """WKAFL's law: the server steps on the first K of P, and sends the new model to just those."""
    events = schedule_events(
        range(12),
        Draws(delay_law("fadas-mild")(12, generator()), generator(1), generator(2)),
        concurrency=12,
        arrivals=90,
        refill=3,
    )
    came, sent, number = [], [], 0
    for event in events:
        if isinstance(event, Arrival):
            came.append(event.client)
        elif number < 12:
            number += 1  # all P at the start
        else:
            sent.append(event.client)
            if len(sent) == 3:
                assert len(came) == 3
                assert set(sent) == set(came)
                came, sent = [], []


def test_the_settings_are_options_of_the_command_line(tmp_path):
    from typer.testing import CliRunner

    from afflux.cli.lab.app import app

    settings = "--model logreg --arrivals 10 --protocol rounds --stale-models 2 --sampling biased"
    clients = "--partition classes --classes 3 --client-optimizer scaffold --steps-law uniform --examples batch"
    out = tmp_path / "out"
    arguments = ["run", "--rule", "twafl:buffer_size=5", *settings.split(), *clients.split()]
    result = CliRunner().invoke(app, [*arguments, "--out", str(out), "--num-clients", "10"])
    assert result.exit_code == 0, result.output
    assert (out / "metrics.csv").read_text().count("\n") == 3
