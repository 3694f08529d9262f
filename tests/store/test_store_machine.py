"""Hypothesis plays with a server that has a store, next to one that has none: pushes of every kind, flush and discard,
late arrivals, other rules, checkpoints, closing and opening, and the end of its process at any moment between two
calls. What was committed last is remembered as plain data; after each move the two servers keep the same, bit for bit.
"""

import shutil
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

import afflux.store.metadata
import afflux.store.store
from afflux import AffluxError, Server, StoreError
from afflux.rules import RULES
from conftest import bits, check_error, ready, same_state
from crashes import MEMORY
from inside import stopped_clock
from pairwise import soak_all

CLIENTS, M, D = 7, 3, 70
#: Of each machine; `make soak` plays more.
EXAMPLES = 7
#: The rules, and the options of their servers.
PLAYED = {
    "ca2fl": {},
    "ca2fl-2": {"commit_every": 2},
    "ca2fl-none": {"commit_every": None, "durability": "power"},
    "ca2fl-reject": {"duplicates": "reject", "slot_dtype": "bfloat16"},
    "mf_ca2fl": {"seed": 3},
    "mf_ca2fl-2": {"rule": {"buffer_size": M, "bits": 2, "codec": "rotated", "quantize_direction": True}},
    "mf_ca2fl-vector": {"rule": {"buffer_size": M, "bits": 4, "codec": "affine-vector"}, "commit_every": 2},
    "afa_cs": {"dtype": "float64"},
    "fedbuff": {},
    "fedbuff-streaming": {"accumulate": True, "commit_every": 2},
    "fadas": {"durability": "power"},
    "fadas-clip": {"clip_norms": 1.0},
    "wkafl": {},
    "gsgm": {},
    "zenopp": {},
}


class Play(RuleBasedStateMachine):
    """The moves. `committed` is what a process that ends now leaves."""

    name = "ca2fl"
    now = 0.0  # of the clock
    set_time = None  # sets the time of servers

    def __init__(self):
        super().__init__()
        options = dict(PLAYED[self.name])
        name = self.name.partition("-")[0]
        own = options.pop("rule", {} if name == "zenopp" else {"buffer_size": M})
        self.rule = RULES[name](**own)
        self.settings = {key: options.pop(key) for key in ("commit_every", "durability") if key in options}
        self.every = self.settings.get("commit_every", 1)
        given = {"num_clients": CLIENTS, "max_staleness": 4, "faults": "record", "log": True, "flush_after": 10}
        given |= options
        self.make = lambda **store: Server(self.rule, np.ones(D, np.float32), **given, **store)
        self.folder = tempfile.mkdtemp(dir=MEMORY)
        self.lives = 0
        self.there, self.here = ready(self.make(store=self.path, **self.settings)), ready(self.make())
        self.held = []  # what somebody has pulled, and its bits
        self.keepable = []  # those that this server has handed out
        self.commit()
        if self.rule.needs.handed_in:  # after the commit that made the store
            self.there.checkpoint()

    @property
    def path(self):
        return Path(self.folder, f"life{self.lives}")

    def teardown(self):
        self.there.close(checkpoint=False)
        shutil.rmtree(self.folder)

    def commit(self, **changed):
        """Notes and older versions stay what the last checkpoint was given."""
        before = getattr(self, "committed", {"notes": None, "kept": {}})
        self.committed = {**before, "state": self.here.state_dict(), "rule": self.here.rule, **changed}

    def stepped(self, before):
        """Commits if it is a version's turn."""
        if self.every is not None and self.here.version // self.every > before // self.every:
            self.commit()

    def both(self, call):
        """The same of both servers, or the same error."""
        answers = []
        for server in (self.there, self.here):
            try:
                answers.append(call(server))
            except AffluxError as error:
                answers.append(str(error))
        return answers

    @rule(client=st.integers(0, CLIENTS - 1), age=st.integers(0, 6), what=st.sampled_from("vvvvvvvvnx"))
    def push(self, client, age, what):
        """A vector; one with a NaN, or one that is too short."""
        before = self.here.version
        rng = np.random.default_rng([self.here.joins, client])
        vector = rng.standard_normal(D - (what == "x")).astype(np.float32)
        if what == "n":
            vector[5] = np.nan
        version = max(0, before - age)
        there, here = self.both(
            lambda server: server.push(client=client, **{server.rule.kind: vector}, version=version, loss=age / 7)
        )
        assert there.status == here.status
        if self.every is not None and there.join is not None:
            assert there.durable >= there.version
        self.stepped(before)

    @rule()
    def flush(self):
        before = self.here.version
        there, here = self.both(lambda server: server.flush())
        assert (there is None) == (here is None)
        self.stepped(before)

    @rule(seconds=st.integers(1, 15))
    def wait(self, seconds):
        type(self).now += seconds
        self.set_time(type(self).now)
        before = self.here.version
        there, here = self.both(lambda server: server.poll())
        assert (there is None) == (here is None)
        self.stepped(before)

    @rule(size=st.integers(1, M + 1))
    def replace_rule(self, size):
        there, here = self.both(lambda server: server.replace_rule(replace(self.rule, buffer_size=size)))
        assert there == here

    @rule()
    def discard(self):
        there, here = self.both(lambda server: server.discard())
        assert there == here

    @precondition(lambda self: self.rule.needs.handed_in)
    @rule(value=st.floats(-1, 1, width=32))
    def hand_in(self, value):
        self.both(lambda server: server.set_rule_vector(server.rule.needs.handed_in[0], np.full(D, value, np.float32)))

    @rule()
    def pull(self):
        self.keepable.append(self.there.pull())
        self.held.append((self.keepable[-1], bits(self.keepable[-1].params)))

    @rule(notes=st.integers(), data=st.data())
    def checkpoint(self, notes, data):
        kept = data.draw(st.lists(st.sampled_from(self.keepable), max_size=3)) if self.keepable else []
        self.there.checkpoint(notes, keep=kept)
        self.commit(notes=notes, kept={held.version: bits(held.params) for held in kept})

    @rule()
    def close_and_open(self):
        self.there.close()
        with pytest.raises(StoreError, match="this server is closed"):
            self.there.push(client=0, **{self.there.rule.kind: np.ones(D)}, version=0)
        self.commit()
        self.open()
        self.here.load_state_dict(self.here.state_dict())  # the time of flush_after begins again

    @rule()
    def crash(self):
        """A copy of what is on disk is what the end of the process leaves."""
        shutil.copytree(self.path, Path(self.folder, f"life{self.lives + 1}"))
        self.there.close(checkpoint=False)
        self.lives += 1
        self.open()
        self.rule = self.committed["rule"]
        self.here = self.make()
        self.here.load_state_dict(self.committed["state"])

    def open(self):
        self.there = Server.open(self.path, **self.settings)
        assert self.there.notes == self.committed["notes"]
        assert {version: bits(held.params) for version, held in self.there.retained_versions.items()} == self.committed[
            "kept"
        ]
        self.keepable = [*self.there.retained_versions.values()]

    @rule(client=st.integers(0, CLIENTS))
    def read_row(self, client):
        if self.here.rows is not None:
            ours, theirs = (server.rows.row(client) for server in (self.there, self.here))
            assert (ours is None) == (theirs is None) == (client not in self.there.rows)
            assert ours is None or bits(ours) == bits(theirs)

    @rule()
    def nobody_else_opens_it(self):
        check_error("is in use", Server.open, self.path, self.rule, error=StoreError)

    @invariant()
    def the_same_is_kept(self):
        same_state(self.there.state_dict(), self.here.state_dict())
        assert self.there.log == self.here.log
        assert self.there.rule == self.here.rule
        for held, expected in self.held:
            assert bits(held.params) == expected


MACHINES = [*((name, True) for name in PLAYED), *((name, False) for name in ("mf_ca2fl", "fedbuff-streaming", "gsgm"))]


@pytest.mark.parametrize(
    ("name", "mapped", "examples"),
    [
        *(pytest.param(*machine, EXAMPLES, id="-".join(map(str, machine))) for machine in MACHINES),
        *soak_all((*machine, 150) for machine in MACHINES),
    ],
)
def test_a_store_against_memory(name, mapped, examples, monkeypatch):
    monkeypatch.setattr(afflux.store.metadata, "MOST_SLOTS", 2)  # new segments, again and again
    if not mapped:
        monkeypatch.setattr(afflux.store.stored_vectors, "promises_space", lambda folder: False)
    with stopped_clock() as set_time:
        run_state_machine_as_test(
            type("Played", (Play,), {"name": name, "set_time": staticmethod(set_time)}),
            settings=settings(
                max_examples=examples, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
            ),
        )
