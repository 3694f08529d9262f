"""What a commit holds, when a push is safe, and which slots and checksums go with it."""

import itertools
import json
import shutil
import signal
import subprocess
import sys
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

from afflux import Server, StoreError
from afflux.rules import ca2fl, fedbuff
from afflux.server.inputs import InputAdapter
from afflux.store import check, info
from afflux.store.disk_cache import DiskRows
from afflux.store.index import Index
from afflux.store.segments import Segments
from conftest import bits, check_error, push_all
from held_up import start
from inside import index_of, store_of
from own_parts import Says
from stores import CLIENTS, M, made, same, some_pushes


@pytest.mark.parametrize("codec", [None, "affine-4", "rotated-2"])
@pytest.mark.parametrize("commit_every", [1, 2, 5, None])
@pytest.mark.parametrize("durability", ["process", "power"])
def test_commits_now_and_then(commit_every, durability, codec, tmp_path):
    settings = {"commit_every": commit_every, "durability": durability}
    there, here = made("ca2fl", 300, tmp_path / "store", codec=codec, **settings), made("ca2fl", 300, codec=codec)
    for count in (20, 3, 1, 30):
        for server in (there, here):
            some_pushes(server, 300, count)
        same(there, here)
        there.close()
        there = Server.open(tmp_path / "store", here.rule, **settings)
        same(there, here)


def test_receipts_say_when_a_push_is_safe(tmp_path):
    def durable(**settings):
        server = made("fedbuff", 10, tmp_path / str(settings), **settings)
        return [server.push(client=i, update=np.ones(10), version=0).durable for i in range(8)]

    assert durable() == [1, 1, 1, 2, 2, 2, 3, 3]
    assert durable(commit_every=2) == [2] * 6 + [4] * 2
    assert durable(commit_every=None) == [None] * 8
    assert made("fedbuff", 10).push(client=1, update=np.ones(10), version=0).durable is None


#: Makes stores with 1 to 8 pushes, one of them with a checkpoint, and is killed.
KILLED = """
import json, os, signal, sys
from pathlib import Path
import numpy as np
from afflux import Server
from afflux.rules import fedbuff
servers, receipts = [], {}
for commit_every in (1, 2, None):
    for count in range(1, 9):
        path = Path(sys.argv[1]) / f"{commit_every}-{count}"
        servers.append(Server(fedbuff(buffer_size=3), np.zeros(10), store=path, commit_every=commit_every))
        each = [servers[-1].push(client=i, update=np.full(10, i + 1.0), version=0) for i in range(count)]
        if count == 5:
            servers[-1].checkpoint()
            each.append(servers[-1].push(client=5, update=np.full(10, 6.0), version=0))
        receipts[path.name] = [receipt.durable for receipt in each]
print(json.dumps(receipts), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="sends SIGKILL")
def test_after_a_kill_the_store_has_the_pushes_whose_receipts_say_so(tmp_path):
    command = [sys.executable, "-c", KILLED, str(tmp_path)]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    safe = 0
    for name, durable in json.loads(ended.stdout).items():
        with Server.open(tmp_path / name) as server:
            for number, version in enumerate(durable):
                held = number < server.joins
                assert held or version is None or version > server.version, (name, number)
                safe += version is not None and version <= server.version
            twin = Server(fedbuff(buffer_size=3), np.zeros(10))
            push_all(twin, range(server.joins), lambda client: np.full(10, client + 1.0), version=0)
            assert (server.version, server.arrivals_waiting) == (twin.version, twin.arrivals_waiting)
            assert bits(server.params) == bits(twin.params)
    assert safe > 20


def test_how_safe_commits_are_is_kept(tmp_path, monkeypatch):
    """What is given anew counts at once, and is kept with the next commit."""
    path = tmp_path / "store"

    def found(**given):
        server = Server.open(path, **given)
        durable = server.push(client=1, update=np.ones(10), version=server.version).durable
        (synchronous,) = index_of(server)._writer.execute("PRAGMA synchronous").fetchone()
        return server, (durable, {1: "process", 2: "power"}[synchronous])

    made("fedbuff", 10, path, durability="power", commit_every=3).close()
    server, how = found()
    assert how == (3, "power")
    server.close(checkpoint=False)
    server, how = found(durability="process", commit_every=None)
    assert how == (None, "process")
    server.close(checkpoint=False)  # no commit, nothing is kept
    server, how = found(commit_every=np.int64(5))
    assert how == (5, "power")
    server.close()
    server, how = found()
    assert how == (5, "power")
    server.checkpoint()
    assert (info(path).durability, info(path).commit_every) == ("power", 5)
    server.close()
    server, _ = found(durability="process", commit_every=None)
    written, commit = [], Index.commit
    with monkeypatch.context() as patch:
        patch.setattr(Index, "commit", lambda self, change: (written.append([*change.facts]), commit(self, change)))
        server.checkpoint()
        server.close()
    assert written == [["commits"], []]
    server, how = found()
    assert how == (None, "process")
    server.close()
    for options, message in (({"commit_every": "never"}, "commit_every is 'never'"), ({"durability": ""}, "is ''")):
        check_error(message, Server.open, path, **options)


def test_what_is_not_committed_is_gone_and_what_a_checkpoint_holds_is_not(tmp_path):
    path = tmp_path / "store"
    server = made("fedbuff", 10, path, commit_every=2)
    some_pushes(server, 10, 13)  # four rounds and one arrival
    store_of(server).close()  # as if the process had ended
    server = Server.open(path, server.rule, commit_every=2)
    assert (server.version, server.joins, server.arrivals_waiting) == (4, 12, 0)
    some_pushes(server, 10, 4)
    server.checkpoint()
    server.push(client=0, update=np.ones(10), version=server.version)
    store_of(server).close()
    server = Server.open(path, server.rule)
    assert (server.version, server.joins, server.arrivals_waiting) == (5, 16, 1)


def test_no_client_is_missing_while_another_thread_commits(tmp_path, monkeypatch):
    with made("ca2fl", 10, tmp_path / "store", commit_every=2) as server:

        def make_round():
            some_pushes(server, 10, 1)
            server.flush()

        make_round()
        clients, read = server.clients, Index.rows

        def rows(index):
            monkeypatch.setattr(Index, "rows", read)
            entries = [*index.rows()]
            make_round()  # as another thread does
            return entries

        monkeypatch.setattr(Index, "rows", rows)
        assert len(clients) == 1
        assert server.clients >= clients
        assert server.version == 2


def test_notes_and_kept_versions_come_back(tmp_path):
    server = made("fedbuff", 300, tmp_path / "store", commit_every=None)
    held = {}
    for _ in range(4):
        some_pushes(server, 300, M)
        held[server.version] = server.pull()
    server.checkpoint({"events": [1, 2.5, "three"]}, keep=[held[1], held[3]])
    expected = {version: bits(held[version].params) for version in (1, 3)}
    store_of(server).close()
    again = Server.open(tmp_path / "store", server.rule, commit_every=None)
    assert again.notes == {"events": [1, 2.5, "three"]}
    for _ in range(5):  # what is kept is not written over
        some_pushes(again, 300, M)
    again.close()
    again = Server.open(tmp_path / "store", server.rule)
    assert {version: bits(pulled.params) for version, pulled in again.retained_versions.items()} == expected
    assert again.notes == {"events": [1, 2.5, "three"]}


def test_a_checkpoint_that_is_interrupted_after_its_transaction_counts(tmp_path, monkeypatch):
    """What comes next must not be written over what is committed."""
    path = tmp_path / "store"
    server = made("ca2fl", 300, path, commit_every=None)
    some_pushes(server, 300, 10)
    index = index_of(server)
    commit = index.commit

    def interrupted(change):
        commit(change)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(index, "commit", interrupted)
        server.checkpoint("mine")
    assert server.notes == "mine"
    expected = server.state_dict()
    some_pushes(server, 300, 9)  # rounds that are not committed
    store_of(server).close()
    again = Server.open(path, server.rule)
    assert (again.notes, again.state_dict()["meta"]) == ("mine", expected["meta"])
    for client in again.rows.client_ids:
        again.rows.row(client)


def test_clients_are_told_once_amid_a_commit(tmp_path, monkeypatch):
    """A view of the rows that a caller keeps."""
    server = made("ca2fl", 30, tmp_path / "store", commit_every=2)
    push_all(server, range(5), np.ones(30))
    index, rows, seen = index_of(server), server.rows, []
    commit = index.commit

    def told(change):
        seen.append(rows.client_ids)
        commit(change)
        seen.append(rows.client_ids)

    monkeypatch.setattr(index, "commit", told)
    server.push(client=5, update=np.ones(30), version=server.version)
    assert (server.version, seen) == (2, [[0, 1, 2]] * 2)
    assert rows.client_ids == list(range(6))


def test_sqlite_is_asked_for_no_row_twice(tmp_path, monkeypatch):
    """Places that a commit writes are known from then on."""
    asked, read = [], Index._read

    def noted(self, statement, values=()):
        if "FROM rows WHERE" in statement:
            asked.extend(values)
        return read(self, statement, values)

    monkeypatch.setattr(Index, "_read", noted)
    path = tmp_path / "store"
    there, here = made("ca2fl", 300, path), made("ca2fl", 300)
    for reopened in (False, True):
        if reopened:
            there.close()
            there = Server.open(path)
        for r in range(5):
            for client in range(M):
                for server in (there, here):
                    server.push(client=client, update=np.full(300, r + client, np.float32), version=server.version)
        assert asked == [*range(M)]
        asked.clear()
    same(there, here)


def test_a_row_that_a_commit_moves_while_its_client_pushes(tmp_path, monkeypatch):
    there, here = made("ca2fl", 300, tmp_path / "store"), made("ca2fl", 300)
    ingest = InputAdapter.ingest
    late = []

    def pushes(server, first, *clients):
        push_all(server, clients, lambda client: np.full(300, first + client, np.float32), version=1)

    def held_up(self, *arguments):
        if late:
            start(partial(pushes, there, *late.pop())).result(600)
        return ingest(self, *arguments)

    for server in (there, here):
        push_all(server, range(M), lambda client: np.full(300, client + 1, np.float32), version=0)
    monkeypatch.setattr(InputAdapter, "ingest", held_up)
    late.append((10, 0, 1, 2))
    pushes(there, 20, 1)
    pushes(here, 10, 0, 1, 2)
    pushes(here, 20, 1)
    for server in (there, here):
        pushes(server, 30, 0, 2)
        assert server.version == 3
    same(there, here)


def test_rows_that_a_round_reads_and_writes_do_not_use_up_slots(tmp_path, mapped):
    """Without a commit between the rounds each has two, in turn; a second arrival is rejected, and reads its row."""
    rule, path = replace(ca2fl(buffer_size=2), weigh=Says(np.array([1.0, 0.0]))), tmp_path / "store"
    there, here = (
        Server(rule, np.ones(300), num_clients=CLIENTS, duplicates="both", **to)
        for to in ({"store": path, "commit_every": 4}, {})
    )
    for k in range(22):
        for server in (there, here):
            server.push(client=0, update=np.full(300, k, np.float32), version=server.version)
        rows = store_of(there).rows
        counts, held = rows.counts, [*rows.slots.values()]
        assert counts.high <= 3
        assert len({*held, *counts.free, *counts.retired}) == len([*held, *counts.free, *counts.retired])
        same(there, here)
    assert there.version == 11
    there.close()
    assert check(path).sound


def sound_at(path, to):
    """What a process that was ended here would leave: every checksum that is committed is that of what lies there."""
    found = check(shutil.copytree(path, to))
    assert found.sound, found.problems


@pytest.mark.parametrize("commit_every", [1, 4])
def test_checksums_of_a_round_that_could_not_be_kept_at_first(commit_every, tmp_path, mapped, monkeypatch):
    """It is kept later, of the same sweep: a checksum of what a row was before, or of another row that had its memory,
    would show.
    """
    path, commits, calls, records = tmp_path / "store", [], itertools.count(1), itertools.count(1)
    there, here = (
        made("ca2fl", 5000, max_staleness=None, **to) for to in ({"store": path, "commit_every": commit_every}, {})
    )
    write, record, commit = Segments.write, DiskRows.record_sweep, Index.commit

    def may_fail(segments, slot, array):
        if next(calls) % 7 == 0:
            raise StoreError("[store] cannot write: for once")
        write(segments, slot, array)

    def may_fail_later(rows, *arguments):  # rows in mapped files are not written again
        record(rows, *arguments)
        if next(records) % 3 == 1:  # never when it is repeated: that would be another push's error
            raise StoreError("[store] cannot write: after the rows")

    def looked_at(index, change):
        commit(index, change)
        commits.append(path)
        sound_at(path, tmp_path / str(len(commits)))

    if there.rows.memory.segments.mapped:
        monkeypatch.setattr(DiskRows, "record_sweep", may_fail_later)
    else:
        monkeypatch.setattr(Segments, "write", may_fail)
    monkeypatch.setattr(Index, "commit", looked_at)
    failed = 0
    for k in range(40):
        for server in (there, here):
            vector = np.random.default_rng(k).standard_normal(5000).astype(np.float32)
            before = server.joins
            while server.joins == before:
                try:
                    server.push(client=k % CLIENTS, update=vector, version=0)
                except StoreError:
                    failed += 1
    monkeypatch.setattr(Segments, "write", write)
    monkeypatch.setattr(DiskRows, "record_sweep", record)
    there.checkpoint()
    assert failed > 5
    assert len(commits) > 12 // commit_every
    same(there, here)


def test_what_was_not_flushed_is_as_soon_as_that_is_asked_for(tmp_path, monkeypatch):
    """A power cut must not take rows that an earlier commit without flushes refers to."""
    server = made("ca2fl", 30, tmp_path / "store")
    some_pushes(server, 30, 2 * M)
    server.close()
    flushed = set()
    flush = Segments.flush

    def noted(self, slots):
        flushed.add(self.folder.name)
        flush(self, slots)

    monkeypatch.setattr(Segments, "flush", noted)
    Server.open(tmp_path / "store", server.rule).close()
    assert not flushed
    for expected in ({"params", "rows", "sum", "arrivals"}, set()):
        flushed.clear()
        server = Server.open(tmp_path / "store", server.rule, durability="power")
        assert flushed == expected
        server.close()
