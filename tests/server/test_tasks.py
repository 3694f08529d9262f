"""Tasks: a dictionary of what each client pulled, as the server keeps it, with bounds, leases, a store and a log."""

import numpy as np
import pytest

from afflux import AffluxError, Closed, Opened, Server, replay
from afflux.rules import fedasync, fedavg, fedbuff
from afflux.server.aggregator import Aggregator
from checked_out import D, held, made, step, vector
from conftest import bits, check_error, check_raises, push_all
from inside import aggregator_of, slots_taken, stopped_clock, without_fast_path


@pytest.fixture
def set_time():
    """Sets the time of servers."""
    with stopped_clock() as set_clock:
        yield set_clock


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
    assert server.push(task=task, update=vector()).staleness == 0
    assert server.push(task=far.id, model=far.params + 3, num_examples=2).staleness == 1
    assert server.tasks == ()
    assert server.params.tolist() == [4.0] * D
    for again in (task, far.id, "of another server"):
        receipt = server.push(task=again, update=vector())
        assert (receipt.status, receipt.join, receipt.report) == ("expired", None, None)
        assert receipt.reason
    assert (server.counts["expired"], server.joins) == (3, 2)
    check_error(r"\[Task\] version 0 is no longer held for client 1: the task is closed", lambda: task.params)


def test_a_client_may_have_several_tasks():
    server = made()
    first, second = server.checkout(7), server.checkout(7)
    server.push(task=second, model=second.params + 1)
    server.push(task=first, model=first.params + 1)
    assert server.params.tolist() == [2.0] * D


def test_cancel_and_lease(set_time):
    server = made(log=True)
    lost, late, free = server.checkout(1), server.checkout(2, lease=10.0), server.checkout(3)
    assert (lost.cancel(), lost.cancel()) == (True, False)
    set_time(9.0)
    assert [task.client for task in server.tasks] == [2, 3]
    set_time(10.0)
    assert server.push(task=late, update=vector()).status == "expired"
    assert [task.client for task in server.tasks] == [3]
    server.push(task=free, update=vector())
    ids = {task.client: task.id for task in (lost, late, free)}
    assert [entry for entry in server.log if isinstance(entry, Closed)] == [
        Closed(ids[1], "cancelled"),
        Closed(ids[2], "expired"),
        Closed(ids[3], "pushed"),
    ]
    opened = [entry for entry in server.log if isinstance(entry, Opened)]
    assert [(entry.client_id, entry.version, entry.hold, entry.until is None, entry.lease) for entry in opened] == [
        (1, 0, True, True, None),
        (2, 0, True, False, 10.0),
        (3, 0, True, True, None),
    ]


def test_poll_and_a_checkout_end_leases(set_time):
    server = made()
    server.checkout(1, lease=1)
    set_time(2.0)
    server.poll()
    assert aggregator_of(server).admission.task_count == 0
    server.checkout(1, lease=1)
    set_time(4.0)
    server.checkout(2)
    assert [task.client for task in server.tasks] == [2]


def test_the_end_of_a_lease_does_not_read_the_other_tasks(set_time):
    server = made(preset=fedbuff(buffer_size=1000))
    rng = np.random.default_rng(0)
    leases = rng.permutation(300) + 0.5
    for client, lease in enumerate(leases):
        server.checkout(client, lease=float(lease))
    admission = aggregator_of(server).admission
    for second in range(1, 301):
        set_time(float(second))
        server.push(client=0, update=vector(), version=0)
        assert admission.task_count == 300 - second
    assert admission.next_deadline == np.inf


def test_tasks_that_are_closed_early_leave_no_lease_behind(set_time):
    """Nor does the heap of deadlines grow with each task that ever was."""
    server = made(preset=fedbuff(buffer_size=10**5))
    kept = [server.checkout("kept", lease=500.0 + number) for number in range(40)]
    admission = aggregator_of(server).admission
    for client in range(3000):
        task = server.checkout(client, lease=1000.0)
        if client % 2:
            task.cancel()
        else:
            server.push(task=task, update=vector())
        assert admission.next_deadline == 500.0
    set_time(519.0)
    assert len(server.tasks) == 20
    assert admission.next_deadline == 520.0
    assert [task.client for task in server.tasks] == ["kept"] * 20
    set_time(2000.0)
    assert server.push(task=kept[-1], update=vector()).status == "expired"
    assert admission.task_count == 0
    assert admission.next_deadline == np.inf


def test_a_faulty_push_closes_its_task_only_where_faults_are_recorded():
    for faults, left in (("raise", 1), ("record", 0)):
        server = made(faults=faults)
        task = server.checkout(1)
        try:
            assert server.push(task=task, update=vector(np.nan)).status == "faulty"
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
    assert server.push(task=old, model=vector()).status == "expired"
    assert server.push(task=other, update=vector()).status == "dropped"


def test_bases_are_given_up_oldest_first_and_never_make_a_step_fail():
    server = made(max_versions=4)
    tasks = []
    for client in range(8):
        tasks.append(server.checkout(client))
        step(server)
    assert [held(server, task) for task in tasks] == [False] * 5 + [True] * 3
    assert server.version == 8
    assert server.push(task=tasks[0], model=vector()).status == "expired"
    assert server.push(task=tasks[1], update=vector()).status == "joined"
    assert server.push(task=tasks[-1], model=vector(9.0)).status == "joined"


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
                server.push(task=task, update=vector(0.0))
        most = max(most, server.versions_held)
    assert most <= 66
    assert 60 < len(server.tasks) < 200


def test_hold_false_pins_nothing():
    server = made(max_versions=2)
    task = server.checkout(1, hold=False)
    far = server.checkout(2, hold=False).id
    assert task.params.tolist() == [0.0] * D
    step(server, 3)
    check_error("version 0 is no longer held for client 1: the task is closed or of hold=", lambda: task.params)
    for lost in (task, far):
        assert server.push(task=lost, model=vector()).status == "expired"
    assert server.push(task=server.checkout(2, hold=False).id, model=vector()).status == "joined", "the newest version"


def test_in_place_only_hold_false():
    server = made(inplace=True)
    check_error(r"\[checkout\] inplace=True .* give hold=False", server.checkout, 1)
    task = server.checkout(1, hold=False)
    step(server)
    assert task.params.tolist() == [0.0] * D
    server.push(task=task, model=vector(5.0))
    assert server.params.tolist() == [6.0] * D


def test_wrong_arguments():
    server = made()
    for arguments, message in (
        (dict(client=1.5), r"\[checkout\] client_id is 1.5"),
        (dict(client=1, lease=0), r"\[checkout\] lease is 0, must be finite and positive"),
        (dict(client=1, hold="no"), r"\[checkout\] hold is 'no', must be True or False"),
    ):
        check_error(message, server.checkout, **arguments)
    check_error(r"give task=, or client= and version=", server.push, update=vector())
    assert server.tasks == ()


def test_tree_and_load_are_private_and_of_the_first_params(rng):
    import torch

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
    check_error(r"\[Task.load\] out: ", task.load, torch.nn.Linear(3, 3))


def test_a_flat_vectors_tree_is_flat():
    import torch

    for params in (np.zeros(D), torch.zeros(D, dtype=torch.float64), torch.zeros(D)):
        tree = made(params).checkout(1).tree()
        assert (type(tree), tree.dtype, tuple(tree.shape)) == (type(params), params.dtype, (D,))
        tree[0] = 1


def test_a_store_keeps_open_tasks_and_their_bases(tmp_path):
    with made(store=tmp_path / "s", log=True) as server:
        kept, pushed = server.checkout("ann", lease=1000), server.checkout("bob")
        step(server, 3)
        server.push(task=pushed, update=vector())
        newer = server.checkout("eve", hold=False)
        server.checkpoint()
        step(server)
    with Server.open(tmp_path / "s") as server:
        assert [(task.id, task.client, task.version) for task in server.tasks] == [
            (kept.id, "ann", 0),
            (newer.id, "eve", 4),
        ]
        assert server.tasks[0].params.tolist() == [0.0] * D
        assert server.push(task=pushed.id, update=vector()).status == "expired"
        before = server.params[0]
        assert server.push(task=kept.id, model=vector(10.0)).status == "joined"
        assert server.params[0] - before == 10.0
        assert server.push(task=newer.id, model=vector()).status == "expired"
        assert server.checkout("ann").id not in (kept.id, newer.id)


@pytest.mark.parametrize(("change", "left"), [(-86_400.0, 20.0), (-5.0, 20.0), (12.0, 8.0)])
def test_the_system_clock_changes_while_a_store_is_closed(change, left, set_time, tmp_path, monkeypatch):
    """A clock that was set back prolongs no lease; time that has passed shortens it."""
    monkeypatch.setattr("afflux.server.tasks.time", lambda: 1e9)
    with made(store=tmp_path / "s") as server:
        server.checkout("ann", lease=20.0)
        server.checkout("bob")
    monkeypatch.setattr("afflux.server.tasks.time", lambda: 1e9 + change)
    with Server.open(tmp_path / "s") as server:
        set_time(left - 0.5)
        assert [task.client for task in server.tasks] == ["ann", "bob"]
        set_time(left)
        assert [task.client for task in server.tasks] == ["bob"]


def test_the_tree_of_an_opened_server_is_numpys(tmp_path):
    import torch

    with made({"w": [torch.ones(2), torch.zeros(1)]}, store=tmp_path / "s") as server:
        assert isinstance(server.checkout(1).tree()["w"][0], torch.Tensor)
    with Server.open(tmp_path / "s") as server:
        tree = server.checkout(1).tree()
        assert [type(array) for array in tree["w"]] == [np.ndarray] * 2
        assert [array.tolist() for array in tree["w"]] == [[1.0, 1.0], [0.0]]


def test_a_push_that_a_crash_forgets_leaves_its_task_open(tmp_path):
    """And one that was committed does not: a client that tries again is counted once."""
    server = made(preset=fedavg(buffer_size=2), store=tmp_path / "s")
    tasks = [server.checkout(client) for client in range(3)]
    server.checkpoint()
    for task in tasks[:2]:
        server.push(task=task, update=vector())  # the second one makes a step, which is committed
    server.push(task=tasks[2], update=vector())
    server.close(checkpoint=False)
    with Server.open(tmp_path / "s") as server:
        assert server.version == 1
        assert [task.id for task in server.tasks] == [tasks[2].id]
        assert [server.push(task=task.id, update=vector()).status for task in tasks] == ["expired"] * 2 + ["joined"]


@pytest.mark.parametrize(
    ("preset", "joined", "expired"),
    [(fedbuff(buffer_size=1), ("update", "gradient"), ("model",)), (fedasync(), ("model",), ("update", "gradient"))],
)
def test_only_a_conversion_needs_params_that_are_gone(preset, joined, expired, tmp_path):
    """They are gone after a crash, too, which also forgets the tasks that were opened since the last commit."""
    for crash in (False, True):
        server = Server(preset, np.zeros(D), store=tmp_path / "s" if crash else None)
        tasks = {kind: server.checkout(kind, hold=crash) for kind in (*joined, *expired)}
        push_all(server, [0] * 3, vector(), version=lambda _, server=server: server.pull())
        newest = server.checkout("newest")
        if crash:
            server.close(checkpoint=False)
            server = Server.open(tmp_path / "s")
        own = {"client_lr": 1.0, "local_steps": 1}
        found = {kind: server.push(task=task.id, **{kind: vector()}, **own).status for kind, task in tasks.items()}
        assert found == dict.fromkeys(joined, "joined") | dict.fromkeys(expired, "expired")
        again = server.push(task=newest.id, **{preset.kind: vector()})
        assert (again.status, again.reason.startswith("the task is closed, or was never")) == (
            ("expired", True) if crash else ("joined", False)
        )
    server.close()


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


def test_a_replay_needs_no_tasks_and_no_clock(set_time):
    rng, vectors, now = np.random.default_rng(2), {}, 0.0
    server = made(preset=fedasync(), log=True)
    for turn in range(30):
        task = server.checkout(turn % 3, lease=2.0)
        now += float(rng.random())
        set_time(now)
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
    without_fast_path(server)
    task = server.checkout(1)
    take, other = aggregator_of(server).take_slot, []

    def meanwhile(timeout):
        if not other:
            other.append(None)
            other[0] = server.push(task=task, update=vector(2.0))
        return take(timeout)

    monkeypatch.setattr(aggregator_of(server), "take_slot", meanwhile)
    assert server.push(task=task, update=vector()).status == "expired"
    assert other[0].status == "joined"
    assert (server.joins, server.arrivals_waiting) == (1, 1)
    assert slots_taken(server) == 1


def test_an_interrupt_amid_the_end_of_leases_forgets_none(set_time, monkeypatch):
    server = made()
    for client in range(3):
        server.checkout(client, lease=1)
    set_time(2.0)
    with monkeypatch.context() as patch:
        patch.setattr(Aggregator, "locked", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        check_raises(KeyboardInterrupt, server.poll)
    server.poll()
    assert aggregator_of(server).admission.task_count == 0
