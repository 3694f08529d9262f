"""A forged store, with checksums that agree: an error within a second, or a server that works."""

import json
import os
import shutil
import signal
import sqlite3
import time
from contextlib import closing
from dataclasses import replace

import pytest

from afflux import Server, StoreError, store
from afflux.rules import fedbuff
from conftest import FORKING, check_error, check_raises
from forged import DEEP, forge_fact, forge_list, forge_row, forge_state, index
from hostile_stores import BASES, GOOD, MODEL, STATEMENTS, make_bases, many, outcome
from own_parts import Says
from pairwise import soak_all

pytestmark = FORKING


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    return make_bases(tmp_path_factory.mktemp("bases"))


@pytest.fixture
def path(bases, tmp_path):
    return shutil.copytree(bases / "ca2fl", tmp_path / "store")


@pytest.fixture(autouse=True)
def in_seconds():
    """Ends a test that hangs, and fails one that takes long; nothing here reads much."""
    signal.alarm(120)
    begin = time.process_time()
    yield
    signal.alarm(0)
    assert time.process_time() - begin < 10


def refused(path, message="", reading=True):
    """Whatever looks into the store is refused, for this reason."""
    calls = [lambda: Server.open(path)] + [lambda: store.info(path), lambda: store.check(path)] * reading
    for call in calls:
        check_error(message, call, error=StoreError)


@pytest.mark.parametrize("piece", [*range(5), *soak_all((piece,) for piece in range(5, 10))])
@pytest.mark.parametrize("name", BASES)
def test_random_hostility(name, piece, bases, tmp_path):
    signal.alarm(300)
    for seed in range(1_000_000 + piece * 6, 1_000_000 + piece * 6 + 6):
        how, what = outcome(bases / name, tmp_path / str(seed), seed)
        assert what in GOOD, f"seed {seed}: {how}"


def test_hostile_stores_are_counted_and_go_on_where_they_stopped(tmp_path):
    signal.alarm(300)
    file = tmp_path / "hostile.json"
    for count in (3, 5):
        many(count, file)
        assert sum(json.loads(file.read_text()).values()) == count


OPTIONS = [
    ("commits", {"commit_every": 0}),
    ("commits", {"commit_every": "x"}),
    ("commits", {"durability": "never"}),
    ("options", {"max_staleness": "x"}),
    ("options", {"max_staleness": -1}),
    ("options", {"log": "yes"}),
    ("server", {"d": "x"}),
    ("server", {"d": 0}),
    ("server", {"d": 2**62}),
    ("server", {"d": True}),
    ("server", {"num_clients": -3}),
    ("server", {"rule_vectors": ["../../victim"]}),
    ("server", {"codec": "../../victim"}),
    ("server", {"codec": None}),
    ("server", {"layout": {"fields": DEEP}}),
    ("shapes", {"../../victim": ["float32", 16, 4]}),
    ("shapes", {"params": ["object", 32, 4]}),
    ("shapes", {"params": ["float32", 32, 10**9]}),
    ("shapes", {"params": ["float32", 2**40, 4]}),
    ("shapes", {"arrivals": [DEEP]}),
]


@pytest.mark.parametrize(("name", "changes"), OPTIONS, ids=lambda value: str(value)[:50].replace("\0", ""))
def test_facts_that_cannot_be(name, changes, path):
    forge_fact(path, name, lambda fact: fact | changes)
    refused(path, r"index\.sqlite is damaged: ")


def test_an_option_that_is_not_known(path):
    """It is not read: afflux 0.1.0 had more of them."""
    forge_fact(path, "options", lambda options: options | {"evil": 1})
    Server.open(path).close()
    forge_fact(path, "options", lambda options: options | {"evil": True})
    refused(path, "has the option evil=True, which servers no longer have")


def test_a_fact_that_is_missing_or_too_many(path):
    forge_fact(path, "shapes", lambda shapes: {name: shapes[name] for name in shapes if name != "sum"})
    refused(path, "the arrays are")


def meta(**changes):
    return lambda found: found["meta"].update(changes)


STATES = {
    "rows": meta(rows=[5, 2**40, []]),
    "free": meta(rows=[5, 7, [0, 0]]),
    "negative": meta(rows=[-1, 0, []]),
    "joins": meta(joins=2**63),
    "version": meta(version="1"),
    "largest": meta(largest_row=None),
    "raw": meta(raw="x"),
    "asked": meta(asked={}),
    "deep": meta(next_rule=DEEP),
    "unknown": meta(evil=1),
    "notes": lambda found: found.update(notes=DEEP),
    "vector": lambda found: found["vectors"].pop(),
    "name": lambda found: found["vectors"].append(["params:../../victim", 0, b""]),
    "slot": lambda found: found["vectors"][0].__setitem__(1, -1),
    "record": lambda found: found["arrivals"][0].__setitem__(4, DEEP),
}


@pytest.mark.parametrize("change", STATES.values(), ids=STATES)
def test_states_that_cannot_be(change, path):
    forge_state(path, change)
    refused(path, r"index\.sqlite is damaged: ")


@pytest.mark.parametrize("buffers", [None, b"", b"123", bytes(8 * 5)])
def test_buffers_of_another_size(buffers, path):
    forge_state(path, lambda found: found.update(buffers=buffers))
    refused(path, "is damaged", reading=False)


@pytest.mark.parametrize("table", ["tasks", "log", "passed"])
@pytest.mark.parametrize("entry", [DEEP, {"evil": 1}, [], ["open", "task", [], 1, True, None], 2**70])
def test_entries_of_lists(table, entry, bases, tmp_path):
    base = {"tasks": "ca2fl", "log": "mf_ca2fl", "passed": "gsgm"}[table]
    here = shutil.copytree(bases / base, tmp_path / "store")
    forge_list(here, table, lambda entries: [*entries, entry])
    check_raises(StoreError, Server.open, here)


@pytest.mark.parametrize(
    "values", [{"slot": -5}, {"slot": 2**40}, {"place": -1}, {"place": 2**50}, {"client": 1.5}, {"client": b"evil"}]
)
def test_entries_of_rows(values, path):
    forge_row(path, 1, values)
    health = store.check(path)
    assert health.problems
    with pytest.raises(StoreError):
        server = Server.open(path)
        try:
            server.rows.row(1)
            assert server.rows.client_ids is None
        finally:
            server.close(checkpoint=False)


@pytest.mark.parametrize("statement", STATEMENTS[:7])
def test_a_schema_of_ones_own(statement, path):
    with index(path) as connection:
        connection.executescript(statement)
    before = (path / "index.sqlite").read_bytes()
    refused(path, "is not an index of afflux: its schema differs")
    assert (path / "index.sqlite").read_bytes() == before, "no trigger has run, nothing was written"


def test_a_rollback_journal_is_not_played_back(path, tmp_path):
    """It may name another file, which SQLite deletes when it has played the journal back."""
    victim = tmp_path / "victim"
    victim.write_bytes(b"precious")
    with closing(sqlite3.connect(path / "index.sqlite", isolation_level=None)) as connection:
        connection.execute("PRAGMA journal_mode = DELETE")
        connection.execute("BEGIN")
        connection.execute("UPDATE facts SET value = 'x'")
        journal = (path / "index.sqlite-journal").read_bytes()
        connection.execute("ROLLBACK")
    (path / "index.sqlite-journal").write_bytes(journal)
    before = (path / "index.sqlite").read_bytes()
    refused(path, "index.sqlite-journal is not a file of a store")
    assert (path / "index.sqlite").read_bytes() == before
    assert victim.read_bytes() == b"precious"


def test_a_table_that_holds_one_page_many_times(path):
    """Each page of the list refers to the same leaf: reading ends at the first entry that stands there again."""
    with index(path) as connection:
        connection.execute("DELETE FROM tasks")
        connection.executemany("INSERT INTO tasks VALUES (?, ?)", [(i, "x" * 900) for i in range(4000)])
        (root,) = connection.execute("SELECT rootpage FROM sqlite_schema WHERE name = 'tasks'").fetchone()
        connection.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        (size,) = connection.execute("PRAGMA page_size").fetchone()
    content = bytearray((path / "index.sqlite").read_bytes())
    begin = (root - 1) * size
    assert content[begin] == 5  # an inner page of a table
    cells = int.from_bytes(content[begin + 3 : begin + 5], "big")
    first = begin + int.from_bytes(content[begin + 12 : begin + 14], "big")
    for i in range(cells):
        cell = begin + int.from_bytes(content[begin + 12 + 2 * i : begin + 14 + 2 * i], "big")
        content[cell : cell + 4] = content[first : first + 4]
    (path / "index.sqlite").write_bytes(content)
    refused(path, "tasks|malformed")


def test_a_huge_zarr_json(path):
    os.truncate(path / "params/zarr.json", 1 << 40)
    check_error("it has more than 1048576 bytes", Server.open, path, error=StoreError)


def test_rule_vectors_that_name_no_folder(tmp_path):
    """A folder of the store is called after each."""
    rule = replace(fedbuff(buffer_size=2), weigh=Says(None, rule_vectors=("../../victim",)))
    check_error(r"rule vector '../../victim'", Server, rule, MODEL, store=tmp_path / "a/b/store", error=StoreError)
    assert not (tmp_path / "victim").exists()
