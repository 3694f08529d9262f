"""Decisions at the join, their counters and their log; replays and checkpoints of random histories."""

import copy
import gc
import json
import sys
from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afflux import AffluxError, Cut, Fault, PlaneError, Server, StoreError, replay
from afflux.aggregation.admission import ClientError
from afflux.aggregation.local_plane import LocalPlane
from afflux.aggregation.reports import DECISIONS
from afflux.rules import afa_cs, ca2fl, fadas, fedasync, fedavg, fedbuff, gsgm, wkafl, zenopp
from afflux.rules.weights import Given
from afflux.server import versions
from afflux.server.aggregator import Aggregator
from afflux.server.pushing import CallError
from checked_out import D, vector
from conftest import bits, check_error, check_raises, push_all, raising, same_state
from inside import aggregator_of, without_fast_path
from stores import through_a_file

RULES = {
    "fedbuff": lambda: fedbuff(buffer_size=3),
    "fedavg": lambda: fedavg(buffer_size=4),
    "fedasync": fedasync,
    "ca2fl": lambda: ca2fl(buffer_size=3),
    "afa_cs": lambda: afa_cs(buffer_size=2, divide_by="seen"),
    "fadas": lambda: fadas(buffer_size=3, delay_adaptive="inverse"),
    "wkafl": lambda: wkafl(buffer_size=3, stage_two_loss=1.5),
    "gsgm": lambda: gsgm(buffer_size=2),
    "zenopp": zenopp,
}


# Duplicates, faults, flush, discard


def test_latest_without_a_cache():
    server = Server(fedavg(buffer_size=2), vector(0.0), duplicates="latest")
    assert server.push(client=1, update=vector(1.0), version=0).status == "joined"
    assert server.push(client=1, update=vector(5.0), version=0).status == "replaced"
    assert server.arrivals_waiting == 1
    server.push(client=2, update=vector(1.0), version=0)
    assert server.params.tolist() == [3.0] * D


@pytest.mark.parametrize("rule", [fedavg(buffer_size=2), ca2fl(buffer_size=2)], ids=["fedavg", "ca2fl"])
def test_reject_keeps_the_first(rule):
    server = Server(rule, vector(0.0), num_clients=2, duplicates="reject")
    server.push(client=1, update=vector(1.0), version=0)
    receipt = server.push(client=1, update=vector(9.0), version=0)
    assert (receipt.status, receipt.join, receipt.step, server.arrivals_waiting) == ("rejected", 1, None, 1)
    server.push(client=0, update=vector(3.0), version=0)
    assert server.params.tolist() == [2.0] * D
    assert server.push(client=1, update=vector(1.0), version=0).status == "joined"  # the next buffer


def test_both_with_a_cache_enter_against_the_same_row():
    """v = h + 1/3 ((2 - 1) + (4 - 1) + (5 - 0)); row and sum take client 0's later arrival only."""
    server = Server(ca2fl(buffer_size=3), vector(0.0), num_clients=2, duplicates="both")
    server.push(client=0, update=vector(1.0), version=0)
    server.flush()
    before = server.params[0]
    pushes = ((0, vector(2)), (1, vector(5)), (0, vector(4)))
    assert [server.push(client=i, update=x, version=1).status for i, x in pushes] == ["joined"] * 3
    assert np.allclose(server.params - before, 0.5 + (1 + 3 + 5) / 3, rtol=1e-6)
    assert [server.rows.row(c)[0] for c in range(2)] == [4.0, 5.0]
    assert server.rows.sum.tolist() == [9.0] * D


def test_both_lets_a_buffer_exceed_the_clients():
    check_error("num_clients 1: with duplicates='latest'", Server, ca2fl(buffer_size=3), vector(), num_clients=1)
    server = Server(ca2fl(buffer_size=3), vector(), num_clients=1, duplicates="both")
    push_all(server, [0] * 3, vector(), version=0)
    assert server.version == 1


def test_a_fault_is_recorded_and_the_server_goes_on():
    server = Server(fedavg(buffer_size=2), vector(0.0), faults="record")
    bad = vector()
    bad[3] = np.nan
    server.push(client=0, update=vector(), version=0)
    receipt = server.push(client=7, update=bad, version=0)
    assert (receipt.status, receipt.join, receipt.step, server.arrivals_waiting) == ("faulty", None, None, 1)
    assert receipt.reason == "[push] client 7's update has a non-finite value at index 3"
    assert server.faults == (Fault(7, 0, receipt.reason),)
    server.push(client=1, update=vector(), version=0)
    assert server.params.tolist() == [1.0] * D
    assert server.counts["faulty"] == 1
    assert server.joins == 2


@pytest.mark.parametrize(
    ("sent", "reason", "known"),
    [
        (dict(client=1.5, version=0), "client_id is 1.5", (None, None)),
        (dict(client=7, version=5), "says that it pulled version 5", (7, 5)),
        (dict(client=7, version="a"), "client 7's version is 'a'", (7, None)),
        (dict(client=7, version=0, num_examples=-1), "client 7's num_examples is -1", (7, 0)),
        (dict(client=7, version=0, loss="low"), "client 7's loss is 'low'", (7, 0)),
        (dict(client=7, version=0, client_lr=-1.0), "client 7's client_lr is -1.0", (7, 0)),
        (dict(client=7, version=0, local_steps=0.5), "client 7's local_steps is 0.5", (7, 0)),
        (dict(client=7, version=0, update=np.ones(2)), "has 2 elements", (7, 0)),
        (dict(client=7, version=0, update=np.ones(2 * D, np.int64)[::2]), "is strided", (7, 0)),
        (dict(client=7, version=0, update=vector(np.inf)), "non-finite value at index 0", (7, 0)),
        (dict(client=7, version=0, update="model"), "is a str, expected an array", (7, 0)),
        (dict(client=9, version=0), "would be number 3, but num_clients is 2", (9, 0)),
    ],
)
def test_what_a_client_sent_never_raises_where_faults_are_recorded(sent, reason, known):
    server = Server(ca2fl(buffer_size=2), vector(0.0), num_clients=2, faults="record", log=True)
    push_all(server, (0, 1), vector(), version=0)
    receipt = server.push(**{"update": vector(), **sent})
    assert receipt.status == "faulty"
    assert reason in receipt.reason
    (fault,) = server.faults
    assert (fault.client_id, fault.version, fault.reason) == (*known, receipt.reason)
    assert (server.counts["faulty"], server.counts["refused"], len(server.log)) == (1, 0, 2)
    assert (receipt.staleness, receipt.join) == (None if fault.version in (None, 5) else 1, None)


def test_the_operators_own_mistakes_raise_also_where_faults_are_recorded():
    server = Server(fadas(buffer_size=2), vector(0.0), faults="record", max_norm=1e30)
    task = server.checkout(2)
    mistakes = [
        (dict(timeout=-1), AffluxError, "timeout is -1"),
        (dict(model=vector()), CallError, "not update= and model="),
        (dict(update=None), CallError, "give one of update=, gradient= and model=, not none"),
        (dict(version=None), CallError, "give task=, or client= and version="),
        (dict(task=task), CallError, "task= says who pushes"),
        (dict(update=None, gradient=vector()), CallError, "cannot become an update without client_lr= and local_steps"),
    ]
    for mistake, error, message in mistakes:
        check_error(message, server.push, error=error, **{"client": 1, "version": 0, "update": vector(), **mistake})
    assert (server.counts["refused"], server.faults, server.tasks) == (len(mistakes), (), (task,))


@pytest.mark.parametrize(
    "sent",
    [dict(client=9), dict(facts={"tokens": 1.0, "no": 1.0}), dict(facts={}), dict(task=7, client=None, version=None)],
)
def test_errors_of_clients_have_a_class(sent):
    rule = replace(ca2fl(buffer_size=2), weigh=Given("tokens"))
    server = Server(rule, vector(0.0), num_clients=2)
    push_all(server, (0, 1), vector(), version=0, facts={"tokens": 1.0})
    with pytest.raises(ClientError):
        server.push(**{"client": 0, "version": 0, "update": vector(), "facts": {"tokens": 1.0}, **sent})


@pytest.mark.parametrize(
    ("place", "name", "error", "raised"),
    [
        (Aggregator, "take_slot", AffluxError("[push] step 3 has written a value that is not finite"), AffluxError),
        (versions, "newest", AffluxError("[pull] all 2 versions are held"), AffluxError),
        (LocalPlane, "ingest", StoreError("file.bin is truncated"), StoreError),
        (LocalPlane, "ingest", PlaneError("a shard has ended"), PlaneError),
        (LocalPlane, "ingest", RuntimeError("[cuda] cudaMemcpy failed"), PlaneError),
        (LocalPlane, "first_beyond", PlaneError("a shard has ended"), PlaneError),
    ],
)
def test_an_error_of_the_server_is_no_fault_of_a_client(place, name, error, raised, monkeypatch):
    server = Server(fedasync(), vector(0.0), faults="record", inplace=True, max_abs=2.0)
    without_fast_path(server)
    task = server.checkout(1, hold=False)
    monkeypatch.setattr(place, name, raising(type(error), *error.args))
    task_id = task.id  # without a copy of its version
    for vectors in ({"update": vector(3.0)}, {"model": vector(3.0)}) if name != "newest" else ({"update": vector()},):
        assert "client" not in str(check_raises(raised, server.push, task=task_id, **vectors))
    assert (server.faults, server.tasks, server.counts["faulty"], server.arrivals_waiting) == ((), (task,), 0, 0)


def test_the_newest_faults_are_kept():
    server = Server(fedavg(), vector(0.0), faults="record")
    push_all(server, range(1200), vector(np.nan), version=0)
    assert [fault.client_id for fault in server.faults] == [*range(200, 1200)]
    assert server.counts["faulty"] == 1200


def test_no_examples_make_no_arrival():
    server = Server(fedavg(buffer_size=1), vector(0.0), log=True)
    for vectors in ({}, {"update": vector()}):
        receipt = server.push(client=1, version=0, num_examples=0, **vectors)
        assert (receipt.status, receipt.staleness, receipt.join, server.version) == ("empty", 0, None, 0)
    assert (server.counts["empty"], server.log) == (2, ())


def test_flush_steps_with_a_short_buffer():
    server = Server(fedbuff(buffer_size=5), vector(0.0))
    assert server.flush() is None
    server.push(client=2, update=vector(1.0), version=0)
    server.push(client=1, update=vector(3.0), version=0)
    report = server.flush()
    assert (report.version, report.client_ids, report.weights.tolist()) == (1, (1, 2), [0.5, 0.5])
    assert server.params.tolist() == [2.0] * D
    assert server.arrivals_waiting == 0


def test_discard_gives_the_slots_back():
    server = Server(fedavg(buffer_size=3), vector(0.0), max_slots=3)
    for _ in range(4):
        server.push(client=2, update=vector(1.0), version=0)
        server.push(client=1, update=vector(1.0), version=0)
        assert server.discard() == 2
        assert server.arrivals_waiting == 0
    assert server.version == server.discard() == 0
    assert server.push(client=1, update=vector(), version=0, timeout=0).status == "joined"


def test_no_log_unless_asked_for():
    check_error(r"\[log\] this server keeps no log", lambda: Server(fedavg(), vector()).log)


def test_replay_notices_another_server():
    server = Server(fedavg(buffer_size=2), vector(0.0), log=True)
    push_all(server, (0, 0, 1), vector(), version=0)
    other = Server(fedavg(buffer_size=2), vector(0.0), duplicates="reject")
    check_error("join 1 of client 0 was joined .* join 1 is rejected", replay, server.log, other, lambda join: vector())


# Random histories


PUSH = st.tuples(
    st.just("push"),
    st.integers(0, 4),  # client
    st.integers(0, 3),  # how many versions back
    st.integers(0, 5),  # which vector; 5 has a NaN
    st.integers(1, 9),  # examples
)
CUT = st.tuples(st.sampled_from(["flush", "discard"]))
HAND = st.tuples(st.just("hand"), st.integers(0, 4))
SCRIPT = st.lists(st.one_of(*[PUSH] * 8, CUT, HAND), max_size=40).map(lambda script: [("hand", 0), *script])
VECTORS = np.random.default_rng(5).standard_normal((6, D)).astype(np.float32)
VECTORS[5, 2] = np.nan


def play(server, script, vectors):
    """Executes a script. `vectors` collects the pushed vector of each join, and in a list the vectors that were set."""
    for entry in script:
        if entry[0] == "hand":
            for name in server.rule.needs.handed_in:
                server.set_rule_vector(name, 0.1 * VECTORS[entry[1]])
                vectors.setdefault("handed", []).append(0.1 * VECTORS[entry[1]])
            continue
        if entry[0] != "push":
            getattr(server, entry[0])()
            continue
        _, client, back, pick, examples = entry
        facts = {"version": max(0, server.version - back), "num_examples": examples, "loss": float(pick)}
        receipt = push_all(server, [client], VECTORS[pick], **facts)
        if receipt.join is not None:
            vectors[receipt.join] = VECTORS[pick]
    return server


def joined(state):
    """The state without the counts of pushes that made no arrival, which the log does not hold."""
    counts = {status: state["meta"]["counts"][status] for status in DECISIONS}
    return {**state, "meta": {**state["meta"], "counts": counts}}


@given(
    script=SCRIPT,
    name=st.sampled_from(sorted(RULES)),
    duplicates=st.sampled_from([None, "latest", "both", "reject"]),
    cut=st.integers(1, 40),
)
@settings(max_examples=300, deadline=None)
def test_a_replay_and_a_restored_server_give_the_same_bits(script, name, duplicates, cut):
    def fresh():
        options = dict(duplicates=duplicates, max_staleness=2, faults="record", log=True)
        return Server(RULES[name](), vector(0.5), num_clients=5, **options)

    vectors = {}
    server = play(fresh(), script, vectors)
    assert sum(server.counts.values()) == sum(entry[0] == "push" for entry in script)
    handed = vectors.pop("handed", [])
    assert len(server.log) == len(vectors) + len(handed) + sum(isinstance(entry, Cut) for entry in server.log)

    again = iter(handed)
    replayed = replay(server.log, fresh(), lambda join: vectors[join.number], rule_vector=lambda _: next(again))
    same_state(joined(replayed.state_dict()), joined(server.state_dict()))

    saved = through_a_file(play(fresh(), script[:cut], {}).state_dict())
    restored = fresh()
    play(restored, [("hand", 3), *[("push", 3, 0, 1, 1)] * 2], {})  # it had a life of its own
    restored.load_state_dict(saved)
    same_state(play(restored, script[cut:], {}).state_dict(), server.state_dict())


# Checkpoints that do not fit


def saved(**options):
    server = Server(ca2fl(buffer_size=3), vector(0.5), num_clients=4, log=True, **options)
    push_all(server, (0, 1, 2, 3), lambda client: vector(client + 1.0), version=0)
    return server.state_dict()


def change(part, name, value):
    def changed(state):
        state[part][name] = value

    return changed


def waits(client_id, version, num_examples, join, staleness, norm=1.0, count=1):
    return change(
        "meta", "waiting", [[client_id, version, num_examples, None, norm, 0.0, 1.0, join, staleness]] * count
    )


LISTS = ("waiting", "log", "raw", "handed", "passed")


def remove(part, name):
    return lambda state: state[part].pop(name)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (change("meta", "rule", "fedbuff"), "rule is 'fedbuff' in the state, 'ca2fl' here"),
        (change("meta", "d", 6), "d is 6 in the state, 5 here"),
        (change("meta", "format", 1), "format is 1 in the state, 5 here"),
        (change("meta", "order_version", 0), "order_version is 0 in the state"),
        (change("meta", "num_clients", 5), "num_clients is 5 in the state, 4 here"),
        (change("meta", "version", -1), "-1 is not a count"),
        (change("meta", "version", 1.0), "1.0 is not a count"),
        (waits(1, 0, 1, 0, 0, count=3), "of 3 arrivals are in the buffer, which is impossible"),
        (change("meta", "filled", 9), "9 of [0-9] arrivals are in the buffer, which is impossible"),
        (change("meta", "scalars", {"stage": 1}), "the rule's numbers are \\['stage'\\] in the state, \\[\\] here"),
        (change("meta", "row_ids", [0, 1]), r"rows is float32 of shape \(3, 5\), expected float32 of shape \(2, 5\)"),
        (change("meta", "row_ids", [0, 1, 1]), "a client has two rows"),
        (lambda state: state["meta"]["log"].append(["stop"]), "the log has an unknown entry \\['stop'\\]"),
        (change("meta", "log", [[0, "lost", 0, 0, 0, 1, None, False]]), r"the log has an unknown entry \[0, 'lost', 0"),
        (change("meta", "log", [[0, "joined", 0, 0, 0, 1, None]]), r"the log has an unknown entry \[0, 'joined', 0"),
        (change("meta", "log", [[0, "joined", 0, 0, 0, 1, "x", False]]), "'x' is not a finite number"),
        (change("meta", "log", [[0, "joined", 0, 0, True, 1, 0.5, False]]), "True is not a count"),
        (remove("meta", "joins"), "the state is damaged: KeyError: 'joins'"),
        (remove("arrays", "sum"), "the state is damaged: KeyError: 'sum'"),
        (change("arrays", "params", np.zeros(5)), r"params is float64 of shape \(5,\), expected float32"),
        (change("arrays", "sum", np.full(5, np.nan)), r"sum has a non-finite value at index \[0\]"),
        (waits(3, 0, 1, 3, 1, norm=-1.0), "arrival 0 has norm -1.0"),
        (change("meta", "version", 2**63), "9223372036854775808 is not a count"),
        (waits(3, 2, 1, 3, 0), "arrival 0 has version 2, join 3 and 1 examples"),
        (waits(3, 0, 0, 3, 0), "arrival 0 has version 0, join 3 and 0 examples"),
        (waits(3, 0, 1, 4, 0), "arrival 0 has version 0, join 4 and 1 examples"),
        (waits("\udc80", 0, 1, 3, 1), r"client_id '\\udc80' is no Unicode text"),
        (waits(3, 0, 1, 3, 5), "arrival 0 has staleness 5 and version 0, at version 1"),
        (change("meta", "row_ids", [0, 1, True]), "client_id is True, must be an int or a str"),
        (change("arrays", "slots", np.full((1, 5), np.inf, np.float32)), r"slots has a non-finite .* \[0, 0\]"),
        (waits(1.5, 0, 1, 3, 1), "client_id is 1.5, must be an int or a str"),
        (change("arrays", "slots", np.zeros((1, 4), np.float32)), r"slots is float32 of shape \(1, 4\)"),
        (lambda state: state.pop("arrays"), "the state is damaged: KeyError: 'arrays'"),
        # Sequences whose length costs no memory: these could keep a server busy for hours.
        *[(change("meta", name, np.broadcast_to(1.0, 2**40)), f"{name} is .*, must be a list$") for name in LISTS],
    ],
)
def test_a_wrong_state_changes_nothing(damage, message):
    server = Server(ca2fl(buffer_size=3), vector(9.0), num_clients=4)
    server.push(client=2, update=vector(), version=0)
    before = server.state_dict()
    state = copy.deepcopy(saved())
    damage(state)
    check_error(r"\[load_state_dict\] .*" + message, server.load_state_dict, state)
    same_state(server.state_dict(), before)


def test_a_loaded_state_is_a_copy():
    state = saved()
    server = Server(ca2fl(buffer_size=3), vector(), num_clients=4)
    server.load_state_dict(state)
    before = bits(state["arrays"]["rows"]), bits(state["arrays"]["slots"])
    push_all(server, range(3), vector(7.0), version=1)
    assert (bits(state["arrays"]["rows"]), bits(state["arrays"]["slots"])) == before


def test_a_load_that_runs_out_of_memory_changes_nothing(monkeypatch):
    full = Server(fadas(buffer_size=1), vector(0.0), inplace=True)
    full.push(client=0, update=vector(), version=0)
    server = Server(fadas(buffer_size=1), vector(5.0), inplace=True)
    before = server.state_dict()
    monkeypatch.setattr(type(aggregator_of(server).plane.device), "moved", raising(MemoryError))
    check_raises(MemoryError, server.load_state_dict, full.state_dict())
    same_state(server.state_dict(), before)


def test_a_pulled_version_outlives_a_load():
    server = Server(fedavg(buffer_size=1), vector(0.0))
    state = server.state_dict()
    server.push(client=0, update=vector(), version=0)
    held = server.pull()
    server.load_state_dict(state)
    assert (held.version, held.params[0], server.version, server.params[0]) == (1, 1.0, 0, 0.0)


@pytest.mark.parametrize("fast", [True, False])
def test_a_loss_is_a_finite_number_or_unknown(fast):
    """On both paths of a push; a replay pushes an unknown loss again as None, and `meta` is JSON."""
    vectors = [np.full(3, number, np.float32) for number in range(2)]
    server = Server(fedbuff(buffer_size=2), np.zeros(3, np.float32), log=True)
    if not fast:
        without_fast_path(server)
    for loss in ("nan", "inf", "-inf"):
        check_error(f"client 1's loss is {loss}", server.push, client=1, update=vectors[0], version=0, loss=float(loss))
    server.push(client=1, update=vectors[0], version=0)
    state = server.state_dict()
    json.dumps(state["meta"], allow_nan=False)
    server.push(client=1, update=vectors[1], version=0, loss=1e300)
    assert [entry.loss for entry in server.log] == [pytest.approx(np.nan, nan_ok=True), 1e300]
    again = replay(server.log, Server(fedbuff(buffer_size=2), np.zeros(3, "f4")), lambda join: vectors[join.number])
    assert again.params.tobytes() == server.params.tobytes()


@pytest.mark.parametrize("large", [False, True])
def test_bytes_of_the_log(large):
    """As docs/reference/server.md states them: of the entries, what they hold, and their places in the list."""
    server, pushes = Server(fedbuff(buffer_size=2), np.zeros(1, np.float32), log=True), 400
    for number in range(pushes):
        if large:
            task = server.checkout(f"{number:036}")
            server.push(task=task, update=np.ones(1), loss=number / 3, num_examples=1000 + number)
        else:
            server.push(client=number % 100, version=server.version, update=np.ones(1))
    objects = {id(each): each for entry in server.log for each in (entry, *gc.get_referents(entry))}
    held = [each for each in objects.values() if not isinstance(each, type)]
    size = (8 * len(server.log) + sum(map(sys.getsizeof, held))) / pushes
    assert (390 <= size <= 540) if large else (140 <= size <= 320)


def long_error(*args):
    raise ValueError("the first line\n" + "a line of the trace\n" * 500 + "the cause")


def test_the_reason_of_a_fault_has_the_first_line_and_the_end_of_a_long_error():
    server = Server(fedavg(buffer_size=2), {"w": vector(0.0)}, faults="record")
    update = type("Trace", (Mapping,), dict.fromkeys(("__getitem__", "__iter__", "__len__"), long_error))()
    receipt = server.push(client=1, version=0, update=update)
    assert receipt.status == "faulty"
    assert len(receipt.reason) < 600
    assert "the first line" in receipt.reason
    assert receipt.reason.endswith("the cause")
