"""Gradient scheduling: every client enters once per pass; then it is blocked until the pass ends."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from afflux import BlockedError, BusyError, Cut, Server, replay
from afflux.rules import fedbuff, gsgm
from afflux.rules.presets.gsgm import GradientScheduling
from conftest import bits, check_error, check_raises
from inside import slots_taken

SIZE = 8
REASON = "has entered in this pass"


def gradient(join):
    return np.random.default_rng(join).standard_normal(SIZE).astype(np.float32)


def server(clients, buffer_size, **options):
    return Server(gsgm(buffer_size=buffer_size), np.zeros(SIZE, np.float32), num_clients=clients, **options)


def push(ours, client, number=0, version=0):
    return ours.push(client=client, gradient=gradient(number), version=version)


def vectors_of(ours):
    return {"params": bits(ours.params)} | {name: bits(vector) for name, vector in ours.rule_vectors.items()}


def expected_rounds(clients, buffer_size, order):
    """The rule in words: for each arrival, whether it joins, and the round (joins) that it completes; what waits."""
    entered, buffer, caused = set(), [], []
    for join, client in enumerate(order):
        if client in entered:
            caused.append((False, None))
            continue
        entered.add(client)
        buffer.append(join)
        whole = len(buffer) == buffer_size or len(entered) == clients
        caused.append((True, list(buffer) if whole else None))
        if whole:
            buffer.clear()
        if len(entered) == clients:
            entered.clear()
    return caused, buffer


@pytest.mark.parametrize("seed", range(30))
def test_against_the_rule_in_words(seed):
    rng = np.random.default_rng(seed)
    clients, buffer_size = int(rng.integers(1, 7)), int(rng.integers(1, 5))
    # Skewed, so that fast clients come again and again.
    order = [int(c) for c in rng.choice(clients, 120, p=rng.dirichlet(np.full(clients, 0.7)))]
    caused, waiting = expected_rounds(clients, buffer_size, order)
    ours = server(clients, buffer_size, log=True)
    for join, (client, (joins, made)) in enumerate(zip(order, caused, strict=True)):
        receipt = push(ours, client, join, ours.version)
        assert (receipt.status, receipt.reason) == (("joined", "") if joins else ("rejected", REASON))
        assert (None if receipt.report is None else sorted(receipt.report.joins.tolist())) == made
    assert sorted(ours.waiting) == waiting
    assert ours.counts["joined"] == sum(joins for joins, _ in caused)
    assert ours.discard() == len(waiting)
    again = replay(ours.log, server(clients, buffer_size, log=True), lambda entry: gradient(entry.number))
    assert vectors_of(again) == vectors_of(ours)
    assert again.log == ours.log


def test_a_client_that_has_entered_is_blocked_until_the_pass_ends():
    ours = server(3, 2)
    early = ours.checkout("a"), ours.checkout("a")
    assert ours.push(task=early[0], gradient=gradient(0)).status == "joined"
    assert isinstance(check_error(f"client 'a' {REASON}", ours.checkout, "a", error=BlockedError), BusyError)
    late = ours.push(task=early[1], gradient=gradient(1))
    assert (late.status, late.reason, late.step, late.report) == ("rejected", REASON, None, None)
    assert ours.tasks == ()
    push(ours, "b", 2)
    assert ours.entered == ours.clients == {"a", "b"}
    assert push(ours, "c", 3, 1).report.client_ids == ("c",)  # the short buffer of the pass
    assert (ours.clients, ours.scalars) == (set(), {"rounds_in_pass": 0.0})
    assert ours.checkout("a").version == 2


def test_an_old_task_joins_in_the_next_pass():
    ours = server(2, 2)
    task = ours.checkout(0)
    push(ours, 0)
    push(ours, 1)
    receipt = ours.push(task=task, gradient=gradient(1))
    assert (receipt.status, receipt.staleness, ours.clients) == ("joined", 1, {0})


def test_more_clients_than_num_clients_in_one_pass_are_an_error():
    ours = server(2, 3, rounds="flush")
    push(ours, 0)
    push(ours, 1)
    check_error("client 2 would be number 3 of this pass, but num_clients is 2", push, ours, 2)
    assert (ours.arrivals_waiting, ours.counts["refused"], push(ours, 0).status) == (2, 1, "rejected")
    assert ours.flush().client_ids == (0, 1)
    assert push(ours, 2).status == "joined"


def test_flush_and_discard_keep_the_pass():
    ours = server(4, 2)
    push(ours, 0)
    assert ours.flush().client_ids == (0,)
    assert push(ours, 0, 1).status == "rejected"
    push(ours, 1, 2)
    assert ours.discard() == 1
    assert push(ours, 1, 3).status == "joined"  # its first arrival was discarded
    assert push(ours, 0, 4).status == "rejected"


def test_a_step_keeps_the_pass():
    ours = server(4, 2)
    receipts, report = ours.step([(client, 0, gradient(client)) for client in (0, 1, 0, 2)])
    assert [(receipt.status, receipt.reason) for receipt in receipts] == [
        *[("joined", "")] * 2,
        ("rejected", REASON),
        ("joined", ""),
    ]
    assert (report.client_ids, ours.clients) == ((0, 1, 2), {0, 1, 2})
    assert ours.step([(3, 1, gradient(3))])[1].client_ids == (3,)
    assert (ours.clients, ours.scalars) == (set(), {"rounds_in_pass": 0.0})


@pytest.mark.parametrize("stored", [False, True])
def test_end_pass(stored, tmp_path):
    """Its round is the last one of the pass; a pass that ends without a round counts as the begin of the next one."""
    ours = server(5, 2, log=True, store=tmp_path / "store" if stored else None)
    for number, client in enumerate("abc"):
        push(ours, client, number)
    momentum = ours.rule_vectors["pass_sum"]
    report = ours.end_pass()
    assert (report.client_ids, ours.clients, ours.scalars) == (("c",), set(), {"rounds_in_pass": 0.0})
    assert ours.log[-1] == Cut("end_pass")
    v = gradient(2)
    np.testing.assert_allclose(ours.rule_vectors["momentum"], (momentum + v) / 2, rtol=1e-6)
    assert not ours.rule_vectors["pass_sum"].any()
    assert (ours.end_pass(), len(ours.log)) == (None, 4)  # nothing to end
    for number, client in enumerate("ab"):
        push(ours, client, 3 + number, 2)
    assert (ours.end_pass(), ours.log[-1], ours.scalars) == (None, Cut("end_pass"), {"rounds_in_pass": 1.0})
    assert ours.checkout("a").version == 3
    push(ours, "a", 5, 3)
    again = replay(ours.log, server(5, 2, log=True), lambda entry: gradient(entry.number))
    assert vectors_of(again) == vectors_of(ours)
    assert (again.clients, again.waiting) == (ours.clients, ours.waiting)
    loaded = server(5, 2, log=True)
    loaded.load_state_dict(ours.state_dict())
    assert [entry for entry in loaded.log if isinstance(entry, Cut)] == [Cut("end_pass")] * 2
    assert loaded.clients == {"a"}
    if stored:
        ours.close()
        with Server.open(tmp_path / "store") as opened:
            assert (opened.clients, opened.waiting, vectors_of(opened)) == ({"a"}, {5: "a"}, vectors_of(again))


def test_end_pass_is_atomic(monkeypatch):
    ours = server(5, 2, log=True)
    push(ours, "a")
    with monkeypatch.context() as patched:
        patched.setattr(GradientScheduling, "__call__", lambda self, arrivals: 1 / 0)
        check_raises(ZeroDivisionError, ours.end_pass)
    assert (ours.version, ours.clients, len(ours.log)) == (0, {"a"}, 1)
    assert ours.end_pass().client_ids == ("a",)
    check_error(r"\[end_pass\] fedbuff takes clients as they come", Server(fedbuff(), np.zeros(2)).end_pass)


def test_slots_are_bounded():
    """Clients that have entered cannot fill the memory."""
    ours = server(5, 3, max_slots=3)
    for join in range(60):
        assert push(ours, join % 2, join).status == ("joined" if join < 2 else "rejected")
    assert slots_taken(ours) == 2


@pytest.mark.parametrize("change", ["waits", "full"])
def test_states_that_cannot_be_are_refused(change):
    ours = server(3, 2)
    push(ours, 0)
    state = ours.state_dict()
    meta = state["meta"]
    if change == "waits":  # as a state of version 0.1.0
        meta["filled"] = 0
        text = "1 arrivals wait for the next pass, as in afflux 0.1.0"
    else:
        meta["passed"] = [1, 2, 0]
        text = "all clients have entered in this pass, and their last round is not made"
    check_error(text, ours.load_state_dict, state)
    assert ours.waiting == {0: 0}


def test_threads_and_replay():
    clients, buffer_size, each = 8, 3, 200
    ours = server(clients, buffer_size, log=True)

    def work(thread):
        rng = np.random.default_rng(thread)
        for k in range(each):
            client, number = int(rng.integers(clients)), 1000 * thread + k
            ours.push(client=client, gradient=gradient(number), version=0, num_examples=number + 1)

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(work, range(4)))
    assert ours.counts["joined"] + ours.counts["rejected"] == 4 * each
    again = replay(ours.log, server(clients, buffer_size), lambda entry: gradient(entry.num_examples - 1))
    assert ours.version == again.version > 0
    assert vectors_of(again) == vectors_of(ours)
