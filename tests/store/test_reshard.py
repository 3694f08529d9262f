"""`afflux store reshard` changes the number of shards and no bit."""

import json
import os
import re
import shutil
import sqlite3
from contextlib import closing

import numpy as np
import pytest

import afflux.store
import pairwise
from afflux import Server, StoreError, rules
from afflux.aggregation.sharded_plane import ShardedPlane
from afflux.store import resharding as module
from afflux.store.reader import locked_reader
from commands import invoke
from conftest import bits, check_error, ready
from sharded_runs import CASES, SUPERBLOCK, contents_of

SIZE = 4 * SUPERBLOCK + 77
NOW = [("mf_ca2fl, rotated-4", (1, 3)), ("accumulate", (3, 1))]
MORE = [(case, numbers) for case in CASES if case != "inplace" for numbers in ((1, 2, 1), (2, 3), (5, 1))]


def plane(shards):
    return None if shards == 1 else ShardedPlane(shards)


def push(server):
    """The next push: the same after the same joins."""
    vector = np.random.default_rng(server.joins).standard_normal(SIZE, np.float32) * np.float32(2.0**-12)
    facts = {"client": server.joins * 3 % 5, "version": max(0, server.version - server.joins % 2)}
    server.push(**facts, **{server.rule.kind: vector})


@pytest.mark.parametrize(("case", "numbers"), [*NOW, *pairwise.soak_all(MORE)])
def test_no_bit_changes(case, numbers, tmp_path):
    """Amid a buffer, with an older version that a checkpoint has kept."""
    rule, options = CASES[case]
    vector = np.ones(SIZE, np.float32)
    path, expected = tmp_path / "store", Server(rule, vector, log=True, **options)
    server = Server(rule, vector, log=True, plane=plane(numbers[0]), store=path, **options)
    ready(server, vector), ready(expected, vector)
    for shards in (*numbers[1:], numbers[-1]):
        first = server.pull()
        for _ in range(4):
            push(server), push(expected)
        server.checkpoint(keep=[first])
        before, old = contents_of(server), bits(first.params)
        server.close()
        assert afflux.store.reshard(path, shards) == ((len(server._store.facts.get("cuts", ())) + 1) != shards)
        assert afflux.store.check(path).sound
        assert afflux.store.info(path).shards == shards
        assert [file.name for file in tmp_path.iterdir()] == ["store"]
        server = Server.open(path, plane=plane(shards))
        assert contents_of(server) == before == contents_of(expected)
        assert [bits(each.params) for each in server.retained_versions.values()] == [old]
    server.close()


def test_a_store_in_one_piece_again_has_the_index_of_one(tmp_path):
    indices = []
    for path, shards in ((tmp_path / "one", 1), (tmp_path / "shards", 3)):
        rule = rules.ca2fl(buffer_size=2, codec="affine-4")
        with Server(rule, np.ones(SIZE), num_clients=9, plane=plane(shards), store=path) as server:
            for _ in range(5):
                push(server)
        assert afflux.store.reshard(path, 1) == (shards == 3)
        with closing(sqlite3.connect(path / "index.sqlite")) as index:
            facts = {name: json.loads(text) for name, text in index.execute("SELECT * FROM facts WHERE name != 'crc'")}
            rows = index.execute("SELECT * FROM rows ORDER BY client").fetchall()
            pragmas = [index.execute(f"PRAGMA {name}").fetchone() for name in ("user_version", "journal_mode")]
        indices.append((facts, rows, pragmas))
    for each, other in zip(*indices, strict=True):
        assert each == other


@pytest.fixture
def store(tmp_path):
    path = tmp_path / "store"
    with Server(rules.ca2fl(buffer_size=2), np.ones(SIZE, np.float32), num_clients=9, store=path) as server:
        for _ in range(5):
            push(server)
    return path


def files(path):
    return {file: file.read_bytes() for file in path.parent.rglob("*") if file.is_file() and "-shm" not in file.name}


@pytest.mark.parametrize("name", ["params", "rows"])
def test_a_damaged_store_is_refused_and_stays(name, store):
    with locked_reader(store) as reader:
        place = reader.committed.vectors["params"] if name == "params" else next(reader.index.rows_by_slot())[1]
        array = reader.segments[name]
        vector = array.array(place.slot)
        vector.view(np.uint8)[-1] ^= 1
        array.write(place.slot, vector)
    before = files(store)
    with pytest.raises(StoreError, match="only a backup" if name == "params" else "client .*row is damaged"):
        afflux.store.reshard(store, 2)
    assert files(store) == before
    check_error("shards is 0, must be an int of at least 1", afflux.store.reshard, store, 0)


def test_free_space_is_asked_for_first(store, monkeypatch):
    before, usage = files(store), shutil.disk_usage(store)
    with monkeypatch.context() as patch:
        patch.setattr(module.shutil, "disk_usage", lambda path: usage._replace(free=4097))
        patch.setattr(module, "make_arrays", None)  # nothing is written
        with pytest.raises(StoreError, match=r"needs [\d,]+ bytes, and 4,097 are free") as error:
            afflux.store.reshard(store, 3)
    assert files(store) == before
    assert [file.name for file in store.parent.iterdir()] == ["store"]
    needed = int(re.search(r"needs ([\d,]+) bytes", str(error.value))[1].replace(",", ""))
    monkeypatch.setattr(module.shutil, "disk_usage", lambda path: usage._replace(free=needed))
    assert afflux.store.reshard(store, 3)
    assert 0.5 * needed < sum(file.stat().st_size for file in store.rglob("*")) <= needed


@pytest.mark.parametrize("atomic", [True, False])
def test_a_store_is_there_until_the_new_one_takes_its_place(atomic, store, monkeypatch):
    """Also where the system cannot exchange two folders."""
    before, seen = files(store), []
    if not atomic:
        monkeypatch.setattr(module.ctypes, "CDLL", lambda *arguments, **options: object())
    exchange = module._exchange

    def looked(path, new):
        seen.append({file: data for file, data in files(store).items() if new not in file.parents})
        shutil.copytree(new, store.with_name("copy"))
        exchange(path, new)

    monkeypatch.setattr(module, "_exchange", looked)
    assert afflux.store.reshard(store, 2)
    assert seen == [before]
    assert {file.name for file in store.parent.iterdir()} == {"store", "copy"}
    for path in (store, store.with_name("copy")):
        assert afflux.store.check(path).sound
    assert os.stat(store).st_mode == os.stat(store.parent / "store").st_mode


def test_the_command(store):
    assert "has 3 shards" in invoke("store", "reshard", store, "--shards", 3).stdout
    assert "already" in invoke("store", "reshard", store, "--shards", 3).stdout
