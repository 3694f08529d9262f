"""The cache of places of rows: it agrees with the index, whatever threads do."""

from contextlib import closing
from threading import Thread
from time import monotonic

import numpy as np
import pytest

from afflux import Server
from afflux.rules import ca2fl
from afflux.store import check
from afflux.store.commits import Transaction
from afflux.store.index import Index, RecentPlaces
from afflux.store.index_entries import ListUpdate
from afflux.store.schema import make_index
from afflux.store.segments import Place
from conftest import raising

FACTS = {"order_version": 1, "server": {}}


def place(slot, rank=0):
    return Place(slot, bytes(4), rank)


def transaction(rows, **others):
    lists = {"log": ListUpdate(0, []), "tasks": ListUpdate(0, [])}
    return Transaction({}, None, None, {"params": place(0)}, [], rows, lists, **others)


@pytest.fixture
def index(tmp_path):
    path = tmp_path / "index.sqlite"
    make_index(path, FACTS)
    with closing(Index(path)) as index:
        yield index


def test_the_oldest_are_forgotten():
    recent = RecentPlaces(most_bytes=4 * 304)
    for client in range(9):
        recent.add(client, place(client), 0)
    assert [recent.get(client) for client in range(9)] == ["unknown"] * 5 + [place(client) for client in range(5, 9)]
    recent.add("long checksums", Place(1, bytes(4 * 304), 0), 0)
    assert [recent.get(client) for client in range(9)] == ["unknown"] * 9
    assert recent.get("long checksums") != "unknown"  # one always has room
    recent.add("a" * 1000, None, 0)  # texts count too
    recent.add("b" * 1000, None, 0)
    assert recent.get("a" * 1000) == "unknown"
    assert recent.get("b" * 1000) is None


def test_a_commit_replaces_what_is_known(index):
    assert index.row(7) is None
    index.commit(transaction({7: place(3, rank=0), "7": place(4, rank=1)}))
    assert (index.row(7), index.row("7")) == (place(3, rank=0), place(4, rank=1))
    index.commit(transaction({7: place(5, rank=-1)}))
    assert (index.row(7), index.row("7")) == (place(5, rank=0), place(4, rank=1))  # the rank stays
    index.commit(transaction({8: place(6, rank=0)}, delete_rows=True))
    assert (index.row(7), index.row("7"), index.row(8)) == (None, None, place(6, rank=0))


def test_the_rank_of_a_client_that_is_not_known_is_read(index):
    index.commit(transaction({7: place(3, rank=2)}))
    index._recent = RecentPlaces()
    index.commit(transaction({7: place(5, rank=-1)}))
    assert index.row(7) == place(5, rank=2)


@pytest.mark.parametrize("delete_rows", [False, True])
def test_a_read_amid_a_commit_leaves_nothing_old(index, monkeypatch, delete_rows):
    index.commit(transaction({7: place(3, rank=0)}))
    fill, found = type(index._commits)._fill, []

    def reads(self, *arguments):
        tables = fill(self, *arguments)
        found.append(index.row(7))  # as another thread would: not committed yet
        return tables

    monkeypatch.setattr(type(index._commits), "_fill", reads)
    rows = {8: place(4, rank=0)} if delete_rows else {7: place(4, rank=-1)}
    index.commit(transaction(rows, delete_rows=delete_rows))
    assert found == [place(3, rank=0)]
    assert index.row(7) == (None if delete_rows else place(4, rank=0))


@pytest.mark.parametrize("there", [True, False])
@pytest.mark.parametrize("read", ["before", "amid"])
def test_a_read_that_a_commit_overtakes_leaves_nothing_old(index, monkeypatch, read, there):
    """The thread that has read adds what it has found after the commit has ended."""
    if there:
        index.commit(transaction({7: place(3, rank=0)}))
    index._recent.begin_commit({7: place(0)}, others=False)  # a commit that has failed: the entry is not known
    add, late = type(index._recent).add, []
    monkeypatch.setattr(type(index._recent), "add", lambda self, *found: late.append(found))
    new = transaction({7: place(4, rank=-1 if there else 0)})
    if read == "before":
        index.row(7)
    else:
        fill = type(index._commits)._fill

        def reads(self, *arguments):
            tables = fill(self, *arguments)
            index.row(7)
            return tables

        monkeypatch.setattr(type(index._commits), "_fill", reads)
    index.commit(new)
    assert len(late) == 1
    assert late[0][1] == (place(3, rank=0) if there else None)
    add(index._recent, *late[0])
    assert index.row(7) == place(4, rank=0)


@pytest.mark.parametrize("interrupted", ["write", "end_commit"])
def test_an_interrupt_leaves_the_last_commit_known(index, monkeypatch, interrupted):
    """Whether the transaction was made or not: missing places are read."""
    index.commit(transaction({7: place(3, rank=0)}))
    owner = index._commits if interrupted == "write" else index._recent
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(owner, interrupted, raising(KeyboardInterrupt))
        index.commit(transaction({7: place(4, rank=-1)}))
    assert index.row(7) == place(3 if interrupted == "write" else 4, rank=0)
    index.commit(transaction({7: place(5, rank=-1)}))
    assert index.row(7) == place(5, rank=0)


def test_a_reader_remembers_nothing(index):
    index.commit(transaction({7: place(3, rank=0)}))
    with closing(Index(index.path, read_only=True)) as reader:
        assert reader.row(7) == place(3, rank=0)
        index.commit(transaction({7: place(4, rank=-1)}))
        assert reader.row(7) == place(4, rank=0)


def test_a_list_may_become_shorter(index):
    for start, entries, expected in ((0, [1, 2, 3], [1, 2, 3]), (3, [4], [1, 2, 3, 4]), (1, [], [1]), (1, [5], [1, 5])):
        lists = {"log": ListUpdate(start, entries), "tasks": ListUpdate(0, [])}
        index.commit(Transaction({}, None, None, {"params": place(0)}, [], {}, lists))
        assert index._list("log") == expected


def test_statements_that_change_nothing_are_left_out(index):
    said = []
    index._writer.set_trace_callback(said.append)
    index.commit(transaction({7: place(3, rank=0)}))
    assert any("DELETE FROM vectors" in line for line in said)
    said.clear()
    index.commit(transaction({7: place(4, rank=-1)}))
    assert [line.split(" VALUES")[0] for line in said] == [
        "BEGIN IMMEDIATE",
        "INSERT INTO rows",
        "INSERT OR REPLACE INTO vectors",
        "INSERT OR REPLACE INTO state",
        "COMMIT",
    ]


def test_places_agree_with_the_index_while_threads_push(tmp_path):
    """Few clients, which push again at once: their rows move while others read where they are."""
    rule, clients, threads = ca2fl(buffer_size=2), 8, 4
    server = Server(rule, np.zeros(300, np.float32), num_clients=clients, store=tmp_path / "store", num_threads=1)
    end, failures = monotonic() + 1.5, []

    def push(first):
        while monotonic() < end and not failures:
            for client in range(first, clients, threads):
                try:
                    server.push(client=client, update=np.full(300, client + 1.0), version=server.version)
                except Exception as error:
                    failures.append(error)

    pushing = [Thread(target=push, args=(first,)) for first in range(threads)]
    for thread in pushing:
        thread.start()
    for thread in pushing:
        thread.join()
    assert not failures
    index = server.rows._index
    for client in range(clients):
        known = index.row(client)
        index._recent = RecentPlaces()
        assert index.row(client) == known
    assert len({index.row(client).slot for client in range(clients)}) == clients
    server.close()
    assert not check(tmp_path / "store").problems
