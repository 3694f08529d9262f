"""Calls of other threads amid those of a server in passes over all clients: the log gives every bit."""

import random
import re
import shutil
import tempfile
import threading
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, rule, run_state_machine_as_test

import afflux.store
from afflux import AffluxError, BlockedError, Handed, Needs, Rule, Server, Weights, replay, rules
from afflux.aggregation.reports import DECISIONS
from afflux.rules.calibration import NONE
from afflux.rules.optimizers import Sgd
from conftest import same_state
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

    def checkout(self, client):
        """Open a task, and cancel it, unless the client is blocked."""
        with suppress(BlockedError):
            self.server.checkout(client, hold=False).cancel()

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
        same_state(ours, again)

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
                other.join(600)
                assert not other.is_alive(), "the second actor waits for the first one"
                assert not errors, errors

        make_rounds_by(self.server, made)


CALLS = {
    "flush": lambda played: played.server.flush(),
    "poll": lambda played: played.server.poll(),
    "discard": lambda played: played.server.discard(),
    "end_pass": lambda played: played.server.end_pass(),
    "set_rule_vector": lambda played: played.name == "reference" and played.set_rule_vector(),
    "replace_rule": lambda played: played.replace_rule(),
    "state_dict": lambda played: played.server.state_dict(),
    "push": lambda played: played.push(1),
    "checkout": lambda played: played.checkout(1),
}


PUSH = st.tuples(st.just("push"), st.integers(0, 3), st.integers(0, 4), st.sampled_from([0, 0, 0, 0, 0, 0, BAD]))
ACTIONS = st.one_of(
    *[PUSH] * 5,
    st.tuples(st.sampled_from(["flush", "poll", "discard", "end_pass", "set_rule_vector", "state_dict"])),
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
        if name in ("push", "flush", "end_pass"):
            try:
                (played.push if name == "push" else getattr(server, name))(*arguments)
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
    "few": ("reference", {"max_staleness": 2, "max_slots": 4}),
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
            try:
                task = server.checkout(client, lease=rng.choice([None, 1e-3]), hold=hold)
            except BlockedError:
                return
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
    "gsgm, store, max_staleness": ("gsgm", {"store": True, "max_staleness": 5}),
    "reference": ("reference", {"max_slots": 30}),
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
