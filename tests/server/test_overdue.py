"""Rounds that are overdue: a pass of gradient scheduling begins with a full buffer, and other calls come before its
round. The state alone determines these rounds, so that the log, which has no entry of theirs, gives every bit.
"""

import json
import random
import re
import shutil
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

import afflux.store
from afflux import AffluxError, Cut, Handed, Needs, Replaced, Rule, Server, Weights, replay, rules
from afflux.aggregation.reports import DECISIONS
from afflux.rules.calibration import NONE
from afflux.rules.optimizers import Sgd
from conftest import bits
from crashes import MEMORY
from inside import aggregator_of, make_rounds_by, rounds_of
from pairwise import soak_all

D = 5
BAD = 7.0  #: a loss


class Reference:
    """The mean, and a vector that the user sets; it raises if the loss of an arrival is BAD."""

    needs = Needs(rule_vectors=("reference",), handed_in=("reference",), passes=True)

    def __eq__(self, other):
        return isinstance(other, Reference)

    def __call__(self, arrivals):
        if BAD in arrivals.losses.tolist():
            raise RuntimeError("a bad loss")
        return Weights(np.full(len(arrivals), 1 / len(arrivals)), (1.0,))


RULES = {
    "gsgm": lambda size: rules.gsgm(buffer_size=size, server_lr=0.5),
    "reference": lambda size: Rule("reference", "gradient", size, Reference(), NONE, Sgd(0.5)),
}


def vector(number):
    return np.random.default_rng(number).standard_normal(D).astype(np.float32)


#: Options that change no decision.
NOT_REPLAYED = ("store", "commit_every", "max_versions")


class Played:
    """A server, and what its calls were given: each push has a number of its own, which is its number of examples."""

    def __init__(self, name="reference", clients=3, size=1, **options):
        self.name, self.numbers, self.references = name, iter(range(1, 10**6)), []
        self.options = {"num_clients": clients, "log": True, **options}
        self.size = size
        self.use(Server(RULES[name](size), np.zeros(D, np.float32), **self.options))
        if name == "reference":
            self.set_rule_vector()

    def use(self, server):
        """Go on with this server; note the vectors that are set, in the order of the decisions."""
        self.server, admission = server, aggregator_of(server).admission
        del self.references[sum(isinstance(entry, Handed) for entry in server.log) :]
        hand_in = admission.hand_in

        def noted(rule_vectors, name):
            hand_in(rule_vectors, name)
            self.references.append(np.array(rule_vectors[name]))

        admission.hand_in = noted

    def push(self, client, age=0, loss=0.0):
        number, version = next(self.numbers), max(0, self.server.version - age)
        return self.server.push(
            client=client, gradient=vector(number), version=version, num_examples=number, loss=float(loss)
        )

    def set_rule_vector(self):
        self.server.set_rule_vector("reference", vector(next(self.numbers)))

    def replace_rule(self, size=2):
        self.server.replace_rule(RULES[self.name](size))

    def replayed(self):
        """A server that repeats the log."""
        options = {name: value for name, value in self.options.items() if name not in NOT_REPLAYED}
        other = Server(RULES[self.name](self.size), np.zeros(D, np.float32), **options)
        references = iter(self.references)
        return replay(
            self.server.log,
            other,
            lambda join: vector(join.num_examples),
            rule_vector=lambda handed: next(references),
            rule=lambda entry: RULES[self.name](entry.config["buffer_size"]),
        )

    def check(self):
        """A replay ends with the same state, and with the same log."""
        ours, again = self.server.state_dict(), self.replayed().state_dict()
        for state in (ours, again):
            state["meta"]["counts"] = {status: state["meta"]["counts"][status] for status in DECISIONS}
            state["meta"]["log"] = [entry for entry in state["meta"]["log"] if entry[0] not in ("open", "close")]
        assert ours["meta"] == again["meta"]
        assert {k: bits(v) for k, v in ours["arrays"].items()} == {k: bits(v) for k, v in again["arrays"].items()}

    def between(self, act):
        """Let another thread call `act` after each round that this thread makes."""
        run, me = rounds_of(self.server), threading.get_ident()
        errors = []

        def acted():
            try:
                act()
            except BaseException as error:
                errors.append(error)

        def made(job):
            run(job)
            job.driver = None  # its frames have ended
            if threading.get_ident() == me:
                other = threading.Thread(target=acted, daemon=True)
                other.start()
                other.join(20)
                assert not other.is_alive(), "the second actor waits for the first one"
                assert not errors, errors

        make_rounds_by(self.server, made)


CALLS = {
    "flush": lambda played: played.server.flush(),
    "poll": lambda played: played.server.poll(),
    "discard": lambda played: played.server.discard(),
    "set_rule_vector": lambda played: played.name == "reference" and played.set_rule_vector(),
    "replace_rule": lambda played: played.replace_rule(),
    "state_dict": lambda played: played.server.state_dict(),
    "push": lambda played: played.push(1),
    "checkout": lambda played: played.server.checkout(1, hold=False).cancel(),
}


def defer(played, more=()):
    """End a pass with two rounds, or more, overdue: clients 0 and 1 have pushed again before client 2 pushes."""
    for client in (0, 0, 1, 1, *more):
        played.push(client)
    return played


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("call", CALLS)
def test_a_call_of_another_thread_between_the_rounds_of_a_push(call, name):
    played = defer(Played(name), more=(0, 1, 0))
    played.between(lambda: CALLS[call](played))
    receipt = played.push(2)
    assert receipt.report.version == 3
    assert played.server.version >= 5
    played.check()
    for client in (2, 0, 2, 1):
        played.push(client)
    played.check()


def killed(played, path, **options):
    """Push until a pass ends, and go on with what a kill behind the commit of its last round leaves.

    Opening makes the round that was overdue in the commit.
    """
    defer(played)
    played.between(lambda: path.exists() or shutil.copytree(played.options["store"], path))
    played.push(2)
    played.server.close(checkpoint=False)
    assert (afflux.store.info(path).version, afflux.store.info(path).waiting) == (2, 2)
    played.use(Server.open(path, RULES[played.name](played.size), **options))
    assert (played.server.version, played.server.arrivals_waiting) == (3, 0)
    return played


@pytest.mark.parametrize("call", CALLS)
def test_a_kill_behind_the_commit_of_the_round_that_ends_a_pass(call, tmp_path):
    played = killed(Played(size=2, store=tmp_path / "first"), tmp_path / "second")
    CALLS[call](played)
    assert [entry for entry in played.server.log if isinstance(entry, Cut)] == []
    for client in (2, 0, 1, 1):
        played.push(client)
    played.check()
    with played.server:
        pass
    played.use(Server.open(tmp_path / "second", RULES["reference"](2)))
    played.check()
    played.server.close()


def test_a_restart_makes_the_rounds_that_it_finds(tmp_path):
    """Also if no push is left: params are those of a run without an interruption. on_step gets their reports."""
    seen, whole = [], defer(Played(size=2))
    whole.push(2)
    played = killed(Played(size=2, store=tmp_path / "first"), tmp_path / "second", on_step=seen.append)
    assert [report.client_ids for report in seen] == [(0, 1)]
    assert (played.server.version, bits(played.server.params)) == (3, bits(whole.server.params))
    assert played.server.checkout(0, hold=False).version == 3
    receipt = played.server.push(client=0, gradient=vector(1), version=3)
    assert (receipt.status, receipt.staleness, receipt.version, receipt.more) == ("deferred", 0, 3, ())
    with pytest.raises(AffluxError, match="pulled version 4; the server has made 0 to 3"):
        played.server.push(client=2, gradient=vector(1), version=4)
    played.server.close(checkpoint=False)


def test_a_restart_that_cannot_make_a_round_leaves_it(tmp_path):
    played = Played(size=2, store=tmp_path / "first")
    defer(played)
    played.between(lambda: (tmp_path / "second").exists() or shutil.copytree(tmp_path / "first", tmp_path / "second"))
    played.push(2)
    played.server.close(checkpoint=False)
    part = Reference()
    part.__class__ = type("Broken", (Reference,), {"__call__": lambda self, arrivals: 1 / 0})
    server = Server.open(tmp_path / "second", Rule("reference", "gradient", 2, part, NONE, Sgd(0.5)))
    assert (server.version, server.arrivals_waiting) == (2, 2)
    with pytest.raises(ZeroDivisionError):
        server.flush()
    server.close()


@pytest.mark.parametrize("call", ["push", "flush", "poll", "discard", "set_rule_vector"])
def test_the_call_that_makes_an_overdue_round_reports_it(call):
    seen = []
    played = stuck(Played(size=2, max_versions=2, on_step=seen.append))
    played.held = None
    result = CALLS[call](played)
    assert [report.client_ids for report in seen[2:]] == [(0, 1)]
    if call in ("flush", "poll"):
        assert result is seen[2]
        assert CALLS[call](played) is None


def test_a_push_from_the_version_of_an_overdue_round():
    """Its client has pulled the version from the server whose state was loaded before the round."""
    state = stuck(Played(size=2, max_versions=2)).server.state_dict()
    played = Played(size=2)
    played.server.load_state_dict(state)
    with pytest.raises(AffluxError, match="pulled version 4; the server has made 0 to 3"):
        played.server.push(client=2, gradient=vector(1), version=4)
    played.server.load_state_dict(state)
    receipt = played.server.push(client=0, gradient=vector(1), version=3)
    assert (receipt.status, receipt.staleness, receipt.version) == ("deferred", 0, 3)
    assert [report.version for report in receipt.more] == [3]


def test_a_replay_ends_behind_the_overdue_rounds():
    played = defer(Played())
    played.push(2)
    assert played.replayed().version == played.server.version == 5


def test_the_second_of_two_overdue_rounds_finds_no_version():
    """The replay of the discard makes the first one before it."""
    played, held = defer(Played(max_versions=2)), []
    played.between(lambda: held.append(played.server.pull()) if played.server.version == 3 else None)
    assert [report.version for report in played.push(2).more] == [4]
    assert played.server.discard() == 1
    assert played.server.log[-1] == Cut("discard", 1)
    played.check()


@pytest.mark.parametrize("call", CALLS)
def test_a_loaded_state_with_an_overdue_round(call):
    """Its server could not make the round."""
    first = stuck(Played(size=2, max_versions=2))
    played = Played(size=2)
    played.references, played.numbers = first.references, first.numbers
    played.use(played.server)
    played.server.load_state_dict(first.server.state_dict())
    assert (played.server.version, played.server.arrivals_waiting) == (2, 2)
    CALLS[call](played)
    assert played.server.version == (2 if call == "checkout" else 3)
    played.check()


def stuck(played):
    """Push until a pass ends, while a client holds a version that the overdue round needs."""
    defer(played)
    played.held = played.server.pull()
    receipt = played.push(2)
    assert (receipt.status, receipt.version, receipt.more) == ("joined", 2, ())
    return played


#: Calls that go on before a round that cannot be made.
QUIET = [name for name in CALLS if name not in ("flush", "push")]


@pytest.mark.parametrize("call", QUIET)
def test_before_a_round_that_finds_no_version(call):
    """No call raises or waits because of the round, and the log says that it came first."""
    played = stuck(Played(size=2, max_versions=2))
    CALLS[call](played)
    assert played.server.version == 2
    played.server.replace_rule(RULES["reference"](1))  # a second entry
    del played.held
    marked = [entry.overdue for entry in played.server.log if isinstance(entry, Cut | Handed | Replaced)]
    assert marked[1:] == {"discard": [2, 0], "set_rule_vector": [2, 2], "replace_rule": [2, 2]}.get(call, [2])
    played.check()
    played.push(2)
    played.push(0)
    played.check()


def test_flush_and_push_raise_the_error_of_a_round_that_cannot_be_made():
    played = stuck(Played(size=2, max_versions=2))
    with pytest.raises(AffluxError, match=r"^\[flush\] all 2 versions"):
        played.server.flush()
    with pytest.raises(AffluxError, match=r"^\[push\] all 2 versions"):
        played.push(1)
    assert played.server.poll() is None
    assert played.server.discard() == 2
    played.push(1)
    played.check()


def test_discard_removes_arrivals_that_the_rule_cannot_weigh():
    played = Played(size=2)
    for client, loss in (0, 0), (0, BAD), (1, 0), (1, 0), (2, 0):
        played.push(client, loss=loss)
    assert (played.server.version, played.server.arrivals_waiting) == (2, 2)
    with pytest.raises(RuntimeError, match="a bad loss"):
        played.server.flush()
    assert played.server.poll() is None
    played.set_rule_vector()
    assert played.server.discard() == 2
    assert (played.server.version, played.server.arrivals_waiting) == (2, 0)
    played.push(1)
    played.check()


def test_the_marks_of_entries_are_saved_and_checked():
    """A mark says that a round was overdue, and could not be made before the entry."""
    played = stuck(Played(size=2, max_versions=2))
    played.set_rule_vector()
    played.replace_rule()
    played.server.discard()
    log = played.server.log
    assert log[-3:] == (Handed("reference", 2), Replaced(log[-2].config, 2), Cut("discard", 2))
    state = json.loads(json.dumps(played.server.state_dict()["meta"]))
    whole = played.server.state_dict() | {"meta": state}
    other = Played(size=2).server
    other.load_state_dict(whole)
    assert other.log == log
    for mark in ([-1], [None], [True], ["2"], [2.5], [2, 2]):
        state["log"][-1] = ["discard", *mark]
        with pytest.raises(AffluxError, match=r"unknown entry|is not a count"):
            other.load_state_dict(whole)


PUSH = st.tuples(st.just("push"), st.integers(0, 3), st.integers(0, 4), st.sampled_from([0, 0, 0, 0, 0, 0, BAD]))
ACTIONS = st.one_of(
    *[PUSH] * 5,
    st.tuples(st.sampled_from(["flush", "poll", "discard", "set_rule_vector", "state_dict"])),
    st.tuples(st.just("replace_rule"), st.integers(1, 3)),
    st.tuples(st.sampled_from(["hold", "let go", "kill"])),
)


class TwoActors(RuleBasedStateMachine):
    """One actor's calls, and those of a second one behind each round that a call of the first one makes."""

    name, options, stored = "reference", {}, False

    def __init__(self):
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(dir=MEMORY))
        self.calls_left, self.held, self.lives, self.killed = [], [], 0, False
        store = {"store": self.path} if self.stored else {}
        self.played = Played(self.name, clients=4, size=2, **self.options, **store)
        self.played.between(self.second)

    @property
    def path(self):
        return self.folder / str(self.lives)

    def teardown(self):
        self.held.clear()
        self.played.check()
        if self.stored:
            self.played.server.close()
            self.played.use(Server.open(self.path))
            self.played.check()
            self.played.server.close()
        shutil.rmtree(self.folder)

    def second(self):
        if self.calls_left:
            self.act(*self.calls_left.pop(0))

    def act(self, name, *arguments):
        played, server = self.played, self.played.server
        if name in ("push", "flush"):
            try:
                (played.push if name == "push" else server.flush)(*arguments)
            except (AffluxError, RuntimeError) as error:
                if not re.search("a bad loss|all . versions of max_versions", str(error)):  # of the rounds it makes
                    raise
        elif name == "hold":
            self.held.append(server.pull())
        elif name == "let go":
            self.held.clear()
        elif name == "replace_rule":
            played.replace_rule(*arguments)
        elif name != "kill":
            CALLS[name](played)
        elif self.stored and not self.killed:  # a copy of what is on disk is what the end of the process leaves
            shutil.copytree(self.path, self.folder / str(self.lives + 1))
            self.killed = True

    @rule(action=ACTIONS, others=st.lists(ACTIONS, max_size=3))
    def calls(self, action, others):
        self.calls_left = list(others)
        self.act(*action)
        if self.killed:
            self.held.clear()
            self.played.server.close(checkpoint=False)
            self.lives, self.killed = self.lives + 1, False
            self.played.use(Server.open(self.path))
            self.played.between(self.second)


MACHINES = {
    "gsgm": ("gsgm", {}),
    "reference": ("reference", {}),
    "versions": ("reference", {"max_versions": 3}),
    "few": ("reference", {"max_deferred": 3, "max_staleness": 2}),
    "store": ("gsgm", {"store": True}),
    "store, commit_every=3": ("gsgm", {"store": True, "commit_every": 3, "max_versions": 4}),
}
#: Of each machine; `make soak` plays more.
EXAMPLES = 25


@pytest.mark.parametrize(
    ("name", "examples"), [*((name, EXAMPLES) for name in MACHINES), *soak_all((name, 1500) for name in MACHINES)]
)
def test_two_actors(name, examples):
    played, options = MACHINES[name]
    options = dict(options)
    stored = options.pop("store", False)
    machine = type("Machine", (TwoActors,), {"name": played, "options": options, "stored": stored})
    run_state_machine_as_test(
        machine,
        settings=settings(
            max_examples=examples, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


#: Errors of a storm: a bad vector, and the effects of a restart from the last commit.
EXPECTED = "non-finite value|this server is closed|the server has made 0 to|an older state that was loaded meanwhile"


class Storm:
    """Threads that make all calls of a server, in any order."""

    def __init__(self, played, threads, calls):
        self.played, self.calls = played, calls
        self.restart, self.errors = threading.Lock(), []
        self.threads = [threading.Thread(target=self.work, args=(i,), daemon=True) for i in range(threads)]

    def run(self):
        for thread in self.threads:
            thread.start()
        for thread in self.threads:
            thread.join(500)
        assert not any(thread.is_alive() for thread in self.threads)
        assert not self.errors, self.errors[:3]

    def work(self, number):
        rng = random.Random(number)
        for _ in range(self.calls):
            try:
                self.call(rng)
            except BaseException as error:
                if not (isinstance(error, AffluxError) and re.search(EXPECTED, str(error))):
                    self.errors.append(error)

    def call(self, rng):
        played, client = self.played, rng.randrange(12)
        server, call = played.server, rng.choice(CHOICES)
        if call == "push":
            played.push(client, rng.randrange(3))
        elif call == "task":
            hold, number = not server.options.inplace, next(played.numbers)
            task = server.checkout(client, lease=rng.choice([None, 1e-3]), hold=hold)
            if rng.random() < 0.2:
                task.cancel()
            else:
                server.push(task=task, gradient=vector(number), num_examples=number)
        elif call == "bad":
            server.push(client=client, gradient=np.full(D, np.nan), version=0)
        elif call == "replace_rule":
            played.replace_rule(rng.randrange(1, 6))
        elif call != "restart":
            CALLS[call](played)
        elif "store" in played.options and self.restart.acquire(blocking=False):
            try:
                server.close(checkpoint=rng.random() < 0.5)
                played.use(Server.open(played.options["store"]))
            finally:
                self.restart.release()


CHOICES = ["push"] * 20 + ["task"] * 4 + [*CALLS] + ["bad", "flush", "discard", "restart"]
STORMS = {
    "gsgm, store": ("gsgm", {"store": True}),
    "gsgm, store, max_staleness": ("gsgm", {"store": True, "max_staleness": 5, "max_deferred": 20}),
    "reference": ("reference", {"max_deferred": 30}),
    "reference, max_staleness": ("reference", {"max_staleness": 3}),
    "reference, inplace": ("reference", {"inplace": True}),
}


@pytest.mark.parametrize(
    ("name", "threads", "calls"),
    [("gsgm, store", 24, 150), ("reference", 24, 150), *soak_all((name, 40, 1000) for name in STORMS)],
)
def test_a_storm_of_threads(name, threads, calls, tmp_path):
    rule, options = STORMS[name]
    if "store" in options:
        options = {**options, "store": tmp_path / "store"}
    played = Played(rule, clients=12, size=4, **options)
    Storm(played, threads, calls).run()
    assert played.server.version > 0
    played.check()
    if "store" in options:
        played.server.close()
        assert afflux.store.check(options["store"]).sound
