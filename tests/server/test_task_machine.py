"""Tasks under a state machine, beside a dictionary of what is open and what each version was."""

import tempfile
from itertools import count
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import oracle
from afflux import Server
from afflux._engine import set_clock
from afflux.rules import fedavg
from checked_out import D, held, made
from conftest import bits


class Tasks(RuleBasedStateMachine):
    """A server and a dictionary of its open tasks, through checkouts, pushes, ends of leases, and crashes."""

    @initialize(store=st.booleans(), bound=st.sampled_from([None, 4]), staleness=st.sampled_from([None, 3]))
    def start(self, store, bound, staleness):
        self.clock, self.patch = 0.0, pytest.MonkeyPatch()
        self.patch.setattr("afflux.server.tasks.time", lambda: self.clock)
        set_clock(0.0)
        self.folder = tempfile.TemporaryDirectory() if store else None
        self.staleness, self.values = staleness, count()
        options = {"store": f"{self.folder.name}/s"} if store else {}
        bounds = {"max_versions": bound, "max_staleness": staleness}
        self.server = made(np.zeros(D), preset=fedavg(buffer_size=2), dtype="float64", **bounds, **options)
        self.open = {}  # id: (client, version, deadline, hold)
        self.params = [np.zeros(D)]  # of each version
        self.waiting = []  # (client, version, number of the join, update) in the buffer
        self.commit()

    def commit(self):
        self.committed = dict(self.open), list(self.params), list(self.waiting)

    def expire(self):
        self.open = {key: entry for key, entry in self.open.items() if entry[2] > self.clock}

    @rule(client=st.integers(0, 3), lease=st.sampled_from([None, 2.0, 5.0]), hold=st.booleans())
    def checkout(self, client, lease, hold):
        task = self.server.checkout(client, lease=lease, hold=hold)
        assert bits(task.params) == bits(self.params[-1])
        self.open[task.id] = (client, task.version, np.inf if lease is None else self.clock + lease, hold)

    @rule(data=st.data(), kind=st.sampled_from(["update", "model"]))
    def push(self, data, kind):
        if not self.open:
            return
        task = data.draw(st.sampled_from([*self.open]))
        newest, value = self.server.version, np.full(D, float(next(self.values)))
        receipt = self.server.push(task=task, **{kind: value})
        self.check(task, kind, value, newest, receipt)
        if receipt.report is not None:
            self.stepped()
        assert bits(self.server.params) == bits(self.params[-1])

    @rule(data=st.data())
    def step(self, data):
        """Some tasks are pushed at once, one of them perhaps twice."""
        tasks = data.draw(st.lists(st.sampled_from([*self.open]), max_size=4)) if self.open else []
        newest, values = self.server.version, [np.full(D, float(next(self.values))) for _ in tasks]
        kinds = ["update" if i % 2 else "model" for i in range(len(tasks))]
        entries = zip(tasks, kinds, values, strict=True)
        receipts, report = self.server.step([{"task": task, kind: value} for task, kind, value in entries])
        for task, kind, value, receipt in zip(tasks, kinds, values, receipts, strict=True):
            if task in self.open:
                self.check(task, kind, value, newest, receipt)
            else:
                assert receipt.status == "expired"
        if report is not None:
            assert len(report.client_ids) == len(self.waiting)
            self.stepped()
        assert bits(self.server.params) == bits(self.params[-1])

    def stepped(self):
        updates = [update for *_, update in sorted(self.waiting, key=lambda entry: entry[:3])]  # in canonical order
        weights = [1 / len(updates)] * len(updates)
        self.params.append(self.params[-1] + oracle.weighted(weights, updates, np.zeros(D)))
        self.waiting.clear()
        self.commit()

    def check(self, task, kind, value, newest, receipt):
        """A push has closed this task, unless it had ended."""
        client, version, deadline, _ = self.open[task]
        if deadline <= self.clock:
            allowed = {"expired"}
        elif self.staleness is not None and newest - version > self.staleness:
            allowed = {"dropped"} if kind == "update" else {"dropped", "expired"}
        elif kind == "update" or version == newest:
            allowed = {"joined"}
        else:  # perhaps its base was given up, or is held for another task
            allowed = {"joined", "expired"}
        assert receipt.status in allowed
        del self.open[task]
        self.expire()
        if receipt.status == "joined":
            update = value - (0 if kind == "update" else self.params[version])
            self.waiting.append((client, version, len(self.waiting), update))

    @rule(data=st.data())
    def cancel(self, data):
        self.expire()
        if self.open:
            task = data.draw(st.sampled_from(self.server.tasks))
            assert task.cancel()
            del self.open[task.id]

    @rule(seconds=st.floats(0.5, 3.0))
    def wait(self, seconds):
        self.clock += seconds
        set_clock(self.clock)

    @rule(crash=st.booleans())
    def reopen(self, crash):
        if self.folder is None:
            return
        self.server.close(checkpoint=not crash)
        if crash:
            self.open, self.params, self.waiting = (type(each)(each) for each in self.committed)
        self.server = Server.open(f"{self.folder.name}/s")
        self.commit()

    @rule()
    def checkpoint(self):
        if self.folder is not None:
            self.server.checkpoint()
            self.commit()

    @invariant()
    def the_same_tasks_are_open(self):
        if not hasattr(self, "server"):
            return
        self.expire()
        found = {task.id: (task.client, task.version) for task in self.server.tasks}
        assert found == {key: entry[:2] for key, entry in self.open.items()}
        assert (self.server.version, self.server.arrivals_waiting) == (len(self.params) - 1, len(self.waiting))
        for task in self.server.tasks:
            if held(self.server, task):
                assert bits(task.params) == bits(self.params[task.version])

    def teardown(self):
        if hasattr(self, "server"):
            if self.folder is not None:
                self.server.close()
                self.folder.cleanup()
            self.patch.undo()
            set_clock(None)


def test_a_step_of_three_arrivals():
    """Each is multiplied by 1/3, which is not their sum divided by 3."""
    tasks = Tasks()
    tasks.start(store=False, bound=None, staleness=None)
    for value in range(4):
        for client in (2, 0, 1):
            tasks.checkout(client, None, hold=True)
        tasks.step(SimpleNamespace(draw=lambda strategy: [*tasks.open]))
        assert len(tasks.params) == value + 2
    tasks.teardown()


TestTasks = Tasks.TestCase
TestTasks.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
