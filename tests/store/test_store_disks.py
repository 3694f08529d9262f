"""Disks that are full, read-only or lose files under a running server; files of a store that are damaged at any place:
an error that says what, or nothing to notice; no signal, and no other bits.
"""

import json
import os
import shutil
import sys

import numpy as np
import pytest

import afflux.store.metadata
from afflux import AffluxError, Server, StoreError, store
from afflux.rules import RULES
from conftest import FORKS, check_raises
from crashes import Case, check, digest, in_child, reference, result, told
from mounts import NotAllowedError, Tmpfs

pytestmark = [pytest.mark.skipif(sys.platform != "linux", reason="needs Linux"), pytest.mark.filterwarnings(FORKS)]

LARGE = Case("ca2fl", d=20_001, pushes=45, checkpoints=0.0)


@pytest.fixture(scope="module")
def large():
    return reference(LARGE)


@pytest.fixture(autouse=True)
def small_segments(monkeypatch):
    monkeypatch.setattr(afflux.store.metadata, "MOST_SLOTS", 2)


def mounted(path, size):
    try:
        return Tmpfs(path, size)
    except NotAllowedError as error:
        return str(error)


def filled(path, size, states):
    """The errors of a server on a disk of a given size, which becomes larger after the first error."""
    disk = mounted(path, size)
    if isinstance(disk, str):
        return "skip " + disk
    said = "nothing"

    def tried(call):
        nonlocal said
        try:
            return call()
        except StoreError as error:
            assert said == "nothing"
            said = f"life {error}"
        disk.resize(1 << 30)
        shutil.copytree(path / "store", path / "copy")  # what the end of the process would leave
        with LARGE.open(path / "copy") as killed:
            check(killed, states, 3 * server.version)
        return call()

    def push():
        newest, _ = states[server.joins]
        assert server.version == newest or server.rule_vectors is not None
        LARGE.push(server, newest)

    try:
        server = LARGE.server(path / "store")
    except StoreError as error:
        return f"birth {error}"
    while server.joins < LARGE.pushes:
        tried(push)
    tried(server.close)
    check(LARGE.open(path / "store"), states, LARGE.pushes)
    return said


def test_a_disk_that_fills_up(tmp_path, large):
    """At each size from too small for anything to large enough."""
    said = []
    for size in range(64 << 10, 4 << 20, 300 << 10):
        (words,) = result(lambda tell, size=size: tell(filled(tmp_path, size, large).replace("\n", " ")))
        said.append(words)
        if words.startswith("skip"):
            pytest.skip(f"no file system of our own: {words}")
    kinds = [words.split()[0] for words in said]
    print(*said, sep="\n")
    assert kinds == sorted(kinds), kinds  # birth, life, nothing: the larger the later
    assert set(kinds) == {"birth", "life", "nothing"}
    assert any("no space for" in words for words in said)


def twenty(path):
    with LARGE.server(path) as server:
        while server.joins < 20:
            LARGE.push(server)


def read_only(path, states):
    disk = mounted(path, 1 << 26)
    if isinstance(disk, str):
        return "skip " + disk
    result(lambda tell: twenty(path / "store"))  # by a process whose maps are gone
    disk.read_only()
    calls = ((LARGE.open, path / "store"), (LARGE.server, path / "other"))
    said = [str(check_raises(StoreError, call, place)) for call, place in calls]
    disk.writable()
    check(LARGE.open(path / "store"), states, 20)
    return " ".join(said)


def test_a_disk_that_can_only_be_read(tmp_path, large):
    (words,) = result(lambda tell: tell(read_only(tmp_path, large).replace("\n", " ")))
    if words.startswith("skip"):
        pytest.skip(f"no file system of our own: {words}")
    assert words.count("Read-only file system") == 2


SIZE = 70_001
CALLS = {
    "push": lambda server: server.push(client=1, update=np.ones(SIZE, np.float32), version=server.version),
    "flush": lambda server: server.flush(),
    "rows": lambda server: [server.rows.row(client) for client in server.rows.client_ids] if server.rows else None,
    "state_dict": lambda server: server.state_dict(),
    "rule_vectors": lambda server: server.rule_vectors,
    "pull": lambda server: server.pull(out=np.empty(SIZE, np.float32)),
    "checkpoint": lambda server: server.checkpoint(),
    "close": lambda server: server.close(),
}


def under_way(path, rule, accumulate, commit_every, how, call):
    """The error of a call after a segment was cut off, or removed with its folder."""
    options = {"num_clients": 9, "accumulate": accumulate, "commit_every": commit_every}
    server = Server(RULES[rule](buffer_size=3), np.ones(SIZE, np.float32), store=path, **options)
    for client in (0, 1, 2, 3, 4, 0, 1, 2, "checkpoint", 3, 4, 0, 1):
        if client == "checkpoint":
            server.checkpoint()
        else:
            server.push(client=client, update=np.full(SIZE, client, np.float32), version=server.version)
    if how == "gone":
        shutil.rmtree(path)
    else:
        os.truncate(path / how / "c" / "0" / "0", 4096)
    try:
        CALLS[call](server)
    except StoreError as error:
        return f"error {error}".replace("\n", " ")
    finally:
        server.close(checkpoint=False)  # never fails
    return "nothing"


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize(
    ("rule", "accumulate", "commit_every", "how"),
    [
        *(("ca2fl", False, every, how) for every in (1, None) for how in ("rows", "sum", "params", "arrivals")),
        ("fadas", False, 1, "rule_vector.m"),
        ("fedbuff", True, 1, "total"),
        ("ca2fl", False, 1, "gone"),
    ],
)
def test_a_segment_that_is_cut_off_under_a_server(rule, accumulate, commit_every, how, call, tmp_path):
    """No SIGBUS; calls that need the segment, or would lose data, raise an error."""
    body = (rule, accumulate, commit_every, how, call)
    (said,) = result(lambda tell: tell(under_way(tmp_path / "store", *body)))
    needed = {"sum", "params", "rule_vector.m", "total", "gone"}
    if how in needed and call != "push":
        assert said.startswith("error")
    if said != "nothing":
        assert "truncated" in said or "has vanished" in said


def outcome(case, path, states):
    """What a store that is damaged somewhere does when it is opened, read, and driven to the end."""
    try:
        server = case.open(path)
        assert [server.version, digest(server)] == states[server.joins], "other bits"
        while server.joins < case.pushes:
            case.push(server)
        server.close()
        server = case.open(path)
        assert [server.version, digest(server)] == states[case.pushes], "other bits"
    except AffluxError as error:  # a client whose entry cannot be found is one too many
        return f"error {error}"
    return "nothing"


SMALL = Case("ca2fl", d=70, pushes=60)


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    """A store with rows, kept versions and arrivals that wait, and what it holds."""
    path = tmp_path_factory.mktemp("sound") / "store"

    def body(tell):
        with SMALL.server(path) as server:
            while server.joins < 50:
                SMALL.push(server)
            server.checkpoint("a note", keep=[server.pull()])

    result(body)
    return path, reference(SMALL)


def mends(path):
    """What `check` says of a store in which only metadata are damaged: if it says so, they are made again."""
    health = store.check(path)
    assert (health.damaged, health.keeps_bits, health.mendable) == ((), True, not health.sound)
    assert store.repair(path) is None
    assert store.check(path).sound
    return "nothing" if health.sound else "error"


def damaged(sound, path, file, changes, *, mended=False):
    """The outcomes of changes, which are (offset, mask) of one byte, or a length to cut to; `mended`: whatever they
    were, `repair` undoes them.
    """
    seed, states = sound
    whole = (seed / file).read_bytes()

    def body(tell):
        for i, change in enumerate(changes):  # a server that failed may still hold its own folder
            here = path / str(i)
            shutil.copytree(seed, here)
            if isinstance(change, int):
                (here / file).write_bytes(whole[:change])
            else:
                offset, mask = change
                (here / file).write_bytes(whole[:offset] + bytes([whole[offset] ^ mask]) + whole[offset + 1 :])
            copy = shutil.copytree(here, path / f"{i} mended") if mended else None
            said = outcome(SMALL, here, states)
            if copy is not None:
                assert mends(copy) == said.split()[0]
                assert outcome(SMALL, copy, states) == "nothing"
            tell(json.dumps([change, said]))
        shutil.rmtree(path, ignore_errors=True)

    child, reading = in_child(body)
    lines = [json.loads(line) for line in told(reading)]
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    assert status == 0, f"{status} at {changes[len(lines)]} of {file}"
    return [said.split()[0] for _, said in lines]


@pytest.mark.parametrize("array", ["rows", "sum", "params", "arrivals"])
def test_damaged_metadata(array, sound, tmp_path):
    file = f"{array}/zarr.json"
    whole = (sound[0] / file).read_bytes()
    size, chance = len(whole), np.random.default_rng(1)
    flips = [(int(offset), 1 << int(chance.integers(8))) for offset in chance.integers(0, size, 15)]
    flips += [(offset, 1) for offset in range(size) if whole[offset : offset + 1].isdigit()]  # still a number
    kinds = damaged(sound, tmp_path / "store", file, [*range(0, size - 2, 150), *flips], mended=True)
    assert kinds[: len(range(0, size - 2, 150))] == ["error"] * len(range(0, size - 2, 150))
    assert "error" in kinds


def test_a_bit_of_the_index(sound, tmp_path):
    """In each page: its head, and what it holds."""
    whole = (sound[0] / "index.sqlite").read_bytes()
    chance = np.random.default_rng(2)
    for page in range(0, len(whole), 4096):
        used = [page + i for i in range(4096) if whole[page + i]]
        places = [*range(page, page + 12), *map(int, chance.choice(used, min(len(used), 12), replace=False))]
        flips = [(offset, 1 << int(chance.integers(8))) for offset in places]
        assert damaged(sound, tmp_path / str(page), "index.sqlite", flips).count("error") >= 3
