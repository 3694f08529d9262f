"""States that a server loads while its own arrivals wait: slots, larger buffers, and calls of other threads."""

import numpy as np
import pytest

from afflux import Server, rules
from afflux.server import persistence
from conftest import bits, check_error, check_raises, push_all, same_state
from inside import aggregator_of, slots_taken

D, M = 5, 3


def vector(number):
    return np.random.default_rng(number).standard_normal(D).astype(np.float32)


def filled(rule, waiting, **options):
    server = Server(rule, np.zeros(D, np.float32), num_clients=4, **options)
    push_all(server, range(waiting), vector, timeout=0)
    return server


@pytest.mark.parametrize(
    ("rule", "waiting", "options"),
    [
        (rules.fedbuff(buffer_size=M), M - 1, {"max_slots": M}),
        (rules.fedbuff(buffer_size=M), M + 1, {"max_slots": M, "slot_dtype": "bfloat16", "max_versions": 2}),
        (rules.fedbuff(buffer_size=M), M - 1, {"max_slots": 1, "accumulate": True}),
        (rules.fedbuff(buffer_size=M), M - 1, {"max_slots": M, "inplace": True}),
    ],
    ids=["full", "bfloat16", "sum", "inplace"],
)
def test_a_server_loads_its_own_state(rule, waiting, options):
    """Twice, with as many slots as arrivals wait; then it goes on as before, and has no more slots than before."""
    server, other = filled(rule, waiting, **options), filled(rule, waiting, **options)
    for _ in range(2):
        server.load_state_dict(server.state_dict())
        assert slots_taken(server) == slots_taken(other) == aggregator_of(server).admission.slots_held
    for each in server, other:
        push_all(each, (0, 1, 2, 3, 0), lambda client: vector(10 + client), timeout=0)
    assert (server.version, bits(server.params)) == (other.version, bits(other.params))
    assert server.counts == other.counts


def test_slots_of_pushes_in_progress(monkeypatch):
    """All slots are in use by pushes that have not joined, so that the loaded vectors stay where they are."""
    server = filled(rules.fedbuff(buffer_size=M), M - 1, max_slots=M)
    state, slots = server.state_dict(), [aggregator_of(server).plane.reserve()]
    load = aggregator_of(server).admission.load
    monkeypatch.setattr(
        aggregator_of(server).admission,
        "load",
        lambda *given: (len(load(*given)), slots.extend(aggregator_of(server).plane.reserve() for _ in range(2)))[0],
    )
    server.load_state_dict(state)
    slots.clear()
    assert (slots_taken(server), server.arrivals_waiting) == (0, M - 1)
    server.push(client=3, version=0, update=vector(2), timeout=0)
    other = filled(rules.fedbuff(buffer_size=M), M - 1)
    other.push(client=3, version=0, update=vector(2))
    assert bits(server.params) == bits(other.params)


def test_an_error_while_the_vectors_move_changes_nothing(monkeypatch):
    server = filled(rules.fedbuff(buffer_size=M), M - 1, max_slots=M)
    state, calls = server.state_dict(), []
    arrivals_of = persistence.arrivals_of

    def failing(*given):
        calls.append(given)
        if len(calls) == 2:
            raise MemoryError
        return arrivals_of(*given)

    monkeypatch.setattr(persistence, "arrivals_of", failing)
    check_raises(MemoryError, server.load_state_dict, state)
    same_state(server.state_dict(), state)


def test_a_state_with_more_arrivals_than_the_rule_of_the_server_takes(tmp_path):
    """The way that the message names: the rule that has the arrivals, and then replace_rule."""
    path = tmp_path / "store"
    with filled(rules.fedbuff(buffer_size=10), 9, store=path) as server:
        state = server.state_dict()
    small = rules.fedbuff(buffer_size=5)
    for load in (
        lambda: Server(small, np.zeros(D, np.float32), num_clients=4).load_state_dict(state),
        lambda: Server.open(path, small),
    ):
        check_error(r"9 arrivals wait in the state, .* buffer_size is 5: .* replace_rule", load)
    with Server.open(path) as server:
        assert server.replace_rule(small) is False
        assert server.flush().version == 1
        assert server.rule.buffer_size == 5
