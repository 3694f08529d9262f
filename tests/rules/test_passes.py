"""Gradient scheduling: every client enters once per pass, later arrivals wait for the next one."""

import threading

import numpy as np
import pytest

from afflux import AffluxError, Server, plan, replay, store
from afflux.rules import gsgm
from conftest import bits
from forged import forge_fact
from inside import aggregator_of, slots_taken

SIZE = 8


def gradient(join):
    return np.random.default_rng(join).standard_normal(SIZE).astype(np.float32)


def server(clients, buffer_size, **options):
    options = {"num_clients": clients, "max_deferred": 1000, **options}
    return Server(gsgm(buffer_size=buffer_size), np.zeros(SIZE, np.float32), **options)


def expected_rounds(clients, buffer_size, order):
    """The rule in words: for each arrival, the rounds (as lists of joins) that it causes; and what waits at the end."""
    entered, buffer, deferred = set(), [], []

    def rounds():
        made = []
        while True:
            for arrival in list(deferred):
                if arrival[1] not in entered and len(buffer) < buffer_size:
                    deferred.remove(arrival)
                    buffer.append(arrival)
                    entered.add(arrival[1])
            if len(buffer) < buffer_size and not (buffer and len(entered) == clients):
                return made
            made.append([join for join, _ in buffer])
            buffer.clear()
            if len(entered) == clients:
                entered.clear()

    caused = []
    for join, client in enumerate(order):
        if client in entered:
            deferred.append((join, client))
            caused.append([])
        else:
            entered.add(client)
            buffer.append((join, client))
            caused.append(rounds())
    return caused, [join for join, _ in buffer], [join for join, _ in deferred]


@pytest.mark.parametrize("seed", range(30))
def test_against_the_rule_in_words(seed):
    rng = np.random.default_rng(seed)
    clients, buffer_size = int(rng.integers(1, 7)), int(rng.integers(1, 5))
    # Skewed, so that fast clients come again and again.
    order = [int(c) for c in rng.choice(clients, 120, p=rng.dirichlet(np.full(clients, 0.7)))]
    caused, waiting, deferred = expected_rounds(clients, buffer_size, order)
    ours = server(clients, buffer_size, log=True)
    for join, client in enumerate(order):
        before = ours.version
        receipt = ours.push(client=client, gradient=gradient(join), version=ours.version)
        assert ours.version == before + len(caused[join])
        assert (receipt.report is not None) == bool(caused[join])
        if caused[join]:
            assert sorted(receipt.report.joins.tolist()) == sorted(caused[join][0])
    assert ours.arrivals_waiting == len(waiting)
    assert ours.counts["joined"] + ours.counts["deferred"] == len(order)
    assert ours.discard() == len(waiting) + len(deferred)
    again = replay(ours.log, server(clients, buffer_size), lambda entry: gradient(entry.number))
    assert bits(again.params) == bits(ours.params)
    assert {k: bits(v) for k, v in again.rule_vectors.items()} == {k: bits(v) for k, v in ours.rule_vectors.items()}


def test_a_deferred_arrival():
    ours = server(3, 2)
    ours.push(client="a", gradient=gradient(0), version=0)
    receipt = ours.push(client="a", gradient=gradient(1), version=0)
    assert (receipt.status, receipt.step, receipt.report) == ("deferred", None, None)
    ours.push(client="b", gradient=gradient(2), version=0)
    last = ours.push(client="c", gradient=gradient(3), version=1).report  # the short buffer of the pass
    assert last.client_ids == ("c",)
    assert ours.scalars == {"rounds_in_pass": 0.0}
    report = ours.push(client="b", gradient=gradient(4), version=2).report  # "a" has waited two steps
    assert report.client_ids == ("a", "b")
    assert report.staleness.tolist() == [2, 0]


def test_buffers_that_are_full_when_their_pass_begins():
    ours = server(2, 1)
    for join, client in enumerate([0, 0, 0]):
        ours.push(client=client, gradient=gradient(join), version=0)
    receipt = ours.push(
        client=1, gradient=gradient(3), version=1
    )  # ends the pass; client 0's second arrival is a whole buffer
    assert (receipt.version, ours.arrivals_waiting) == (3, 0)
    assert receipt.report.version == 2
    assert [(report.version, report.joins.tolist()) for report in receipt.more] == [(3, [1])]


def test_a_full_buffer_that_cannot_step_yet_waits_for_the_next_push():
    """Its failure is not the push's that began the pass, which has joined."""
    ours = server(4, 2, max_versions=2)
    for join, client in enumerate([1, 1, 2, 2, 3]):
        ours.push(client=client, gradient=gradient(join), version=0)
    held = ours.pull()
    receipt = ours.push(client=4, gradient=gradient(5), version=1)
    assert (receipt.status, receipt.report.version, receipt.more) == ("joined", 2, ())
    with pytest.raises(AffluxError, match="all 2 versions of max_versions are held"):
        ours.push(client=3, gradient=gradient(6), version=1)
    assert (ours.counts["joined"], ours.counts["deferred"], ours.counts["refused"]) == (4, 2, 1)
    del held
    receipt = ours.push(client=3, gradient=gradient(6), version=1)
    assert [report.joins.tolist() for report in receipt.more] == [[1, 3]]
    assert (receipt.status, receipt.report) == ("joined", None)


def test_arrivals_that_wait_too_long_are_dropped():
    ours = server(6, 2, max_staleness=1)
    for join, client in enumerate([1, 1, 2, 3, 4, 5, 6]):
        ours.push(client=client, gradient=gradient(join), version=ours.version)
    assert ours.version == 3
    assert (ours.arrivals_waiting, ours.counts["deferred"], ours.counts["dropped"]) == (0, 0, 1)


def test_deferred_arrivals_are_counted_in_the_memory():
    ours = server(3, 2)
    empty = ours.state_bytes
    for join in range(5):
        ours.push(client=1, gradient=gradient(join), version=0)
    assert ours.state_bytes == empty + 4 * 4 * SIZE


@pytest.mark.parametrize(
    ("options", "most"), [({"max_deferred": None}, 50), ({"max_deferred": 3}, 3), ({"max_deferred": 0}, 0)]
)
def test_no_more_arrivals_wait_than_max_deferred(options, most):
    """A client that never pushes keeps its pass open; the others cannot fill the memory."""
    ours = server(5, 3, log=True, **options)
    for join in range(60):
        receipt = ours.push(client=join % 2, gradient=gradient(join), version=0)
        assert receipt.status == ("joined" if join < 2 else "deferred" if join < 2 + most else "rejected")
    assert (receipt.staleness, receipt.step, receipt.join) == (0, None, 59)
    assert receipt.reason == f"{most} arrivals wait for the next pass (max_deferred)"
    assert (ours.counts["deferred"], ours.counts["rejected"]) == (most, 58 - most)
    assert slots_taken(ours) == 2 + most
    found = plan(gsgm(buffer_size=3), SIZE, num_clients=5, **options)
    held = sum(part.size for part in found.memory.values())
    assert ours.state_bytes == held + (found.working["deferred"].size if most else 0)
    assert found.memory_bytes >= ours.state_bytes
    for client in (2, 3, 4):  # the pass ends, and the next one takes what waits
        ours.push(client=client, gradient=gradient(client), version=0)
    assert ours.push(client=0, gradient=gradient(0), version=0).status == ("deferred" if most else "joined")
    again = replay(ours.log, server(5, 3, log=True, **options), lambda join: gradient(join.number % 60))
    assert again.log == ours.log


def test_a_store_keeps_max_deferred(tmp_path):
    server(3, 2, max_deferred=1, store=tmp_path / "store").close()
    for most in (1, 30):
        with Server.open(tmp_path / "store") as ours:
            assert ours.options.max_deferred == most
            for join in range(40):
                ours.push(client=0, gradient=gradient(join), version=0)
            assert len(aggregator_of(ours).admission.deferred()) == most
        # as in a store of an earlier version, which may also hold more arrivals
        forge_fact(tmp_path / "store", "options", lambda facts: {k: v for k, v in facts.items() if k != "max_deferred"})
    forge_fact(tmp_path / "store", "options", lambda facts: {**facts, "max_deferred": 5})
    with Server.open(tmp_path / "store") as ours:
        assert ours.push(client=0, gradient=gradient(0), version=0).status == "rejected"
        for client in (1, 2, 1, 2):
            ours.push(client=client, gradient=gradient(client), version=0)
        assert ours.version > 2


def test_the_arrivals_on_disk_are_at_most_those_of_the_plan(tmp_path):
    with server(3, 2, max_deferred=20, store=tmp_path / "store") as ours:
        for join in range(50):
            ours.push(client=join % 2, gradient=gradient(join), version=0)
            ours.checkpoint()
    taken = store.info(tmp_path / "store").disk_bytes["arrivals"]
    assert taken <= plan(gsgm(buffer_size=2), SIZE, num_clients=3, max_deferred=20, store=True).disk["arrivals"].size


def test_flush_and_discard_keep_the_pass():
    ours = server(4, 2)
    ours.push(client=0, gradient=gradient(0), version=0)
    assert ours.flush().client_ids == (0,)
    assert ours.push(client=0, gradient=gradient(1), version=0).status == "deferred"
    ours.push(client=1, gradient=gradient(2), version=0)
    assert ours.discard() == 2
    assert (
        ours.push(client=1, gradient=gradient(3), version=0).status == "joined"
    )  # what was thrown away has not entered
    assert ours.push(client=0, gradient=gradient(4), version=0).status == "deferred"


def test_threads_and_replay():
    clients, buffer_size, each = 8, 3, 200
    ours = server(clients, buffer_size, log=True)

    def work(thread):
        rng = np.random.default_rng(thread)
        for k in range(each):
            client = int(rng.integers(clients)) if k % 3 else (thread + k) % clients
            ours.push(
                client=client, gradient=gradient(1000 * thread + k), version=0, num_examples=1000 * thread + k + 1
            )

    threads = [threading.Thread(target=work, args=(t,)) for t in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ours.counts["joined"] + ours.counts["deferred"] == 4 * each
    again = replay(ours.log, server(clients, buffer_size), lambda entry: gradient(entry.num_examples - 1))
    assert ours.version == again.version > 0
    assert bits(ours.params) == bits(again.params)


def test_it_needs_the_number_of_clients():
    with pytest.raises(AffluxError, match="every client once per pass: give num_clients"):
        Server(gsgm(), np.zeros(2))
