"""The event loop: order, ties, selection; schedules by hand; the papers' staleness."""

from collections import Counter
from itertools import pairwise

import numpy as np
import pytest

from afflux.sim.clients.schedule import Arrival, Dispatch, Draws, schedule_events
from afflux.sim.workload.delays import delay_law
from afflux.sim.workload.selection import Population, selection_law
from conftest import generator


def events_of(clients, concurrency, arrivals, delay, *, seed=0, refill=1, selection="uniform", **draws):
    law = selection_law(selection)
    law.begin(Population(len(clients), clients), None)
    draws = Draws(delay, generator(seed), generator(seed + 1), law=law, **draws)
    return list(schedule_events(clients, draws, concurrency=concurrency, arrivals=arrivals, refill=refill))


def arrivals_of(events):
    return [(event.time, event.client) for event in events if isinstance(event, Arrival)]


def test_arrivals_of_a_schedule_done_by_hand():
    # Client 0 takes 1, client 1 takes 2.5; the client that finishes is the only idle one, and trains again.
    events = events_of([0, 1], 2, 7, lambda client, times: (1.0, 2.5)[client])
    # Both finish at 5; client 1 was dispatched first (at 2.5, the other at 4).
    by_hand = [(1.0, 0), (2.0, 0), (2.5, 1), (3.0, 0), (4.0, 0), (5.0, 1), (5.0, 0)]
    assert arrivals_of(events) == by_hand


def test_equal_times_arrive_in_the_order_of_dispatch():
    events = events_of(range(10), 4, 40, delay_law("constant")(10, generator()))
    assert [event.sequence for event in events if isinstance(event, Arrival)] == list(range(40))


def test_concurrency_is_kept_and_no_client_trains_twice_at_once():
    training = set()
    dispatched = {}
    now = 0.0
    for event in events_of(range(30), 12, 500, delay_law("fadas-mild")(30, generator())):
        assert event.time >= now
        now = event.time
        if isinstance(event, Dispatch):
            assert event.client not in training
            assert event.sequence == len(dispatched)
            training.add(event.client)
            dispatched[event.sequence] = event
        else:
            assert len(training) == 12
            assert dispatched[event.sequence].client == event.client
            assert event.time > dispatched[event.sequence].time
            training.remove(event.client)
    assert len(training) == 11, "after the last arrival nobody is dispatched"


def test_selection_is_uniform_and_includes_the_client_that_just_finished():
    events = events_of(range(5), 1, 20_000, delay_law("constant")(5, generator()))
    chosen = [event.client for event in events if isinstance(event, Dispatch)]
    pairs = Counter(pairwise(chosen))
    # 25 equally likely pairs; 5 standard deviations of a binomial count.
    expected = 20_000 / 25
    assert len(pairs) == 25
    assert max(abs(count - expected) for count in pairs.values()) < 5 * np.sqrt(expected)


@pytest.mark.parametrize(
    ("count", "concurrency", "refill"), [(10, 3, 1), (10, 10, 4), (10, 8, 8), (7, 2, 2), (3, 1, 1)]
)
def test_a_blocked_client_starts_again_only_after_the_end_of_the_pass(count, concurrency, refill):
    delay = delay_law("exponential")(count, generator())
    events = events_of(range(count), concurrency, 6 * count, delay, refill=refill, selection="blocked-until-pass-ends")
    finished, training = 0, set()
    for event in events:
        if isinstance(event, Dispatch):
            # Everything that trains was started in the pass that is under way.
            this_pass = {other for _, other in arrivals_of(events)[finished - finished % count : finished]}
            assert event.client not in training | this_pass
            training.add(event.client)
            assert len(training) <= concurrency
        else:
            training.remove(event.client)
            finished += 1
    clients = [client for _, client in arrivals_of(events)]
    for start in range(0, len(clients), count):
        assert sorted(clients[start : start + count]) == list(range(count))


def test_synchronous_rounds_wait_for_the_whole_cohort():
    events = events_of(range(8), 3, 9, lambda client, times: 1.0 + client, refill=3)
    kinds = [type(event) for event in events]
    assert kinds == ([Dispatch] * 3 + [Arrival] * 3) * 3
    for start in (6, 12):
        assert {event.time for event in events[start : start + 3]} == {events[start - 1].time}


def staleness_of(events, buffer_size):
    """Staleness of each arrival for a rule that steps every `buffer_size` arrivals."""
    pulled, staleness = {}, []
    for event in events:
        version = len(staleness) // buffer_size
        if isinstance(event, Dispatch):
            pulled[event.sequence] = version
        else:
            staleness.append(version - pulled[event.sequence])
    return np.array(staleness)


@pytest.mark.parametrize(
    ("name", "num_clients", "concurrency", "buffer_size", "largest", "mean"),
    [
        ("ca2fl", 100, 20, 10, (3, 5), (0.85, 1.0)),  # CA2FL, Table 4: 4 and .918
        ("ca2fl", 100, 20, 5, (8, 10), (2.6, 3.0)),  # CA2FL, Table 4: 9 and 2.651
        ("fadas-large", 50, 25, 5, (120, 160), (3.8, 4.0)),  # the authors' code: 127, or 139 to 149
    ],
)
def test_delays_and_refill_give_the_papers_staleness(name, num_clients, concurrency, buffer_size, largest, mean):
    maxima, means = [], []
    for seed in range(9):
        law = delay_law(name)(num_clients, generator(seed))
        events = events_of(range(num_clients), concurrency, 500 * buffer_size, law, seed=seed, refill=buffer_size)
        staleness = staleness_of(events, buffer_size)
        maxima.append(staleness.max())
        means.append(staleness.mean())
    assert largest[0] <= np.median(maxima) <= largest[1]
    assert mean[0] <= np.mean(means) <= mean[1]
