"""The decisions about pushes, beside a plain model of them; what decides is one object, which Python cannot change."""

import gc
import threading
import weakref
from contextlib import suppress
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import decisions as oracle
from afflux import AffluxError, BlockedError, Server
from afflux._engine import Ledger, Mutex
from afflux.aggregation.reports import Closed, Cut, Join, Opened, no_counts
from afflux.rules import dp_fedbuff, fedbuff, gsgm
from conftest import check_error, check_raises
from inside import aggregator_of, decide_elsewhere, mutex_of, slots_taken, stopped_clock, without_fast_path

D, CLIENTS, M = 3, 5, 3
#: name: the options of a server, those of the model.
SERVERS = {
    "both": ({}, {}),
    "latest": ({"duplicates": "latest", "max_staleness": 2}, {"duplicates": "latest", "max_staleness": 2}),
    "reject": ({"duplicates": "reject"}, {"duplicates": "reject"}),
    "flush": ({"rounds": "flush"}, {"by_flush": True}),
    "streaming": ({"accumulate": True}, {}),
    "limited": ({"max_staleness": 2}, {"duplicates": "latest", "max_staleness": 2, "participations": 2}),
    "limited-flush": (
        {"rounds": "flush", "duplicates": "reject"},
        {"by_flush": True, "duplicates": "reject", "participations": 1},
    ),
    "passes": ({"num_clients": CLIENTS}, {"num_clients": CLIENTS}),
    "passes-stale": (
        {"num_clients": CLIENTS, "max_staleness": 1, "rounds": "flush"},
        {"num_clients": CLIENTS, "max_staleness": 1, "by_flush": True},
    ),
}
CLIENT = st.sampled_from([*range(CLIENTS - 1), "ann"])
MOVES = st.one_of(
    *[st.tuples(st.just("push"), CLIENT, st.integers(0, 2), st.sampled_from([1, 1, 1, 0]))] * 5,
    *[st.tuples(st.just("task"), st.integers(0, 9), st.sampled_from([1, 1, 0]))] * 2,
    st.tuples(st.just("checkout"), CLIENT, st.sampled_from([None, 2.0])),
    st.tuples(st.just("cancel"), st.integers(0, 9)),
    st.tuples(st.just("step"), st.lists(CLIENT, max_size=4)),
    st.tuples(st.just("fault"), CLIENT, st.sampled_from(["version", "load", "nan"])),
    st.tuples(st.just("wait"), st.just(1.0)),
    st.tuples(st.sampled_from(["flush", "discard", "reload", "end_pass"])),
)


def vector(value=1.0):
    return np.full(D, value, np.float32)


class Played:
    """A server and the model, to which the same happens."""

    def __init__(self, name, fast, set_time):
        options, own = SERVERS[name]
        rule = gsgm(buffer_size=M) if name.startswith("passes") else fedbuff(buffer_size=M)
        if (most := own.get("participations")) is not None:
            rule = dp_fedbuff(buffer_size=M, participations=most)
        self.reports, self.tasks, self.set_time = [], [], set_time
        self.server = Server(rule, vector(0.0), log=True, on_step=self.reports.append, **options)
        if not fast:
            without_fast_path(self.server)
        self.model = oracle.Admission(M, **own)

    def push(self, client, back, examples):
        version = max(0, self.server.version - back)
        self.pushed({"client": client, "version": version}, self.model.push(client, version, None, examples), examples)

    def pushed(self, whose, expected, examples):
        receipt = self.server.push(**whose, **{self.server.rule.kind: vector()}, num_examples=examples)
        assert receipt.status == expected[0]
        if whose.get("task") is None or expected[0] != "expired":
            assert receipt.staleness == expected[1]

    def task(self, place, examples):
        if self.tasks:
            number, task = self.tasks[place % len(self.tasks)]
            self.pushed({"task": task.id}, self.model.push(task=number, examples=examples), examples)

    def checkout(self, client, lease):
        if (number := self.model.checkout(client, lease)) is not None:
            self.tasks.append((number, self.server.checkout(client, lease=lease)))
            return
        why = "has entered in this pass" if self.model.num_clients else "was in as many rounds as dp_fedbuff"
        check_error(f"{client!r} {why}", self.server.checkout, client, lease=lease, error=BlockedError)

    def cancel(self, place):
        if self.tasks:
            number, task = self.tasks[place % len(self.tasks)]
            task.cancel()
            self.model.cancel(number)

    def step(self, clients):
        receipts, _ = self.server.step([(client, self.server.version, vector()) for client in clients])
        assert [receipt.status for receipt in receipts] == self.model.step(clients)

    def fault(self, client, kind):
        wrong = {
            "version": {"version": 10**6},
            "load": {"loss": np.inf},
            "nan": {self.server.rule.kind: vector(np.nan)},
        }
        facts = {"client": client, "version": self.server.version, self.server.rule.kind: vector()} | wrong[kind]
        before = self.server.counts["refused"]
        check_raises(AffluxError, self.server.push, **facts)
        assert self.server.counts["refused"] == before + 1
        self.model.expire()
        self.model.counts["refused"] += 1

    def wait(self, seconds):
        self.model.clock += seconds
        self.set_time(self.model.clock)

    def flush(self):
        self.server.flush()
        self.model.flush()

    def end_pass(self):
        if self.model.num_clients is not None:
            self.server.end_pass()
            self.model.end_pass()

    def discard(self):
        assert self.server.discard() == self.model.discard()

    def reload(self):
        """The state of this server, in which all tasks are closed."""
        state = self.server.state_dict()
        self.server.load_state_dict(state)
        self.model.tasks.clear()

    def same(self):
        server, model = self.server, self.model
        assert server.counts == model.counts
        assert (server.joins, server.arrivals_waiting) == (model.number, len(model.buffer))
        assert server.waiting == {join: client for client, _, join in model.buffer}
        assert server.version == model.version
        assert [sorted(report.joins.tolist()) for report in self.reports] == model.rounds
        assert server.entered == set(filter(model.blocks, [*range(CLIENTS), "ann"]))
        assert server.clients == (server.entered if model.num_clients else {*model.participants})
        model.expire()
        assert [task.client for task in server.tasks] == [client for client, *_ in model.tasks.values()]
        assert self.log() == model.log
        if not server.options.accumulate:  # there a term may wait for the next one
            assert slots_taken(server) == len(model.buffer)

    def log(self):
        """The log, in the words of the model: tasks by the order in which they were opened."""
        names, entries = {}, []
        for entry in self.server.log:
            if isinstance(entry, Opened):
                names[entry.task] = len(names)
                entries.append(("open", entry.client_id))
            elif isinstance(entry, Closed):
                entries.append(("close", names[entry.task], entry.why))
            elif isinstance(entry, Cut):
                entries.append((entry.kind,))
            elif isinstance(entry, Join):
                entries.append(("join", *entry[:5]))
        return entries


@pytest.mark.parametrize("name", SERVERS)
@settings(max_examples=100, deadline=None)
@given(moves=st.lists(MOVES, max_size=40), fast=st.booleans())
def test_a_server_decides_as_the_model(name, moves, fast):
    decide(name, moves, fast)


@pytest.mark.soak
@pytest.mark.parametrize("name", SERVERS)
@settings(max_examples=2000, deadline=None)
@given(moves=st.lists(MOVES, max_size=60), fast=st.booleans())
def test_2000_schedules(name, moves, fast):
    decide(name, moves, fast)


def decide(name, moves, fast):
    with stopped_clock() as set_time:
        played = Played(name, fast, set_time)
        for move, *facts in moves:
            getattr(played, move)(*facts)
            played.same()


def test_what_is_decided_cannot_be_assigned():
    server = Server(fedbuff(buffer_size=3), vector(0.0), log=True)
    admission = aggregator_of(server).admission
    names = [name for name in vars(Ledger) if not name.startswith("_") and not callable(getattr(Ledger, name))]
    assert len(names) > 35
    for name in names:
        before = repr(getattr(admission, name))
        check_raises(AttributeError, setattr, admission, name, None)
        check_raises(AttributeError, delattr, admission, name)
        assert repr(getattr(admission, name)) == before
    server.counts["joined"] = server.counts["refused"] = 7  # of a copy
    assert server.counts == no_counts()


def test_a_wrong_call_of_the_extension_changes_nothing():
    server = Server(fedbuff(buffer_size=3), vector(0.0), log=True)
    server.push(client=1, version=0, update=vector())
    admission = aggregator_of(server).admission
    before = repr(admission.state)
    methods = [name for name in vars(Ledger) if not name.startswith("_") and callable(getattr(Ledger, name))]
    keep = {"abandon_round", "attach", "close", "compact_task_events", "next_report"}  # no argument of these is wrong
    keep |= {"commit_round", "cut_buffer", "set_rule", "set_rule_vectors", "set_version"}
    wrong = [None, (), object(), "x", -1, 2**70, 0.5]
    for name in sorted(set(methods) - keep):
        for value in wrong:
            for count in range(9):
                with suppress(TypeError, ValueError, RuntimeError, AttributeError, KeyError, AffluxError):
                    getattr(admission, name)(*[value] * count)
    assert repr(admission.state) == before
    check_error("it is not held", Mutex().release, error=RuntimeError)
    check_raises(TypeError, Ledger, 1)


def test_a_server_to_which_its_rule_refers_is_collected():
    servers = []

    def weigh(arrivals, servers=servers):
        return np.ones(len(servers))

    servers.append(Server(replace(fedbuff(buffer_size=4), weigh=weigh), vector(0.0), log=True))
    servers[0].push(client=1, version=0, update=vector())
    servers[0].checkout(2)
    gone = weakref.ref(aggregator_of(servers[0]).plane)
    del servers, weigh
    gc.collect()
    assert gone() is None


@pytest.mark.parametrize("of_task", [False, True])
def test_nothing_joins_at_once_while_another_thread_decides(of_task):
    server = Server(fedbuff(buffer_size=9), vector(0.0))
    task = server.checkout(1) if of_task else None
    whose = {"task": task} if of_task else {"client": 1, "version": 0}
    with mutex_of(server):
        thread = threading.Thread(target=lambda: server.push(**whose, update=vector()))
        thread.start()
        thread.join(0.2)
        assert server.arrivals_waiting == 0
    thread.join(600)
    assert server.arrivals_waiting == 1
    decide_elsewhere(server, True)
    assert server.push(client=2, version=0, update=vector()).status == "joined"
    assert not mutex_of(server).locked()
