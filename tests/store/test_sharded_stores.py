"""A store whose vectors are in shards: the bits of a server in one piece, also after a crash at any point."""

import os
import shutil
import sqlite3
from contextlib import closing, suppress
from errno import ENOSPC
from itertools import count, product
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest

import afflux.store
import crashes
import pairwise
from afflux import Server, StoreError, rules
from afflux.aggregation.local_plane import LocalPlane, LocalRound
from afflux.aggregation.sharded_plane import ShardedPlane, ShardedRound
from afflux.selftest.digest import vectors
from afflux.store import segments
from afflux.store.commits import Commits
from afflux.store.disk_cache import DiskRows
from afflux.store.reader import locked_reader
from afflux.store.sharded_vectors import ShardedVectors
from afflux.store.stored_vectors import StoredVectors
from conftest import bits, check_error
from sharded_runs import CASES, SUPERBLOCK, D, Interrupts, check_stored_bits, contents_of, repeated

#: Of a store, whose params are not overwritten.
STORED = [case for case in CASES if case != "inplace"]
NOW = [("ca2fl, float16", 3), ("mf_ca2fl, rotated-4", 2), ("mf_ca2fl, affine-8", 1), ("fadas", 5), ("accumulate", 3)]
NOW += [("gsgm", 2), ("wkafl, two stages", 3), ("bfloat16 slots", 2)]
#: Three superblocks.
SIZE = 2 * SUPERBLOCK + 77


@pytest.fixture(scope="module")
def data():
    return vectors(3, 6, D)


@pytest.mark.parametrize(
    ("case", "shards"), [*NOW, *pairwise.soak_all([*{*product(STORED, (1, 2, 3, 5))}.difference(NOW)])]
)
def test_a_store_of_shards_has_the_bits_of_one_server(case, shards, data, tmp_path):
    check_stored_bits(case, lambda: ShardedPlane(shards), data, tmp_path / "store")


def stored(path, shards=2, rule=None, size=SIZE, **options):
    rule = rule or rules.ca2fl(buffer_size=2, codec="affine-4")
    options = {"num_clients": 9, "log": True, **options}
    store = {} if path is None else {"store": path}
    return Server(rule, np.ones(size, np.float32), plane=shards and ShardedPlane(shards), **store, **options)


def pushes(server, count):
    for _ in range(count):
        push(server)


def push(server, size=SIZE, version=None):
    """The next push: the same after the same joins."""
    vector = np.random.default_rng(server.joins).standard_normal(size, np.float32)
    client, last = server.joins * 3 % 5, max(0, server.version - server.joins % 2)
    version = last if version is None else version
    return server.push(client=client, version=version, **{server.rule.kind: vector})


def test_a_store_of_one_shard_is_one_without_shards(tmp_path):
    contents = []
    for path, shards in ((tmp_path / "one", None), (tmp_path / "shard", 1)):
        with stored(path, shards) as server:
            pushes(server, 5)
        with closing(sqlite3.connect(path / "index.sqlite")) as index:
            version = index.execute("PRAGMA user_version").fetchone()
            files = {str(file.relative_to(path)): file for file in path.rglob("*") if file.is_file()}
            own = {name: file.read_bytes() for name, file in files.items() if "sqlite" not in name and name != "lock"}
            contents.append((version, [*index.iterdump()], own))
    assert contents[0] == contents[1]
    for path, plane in ((tmp_path / "one", ShardedPlane(1)), (tmp_path / "shard", None)):
        Server.open(path, plane=plane).close()


@pytest.mark.parametrize(
    ("shards", "plane", "message"),
    [
        (3, None, r"in 3 shards: open it with plane=ShardedPlane\(3\)"),
        (3, ShardedPlane(2), r"in 3 shards: open it with plane=ShardedPlane\(3\)"),
        (None, ShardedPlane(2), "in one piece: open it without plane"),
    ],
)
def test_other_shards_are_refused(shards, plane, message, tmp_path):
    with stored(tmp_path / "store", shards) as server:
        push(server)
    before = {file: file.read_bytes() for file in tmp_path.rglob("*") if file.is_file() and "sqlite" not in file.name}
    check_error(message, Server.open, tmp_path / "store", plane=plane, error=StoreError)
    assert before == {file: file.read_bytes() for file in before}
    Server.open(tmp_path / "store", plane=shards and ShardedPlane(shards)).close()


def test_cuts_are_named_if_they_are_not_those_of_a_number(tmp_path):
    server = Server(rules.fedbuff(), np.ones(SIZE), plane=ShardedPlane(cuts=(2,)), store=tmp_path / "store")
    server.close()
    check_error(r"cuts=\[2\]", Server.open, tmp_path / "store", plane=ShardedPlane(2), error=StoreError)
    check_error(r"\[open\] plane is 3, must be a DataPlane", Server.open, tmp_path / "store", plane=3)


def test_all_parts_of_a_version_have_one_slot(tmp_path):
    """Also if their free slots are in different orders."""
    server = stored(tmp_path / "store")
    for k, plane in enumerate(server._aggregator.plane.planes):
        drafts = [plane.versions.take() for _ in range(3)]
        while drafts:
            del drafts[-k % 2 * (len(drafts) - 1)]
    pushes(server, 6)
    server.close()
    Server.open(tmp_path / "store", plane=ShardedPlane(2)).close()


def test_versions_that_a_checkpoint_keeps(tmp_path):
    """The server's own vectors may be written over while a caller has a copy: it is written to a slot again."""
    server = stored(tmp_path / "store", max_versions=5)
    first = server.pull()
    pushes(server, 4)
    params, second = first.params.copy(), server.pull()
    push(server), push(server)
    for _ in range(2):  # the second one finds them in their slots
        server.checkpoint(keep=[first, second])
        assert server.versions_held == 3
    for foreign in (params.copy(), None):
        check_error("keep: version 0 is not", server.checkpoint, keep=[type(first)(foreign, 0, None)])
    push(server), push(server)
    server.close()
    server = Server.open(tmp_path / "store", plane=ShardedPlane(2))
    assert [*server.retained_versions] == [0, 2]
    assert bits(server.retained_versions[0].params) == bits(params)
    assert bits(server.retained_versions[2].params) == bits(second.params)
    server.checkpoint(keep=server.retained_versions.values())
    server.close()


SHORT = SUPERBLOCK + 77
PUSHES = 11
CRASHES = {
    "rows": {"rule": rules.ca2fl(buffer_size=2, codec="affine-4")},
    "rows, every 2, power": {"rule": rules.afa_cs(buffer_size=2), "commit_every": 2, "durability": "power"},
    "states, every 3": {"rule": rules.fadas(buffer_size=2), "commit_every": 3},
    "vectors that wait": {"rule": rules.gsgm(buffer_size=2)},
    "accumulate": {"rule": rules.fedbuff(buffer_size=3), "accumulate": True},
}


def spoil(path):
    """Write over each slot that the last commit does not name: sweeps are torn there."""
    rng = np.random.default_rng(0)
    with locked_reader(path) as store:
        named = {"rows": {place.slot for _, place in store.index.rows_by_slot()} if store.codec else set()}
        for name, place in store.committed.vectors.items():
            named.setdefault(name.partition(":")[0], set()).add(place.slot)
        named["arrivals"] = {each.place.slot for each in store.committed.arrivals if each.place}
        for folder, array in store.segments.items():
            for slot in {*range(array.slots)} - named.get(folder.rpartition("/")[2], set()):
                array.write(slot, np.frombuffer(rng.bytes(array.slot_bytes), array.shape.dtype))


def run(server, seen=lambda server: None):
    """Push until PUSHES have joined, with a checkpoint on the way."""
    while server.joins < PUSHES:
        push(server, SHORT)
        if server.joins == 5 and server._store:
            server.checkpoint()
        seen(server)
    return server


def undisturbed(options):
    memory = {name: value for name, value in options.items() if name not in ("commit_every", "durability")}
    server = stored(None, None, size=SHORT, **memory)
    states = [contents_of(server)]
    run(server, lambda server: states.append(contents_of(server)))
    return states


@pytest.fixture
def folder():
    with TemporaryDirectory(dir=crashes.MEMORY) as path:
        yield Path(path)


#: Each point of the rounds between these joins is tried: of one without a commit and the next one with a commit; of two
#: without, the second of which has a free slot beside that of the last commit; in soak of four and a checkpoint.
@pytest.mark.parametrize(
    ("case", "first", "last"),
    [("rows, every 2, power", 4, 8), ("states, every 3", 7, 10), *pairwise.soak_all(product(CRASHES, [3], [10]))],
)
def test_a_crash_at_any_point_changes_no_bit(case, first, last, folder, monkeypatch):
    """Copies of the folder are what it leaves: before, amid and after sweeps, savings, transactions, publications."""
    options, copies = CRASHES[case], []
    path = folder / "store"

    def snap():
        copies.append(folder / f"crash{len(copies)}")
        shutil.copytree(path, copies[-1])

    def around(method):
        def call(*arguments, **named):
            snap()
            result = method(*arguments, **named)
            snap()
            return result

        return call

    states = undisturbed(options)
    server = stored(path, size=SHORT, **options)
    while server.joins < first:
        push(server, SHORT)
    server.close()  # then the slots of the last commit are known from the store alone
    server = Server.open(path, plane=ShardedPlane(2))
    with monkeypatch.context() as patch:
        saving = {StoredVectors: ("save", "flush", "set_committed"), Commits: ("write", "_write_lists")}
        for owner, names in {LocalRound: ("make", "publish"), **saving}.items():
            for name in names:
                patch.setattr(owner, name, around(getattr(owner, name)))
        while server.joins < last:
            push(server, SHORT)
            if server.joins == 4 and first < 4:
                server.checkpoint()
    server.close(checkpoint=False)
    joins = set()
    for copy in copies:
        spoil(copy)
        server = Server.open(copy, plane=ShardedPlane(2))
        joins.add(server.joins)
        assert contents_of(server) == states[server.joins], copy
        assert bits(run(server).params) == states[-1][1]["params"], copy
        server.close()
        shutil.rmtree(copy)
    assert len(copies) > 10
    assert len(joins) > 1 or first == 7


#: The calls by which a commit reaches the vectors, of the whole store and of its parts; and the transaction.
SAVING = "prepare_sweep", "record_sweep", "save", "flush", "set_committed", "params_place", "in_slot", "check", "detach"
CALLS = [
    *product((StoredVectors, ShardedVectors), SAVING),
    *product((LocalPlane, ShardedPlane), ("prepare",)),
    *product((LocalRound, ShardedRound), ("make", "publish", "release")),
    (ShardedVectors, "_drafts"),
    *product((DiskRows,), ("prepare", "record_sweep", "publish", "forget_checksums")),
    (Commits, "write"),
]


def disturbed(path, options, interrupts=None):
    """What a store has, each of whose server's calls is repeated after an interrupt, if it has not joined."""
    server = stored(path, size=SHORT, **options)
    if interrupts is not None:
        interrupts.calls = 0
    kept = []
    for i in range(7):
        while server.joins == i:
            with suppress(KeyboardInterrupt):
                push(server, SHORT, 0)
        if i in (2, 4):
            repeated(lambda: server.rule_vectors)  # waits for the step
            kept.append(repeated(server.pull))
    repeated(lambda: server.checkpoint({"a": "note"}, keep=kept[:1]))
    repeated(server.close)
    calls = None if interrupts is None else interrupts.stop()
    with Server.open(path, plane=ShardedPlane(2)) as server:
        versions = {version: bits(held.params) for version, held in server.retained_versions.items()}
        return (contents_of(server), server.notes, versions), calls


COMMITS = ["rows", "vectors that wait"]


@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("case", [*COMMITS, *pairwise.soak_all((case,) for case in CRASHES if case not in COMMITS)])
def test_each_call_of_a_commit_may_be_repeated_until_it_has_returned(case, after, folder, monkeypatch):
    (expected, _), step, names = disturbed(folder / "store", CRASHES[case]), 1 if pairwise.soaking else 9, set()
    for number in count(4 * after, step):
        with monkeypatch.context() as patch:
            interrupts = Interrupts(patch, CALLS, number, after)
            contents, calls = disturbed(folder / str(number), CRASHES[case], interrupts)
        assert contents == expected, number
        shutil.rmtree(folder / str(number))
        names |= interrupts.names
        if calls <= number:
            break
    unused = {"flush"} if CRASHES[case].get("durability") != "power" else set()
    assert names >= {name for _, name in CALLS[:-5]} - unused
    assert number > 80


def spoiled(path, name, slot, shard):
    """Change a byte of a vector in the last part of a shard; return the file."""
    (folder, *_) = sorted((path / f"shard-{shard}").glob(f"*/{name}"), reverse=True)
    with locked_reader(path) as store:
        array = store.segments[str(folder.relative_to(path))]
        vector = array.array(slot)
        vector.view(np.uint8)[-1] ^= 1
        array.write(slot, vector)
    return folder


@pytest.mark.parametrize("shard", [0, 1])
def test_damage_in_a_shard_is_found_and_repaired_where_that_is_possible(shard, tmp_path):
    path = tmp_path / "store"
    with stored(path, 2, rules.ca2fl(buffer_size=2, codec="affine-4")) as server:
        pushes(server, 5)
        rows = {client: bytes(server.rows.encoded(client)) for client in server.rows.client_ids}
    with locked_reader(path) as store:
        (client, place), *_ = store.index.rows_by_slot()
        vectors, (arrival,) = store.committed.vectors, store.committed.arrivals
    folder = spoiled(path, "rows", place.slot, shard)
    spoiled(path, "sum", vectors["sum"].slot, shard)
    lost = spoiled(path, "arrivals", arrival.place.slot, shard)
    (lost / "zarr.json").unlink()
    health = afflux.store.check(path)
    assert health.damaged == (client,)
    assert len(health.arrivals) == 1
    assert health.mendable
    assert any(f"{lost / 'zarr.json'}" in problem for problem in health.problems)
    check_error(f"client {client}'s row .*damaged", afflux.store.export, path, tmp_path / "rows.npz", error=StoreError)
    check_error(f"shard-{shard}/.*repair {path}", Server.open, path, plane=ShardedPlane(2), error=StoreError)
    repair = afflux.store.repair(path)
    assert (repair.dropped, len(repair.arrivals)) == ((client,), 1)
    assert afflux.store.check(path).sound
    with Server.open(path, plane=ShardedPlane(2)) as server:
        assert {each: bytes(server.rows.encoded(each)) for each in server.rows.client_ids} == {
            each: row for each, row in rows.items() if each != client
        }
        pushes(server, 4)
        (other, place), *_ = [(each, place) for each, place in rows_of(server) if each != client]
    folder = spoiled(path, "rows", place.slot, shard)
    with Server.open(path, plane=ShardedPlane(2)) as server:
        message = f"client {other}'s row is damaged: slot {place.slot} of {folder} .*repair {path}"
        with pytest.raises(StoreError, match=message):
            server.push(client=other, version=server.version, update=np.zeros(SIZE, np.float32))
        check_error(message, server.rows.encoded, other, error=StoreError)
    spoiled(path, "params", vectors_of(path)["params"].slot, shard)
    assert not afflux.store.check(path).mendable
    check_error("only a backup", Server.open, path, plane=ShardedPlane(2), error=StoreError)


def rows_of(server):
    return [*server._store._index.rows()]


def vectors_of(path):
    with locked_reader(path) as store:
        return store.committed.vectors


def test_a_shard_without_space_or_files(tmp_path, monkeypatch):
    """The round is not made, and is made later; a file that vanishes under a server is an error."""
    path = tmp_path / "store"
    server, expected = stored(path, shards=2), stored(None, None)
    allocate, full = segments._allocate, []

    def lacking(descriptor, size):
        if full and "/shard-1/" in os.readlink(f"/proc/self/fd/{descriptor}"):
            raise OSError(ENOSPC, "No space left on device")
        allocate(descriptor, size)

    monkeypatch.setattr(segments, "_allocate", lacking)
    full.append(True)
    push(server)
    check_error(f"no space for .*{path}/shard-1/.*/rows", push, server, error=StoreError)
    assert (server.version, server.joins) == (0, 1)
    full.clear()
    pushes(server, 5)
    pushes(expected, 6)
    assert contents_of(server) == contents_of(expected)
    assert bits(server.params) == bits(expected.params)
    for file in (path / "shard-1").glob("*/params/c/0/0"):
        file.unlink()
    check_error(f"{path}/shard-1/.*has vanished", server.pull, error=StoreError)
    server.close(checkpoint=False)
