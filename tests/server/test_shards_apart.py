"""The plane on Ray, with actors that are objects of this process (fake_ray.py): messages, epochs, interrupts."""

import pickle
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from itertools import count

import numpy as np
import pytest

import fake_ray
import pairwise
from afflux import PlaneError, Server, StoreError, UnavailableError, rules
from afflux.aggregation.sharded_plane import ShardedPlane
from afflux.distributed import RayPlane, connection
from afflux.distributed.shard import Call, PartPlane, Ref, Shard
from afflux.ops import Step
from afflux.selftest.digest import vectors
from conftest import bits, check_error, check_raises, push_all
from sharded_runs import CASES, SUPERBLOCK, D, Interrupts, check_stored_bits, repeated

pytestmark = pytest.mark.filterwarnings("ignore:.RayPlane. .* elements a shard:RuntimeWarning")
SIZE = 2 * SUPERBLOCK + 77


@pytest.fixture(scope="module")
def data():
    return vectors(3, 6, SIZE)


def test_ray_is_imported_by_a_plane_alone():
    code = "import sys, afflux.distributed; assert 'ray' not in sys.modules; sys.modules['ray'] = None\n"
    code += "try: afflux.distributed.RayPlane()\nexcept afflux.UnavailableError as error: print(error)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "needs Ray: pip install 'afflux[ray]'" in result.stdout


def test_a_cluster_is_not_started_without_authentication(ray, monkeypatch):
    ray.is_initialized = lambda: False
    monkeypatch.delenv("RAY_AUTH_MODE", raising=False)
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    check_error("Ray was imported without token authentication", RayPlane.connect, error=UnavailableError)


@pytest.mark.parametrize(("timeout", "waits"), [(60, [20.0, 40.0]), (5, [5]), (20, [20]), (40, [20.0, 20.0])])
def test_a_start_that_waits_for_resources_ends(timeout, waits, ray, data, tmp_path, caplog):
    """The message says what no node has."""
    ray.unplaced, actors = 1, []
    ray.kill = actors.append
    options = {} if timeout == 60 else {"start_timeout": timeout}  # the default
    plane = RayPlane(2, actor_options={"resources": {"gqu": 1}}, **options)
    message = r"shard 1 of 2 .* requests {'num_cpus': 0, 'resources': {'gqu': 1}}\. The cluster has CPU 2; free: no"
    with pytest.raises(UnavailableError, match=message):
        Server(rules.fedbuff(), data[0], plane=plane, store=tmp_path / "store")
    assert ray.waits == waits
    assert len(caplog.messages) == len(waits) - 1
    assert all("The cluster has CPU 2; free: nothing" in line for line in caplog.messages)
    assert len(actors) == 2
    assert not (tmp_path / "store").exists()


def test_a_start_without_a_limit(ray, data):
    Server(rules.fedbuff(), data[0], plane=RayPlane(2, start_timeout=None))
    assert ray.waits == [20.0]
    check_error("start_timeout", RayPlane, 2, start_timeout=0)


def run(server, data, call=lambda call: call()):
    base = call(server.pull)
    for i in range(5):
        vector = data[i] * np.float32(2.0**-12)
        own = {"model": data[0] + vector} if i == 1 else {server.rule.kind: vector}
        while server.joins == i:
            with suppress(KeyboardInterrupt):
                server.push(client=i % 3, version=base, **own)
    state = call(server.state_dict)
    call(lambda: server.load_state_dict(state))
    return {name: bits(array) for name, array in call(server.state_dict)["arrays"].items()}, state["meta"]


REPEATED = {
    "rows": (rules.ca2fl(buffer_size=2, codec="affine-4"), {"num_clients": 9}),
    "accumulate": (rules.fadas(buffer_size=2), {"accumulate": True}),
    "inplace": (rules.fadas(buffer_size=2), {"inplace": True}),
}


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("case", ["rows", "inplace", *pairwise.soak_all([("accumulate",)])])
def test_a_call_whose_reply_is_lost_may_be_repeated(case, after, data, ray, monkeypatch):
    """An interrupt comes before or after a message was sent, or its reply was read: no sweep is made twice."""
    rule, options = REPEATED[case]
    expected = run(Server(rule, data[0], **options), data)
    for number in count(0, 1 if pairwise.soaking else 5):
        with monkeypatch.context() as patch:
            methods = [(connection.RemoteShard, "send"), (fake_ray.FakeRay, "get"), (fake_ray.Actor, "_made")]
            interrupts = Interrupts(patch, methods, number, after)
            server = Server(rule, data[0], plane=RayPlane(cuts=(1,)), **options)
            interrupts.calls = 0
            assert run(server, data, repeated) == expected, number
        if interrupts.calls <= number:
            break
    assert number > 40


def test_objects_of_dropped_handles_are_freed(data, ray):
    server = Server(rules.ca2fl(buffer_size=2), data[0], num_clients=9, plane=RayPlane(2))
    shards = [remote.actor._instance for remote in server._aggregator.plane.remotes]
    numbers = set()
    for i in range(12):
        server.push(client=i % 4, version=server.version, update=data[i % 6])
        if i > 5 and i % 2:
            numbers.add(tuple(len(shard._objects) for shard in shards))
    assert len(numbers) == 1
    assert sum(*numbers) < 30


def test_a_step_that_the_engine_refuses_changes_nothing(data, ray):
    rule = rules.fedbuff(buffer_size=1)
    steps = iter([Step("amsgrad", lr=1.0, epsilon=1.0), Step("sgd", lr=1.0)])
    own = replace(rule, step=lambda arrivals: next(steps))
    server, twin = (Server(each, data[0], plane=plane) for each, plane in ((own, RayPlane(2)), (rule, None)))
    check_error("states has 0 vectors, amsgrad keeps 3", server.push, client=1, version=0, update=data[1])
    assert (server.version, server.arrivals_waiting) == (0, 0)
    for each in (server, twin):
        each.push(client=1, version=0, update=data[1])
    assert bits(server.params) == bits(twin.params)


def test_a_round_in_memory_waits_for_the_shards_once(data, ray):
    server = Server(rules.fadas(buffer_size=1), data[0], plane=RayPlane(2))
    for version in range(4):
        ray.messages.clear()
        server.push(client=1, version=version, update=data[1])
        sweeps = [b"sweep" in message for *_, message in ray.messages]
        assert sweeps == [*[False] * (2 if version else 4), True, True], "the first one allocates a version"


def test_a_shard_that_lacks_memory_for_a_version_has_changed_nothing(data, ray, monkeypatch):
    rule = rules.fadas(buffer_size=1)
    server, twin = (Server(rule, data[0], plane=plane) for plane in (RayPlane(2), None))
    with monkeypatch.context() as patch, pytest.raises(MemoryError):
        patch.setattr(PartPlane, "take", lambda plane, op: [0] * sys.maxsize)
        server.push(client=1, version=0, update=data[1])
    assert (server.version, server.arrivals_waiting) == (0, 0)
    for each in (server, twin):
        each.push(client=1, version=0, update=data[1])
    assert bits(server.params) == bits(twin.params)


def test_a_round_that_fails_in_a_shard_is_made_by_a_later_call(data, ray, monkeypatch):
    """The other shard, which has made its sweep, does not make it again."""
    rule = rules.fadas(buffer_size=1)
    server, twin = (Server(rule, data[0], plane=plane) for plane in (RayPlane(2), None))
    for each in (server, twin):
        each.push(client=1, version=0, update=data[1])
    prepare, lacking, swept = PartPlane.prepare, [True], []

    def prepared(plane, *arguments):
        if lacking and swept and plane is not swept[0]:
            raise MemoryError
        swept.append(plane)
        return prepare(plane, *arguments)

    with monkeypatch.context() as patch:
        patch.setattr(PartPlane, "prepare", prepared)
        for _ in range(2):
            with pytest.raises(MemoryError):
                server.flush() if server.joins == 2 else server.push(client=1, version=1, update=data[1])
        assert (server.version, server.joins) == (1, 2)
        lacking.clear()
        server.flush()
        assert [plane is swept[0] for plane in swept].count(True) == 1
    twin.push(client=1, version=1, update=data[1])
    for each in (server, twin):
        each.push(client=2, version=2, update=data[2])
    assert (server.version, bits(server.params)) == (3, bits(twin.params))


def test_a_call_of_an_older_epoch_is_refused(data, ray):
    """A sweep that a dead coordinator has left in an actor's queue writes nothing."""
    server = Server(rules.fedbuff(buffer_size=1), data[0], plane=RayPlane(2))
    server.push(client=1, version=0, update=data[1])
    (actor, _, late) = [each for each in ray.messages if b"sweep" in each[2]][-1]
    shard = actor._instance
    shard.call(pickle.loads(late)[0] + 1, [], [])  # another control
    check_error("its server was replaced", shard.call, *pickle.loads(late))
    check_error("its server was replaced", server.push, client=1, version=1, update=data[1])
    assert server.version == 1


MORE = [(case, shards) for case in CASES if case != "inplace" for shards in (1, 3)]


@pytest.mark.parametrize(("case", "shards"), [("ca2fl, float16", 2), *pairwise.soak_all(MORE)])
def test_a_store_has_the_bits_of_one_server(case, shards, ray, tmp_path):
    check_stored_bits(case, lambda: RayPlane(shards), vectors(3, 6, D), tmp_path / "store")
    Server.open(tmp_path / "store", plane=ShardedPlane(shards)).close()


def test_a_shard_waits_for_the_process_that_another_control_has_left(ray, data, tmp_path, monkeypatch):
    """Its late sweeps would write slots that the new control has given out again."""
    path = tmp_path / "store"
    server = Server(rules.fedbuff(buffer_size=1), data[0], plane=RayPlane(2), store=path)
    server.push(client=1, version=0, update=data[1])
    server._store._lock.close()  # its control has ended, and its shards have not
    monkeypatch.setattr("afflux.distributed.shard.PATIENCE", 0.0)
    check_error("shard-0 is in use", Server.open, path, plane=RayPlane(2), error=StoreError)
    for remote in server._aggregator.plane.remotes:
        remote.actor._instance.unlock()
    with Server.open(path, plane=RayPlane(2)) as again:
        assert again.version == 1


def test_a_server_goes_on_from_the_last_commit_when_a_shard_has_ended(ray, data, tmp_path, monkeypatch):
    path, plane = tmp_path / "store", RayPlane(2)
    monkeypatch.chdir(tmp_path)
    server = Server(rules.ca2fl(buffer_size=2), data[0], num_clients=9, plane=plane, store="store")
    paths = [message for _, _, message in ray.messages if b"lock" in message or b"_on_host" in message]
    assert len(paths) == 4
    assert all(tmp_path.name.encode() in message for message in paths)  # not relative ones, which an actor may not have
    receipt = push_all(server, range(3), lambda i: data[i])
    ray.kill(plane.remotes[1].actor)
    check_error(r"Server.open\(.*RayPlane.* continues .*`durable`", server.push, client=4, version=1, update=data[4])
    server.close(checkpoint=False)
    with Server.open(path, plane=RayPlane(2)) as again:
        assert (again.version, again.joins) == (1, 2)
        assert receipt.durable > again.version


class Unplaced(Exception):
    """An error of Ray that is not one of the two."""


def end_shard(ray, plane):
    ray.kill(plane.remotes[1].actor)


def shut_down(ray, plane):
    ray.connected = False


def restart(ray, plane):
    """Actors of another cluster."""
    for remote in plane.remotes:
        remote.send = lambda *arguments: (_ for _ in ()).throw(Exception("Can't find actor"))


def lose_replies(ray, plane):
    ray.get = lambda reply: (_ for _ in ()).throw(Unplaced("the object is lost"))


def fail_inside(ray, plane):
    """The files of a shard's memory cannot be opened."""
    for remote in plane.remotes:
        remote.actor._instance._object = lambda ref: (_ for _ in ()).throw(OSError(24, "too many open files"))


def replace_control(ray, plane):
    for remote in plane.remotes:
        remote.actor._instance.call(plane.connection.epoch + 1, [], [])


@pytest.mark.parametrize("stored", [False, True])
@pytest.mark.parametrize("event", [end_shard, shut_down, restart, lose_replies, fail_inside, replace_control])
def test_a_plane_that_ends_is_no_fault_of_a_client(event, stored, data, ray, tmp_path):
    plane, store = RayPlane(2), tmp_path / "store" if stored else None
    rule = rules.fedbuff(buffer_size=3)
    server = Server(rule, data[0], plane=plane, store=store, faults="record", max_slots=4, max_versions=2)
    tasks = [server.checkout(client) for client in (1, 2)]
    server.push(client=0, version=0, update=data[1])
    event(ray, plane)
    lost = StoreError if stored and event in (end_shard, shut_down, restart) else PlaneError
    for whose in ({"task": tasks[0]}, {"client": 9, "version": 0}):
        for vector in ({"update": data[1]}, {"model": data[1]}):
            with pytest.raises(lost) as caught:
                server.push(**whose, **vector)
            assert type(caught.value) is lost
            assert "client" not in str(caught.value)
            check_raises(lost, server.step, [{**whose, **vector}])
    assert not ray.connected or event is not shut_down
    assert server.tasks == tuple(tasks)
    assert (server.faults, server.arrivals_waiting, server.version) == ((), 1, 0)
    assert {name: count for name, count in server.counts.items() if count} == {"joined": 1, "refused": 8}


def test_all_replies_are_awaited_if_a_shard_has_ended(data, ray):
    server = Server(rules.fedbuff(buffer_size=1), data[0], plane=RayPlane(3))
    ray.kill(server._aggregator.plane.remotes[0].actor)
    read, get = [], ray.get
    ray.get = lambda reply: read.append(reply) or get(reply)
    check_error("shard 0 of 3 has ended", server.push, client=1, version=0, update=data[1])
    assert len(read) == 3


def test_an_error_without_reply_is_raised_by_the_call_that_needs_the_result():
    shard = Shard()
    shard.begin(1)
    missing = Call(Ref(-4), "reserve", (), {}, (7, {"a": 8}))
    (failure, value) = shard.call(1, [missing], [Call(Ref(-1), "read", (Ref(8),), {}), Call(Ref(0), "free", (7,), {})])
    assert isinstance(failure.error, KeyError)
    assert value is None
    for without_reply in ([missing._replace(out=None)], []):
        (failure,) = shard.call(1, without_reply, [Call(Ref(0), "free", (7,), {})])
        assert isinstance(failure.error, KeyError)
