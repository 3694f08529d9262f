"""Tasks: a dictionary of what each client pulled, as the server keeps it, with bounds, leases, a store and a log."""

import pickle
import tempfile
import threading
import time
from itertools import count

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from afflux import AffluxError, Closed, Opened, Server, replay
from afflux.rules import fedasync, fedavg, fedbuff
from conftest import bits

D = 5


def made(model=None, preset=None, **options):
    return Server(preset or fedavg(buffer_size=1), np.zeros(D, np.float32) if model is None else model, **options)


def ones(value=1.0):
    return np.full(D, value, np.float32)


def held(server, task):
    return server._aggregator.tasks.base_of(task._task) is not None


def step(server, times=1):
    for _ in range(times):
        server.push(client=0, version=server.version, update=ones())


@pytest.fixture
def clock(monkeypatch):
    """Seconds that a test adds to those of time.monotonic, as the tasks see it."""
    passed = [0.0]
    monkeypatch.setattr("afflux.server.tasks.monotonic", lambda: passed[0])
    monkeypatch.setattr("afflux.server.checkout.monotonic", lambda: passed[0])
    return passed


def test_a_task_is_a_version_and_an_id():
    server = made()
    step(server, 2)
    task, other = server.checkout("ann"), server.checkout("ann")
    assert (task.client, task.version, task.id != other.id) == ("ann", 2, True)
    assert task.params is server.pull().params or bits(task.params) == bits(server.params)
    assert [each.id for each in server.tasks] == [task.id, other.id]
    assert repr(task) == f"Task({task.id!r}, client='ann', version=2)"
    with pytest.raises(ValueError, match="read-only"):
        task.params[0] = 1


def test_a_push_closes_its_task_whether_it_is_an_object_or_an_id():
    server = made()
    task, far = server.checkout(1), server.checkout(2)
    assert server.push(task=task, update=ones()).staleness == 0
    assert server.push(task=far.id, model=far.params + 3, num_examples=2).staleness == 1
    assert server.tasks == ()
    assert server.params.tolist() == [4.0] * D
    for again in (task, far.id, "of another server"):
        receipt = server.push(task=again, update=ones())
        assert (receipt.status, receipt.join, receipt.report) == ("expired", None, None)
        assert receipt.reason
    assert (server.counts["expired"], server.joins) == (3, 2)
    with pytest.raises(AffluxError, match=r"\[Task\] version 0 is no longer held for client 1: the task is closed"):
        _ = task.params


def test_a_client_may_have_several_tasks():
    server = made()
    first, second = server.checkout(7), server.checkout(7)
    server.push(task=second, model=second.params + 1)
    server.push(task=first, model=first.params + 1)
    assert server.params.tolist() == [2.0] * D


def test_cancel_and_lease(clock):
    server = made(log=True)
    lost, late, free = server.checkout(1), server.checkout(2, lease=10.0), server.checkout(3)
    assert (lost.cancel(), lost.cancel()) == (True, False)
    clock[0] = 9.0
    assert [task.client for task in server.tasks] == [2, 3]
    clock[0] = 10.0
    assert server.push(task=late, update=ones()).status == "expired"
    assert [task.client for task in server.tasks] == [3]
    server.push(task=free, update=ones())
    ids = {task.client: task.id for task in (lost, late, free)}
    assert [entry for entry in server.log if isinstance(entry, Closed)] == [
        Closed(ids[1], "cancelled"),
        Closed(ids[2], "expired"),
        Closed(ids[3], "pushed"),
    ]
    opened = [entry for entry in server.log if isinstance(entry, Opened)]
    assert [(entry.client_id, entry.version, entry.hold, entry.until is None) for entry in opened] == [
        (1, 0, True, True),
        (2, 0, True, False),
        (3, 0, True, True),
    ]


def test_poll_and_a_checkout_end_leases(clock):
    server = made()
    server.checkout(1, lease=1)
    clock[0] = 2.0
    server.poll()
    assert len(server._aggregator.tasks) == 0
    server.checkout(1, lease=1)
    clock[0] = 4.0
    server.checkout(2)
    assert [task.client for task in server.tasks] == [2]


def test_a_faulty_push_closes_its_task_only_where_faults_are_recorded():
    for faults, left in (("raise", 1), ("record", 0)):
        server = made(faults=faults)
        task = server.checkout(1)
        try:
            assert server.push(task=task, update=ones(np.nan)).status == "faulty"
        except AffluxError:
            assert faults == "raise"
        assert len(server.tasks) == left


def test_no_examples_close_the_task():
    server = made()
    assert server.push(task=server.checkout(1), num_examples=0).status == "empty"
    assert server.tasks == ()


def test_bases_older_than_max_staleness_are_given_up():
    server = made(max_staleness=2)
    old, other = server.checkout(1), server.checkout(2)
    step(server, 2)
    assert old.params.tolist() == [0.0] * D
    step(server)
    assert server.push(task=old, model=ones()).status == "expired"
    assert server.push(task=other, update=ones()).status == "dropped"


def test_bases_are_given_up_oldest_first_and_never_make_a_step_fail():
    server = made(max_versions=4)
    tasks = []
    for client in range(8):
        tasks.append(server.checkout(client))
        step(server)
    assert [held(server, task) for task in tasks] == [False] * 5 + [True] * 3
    assert server.version == 8
    assert server.push(task=tasks[0], model=ones()).status == "expired"
    assert server.push(task=tasks[1], update=ones()).status == "joined"
    assert server.push(task=tasks[-1], model=ones(9.0)).status == "joined"


def test_without_max_versions_64_are_held():
    server = made()
    tasks = []
    for client in range(100):
        tasks.append(server.checkout(client))
        step(server)
    assert sum(held(server, task) for task in tasks) == 64
    assert len(server.tasks) == 100
    assert server.versions_held <= 66


def test_held_versions_are_bounded_over_many_pushes_with_lost_clients():
    server = made(preset=fedbuff(buffer_size=2))
    rng = np.random.default_rng(0)
    flying, most = [], 0
    for turn in range(10_000):
        flying.append(server.checkout(turn % 50).id)
        if len(flying) > 20:
            task = flying.pop(int(rng.integers(len(flying))))
            if rng.random() >= 0.01:  # else the client is lost, and its task stays open
                server.push(task=task, update=ones(0.0))
        most = max(most, server.versions_held)
    assert most <= 66
    assert 60 < len(server.tasks) < 200


def test_hold_false_pins_nothing():
    server = made(max_versions=2)
    task = server.checkout(1, hold=False)
    far = server.checkout(2, hold=False).id
    assert task.params.tolist() == [0.0] * D
    step(server, 3)
    with pytest.raises(AffluxError, match=r"version 0 is no longer held for client 1: the task is closed or of hold="):
        _ = task.params
    for lost in (task, far):
        assert server.push(task=lost, model=ones()).status == "expired"
    assert server.push(task=server.checkout(2, hold=False).id, model=ones()).status == "joined", "the newest version"


def test_in_place_only_hold_false():
    server = made(inplace=True)
    with pytest.raises(AffluxError, match=r"\[checkout\] inplace=True .* give hold=False"):
        server.checkout(1)
    task = server.checkout(1, hold=False)
    step(server)
    assert task.params.tolist() == [0.0] * D
    server.push(task=task, model=ones(5.0))
    assert server.params.tolist() == [6.0] * D


def test_wrong_arguments():
    server = made()
    for arguments, message in (
        (dict(client=1.5), r"\[checkout\] client_id is 1.5"),
        (dict(client=1, lease=0), r"\[checkout\] lease is 0, must be finite and positive"),
        (dict(client=1, hold="no"), r"\[checkout\] hold is 'no', must be True or False"),
    ):
        with pytest.raises(AffluxError, match=message):
            server.checkout(**arguments)
    with pytest.raises(AffluxError, match=r"give task=, or client= and version="):
        server.push(update=ones())
    assert server.tasks == ()


def test_tree_and_load_are_private_and_of_the_first_params(rng):
    torch = pytest.importorskip("torch")
    first = {
        "conv": [torch.ones(2, 2, dtype=torch.bfloat16), np.ones(3)],
        "running_mean": np.full(2, 0.5, np.float32),
        "steps": torch.tensor(7),
    }
    server = Server(fedbuff(buffer_size=1), first)
    task = server.checkout(1)
    tree = task.tree()
    assert (tree["conv"][0].dtype, tree["conv"][1].dtype) == (torch.bfloat16, np.float64)
    assert (tree["steps"].item(), tree["steps"].dtype, tree["running_mean"].tolist()) == (7, torch.int64, [0.5, 0.5])
    tree["conv"][1] += 5
    tree["conv"][0].add_(5)
    assert task.tree()["conv"][1].tolist() == [1.0] * 3
    assert server.params.tolist() == [1.0] * 7
    assert server.push(task=task, model=tree).status == "joined"
    module = torch.nn.Linear(3, 2)
    server = Server(fedbuff(buffer_size=1), module)
    task, twin = server.checkout(1), torch.nn.Linear(3, 2)
    task.load(twin)
    assert all(torch.equal(a, b) for a, b in zip(twin.parameters(), module.parameters(), strict=True))
    twin.load_state_dict(task.tree())
    with pytest.raises(AffluxError, match=r"\[Task.load\] out: "):
        task.load(torch.nn.Linear(3, 3))


def test_a_flat_vectors_tree_is_flat():
    torch = pytest.importorskip("torch")
    for params in (np.zeros(D), torch.zeros(D, dtype=torch.float64), torch.zeros(D)):
        tree = made(params).checkout(1).tree()
        assert (type(tree), tree.dtype, tuple(tree.shape)) == (type(params), params.dtype, (D,))
        tree[0] = 1


def test_a_store_keeps_open_tasks_and_their_bases(tmp_path):
    with made(store=tmp_path / "s", log=True) as server:
        kept, pushed = server.checkout("ann", lease=1000), server.checkout("bob")
        step(server, 3)
        server.push(task=pushed, update=ones())
        newer = server.checkout("eve", hold=False)
        server.checkpoint()
        step(server)
    with Server.open(tmp_path / "s") as server:
        assert [(task.id, task.client, task.version) for task in server.tasks] == [
            (kept.id, "ann", 0),
            (newer.id, "eve", 4),
        ]
        assert server.tasks[0].params.tolist() == [0.0] * D
        assert server.push(task=pushed.id, update=ones()).status == "expired"
        before = server.params[0]
        assert server.push(task=kept.id, model=ones(10.0)).status == "joined"
        assert server.params[0] - before == 10.0
        assert server.push(task=newer.id, model=ones()).status == "expired"
        assert server.checkout("ann").id not in (kept.id, newer.id)


def test_a_push_that_a_crash_forgets_leaves_its_task_open(tmp_path):
    """And one that was committed does not: a client that tries again is counted once."""
    server = made(preset=fedavg(buffer_size=2), store=tmp_path / "s")
    tasks = [server.checkout(client) for client in range(3)]
    server.checkpoint()
    for task in tasks[:2]:
        server.push(task=task, update=ones())  # the second one makes a step, which is committed
    server.push(task=tasks[2], update=ones())
    server.close(checkpoint=False)
    with Server.open(tmp_path / "s") as server:
        assert server.version == 1
        assert [task.id for task in server.tasks] == [tasks[2].id]
        assert [server.push(task=task.id, update=ones()).status for task in tasks] == ["expired"] * 2 + ["joined"]


def test_closed_tasks_free_the_store(tmp_path):
    """The versions of closed tasks are not kept by the next close."""
    made(store=tmp_path / "s").close()
    for _ in range(5):
        with Server.open(tmp_path / "s") as server:
            for task in server.tasks:
                task.cancel()
            task = server.checkout("ann")
            step(server, 2)
            server.checkpoint()
    with Server.open(tmp_path / "s") as server:
        assert len(server.tasks) == 1
        assert not server.retained_versions, "which are those that the caller asked for"
        assert server.versions_held == 2


def test_a_replay_needs_no_tasks_and_no_clock(clock):
    rng, vectors = np.random.default_rng(2), {}
    server = made(preset=fedasync(), log=True)
    for turn in range(30):
        task = server.checkout(turn % 3, lease=2.0)
        clock[0] += float(rng.random())
        update = rng.standard_normal(D).astype(np.float32)
        base = server.params.copy() if turn % 4 else task.params.copy()
        receipt = server.push(task=task, update=update)
        if receipt.join is not None:
            vectors[receipt.join] = base + update
        server.checkout(9, lease=0.5)
    again = replay(server.log, made(preset=fedasync()), lambda join: vectors[join.number])
    assert bits(again.params) == bits(server.params)


def test_two_threads_push_one_task_and_one_joins(monkeypatch):
    """The second one finds the task closed when it is to join, although it was open when it began."""
    server = made(preset=fedbuff(buffer_size=10))
    task = server.checkout(1)
    take, other = server._aggregator.take_slot, []

    def meanwhile(timeout):
        if not other:
            other.append(None)
            other[0] = server.push(task=task, update=ones(2.0))
        return take(timeout)

    monkeypatch.setattr(server._aggregator, "take_slot", meanwhile)
    assert server.push(task=task, update=ones()).status == "expired"
    assert other[0].status == "joined"
    assert (server.joins, server.arrivals_waiting) == (1, 1)
    assert server._aggregator.slots.taken == 1


# What held a version or lost a task


def test_a_push_that_completes_a_round_does_not_hold_its_own_base():
    server = made(max_versions=2)
    for turn in range(5):
        task = server.checkout(turn)
        step(server)  # there is no third version
        assert server.push(task=task.id, model=ones(turn)).status == "joined"


def test_a_step_waits_for_a_push_that_reads_the_last_free_version(monkeypatch):
    server = made(max_versions=2)
    task, waited = server.checkout(1), []
    ingest = type(server._adapter).ingest

    def slow(self, what, parts, slot, conversion=None):
        if conversion is not None and not waited:
            thread = threading.Thread(target=lambda: waited.append(server.push(client=2, version=1, update=ones())))
            step(server)
            thread.start()
            time.sleep(0.3)
            waited.append(server.version)
            result = ingest(self, what, parts, slot, conversion)
            waited.append(thread)
            return result
        return ingest(self, what, parts, slot, conversion)

    monkeypatch.setattr(type(server._adapter), "ingest", slow)
    assert server.push(task=task, model=ones()).status == "joined"
    version, thread, *_ = [each for each in waited if not isinstance(each, tuple)]
    thread.join(20)
    assert version == 1, "the second step had no version to write into"
    assert server.version == 3


def test_threads_with_few_slots_and_few_versions_end():
    """A push that waits for a slot holds no version, for which the step that frees the slot would wait."""
    server = made(preset=fedavg(buffer_size=2), max_slots=2, max_versions=2)
    joined = []

    def client(number):
        for _ in range(60):
            receipt = server.push(task=server.checkout(number), model=ones(number), timeout=20)
            joined.append(receipt.status)

    threads = [threading.Thread(target=client, args=(number,), daemon=True) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert len(joined) == 240
    assert set(joined) <= {"joined", "expired"}
    assert server.version > 0


def test_bases_that_a_checkpoint_keeps_leave_room_for_steps(tmp_path):
    for most in (3, 4, 6):
        server = made(max_versions=most, store=tmp_path / f"s{most}")
        for _ in range(3):
            tasks = [server.checkout(client) for client in range(3)]
            step(server)
            tasks.append(server.checkout(3))
            server.checkpoint()
            step(server, 6)
        server.close()
        with Server.open(tmp_path / f"s{most}") as server:
            assert len(server.tasks) == 12
            step(server, 6)


def test_a_step_that_fails_anyway_takes_no_base():
    server = made(max_versions=3)
    mine = [server.pull()]
    step(server)
    mine.append(server.pull())
    task = server.checkout(1)
    step(server)
    with pytest.raises(AffluxError, match="all 3 versions of max_versions are held"):
        step(server)
    assert held(server, task)
    mine.clear()
    step(server)


def test_a_version_that_the_caller_keeps_outlives_a_task_on_it(tmp_path):
    server = made(store=tmp_path / "s")
    pulled, task = server.pull(), server.checkout(1)
    step(server)
    server.checkpoint(keep=[pulled])
    server.close()
    with Server.open(tmp_path / "s") as server:
        assert [*server.retained_versions] == [0]
        server.tasks[0].cancel()
    with Server.open(tmp_path / "s") as server:
        assert server.retained_versions[0].params.tolist() == [0.0] * D
        assert task.id not in {each.id for each in server.tasks}


@pytest.mark.parametrize("call", ["close", "add"])
def test_an_interrupt_amid_a_task_counts_nothing_twice(call, monkeypatch):
    """Between the decision and the book of tasks."""
    server = made(max_staleness=1)
    book = type(server._aggregator.tasks)
    task = None if call == "add" else server.checkout(1)
    with monkeypatch.context() as patch:
        patch.setattr(book, call, lambda *arguments: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            _ = server.checkout(1) if call == "add" else server.push(task=task, update=ones())
    if task is not None:
        assert server.push(task=task, update=ones()).status == "expired"
        assert server.joins == 1
    assert server.tasks == ()
    step(server, 3)
    assert server.version == 3 + (task is not None)


def test_a_loaded_state_closes_tasks():
    """Versions have numbers, and those of another past have the same ones."""
    server = made()
    state = server.state_dict()
    step(server)
    task = server.checkout(1)
    server.load_state_dict(state)
    server.push(client=0, version=0, update=ones(20.0))
    assert server.push(task=task, model=ones(1.0)).status == "expired"
    assert server.tasks == ()


def test_ids_differ_in_a_forked_child(monkeypatch):
    """Which has a copy of the counter."""
    server = made()
    book = server._aggregator.tasks
    here = server.checkout(1).id
    book._numbers = count()
    monkeypatch.setattr("afflux.server.tasks.os.getpid", lambda: -1)
    there = server.checkout(1).id
    assert (here != there, here.endswith("-0"), there.endswith("-0")) == (True, True, True)


def test_stored_errors_hold_neither_slots_nor_versions():
    server, errors = made(max_slots=2, max_versions=3), []
    for turn in range(6):
        task = server.checkout(turn)
        for vector in (ones(np.nan), np.ones(2 * D, np.float32)[::2], np.ones(D, np.int32)):
            try:
                server.push(task=task, model=vector, timeout=0)
            except AffluxError as error:
                errors.append(error)
        step(server)
    assert len(errors) == 18
    assert server._aggregator.slots.taken == 0


def test_tasks_are_equal_by_their_ids_and_not_pickled():
    server = made()
    task = server.checkout(1)
    assert task in server.tasks
    assert len({task, *server.tasks}) == 1
    with pytest.raises(AffluxError, match="a task is not pickled: send its id"):
        pickle.dumps(task)


class Tasks(RuleBasedStateMachine):
    """A server and a dictionary of its open tasks, through checkouts, pushes, ends of leases, and crashes."""

    @initialize(store=st.booleans(), bound=st.sampled_from([None, 4]), staleness=st.sampled_from([None, 3]))
    def start(self, store, bound, staleness):
        self.clock, self.patch = 0.0, pytest.MonkeyPatch()
        for name in ("tasks.monotonic", "tasks.time", "checkout.monotonic"):
            self.patch.setattr(f"afflux.server.{name}", lambda: self.clock)
        self.folder = tempfile.TemporaryDirectory() if store else None
        self.staleness, self.values = staleness, count()
        options = {"store": f"{self.folder.name}/s"} if store else {}
        bounds = {"max_versions": bound, "max_staleness": staleness}
        self.server = made(np.zeros(D), preset=fedavg(buffer_size=2), dtype="float64", **bounds, **options)
        self.open = {}  # id: (client, version, deadline, hold)
        self.params, self.waiting = [np.zeros(D)], []  # of each version; updates in the buffer
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
        task = data.draw(st.sampled_from(sorted(self.open)))
        _, version, deadline, _ = self.open[task]
        newest, value = self.server.version, np.full(D, float(next(self.values)))
        receipt = self.server.push(task=task, **{kind: value})
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
            self.waiting.append(value - (0 if kind == "update" else self.params[version]))
        if receipt.report is not None:
            self.params.append(self.params[-1] + sum(self.waiting) / 2)
            self.waiting.clear()
            self.commit()
        assert bits(self.server.params) == bits(self.params[-1])

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


TestTasks = Tasks.TestCase
TestTasks.settings = settings(max_examples=40, stateful_step_count=30, deadline=None)
