"""A server whose shards are actors of Ray has the bits of a server in one piece. Everything listens on loopback."""

import gc
import os
import socket
import warnings
from pathlib import Path

import numpy as np
import pytest

import pairwise
from afflux import AffluxError, Server, UnavailableError, rules
from afflux.distributed import RayPlane
from afflux.selftest.digest import vectors
from conftest import bits
from sharded_runs import CASES, SUPERBLOCK, D, served

pytestmark = [
    pytest.mark.filterwarnings("ignore:.RayPlane. .* elements a shard:RuntimeWarning"),
    pytest.mark.filterwarnings("ignore::ResourceWarning"),  # of Ray itself
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]
SIZE = 2 * SUPERBLOCK + 77
PRESETS = ["fedbuff", "fadas", "wkafl", "mf_ca2fl, rotated-4"]
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
    assert state["meta"] == expected["meta"]
    assert [*state["arrays"]] == [*expected["arrays"]]
    for name, array in expected["arrays"].items():
        assert bits(state["arrays"][name]) == bits(array), name
    rule, options = CASES[case]
    loaded = Server(rule, data[0], log=True, plane=planes(cuts=(5,)), **options)
    loaded.load_state_dict(expected)
    again = loaded.state_dict()
    assert again["meta"] == expected["meta"]
    assert all(bits(again["arrays"][name]) == bits(array) for name, array in expected["arrays"].items())


def test_a_push_that_one_slice_alone_refuses_changes_nothing(planes, data):
    """NaN, max_abs and max_norm; the slots come back."""
    limits = {"max_abs": 1e4, "max_norm": 1e3, "max_slots": 2}
    server = Server(rules.fedbuff(buffer_size=2), data[0][:SIZE], plane=planes(2), **limits)
    vector, before = np.zeros(SIZE, np.float32), server.state_dict()
    for value, message in ((np.nan, f"non-finite value at index {SIZE - 5}"), (1e5, "max_abs"), (2e3, "norm")):
        vector[-5] = value
        for _ in range(3):
            with pytest.raises(AffluxError, match=message):
                server.push(client=1, version=0, update=vector, timeout=0)
    after = server.state_dict()
    for state in (before, after):
        state["meta"]["counts"].pop("refused")
    assert after["meta"] == before["meta"]
    assert bits(after["arrays"]["params"]) == bits(before["arrays"]["params"])
    for i in range(5):
        server.push(client=i, version=0, update=data[1][:SIZE] * np.float32(1e-3), timeout=0)
    assert (server.version, server.versions_held) == (2, 1)


def test_a_server_without_a_store_fails_when_a_shard_dies(planes, cluster, data):
    """The others' replies are awaited, and each later call says what has happened."""
    plane = planes(3)
    server = Server(rules.fedbuff(buffer_size=1), data[0][:SIZE], plane=plane)
    server.push(client=1, version=0, update=data[1][:SIZE])
    cluster.kill(plane.remotes[1].actor)
    for _ in range(2):
        with pytest.raises(AffluxError, match=r"shard 1 of 3 has ended.*server without a store cannot go on"):
            server.push(client=1, version=1, update=data[1][:SIZE])
    assert server.version == 1
    with pytest.raises(AffluxError, match="shard 1 of 3 has ended"):
        server.params  # noqa: B018


def test_what_a_plane_on_ray_cannot_do(planes):
    with pytest.warns(RuntimeWarning, match=r"RayPlane. 50 elements a shard: below 4000000"):
        server = Server(rules.fedbuff(), np.zeros(100), plane=planes(2))
    with pytest.raises(AffluxError, match="copy=False: the update cannot be read in place: the server"):
        server.push(client=1, version=0, update=np.zeros(100), copy=False)
    with pytest.raises(UnavailableError, match="check_versions"):
        Server(rules.fedbuff(), np.zeros(3), plane=planes(2), check_versions=True)
    with pytest.raises(AffluxError, match="actor_options has 1 elements, of 2 shards"):
        RayPlane(2, actor_options=[{}])
