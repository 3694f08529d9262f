"""A server whose shards are actors of Ray has the bits of a server in one piece. Everything listens on loopback."""

import gc
import os
import pickle
import re
import signal
import socket
import subprocess
import sys
import warnings
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from threading import Event
from types import SimpleNamespace

import numpy as np
import pytest

import afflux.store
import pairwise
from afflux import AffluxError, BusyError, Server, StoreError, UnavailableError, rules
from afflux.distributed import RayPlane, ray_plane, service
from afflux.distributed.connection import RemoteShard
from afflux.distributed.messages import (
    Checkout,
    Done,
    Failed,
    Pull,
    Push,
    RemoteTask,
    SliceWrites,
    VersionParts,
    decode,
)
from afflux.lab.results.finished_runs import Job
from afflux.lab.runs.compare import compare
from afflux.lab.runs.simulation import simulate
from afflux.lab.runs.workers import WorkerPool
from afflux.rules.specs import parse_rule
from afflux.selftest.digest import vectors
from afflux.sim import ConfigError
from afflux.sim.errors import TrainingError
from afflux.sim.workload.config import SimConfig
from builds import run
from conftest import ROOT, bits, check_error, found, push_all, raising, reproducible, same_state
from sharded_runs import CASES, SUPERBLOCK, D, served

pytestmark = [
    pytest.mark.filterwarnings("ignore:.RayPlane. .* elements a shard:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # of Ray itself
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
SIZE = 2 * SUPERBLOCK + 77
PRESETS = ["fedbuff", "wkafl", "mf_ca2fl, rotated-4"]
NOW = [(case, 2 + i % 2) for i, case in enumerate(PRESETS)]
MORE = [*{(case, shards) for case in CASES for shards in (1, 2, 3)}.difference(NOW)]


@pytest.fixture(scope="module")
def cluster():
    """The cluster that the first plane starts."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of Ray itself
        try:
            RayPlane.connect()
        except UnavailableError as error:
            if os.environ.get("AFFLUX_RAY") == "needed":  # in make test-integrations, a skip would hide a failure
                raise
            pytest.skip(f"needs ray: make test-integrations ({error})")
        import ray

        yield ray
        ray.shutdown()
        gc.collect()


@pytest.fixture(scope="module")
def data():
    return vectors(3, 6, D)


@pytest.fixture
def planes(cluster):
    """Makes planes, whose actors end with the test."""
    made = []

    def plane(*arguments, **options):
        made.append(RayPlane(*arguments, **options))
        return made[-1]

    yield plane
    for each in made:
        each.close()


def listening(pid):
    """The addresses on which a process and its children listen, of IPv4 and IPv6."""
    owners = [pid, *Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    files = [file for owner in owners for file in Path(f"/proc/{owner}/fd").glob("*")]
    sockets = {os.readlink(file) for file in files if file.is_symlink()}
    addresses = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in sockets:
                words = bytes.fromhex(fields[1].partition(":")[0])
                raw = b"".join(words[i : i + 4][::-1] for i in range(0, len(words), 4))
                addresses.add(socket.inet_ntop(socket.AF_INET if len(raw) == 4 else socket.AF_INET6, raw))
    return addresses


def test_a_cluster_that_afflux_starts_is_closed_to_other_machines(cluster):
    assert os.environ["RAY_AUTH_MODE"] == "token"
    assert len(os.environ["RAY_AUTH_TOKEN"]) == 64
    assert listening(os.getpid()) <= {"127.0.0.1", "::1", "::ffff:127.0.0.1"}
    assert {node["NodeManagerAddress"] for node in cluster.nodes()} == {"127.0.0.1"}


@pytest.mark.parametrize(("case", "shards"), [*NOW, *pairwise.soak_all(MORE)])
def test_shards_on_ray_have_the_bits_of_one_server(case, shards, data, planes):
    expected, reports, log = served(*CASES[case], data)
    state, own_reports, own_log = served(*CASES[case], data, planes(shards))
    assert (own_reports, own_log) == (reports, log)
    same_state(state, expected)
    assert [*state["arrays"]] == [*expected["arrays"]]
    rule, options = CASES[case]
    loaded = Server(rule, data[0], log=True, plane=planes(cuts=(5,)), **options)
    loaded.load_state_dict(expected)
    same_state(loaded.state_dict(), expected)


def check_unchanged(server, before):
    """Check that a server has the state of before, but for the number of refused pushes."""
    after = server.state_dict()
    for state in (before, after):
        state["meta"]["counts"].pop("refused")
    same_state(after, before)


def test_a_push_that_one_slice_alone_refuses_changes_nothing(planes, data):
    """NaN, max_abs and max_norm; the slots come back."""
    limits = {"max_abs": 1e4, "max_norm": 1e3, "max_slots": 2}
    server = Server(rules.fedbuff(buffer_size=2), data[0][:SIZE], plane=planes(2), **limits)
    vector, before = np.zeros(SIZE, np.float32), server.state_dict()
    for value, message in ((np.nan, f"non-finite value at index {SIZE - 5}"), (1e5, "max_abs"), (2e3, "norm")):
        vector[-5] = value
        for _ in range(3):
            check_error(message, server.push, client=1, version=0, update=vector, timeout=0)
    check_unchanged(server, before)
    push_all(server, range(5), data[1][:SIZE] * np.float32(1e-3), version=0, timeout=0)
    assert (server.version, server.versions_held) == (2, 1)


def test_a_server_without_a_store_fails_when_a_shard_dies(planes, cluster, data):
    """The others' replies are awaited, and each later call says what has happened."""
    plane = planes(3)
    server = Server(rules.fedbuff(buffer_size=1), data[0][:SIZE], plane=plane)
    server.push(client=1, version=0, update=data[1][:SIZE])
    cluster.kill(plane.remotes[1].actor)
    for _ in range(2):
        check_error("shard 1 of 3 has ended.*cannot go on", server.push, client=1, version=1, update=data[1][:SIZE])
    assert server.version == 1
    check_error("shard 1 of 3 has ended", lambda: server.params)


def pushes(data):
    """By their client: an update, a model as a tree, an update behind a reference."""
    tree = {"b": data[2][:SUPERBLOCK].copy(), "w": data[2][SUPERBLOCK:SIZE].reshape(3, -1).copy()}
    return [("update", data[1][:SIZE]), ("model", tree), ("update", data[3][:SIZE])]


def test_clients_push_by_a_handle(planes, cluster, data):
    """The bits and the log are those of one server; trees, tasks, references and ranges."""
    params = {"b": data[0][:SUPERBLOCK], "w": data[0][SUPERBLOCK:SIZE].reshape(3, -1)}
    one = Server(rules.fedbuff(buffer_size=2), params, log=True)
    server = Server(rules.fedbuff(buffer_size=2), params, log=True, plane=planes(2))
    handle = server.handle()

    @cluster.remote(num_cpus=0)
    def client(handle, number, kind, vector):
        task = handle.checkout(number)
        pulled = handle.pull(100, SIZE - 100, task=task)
        receipt = handle.push(task=task, num_examples=1 + number, **{kind: vector[0]})
        return task, pulled, receipt

    for _ in range(2):
        for number, (kind, vector) in enumerate(pushes(data)):
            sent = [cluster.put(vector)] if number == 2 else [vector]  # Ray resolves references that are not in a list
            task, pulled, receipt = cluster.get(client.remote(handle, number, kind, sent))
            expected = one.checkout(number)
            assert (task.version, pulled.version) == (expected.version, expected.version)
            assert bits(pulled.params) == bits(expected.params[100:-100])
            other = one.push(task=expected, num_examples=1 + number, **{kind: vector})
            assert (receipt.status, receipt.version, receipt.join) == (other.status, other.version, other.join)
    assert (server.version, server.tasks) == (3, ())
    assert bits(server.params) == bits(handle.pull().params) == bits(one.params)
    strip = re.compile(r"task='[^']*'|")
    assert [strip.sub("", str(entry)) for entry in server.log] == [strip.sub("", str(entry)) for entry in one.log]


def test_a_fault_of_a_client_changes_nothing(planes, cluster, data):
    """It ends after one of two slices, or its slices are refused. The only slot comes back, and the server goes on."""
    plane = planes(2)
    server = Server(rules.fedbuff(buffer_size=1), data[0][:SIZE], max_slots=1, max_versions=2, plane=plane)
    handle, before = server.handle(), server.state_dict()

    def objects():
        plane.wait_for_shards()
        return [cluster.get(each.actor.__ray_call__.remote(lambda s: len(s._objects))) for each in plane.remotes]

    @cluster.remote(max_retries=0, num_cpus=0)
    def end_after_one_slice(handle, vector):
        def settled(connection, calls):
            cluster.get(connection.remotes[0].send(connection.epoch, (), [calls[0]]))
            os._exit(1)

        type(handle._connection).settled = settled
        handle.push(client=1, version=0, update=vector)

    count = objects()
    with pytest.raises(cluster.exceptions.WorkerCrashedError):
        cluster.get(end_after_one_slice.remote(server.handle(timeout=1.0), data[1][:SIZE]))
    vector = data[1][:SIZE].copy()
    vector[-5] = np.nan
    for wrong, message in (
        ({"update": vector}, f"non-finite value at index {SIZE - 5}"),
        ({"update": np.ones(SIZE, np.int32)}, "is int32"),
        ({"update": vector[1:]}, f"has {SIZE - 1} elements"),
        ({"update": vector, "version": 7}, "the server has made 0 to 0"),
        ({"update": vector, "model": vector}, "give one of"),
        ({"update": vector, "colour": "blue"}, "colour"),
    ):
        given = {"client": 1, "version": 0, "timeout": 30.0, **wrong}
        check_error(message, handle.push, **given, error=(AffluxError, UnavailableError, TypeError))
    check_error("elements 3 to 3 are not among", handle.pull, 3, 3)
    handle._request(Pull(None, 0.5), VersionParts)  # a client that pulls and ends: the version is free again
    assert objects() == count
    check_unchanged(server, before)
    for i in range(3):
        assert handle.push(client=1, version=i, update=data[1][:SIZE]).version == i + 1
    del server
    check_error("the server was deleted", handle.pull)


class Executed:
    """Unpickling it ends the process."""

    def __reduce__(self):
        return os._exit, (1,)


class OwnError(Exception):
    """Only this process can import it."""


def test_requests_and_replies_of_a_handle_that_cannot_be_read_are_errors(planes, cluster, data, monkeypatch):
    """The client gets an error, and the next request its reply."""
    server = Server(rules.fedbuff(buffer_size=1), data[0][:SIZE], plane=planes(1), max_slots=1)
    handle = server.handle()

    def unreadable_task(*arguments, **options):
        return SimpleNamespace(id=5, client=1, version=0)

    given = {"client": 1, "version": 0, "update": data[1][:SIZE], "loss": Executed()}
    check_error(r"loss is .*: a handle sends numbers", handle.push, **given)
    first = handle._request(Push(("update",), {"client": 1, "version": 0}, None, 60.0), SliceWrites)
    for token in (None, first.token):
        reply = cluster.get(handle._mailbox.ask.remote(token, pickle.dumps(Executed())))
        error = decode(reply, "", Failed).error()
        assert type(error) is AffluxError
        assert "server's process cannot read the request: msgspec.ValidationError" in str(error)
    for place, name, value, message in (
        (Server, "checkout", raising(OwnError, "of a caller"), "OwnError: of a caller"),
        (Server, "checkout", unreadable_task, "the client cannot read the reply: msgspec.ValidationError"),
        (service, "Thread", raising(RuntimeError, "can't start new thread"), "RuntimeError: can't start new thread"),
    ):
        with monkeypatch.context() as patch, pytest.raises(AffluxError, match=message):
            patch.setattr(place, name, value)
            handle.checkout(1)
    assert handle.push(client=1, version=0, update=data[1][:SIZE]).version == 1


def test_requests_of_handles_beyond_the_limit_are_refused(planes, cluster, data, monkeypatch):
    """Those that wait do not keep replies and second requests from the mailbox."""
    monkeypatch.setattr(ray_plane, "MOST_REQUESTS", 4)
    server, checkout, goes_on = Server(rules.fedbuff(), data[0][:SIZE], plane=planes(1)), Server.checkout, Event()
    handle = server.handle()
    token = handle._request(Pull(None, 60.0), VersionParts).token
    monkeypatch.setattr(Server, "checkout", lambda *own, **options: goes_on.wait() and checkout(*own, **options))
    replies = [handle._send(Checkout(client, None, True)) for client in range(12)]
    refused, waiting = cluster.wait(replies, num_returns=8, timeout=60)  # without a limit none comes
    assert handle._request(Done(), Done, token=token) == Done()
    goes_on.set()
    errors = [decode(each, "", Failed).error() for each in cluster.get(refused)]
    assert {*map(str, errors)} == {"[handle] 4 requests wait for the server's process: try again later"}
    assert {*map(type, errors)} == {BusyError}
    assert [decode(each, "", RemoteTask).version for each in cluster.get(waiting)] == [0] * 4
    assert handle.checkout(1).version == 0


def test_a_pull_amid_publications_has_one_version(planes, cluster):
    server = Server(rules.fedbuff(buffer_size=1), np.zeros(SIZE, np.float32), plane=planes(2))

    @cluster.remote(num_cpus=0)
    def pull(handle):
        seen = set()  # versions
        while len(seen) < 3:
            pulled = handle.pull()
            assert (pulled.params == pulled.version).all(), pulled.version
            seen.add(pulled.version)
        return seen

    reply = pull.remote(server.handle())
    while not cluster.wait([reply], timeout=0)[0]:
        server.push(client=1, version=server.version, update=np.ones(SIZE, np.float32))
    assert len(cluster.get(reply)) == 3


def test_shards_on_two_nodes(planes, cluster, data, tmp_path):
    """A second raylet of the same cluster, on this machine; each shard is placed by a resource of one of them."""
    from ray.cluster_utils import Cluster

    nodes = Cluster()
    nodes.head_node = cluster._private.worker.global_worker.node  # of the cluster that the first plane has started
    second = nodes.add_node(wait=False, num_cpus=0, resources={"second": 2}, object_store_memory=100_000_000)
    try:
        resources = [{"node:__internal_head__": 0.01}, {"second": 1}]
        plane = planes(2, actor_options=[{"resources": each} for each in resources])
        server = Server(rules.fadas(buffer_size=1), data[0][:SIZE], plane=plane)
        one = Server(rules.fadas(buffer_size=1), data[0][:SIZE])
        actors = [remote.actor for remote in plane.remotes]
        ids = [each.__ray_call__.remote(lambda _: cluster.get_runtime_context().get_node_id()) for each in actors]
        assert len({*cluster.get(ids)}) == 2
        for each in (one, server):
            each.push(client=1, version=0, update=data[1][:SIZE])
        assert bits(server.handle().pull().params) == bits(one.params)
        apart = planes(2, actor_options=[{"resources": each} for each in resources])
        together = planes(2, actor_options={"resources": resources[0]})  # without it, Ray may choose the second node
        for path, own_plane, expected in (("apart", apart, "power"), ("together", together, "process")):
            Server(rules.fadas(), data[0][:SIZE], plane=own_plane, store=tmp_path / path).close()
            assert afflux.store.info(tmp_path / path).durability == expected
    finally:
        plane.close()
        nodes.remove_node(second)
        del nodes, second
        gc.collect()  # of Ray's processes, within the filter of warnings


def test_the_page_runs(cluster, capsys):
    page = (ROOT / "docs" / "guides" / "distributed.md").read_text()
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(compile(block, "distributed.md", "exec"), {"__name__": "__main__"})
        printed = capsys.readouterr().out.splitlines()
        assert printed == re.findall(r"^ *print\(.*\)  # (.*)$", block, re.MULTILINE) != []


def test_what_a_plane_on_ray_cannot_do(planes):
    with pytest.warns(RuntimeWarning, match=r"RayPlane. 50 elements a shard: below 4000000"):
        Server(rules.fedbuff(), np.zeros(100), plane=planes(2))
    check_error("actor_options has 1 elements, of 2 shards", RayPlane, 2, actor_options=[{}])
    with pytest.raises(UnavailableError, match="inplace=True: a round would overwrite params"):
        Server(rules.fedbuff(), np.zeros(3), plane=planes(2), inplace=True).handle()


def test_clients_of_the_simulator_train_in_tasks(cluster, tmp_path):
    """The files are those of a run that trains itself, and so are errors."""
    config = SimConfig(model="logreg", num_clients=8, concurrency=3, arrivals=6, local_steps=2, eval_every=3)
    rule, outcomes = parse_rule("ca2fl:buffer_size=3"), []
    for workers in (1, "ray"):
        folder = tmp_path / str(workers)
        folder.mkdir()
        with closing(WorkerPool(workers)) as pool:
            (result,) = simulate([rule], 4, config, output=folder, pool=pool)
            with pytest.raises(TrainingError) as caught:
                simulate([rule], 4, replace(config, client_lr=1e30), pool=pool)
        files = {path.name: path.read_bytes() for path in folder.iterdir()}
        outcomes.append((reproducible(result), str(caught.value), files))
    assert outcomes[0] == outcomes[1]
    assert len(files) == 1
    with pytest.raises(ConfigError, match="workers='ray' trains the clients of one run at a time"):
        compare([Job(rule, seed) for seed in (1, 2)], config, workers="ray", processes=2)


RULE = rules.ca2fl(buffer_size=2, codec="affine-4")
PUSHES = 11


def push(server):
    """The next push: the same after the same joins."""
    vector = np.random.default_rng(server.joins).standard_normal(SIZE, np.float32)
    return server.push(client=server.joins * 3 % 5, version=server.version, update=vector)


def params_of(server):
    """The params after all pushes."""
    while server.joins < PUSHES:
        push(server)
    return bits(server.params)


@pytest.fixture(scope="module")
def undisturbed():
    return params_of(Server(RULE, np.ones(SIZE, np.float32), num_clients=9))


def killing(patch, plane, ray, number, name, when, skipped=0):
    """Kill a shard before or after a message with this call was sent, None: any call; after so many others."""
    pids = [ray.get(remote.actor.__ray_call__.remote(lambda shard: os.getpid())) for remote in plane.remotes]
    send, left = RemoteShard.send, [when, *[""] * skipped]

    def sent(remote, epoch, first, calls):
        names = {call.name for call in (*remote.later, *first, *calls)}
        hit = left and remote is plane.remotes[number] and (name in names or name is None)
        moment = left.pop() if hit else ""
        if moment == "before":
            os.kill(pids[number], signal.SIGKILL)
        reply = send(remote, epoch, first, calls)
        if moment == "after":
            os.kill(pids[number], signal.SIGKILL)
        return reply

    patch.setattr(RemoteShard, "send", sent)


KILLS = [("sweep", "after", 0), ("set_committed", "before", 1)]
NAMES = ["ingest", "prepare", "record_sweep", "sweep", "save", "publish", "set_committed", "checksums_of", None]
MORE_KILLS = [(name, when, number) for name in NAMES for when in ("before", "after") for number in (0, 1)]


@pytest.mark.parametrize(
    ("name", "when", "number"), [*KILLS, *pairwise.soak_all([each for each in MORE_KILLS if each not in KILLS])]
)
def test_after_the_end_of_a_shard_a_store_goes_on_with_the_same_bits(
    name, when, number, planes, cluster, undisturbed, tmp_path, monkeypatch
):
    """The receipts tell what is lost: here the arrivals after the last commit."""
    end_of_a_shard(name, when, number, 0, 2, (planes, cluster, undisturbed, tmp_path, monkeypatch))


def end_of_a_shard(name, when, number, skipped, shards, fixtures):
    planes, cluster, undisturbed, tmp_path, monkeypatch = fixtures
    path, plane, receipts = tmp_path / "store", planes(shards), []
    server = Server(RULE, np.ones(SIZE, np.float32), num_clients=9, plane=plane, store=path)
    for _ in range(3):
        receipts.append(push(server))
    with monkeypatch.context() as patch:
        killing(patch, plane, cluster, number, name, when, skipped)
        with pytest.raises(StoreError, match=f"shard {number} of {shards} has ended.*Server.open"):
            while server.joins < PUSHES:
                receipts.append(push(server))
    server.close(checkpoint=False)
    with Server.open(path, plane=planes(shards)) as server:
        kept = [receipt.durable is not None and receipt.durable <= server.version for receipt in receipts]
        assert kept == [i < server.joins for i in range(len(receipts))]
        assert params_of(server) == undisturbed
    assert afflux.store.check(path).sound
    assert {file.parent for file in path.rglob("*.sqlite*")} == {path}


CONTROL = """
import os, signal, sys, warnings
warnings.simplefilter("ignore")
import ray
ray.init(sys.argv[1], log_to_driver=False, logging_level="ERROR")
import test_ray_plane as own
from afflux import Server
from afflux.distributed import RayPlane
from afflux.distributed.connection import RemoteShard
from afflux.store.commits import Commits
def killed(*arguments):
    os.kill(os.getpid(), signal.SIGKILL)
server = Server.open(sys.argv[2], plane=RayPlane(int(sys.argv[5])))
point, skipped = sys.argv[3], int(sys.argv[4])
if point == "transaction":
    write = Commits._write_lists
    def wrote(*arguments):
        global skipped
        skipped -= 1
        return killed() if skipped < 0 else write(*arguments)
    Commits._write_lists = wrote
else:
    send = RemoteShard.send
    def sent(remote, epoch, first, calls):
        global skipped
        reply = send(remote, epoch, first, calls)
        skipped -= point == "any" or any(call.name == point for call in calls)
        return killed() if skipped < 0 else reply
    RemoteShard.send = sent
own.params_of(server)
"""


@pytest.mark.parametrize("point", ["transaction", *pairwise.soak_all([("sweep",), ("save",), ("prepare",)])])
def test_after_the_end_of_control_a_store_goes_on_with_the_same_bits(point, planes, cluster, undisturbed, tmp_path):
    """Its shards may still sweep when the next server opens the store: each waits for the lock of its folder."""
    end_of_control(point, 0, 2, (planes, cluster, undisturbed, tmp_path))


def end_of_control(point, skipped, shards, fixtures):
    planes, cluster, undisturbed, tmp_path = fixtures
    path = tmp_path / "store"
    with Server(RULE, np.ones(SIZE, np.float32), num_clients=9, plane=planes(shards), store=path) as server:
        for _ in range(3):
            push(server)
    address = cluster.get_runtime_context().gcs_address
    paths = {"PYTHONPATH": os.pathsep.join(map(str, [ROOT / "python", *map(str, sys.path)]))}
    command = [sys.executable, "-c", CONTROL, address, path, point, str(skipped), str(shards)]
    ended = subprocess.run(command, env={**os.environ, **paths}, capture_output=True, text=True, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    with Server.open(path, plane=planes(shards)) as server:
        assert params_of(server) == undisturbed
    assert afflux.store.check(path).sound


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(50))
def test_kills_at_random(seed, planes, cluster, undisturbed, tmp_path, monkeypatch):
    """The first ten come amid a sweep, a save or the transaction; the others before or after any message."""
    draw = np.random.default_rng(seed)
    shards, skipped = int(draw.integers(2, 4)), int(draw.integers(0, 4 if seed < 10 else 20))
    name = str(draw.choice(["sweep", "save", "transaction"])) if seed < 10 else None
    if name == "transaction" or draw.random() < 0.4:
        skipped //= 1 + (name == "transaction")  # fewer commits are left than messages
        end_of_control(name or "any", skipped, shards, (planes, cluster, undisturbed, tmp_path))
    else:
        number, when = int(draw.integers(shards)), str(draw.choice(["before", "after"]))
        end_of_a_shard(name, when, number, skipped, shards, (planes, cluster, undisturbed, tmp_path, monkeypatch))


@pytest.mark.soak
@pytest.mark.parametrize("suites", ["server loading", "by_hand rules passes", "store_commits store"])
def test_the_suites_pass_with_shards_in_actors(suites):
    """Each server has actors of its own, which take seconds to start: half an hour."""
    files = [found(f"test_{name}.py") for name in suites.split()]
    of_ray = ["-W", "ignore::ResourceWarning", "-W", "ignore::pytest.PytestUnraisableExceptionWarning"]
    options = ["-q", f"--rootdir={ROOT}", "-p", "ray_servers", "-p", "no:cacheprovider", *of_ray]
    paths = os.pathsep.join(map(str, [ROOT / "python", found("ray_servers.py").parent, *map(str, sys.path)]))
    assert "passed" in run(sys.executable, "-m", "pytest", *options, *files, PYTHONPATH=paths, AFFLUX_RAY="needed")
