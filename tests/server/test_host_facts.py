"""What the caller of a server knows: the model, an update's staleness, the number of the first version."""

from functools import partial

import numpy as np
import pytest

from afflux import AffluxError, Join, NewParams, Server, replay
from afflux.aggregation.sharded_plane import ShardedPlane
from afflux.rules import afa_cd, fadas, fedasync, fedavg, fedbuff
from conftest import bits, check_error, check_raises, push_all
from inside import aggregator_of, slots_taken
from test_task_interrupts import interrupted

D = 5
ONES = np.ones(D, np.float32)


def stepped(server, times=1):
    push_all(server, [1] * times, ONES)


@pytest.mark.parametrize("options", [{}, {"inplace": True}, {"plane": 2}, {"max_versions": 2}, {"accumulate": True}])
def test_new_params_are_a_version_and_states_stay(options):
    shards = {"plane": ShardedPlane(2)} if "plane" in options else {}
    rule = fedbuff(buffer_size=1) if "accumulate" in options else fadas(buffer_size=1)
    server = Server(rule, np.zeros(D, np.float32), log=True, **options | shards)
    stepped(server, 2)
    vectors = {name: bits(vector) for name, vector in server.rule_vectors.items()}
    task = server.checkout(3, hold=False)
    assert server.set_params(np.full(D, 7.0)) == server.version == 3
    assert server.params.tolist() == [7.0] * D
    assert {name: bits(vector) for name, vector in server.rule_vectors.items()} == vectors
    assert server.tasks == (task,)
    assert server.log[-1:] == (NewParams(),)
    assert server.push(task=task, update=ONES).staleness == 1
    assert server.version == 4
    sets = [np.full(D, 7.0)]
    again = Server(rule, np.zeros(D, np.float32), log=True)
    replay(server.log, again, lambda join: ONES, params=lambda entry: sets.pop())
    assert bits(again.params) == bits(server.params)
    assert [entry for entry in again.log if isinstance(entry, NewParams | Join)] == [
        entry for entry in server.log if isinstance(entry, NewParams | Join)
    ]
    with pytest.raises(AffluxError, match=r"the log has a set_params\(\): give params="):
        replay(server.log, Server(rule, np.zeros(D, np.float32)), lambda join: ONES)


def test_new_params_of_a_tree_with_buffers():
    model = {"w": np.zeros(3, np.float32), "running_mean": np.zeros(2), "mask": np.array([[1, 2]])}
    server = Server(fedavg(buffer_size=1), model)
    other = model | {"w": np.ones(3), "running_mean": np.full(2, 4.0)}
    server.set_params(other)
    assert (server.params.tolist(), server.pull().buffers.tolist()) == ([1.0] * 3, [4.0, 4.0])
    server.set_params(np.zeros(3, np.float32))
    assert (server.params.tolist(), server.pull().buffers.tolist()) == ([0.0] * 3, [4.0, 4.0])
    check_error(r"\[set_params\].*mask.*differs", server.set_params, other | {"mask": np.array([[1, 3]])})
    check_error(r"\[set_params\].*lacks running_mean", server.set_params, {"w": np.ones(3)})
    assert server.version == 2


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (np.ones(4), r"\[set_params\] params has 4 elements, the server's params have 5$"),
        (np.ones(D) * np.nan, r"\[set_params\] params has a non-finite value at index 0"),
        (np.ones(D) * 3e38, "a value beyond 1.7e.38, half of the largest float32"),
        (np.ones(D, int), "is int64, expected"),
    ],
)
@pytest.mark.parametrize("inplace", [False, True])
def test_wrong_params_change_nothing(params, message, inplace):
    server = Server(fedbuff(buffer_size=2), np.zeros(D, np.float32), inplace=inplace, log=True)
    check_error(message, server.set_params, params)
    assert (server.version, server.params.tolist(), server.log) == (0, [0.0] * D, ())


def test_arrivals_that_wait_were_trained_from_other_params():
    server = Server(fedbuff(buffer_size=2), np.zeros(D, np.float32))
    server.push(client=1, version=0, update=ONES)
    check_error(r"1 arrivals wait, .* flush\(\) or discard", server.set_params, ONES)
    server.flush()
    assert server.set_params(ONES) == 2


def test_a_pulled_version_may_take_the_last_memory():
    server = Server(fedbuff(buffer_size=1), np.zeros(D, np.float32), max_versions=2)
    task, pulled = server.checkout(7), server.pull()
    stepped(server)
    check_error(r"\[set_params\] all 2 .*max_versions", server.set_params, ONES)
    assert (server.version, server.versions_held) == (1, 2)
    del pulled  # the task alone holds it now: it is given up
    assert server.set_params(ONES) == 2
    assert server.push(task=task, model=ONES).status == "expired"


@pytest.mark.parametrize("commit_every", [1, None])
def test_a_store_has_new_params_in_its_next_commit(commit_every, tmp_path):
    server = Server(
        fadas(buffer_size=1), np.zeros(D, np.float32), store=tmp_path / "s", log=True, commit_every=commit_every
    )
    stepped(server)
    server.checkpoint({"own": 1})
    server.set_params(ONES * 3)
    server.close(checkpoint=False)
    with Server.open(tmp_path / "s") as opened:
        assert (opened.version, opened.notes) == (1 if commit_every is None else 2, {"own": 1})
        if commit_every is not None:
            assert opened.params.tolist() == [3.0] * D
            assert opened.log == server.log
        stepped(opened)


def test_staleness_in_place_of_a_version():
    """It is counted at the join, by pushes and in a step, and a replay has the version."""
    one, other = (Server(fedbuff(buffer_size=2), np.zeros(D, np.float32), log=True) for _ in range(2))
    for server, facts in ((one, lambda s: {"version": one.version - s}), (other, lambda s: {"staleness": s})):
        for i, staleness in enumerate((0, 0, 1, 0, 2, 1)):
            receipt = server.push(client=i, update=ONES * i, **facts(staleness))
            assert receipt.staleness == staleness
        receipts, _ = server.step([{"client": i, "update": ONES * i, **facts(i)} for i in range(3)])
        assert [receipt.staleness for receipt in receipts] == [0, 1, 2]
    assert one.log == other.log
    assert bits(one.params) == bits(other.params)
    assert bits(replay(other.log, Server(fedbuff(buffer_size=2), np.zeros(D, np.float32)), lambda join: ONES).params)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"client": 1, "staleness": 1}, r"staleness is 1; the server has made 0 to 0: Server\(first_version=\)"),
        ({"client": 1, "staleness": -1}, "staleness is -1, must be an int of at least 0"),
        ({"client": 1, "staleness": 1.5}, "staleness is 1.5, must be an int"),
        ({"client": 1, "staleness": 0, "version": 0}, r"give task=, or client= and version= \(or staleness=\)"),
        ({"client": 1}, r"give task=, or client= and version= \(or staleness=\)"),
        ({"task": "t", "staleness": 0}, r"give no client= and version= \(or staleness=\)"),
    ],
)
@pytest.mark.parametrize("step", [False, True])
def test_wrong_staleness(arguments, message, step):
    server = Server(fedbuff(), np.zeros(D, np.float32))
    with pytest.raises(AffluxError, match=message):
        server.step([arguments | {"update": ONES}]) if step else server.push(**arguments, update=ONES)
    assert (server.joins, server.counts["refused"], slots_taken(server)) == (0, 1, 0)


def test_conversions_with_a_base_need_a_version():
    server = Server(fedbuff(buffer_size=1), np.zeros(D, np.float32))
    check_error("client 1's model .* with staleness=: give version=", server.push, client=1, staleness=0, model=ONES)
    with pytest.raises(AffluxError, match="client 1's update cannot become a model with staleness="):
        Server(fedasync(), np.zeros(D, np.float32)).push(client=1, staleness=0, update=ONES)
    server = Server(afa_cd(buffer_size=1), np.zeros(D, np.float32))
    assert server.push(client=1, staleness=0, update=ONES, client_lr=0.1, local_steps=2).status == "joined"


def test_the_first_version(tmp_path):
    """Staleness counts from it, also to versions that the caller has made before; a store has it."""
    with Server(fedbuff(buffer_size=1), np.zeros(D, np.float32), first_version=100, store=tmp_path / "s") as server:
        assert server.version == server.pull().version == 100
        assert server.push(client=1, version=97, update=ONES).staleness == 3
        assert server.push(client=1, staleness=5, update=ONES).step == 102
        check_error("the server has made 0 to 102", server.push, client=1, version=103, update=ONES)
    with Server.open(tmp_path / "s") as opened:
        assert opened.version == 102


def test_the_state_of_the_largest_first_version():
    server = Server(fedbuff(buffer_size=1), np.zeros(D, np.float32), first_version=2**52)
    push_all(server, [1] * 3, ONES)
    opened = Server(fedbuff(buffer_size=1), np.zeros(D, np.float32))
    opened.load_state_dict(server.state_dict())
    assert opened.version == 2**52 + 3


def test_an_interrupt_leaves_params_that_are_overwritten_in_place_and_their_version_together(monkeypatch):
    server = Server(fedbuff(), np.zeros(D, np.float32), inplace=True, log=True)
    plane, interrupts = aggregator_of(server).plane, [KeyboardInterrupt]
    fill = plane.fill

    def interrupted(vector, values):
        if interrupts:
            raise interrupts.pop()
        fill(vector, values)

    monkeypatch.setattr(plane, "fill", interrupted)
    check_raises(KeyboardInterrupt, server.set_params, ONES)
    assert (server.version, server.params.tolist(), len(server.log)) == (1, [1.0] * D, 1)


@pytest.mark.parametrize("action", ["set_params", "load_state_dict"])
def test_an_interrupt_at_any_call_leaves_params_in_place_and_their_version_together(action):
    saved = Server(fedbuff(buffer_size=1), np.zeros(D, np.float32), inplace=True)
    stepped(saved)
    call = {"set_params": (ONES,), "load_state_dict": (saved.state_dict(),)}[action]
    for k in range(1, 1000):
        server = Server(fedbuff(buffer_size=1), np.zeros(D, np.float32), inplace=True)
        hit = interrupted(partial(getattr(server, action), *call), KeyboardInterrupt, k)
        assert server.params.tolist() == [float(server.version)] * D
        if not hit:
            break
    assert 10 < k < 1000
    assert server.version == 1
