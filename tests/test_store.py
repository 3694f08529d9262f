"""A store holds what a server without one has in memory, bit for bit, and any Zarr tool reads it."""

import itertools
import re
import shutil
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zarr

import afflux.store.folder
import rows as reference
from afflux import AffluxError, Server, StoreError, UnavailableError, codecs, replay
from afflux.rules import RULES, ca2fl, fedbuff, wkafl
from afflux.store import check
from afflux.store.disk import DiskRows
from afflux.store.index import Index
from afflux.store.segments import Segments, shape_of
from conftest import FORKS, bits, ready

pytestmark = pytest.mark.filterwarnings(FORKS)

CLIENTS, M = 9, 3
CODECS = ["float32", "float16", "bfloat16", *(f"affine-{bits}" for bits in (8, 4, 2, 1)), "affine-vector-8",
          "affine-vector-4", "affine-vector-2", "affine-vector-1", "rotated-4", "rotated-2", "rotated-1"]  # fmt: skip


def made(name, size, store=None, *, codec=None, **options):
    rule = RULES[name](buffer_size=M) if name not in ("fedasync", "zenopp") else RULES[name]()
    if codec is not None:
        rule = replace(rule, calibrate=replace(rule.calibrate, codec=codecs.named(codec)))
    given = {"num_clients": CLIENTS, "max_staleness": 6, "log": True, **options}
    return ready(Server(rule, np.ones(size, np.float32), **given, **({} if store is None else {"store": store})))


def some_pushes(server, size, count):
    for _ in range(count):
        rng = np.random.default_rng(server.joins)
        client, age = int(rng.integers(CLIENTS)), int(rng.integers(8))
        server.push(client, rng.standard_normal(size).astype(np.float32), version=max(0, server.version - age))


def same(one, other):
    ours, theirs = one.state_dict(), other.state_dict()
    assert ours["meta"] == theirs["meta"]
    assert ours["arrays"].keys() == theirs["arrays"].keys()
    for name, array in ours["arrays"].items():
        assert bits(array) == bits(theirs["arrays"][name]), name


@pytest.fixture(params=["mapped", "written"])
def mapped(request, monkeypatch):
    """Both ways to reach the disk; on a file system that promises nothing, the second one alone."""
    if request.param == "written":
        monkeypatch.setattr(afflux.store.folder, "promises_space", lambda folder: False)


@pytest.mark.parametrize("name", sorted(RULES))
def test_every_rule_has_the_bits_of_memory(name, tmp_path, mapped):
    size, path = 300, tmp_path / "store"
    there, here = made(name, size, path), made(name, size)
    for server in (there, here):
        some_pushes(server, size, 20)
    same(there, here)
    there.close()
    again = Server.open(path, here.rule)
    same(again, here)
    for server in (again, here):
        some_pushes(server, size, 25)
    same(again, here)


@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("name", ["ca2fl", "mf_ca2fl", "afa_cs"])
def test_every_codec_has_the_bits_of_memory(name, codec, tmp_path, mapped):
    """Of one seed, kept in the folder; with an arrival that waits at the end, whose extremes the next round needs."""
    size, path = 2 * 2048 + 77, tmp_path / "store"
    there, here = made(name, size, path, codec=codec, seed=5), made(name, size, codec=codec, seed=5)
    for server in (there, here):
        some_pushes(server, size, 20)
    same(there, here)
    there.close()
    again = Server.open(path, here.rule)
    assert again.arrivals_waiting
    for server in (again, here):
        some_pushes(server, size, 25)
    same(again, here)
    for client in range(CLIENTS):
        assert bits(again.rows.row(client)) == bits(here.rows.row(client))


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


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float64"},
        {"slot_dtype": "bfloat16"},
        {"duplicates": "both"},
        {"duplicates": "both", "codec": "affine-2", "slot_dtype": "bfloat16"},
        {"codec": "rotated-4", "dtype": "float64"},
        {"duplicates": "reject", "check_versions": True},
        {"num_threads": 1, "max_versions": 3, "max_slots": 5},
    ],
    ids=str,
)
def test_options_are_those_of_before(options, tmp_path):
    size = 140_001
    there, here = made("ca2fl", size, tmp_path / "store", **options), made("ca2fl", size, **options)
    for server in (there, here):
        some_pushes(server, size, 8)
    there.close()
    again = Server.open(tmp_path / "store", here.rule, num_threads=2)
    for server in (again, here):
        some_pushes(server, size, 8)
    same(again, here)
    assert again._slots.limit == here._slots.limit


def test_models_keep_their_layout_and_buffers(tmp_path):
    model = {"weight": np.ones((4, 5), np.float32), "bn": {"running_mean": np.zeros(3, np.float32)}}
    update = {"weight": np.full((4, 5), 2, np.float32)}
    there = Server(fedbuff(buffer_size=2), model, store=tmp_path / "store")
    first = there.pull()
    for value in (1.0, 2.0, 7.0):
        there.push("ann", update, version=0, buffers={"bn": {"running_mean": np.full(3, value, np.float32)}})
    before, old = there.pull(), first.buffers.tolist()
    there.checkpoint(keep=[first])
    there.close()
    again = Server.open(tmp_path / "store", fedbuff(buffer_size=2))
    now = again.pull()
    assert again.kept[0].buffers.tolist() == old
    assert (bits(now.params), bits(now.buffers)) == (bits(before.params), bits(before.buffers))
    again.push("bob", update, version=0, buffers={"bn": {"running_mean": np.full(3, 9, np.float32)}})
    assert again.pull().buffers.tolist() == [8.0] * 3
    assert again.layout == there.layout


def test_client_ids_may_be_text(tmp_path):
    there = Server(ca2fl(buffer_size=2), np.zeros(5), num_clients=4, store=tmp_path / "store")
    for client in ("ann", "böb", "\0", "日本"):
        there.push(client, np.full(5, len(client), np.float32), version=there.version)
    with pytest.raises(StoreError, match="is no Unicode text"):
        there.push("\ud800", np.ones(5), version=there.version)
    there.close()
    again = Server.open(tmp_path / "store", ca2fl(buffer_size=2))
    assert again.rows.client_ids == ["ann", "böb", "\0", "日本"]
    assert again.rows.row("日本").tolist() == [2.0] * 5


@pytest.mark.parametrize("codec", ["float32", "float16", "bfloat16", "affine-4", "affine-vector-2", "rotated-1"])
@pytest.mark.parametrize("size", [5, 300, 70_001])
def test_zarr_and_the_reference_decoder_read_it(size, codec, tmp_path):
    server = made("ca2fl", size, tmp_path / "store", codec=codec)
    some_pushes(server, size, 40)
    rows, index = server.rows, server._store._index
    group = zarr.open_group(tmp_path / "store", mode="r")
    assert group["rows"].dtype == codecs.named(codec).row_dtype
    for client in rows.client_ids:
        place = index.row(client)
        row = group["rows"][place.slot, : codecs.named(codec).row_size(size)]
        expected = row if codec == "float32" else reference.decode(codec, row.tobytes(), size)
        assert bits(expected) == bits(rows.row(client))
    places = index.committed().vectors
    assert bits(group["params"][places["params"].slot, :size]) == bits(server.params)
    assert bits(group["sum"][places["sum"].slot, :size]) == bits(rows.sum)
    assert group["rows"].shape[0] >= len(rows)
    assert group.attrs["order_version"] == 1


def test_receipts_say_when_a_push_is_safe(tmp_path):
    def durable(**settings):
        server = made("fedbuff", 10, tmp_path / str(settings), **settings)
        return [server.push(i, np.ones(10), version=0).durable for i in range(8)]

    assert durable() == [1, 1, 1, 2, 2, 2, 3, 3]
    assert durable(commit_every=2) == [2] * 6 + [4] * 2
    assert durable(commit_every=None) == [None] * 8
    assert made("fedbuff", 10).push(1, np.ones(10), version=0).durable is None


def test_what_is_not_committed_is_gone_and_what_a_checkpoint_holds_is_not(tmp_path):
    path = tmp_path / "store"
    server = made("fedbuff", 10, path, commit_every=2)
    some_pushes(server, 10, 13)  # four rounds and one arrival
    server._store.close()  # as if the process had ended
    server = Server.open(path, server.rule, commit_every=2)
    assert (server.version, server.joins, server.arrivals_waiting) == (4, 12, 0)
    some_pushes(server, 10, 4)
    server.checkpoint()
    server.push(0, np.ones(10), version=server.version)
    server._store.close()
    server = Server.open(path, server.rule)
    assert (server.version, server.joins, server.arrivals_waiting) == (5, 16, 1)


def test_notes_and_kept_versions_come_back(tmp_path):
    server = made("fedbuff", 300, tmp_path / "store", commit_every=None)
    held = {}
    for _ in range(4):
        some_pushes(server, 300, M)
        held[server.version] = server.pull()
    server.checkpoint({"events": [1, 2.5, "three"]}, keep=[held[1], held[3]])
    expected = {version: bits(held[version].params) for version in (1, 3)}
    server._store.close()
    again = Server.open(tmp_path / "store", server.rule, commit_every=None)
    assert again.notes == {"events": [1, 2.5, "three"]}
    for _ in range(5):  # what is kept is not written over
        some_pushes(again, 300, M)
    again.close()
    again = Server.open(tmp_path / "store", server.rule)
    assert {version: bits(pulled.params) for version, pulled in again.kept.items()} == expected
    assert again.notes == {"events": [1, 2.5, "three"]}


def test_params_outlive_their_server(tmp_path):
    server = made("fedbuff", 300, tmp_path / "store")
    first = server.pull()
    some_pushes(server, 300, 12)
    newest = server.pull()
    expected = bits(newest.params)
    server.close()
    server.close()  # twice does no harm
    del server
    assert first.params.tolist() == [1.0] * 300
    assert bits(newest.params) == expected
    again = Server.open(tmp_path / "store", fedbuff(buffer_size=M))
    some_pushes(again, 300, 12)
    assert bits(newest.params) == expected


def test_a_closed_server_says_so(tmp_path):
    server = made("fedbuff", 10, tmp_path / "store")
    server.close()
    for call in (lambda: some_pushes(server, 10, 1), server.flush, server.checkpoint, server.state_dict):
        with pytest.raises(StoreError, match="this server is closed"):
            call()
    with pytest.raises(AffluxError, match="has no store"):
        made("fedbuff", 10).checkpoint()
    server = made("ca2fl", 10, tmp_path / "rows")
    rows = server.rows
    server.close()
    with pytest.raises(StoreError, match=r"cannot read .*index\.sqlite: the server has closed it"):
        rows.row(1)


def test_a_handed_in_memory_is_kept(tmp_path):
    there, here = made("zenopp", 10, tmp_path / "store"), made("zenopp", 10)
    for server in (there, here):
        for _ in range(3):
            some_pushes(server, 10, 2)
            server.set_memory("validation", np.full(10, server.version + 0.5))
    there.close()
    same(Server.open(tmp_path / "store", here.rule), here)


def test_threads_push_into_a_store(tmp_path):
    rule = ca2fl(buffer_size=M)
    server = Server(rule, np.zeros(5000), num_clients=40, log=True, store=tmp_path / "store")

    def vector(client, version):
        return np.full(5000, client + version % 7, np.float32)

    def work(clients):
        for _ in range(10):
            for client in clients:
                version = server.version
                server.push(client, vector(client, version), version=version)

    threads = [threading.Thread(target=work, args=(range(k, 40, 4),)) for k in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    server.close()
    again = Server.open(tmp_path / "store", rule)
    fresh = Server(rule, np.zeros(5000), num_clients=40, log=True)
    same(again, replay(again.log, fresh, lambda join: vector(join.client_id, join.version)))


@pytest.mark.parametrize("rule", [ca2fl, fedbuff, wkafl])
def test_a_fork_is_refused(rule, tmp_path):
    import os

    server = Server(rule(buffer_size=2), np.zeros(10), num_clients=4, store=tmp_path / "store")
    child = os.fork()
    if child == 0:
        try:
            server.push(1, np.ones(10), version=0)
        except UnavailableError as error:
            os._exit(0 if "is its parent's" in str(error) else 1)
        os._exit(2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    server.push(1, np.ones(10), version=0)


def test_another_codec_is_refused(tmp_path):
    path, rule = tmp_path / "store", ca2fl(buffer_size=M, codec="affine-4")
    Server(rule, np.zeros(300), num_clients=CLIENTS, store=path, seed=7).close()
    for codec in (None, "affine-vector-4", "affine-8", "bfloat16"):
        with pytest.raises(StoreError, match="holds a server whose codec is 'affine-4', not '"):
            Server.open(path, ca2fl(buffer_size=M, codec=codec))
    assert Server.open(path, rule).rows.facts() == {"codec": "affine-4", "seed": 7}


def test_a_checkpoint_that_is_interrupted_after_its_transaction_counts(tmp_path, monkeypatch):
    """What comes next must not be written over what is committed."""
    path = tmp_path / "store"
    server = made("ca2fl", 300, path, commit_every=None)
    some_pushes(server, 300, 10)
    index = server._store._index
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
    server._store.close()
    again = Server.open(path, server.rule)
    assert (again.notes, again.state_dict()["meta"]) == ("mine", expected["meta"])
    for client in again.rows.client_ids:
        again.rows.row(client)


def test_clients_are_told_once_amid_a_commit(tmp_path, monkeypatch):
    """A view of the rows that somebody holds meanwhile."""
    server = made("ca2fl", 30, tmp_path / "store", commit_every=2)
    for client in range(5):
        server.push(client, np.ones(30), version=server.version)
    index, rows, seen = server._store._index, server.rows, []
    commit = index.commit

    def told(change):
        seen.append(rows.client_ids)
        commit(change)
        seen.append(rows.client_ids)

    monkeypatch.setattr(index, "commit", told)
    server.push(5, np.ones(30), version=server.version)
    assert (server.version, seen) == (2, [[0, 1, 2]] * 2)
    assert rows.client_ids == list(range(6))


def test_a_segment_that_was_not_made_to_the_end(tmp_path, monkeypatch):
    """The file is there, and the metadata do not know it: then nor do Zarr tools, until they are told."""
    monkeypatch.setattr(afflux.store.segments, "MOST_SLOTS", 2)
    path = tmp_path / "store"
    server = made("ca2fl", 30, path)

    def push(client):
        server.push(client, np.ones(30), version=server.version)

    write = afflux.store.segments._write_slots

    def stopped(folder, slots):
        if slots == 4:
            raise KeyboardInterrupt
        write(folder, slots)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(afflux.store.segments, "_write_slots", stopped)
        for client in range(M):
            push(client)
    server._store.close()
    server = Server.open(path, server.rule)
    for client in range(M):
        push(client)
    shape = zarr.open_group(path, mode="r")["rows"].shape
    assert shape[0] == server.rows._segments.slots >= M


def test_what_was_not_flushed_is_as_soon_as_that_is_asked_for(tmp_path, monkeypatch):
    """A power cut must not take rows that an earlier commit without flushes refers to."""
    server = made("ca2fl", 30, tmp_path / "store")
    some_pushes(server, 30, 2 * M)
    server.close()
    flushed = set()
    flush = afflux.store.segments.Segments.flush

    def noted(self, slots):
        flushed.add(self.folder.name)
        flush(self, slots)

    monkeypatch.setattr(afflux.store.segments.Segments, "flush", noted)
    Server.open(tmp_path / "store", server.rule).close()
    assert not flushed
    for expected in ({"params", "rows", "sum", "arrivals"}, set()):
        flushed.clear()
        server = Server.open(tmp_path / "store", server.rule, durability="power")
        assert flushed == expected
        server.close()


def test_options_may_be_numbers_of_numpy(tmp_path):
    given = {"num_clients": np.int64(5), "seed": np.int64(3), "max_staleness": np.int32(4), "log": np.bool_(True)}
    rule = ca2fl(buffer_size=2, codec="affine-4")
    Server(rule, np.zeros(3), store=tmp_path / "store", **given).close()
    again = Server.open(tmp_path / "store", rule)
    assert (again.rows.num_clients, again.rows.seed, again.log) == (5, 3, ())


def test_rows_are_asked_for_by_numbers_of_numpy(tmp_path):
    for server in (made("ca2fl", 10), made("ca2fl", 10, tmp_path / "store")):
        for client in range(M):
            server.push(np.int32(client), np.ones(10), version=0)
        assert np.int64(1) in server.rows
        assert server.rows.row(np.int64(1)).tolist() == [1.0] * 10
    with pytest.raises(AffluxError, match=r"\[row\] client_id 1180591620717411303424 does not fit into 64 bits"):
        server.rows.row(2**70)


def test_a_store_and_inplace_exclude_each_other(tmp_path):
    with pytest.raises(AffluxError, match=r"\[Server\] inplace: a store keeps the last version"):
        made("fedbuff", 10, tmp_path / "store", inplace=True)
    assert not (tmp_path / "store").exists()


def test_lent_vectors_are_kept_by_a_checkpoint(tmp_path):
    there, here = (
        Server(fedbuff(buffer_size=3), np.zeros(300), log=True, **to) for to in ({"store": tmp_path / "store"}, {})
    )
    vectors = [np.full(300, value, np.float32) for value in (1, 2, np.nan, 4, 5)]
    for server in (there, here):
        for client, vector in enumerate(vectors):
            server.push(client, vector, version=0, copy=False)
    there.close()
    again = Server.open(tmp_path / "store", fedbuff(buffer_size=3))
    same(again, here)
    assert again.arrivals_waiting == 2


def only_the_first(arrivals):
    """Of two, so that a client's second one reads its row after the first one has written it."""
    return np.array([1.0, 0.0])


def test_rows_that_a_round_reads_and_writes_do_not_use_up_slots(tmp_path, mapped):
    """Without a commit between the rounds each has two, in turn."""
    rule, path = replace(ca2fl(buffer_size=2), weigh=only_the_first), tmp_path / "store"
    there, here = (
        Server(rule, np.ones(300), num_clients=CLIENTS, duplicates="both", **to)
        for to in ({"store": path, "commit_every": 4}, {})
    )
    for k in range(22):
        for server in (there, here):
            server.push(0, np.full(300, k, np.float32), version=server.version)
        table = there._store.rows.table
        held = [slot for _, slot in table.changed.values()]
        assert table.high <= 3
        assert len({*held, *table.free, *table.retired}) == len([*held, *table.free, *table.retired])
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
    path, commits, calls = tmp_path / "store", [], itertools.count(1)
    there, here = (
        made("ca2fl", 5000, max_staleness=None, **to) for to in ({"store": path, "commit_every": commit_every}, {})
    )
    put, commit = Segments.put, Index.commit

    def may_fail(segments, slot, array):
        if next(calls) % 7 == 0:
            raise StoreError("[store] cannot write: for once")
        put(segments, slot, array)

    def looked_at(index, change):
        commit(index, change)
        commits.append(path)
        sound_at(path, tmp_path / str(len(commits)))

    monkeypatch.setattr(Segments, "put", may_fail)
    monkeypatch.setattr(Index, "commit", looked_at)
    failed = 0
    for k in range(40):
        for server in (there, here):
            vector = np.random.default_rng(k).standard_normal(5000).astype(np.float32)
            before = server.joins
            while server.joins == before:
                try:
                    server.push(k % CLIENTS, vector, version=0)
                except StoreError:
                    failed += 1
    monkeypatch.setattr(Segments, "put", put)
    there.checkpoint()
    assert failed > 5
    assert len(commits) > 12 // commit_every
    same(there, here)


def test_checksums_of_a_round_that_is_made_again(tmp_path, mapped, monkeypatch):
    """Without what turned out not to be finite; its first sweep was of other bits."""
    path, commits, commit = tmp_path / "store", [], Index.commit

    def looked_at(index, change):
        commit(index, change)
        commits.append(path)
        sound_at(path, tmp_path / str(len(commits)))

    monkeypatch.setattr(Index, "commit", looked_at)
    there, here = (Server(fedbuff(buffer_size=3), np.zeros(5000), **to) for to in ({"store": path}, {}))
    for k in range(12):
        vector = np.random.default_rng(k).standard_normal(5000).astype(np.float32)
        vector[k] = np.nan if k in (1, 3, 4, 11) else 0
        for server in (there, here):
            server.push(k, vector, version=server.version, copy=False)
    assert (there.version, len(commits)) == (4, 5)
    same(there, here)


@pytest.mark.parametrize(
    ("size", "begins"), [(16_383, 64), (16_384, 4096), (2**21 - 2048, 4096), (2**21, 2**21), (2**21 + 1, 2**21)]
)
def test_no_page_holds_parts_of_two_slots(size, begins):
    """Nor does a huge one, where slots are so large that it does not matter."""
    shape = shape_of("float32", size, 3)
    assert shape.slot_bytes % begins == 0
    assert shape.huge == (begins == 2**21)
    assert shape.slot_bytes - 4 * size < begins


@pytest.mark.skipif(not Path("/sys/kernel/mm/transparent_hugepage").exists(), reason="asks Linux for huge pages")
def test_large_slots_are_mapped_by_huge_pages(tmp_path):
    size = 2**21
    with Server(fedbuff(buffer_size=1), np.zeros(size, np.float32), store=tmp_path / "store") as server:
        server.push(1, np.ones(size, np.float32), version=0)
        maps = Path("/proc/self/smaps").read_text()
        found = re.findall(rf"{tmp_path}/store/(\w+)/c/0/0\n(?:\w+: .*\n)*?VmFlags: (.*)", maps)
    assert {name: "hg" in flags.split() for name, flags in found} == {"params": True}


def test_the_disk_reads_while_a_vector_is_copied(tmp_path, mapped, monkeypatch):
    calls = []

    def noted(what, method):
        def call(self, *arguments, **options):
            calls.append(what)
            return method(self, *arguments, **options)

        return call

    with made("ca2fl", 300, tmp_path / "store") as server:
        for client in range(2 * M):
            server.push(client, np.full(300, client, np.float32), version=server.version)
        for owner, name in ((Segments, "prefetch"), (type(server._intake), "ingest"), (DiskRows, "fetch")):
            monkeypatch.setattr(owner, name, noted(name, getattr(owner, name)))
        server.push(1, np.ones(300, np.float32), version=server.version)
        assert calls == ["prefetch", "ingest", "fetch"]
        server.push(8, np.ones(300, np.float32), version=server.version)
        assert calls[3:] == ["ingest", "fetch"]  # it has no row


def test_the_index_is_asked_once_for_who_pushes(tmp_path, monkeypatch):
    """Until the next commit, which moves rows."""
    asked, row = [], Index.row

    def noted(self, client_id):
        asked.append(client_id)
        return row(self, client_id)

    there, here = made("ca2fl", 300, tmp_path / "store"), made("ca2fl", 300)
    for r in range(5):
        if r == 1:
            monkeypatch.setattr(Index, "row", noted)
        for client in range(M):
            for server in (there, here):
                server.push(client, np.full(300, r + client, np.float32), version=server.version)
    assert asked == 4 * [*range(M)]
    same(there, here)


def test_a_row_that_a_commit_moves_while_its_client_pushes(tmp_path, monkeypatch):
    there, here = made("ca2fl", 300, tmp_path / "store"), made("ca2fl", 300)
    ingest = type(there._intake).ingest
    late = []

    def pushes(server, start, *clients):
        for client in clients:
            server.push(client, np.full(300, start + client, np.float32), version=1)

    def held_up(self, *arguments):
        if late:
            thread = threading.Thread(target=pushes, args=(there, *late.pop()))
            thread.start()
            thread.join()
        return ingest(self, *arguments)

    for server in (there, here):
        for client in range(M):
            server.push(client, np.full(300, client + 1, np.float32), version=0)
    monkeypatch.setattr(type(there._intake), "ingest", held_up)
    late.append((10, 0, 1, 2))
    pushes(there, 20, 1)
    pushes(here, 10, 0, 1, 2)
    pushes(here, 20, 1)
    for server in (there, here):
        pushes(server, 30, 0, 2)
        assert server.version == 3
    same(there, here)
