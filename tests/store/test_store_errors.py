"""Damaged and unusable stores: an error with the reason, no crash, and the last commit intact."""

import json
import os
import resource
import shutil
import signal
import sqlite3
import tempfile
from contextlib import closing, nullcontext
from pathlib import Path

import numpy as np
import pytest

import afflux.store.index
from afflux import Server, StoreError
from afflux.rules import ca2fl, fedbuff
from afflux.rules.staleness import Constant
from afflux.store import check, repair
from afflux.store.lock import Lock
from afflux.store.metadata import BACKUP
from conftest import FORKS, check_error, push_all, raising
from crashes import result
from damage import damage, damage_vectors, place
from inside import index_of, slots_taken
from nine_rows import change

pytestmark = pytest.mark.filterwarnings(FORKS)

SIZE, CLIENTS, M = 70_001, 30, 3
RULE = ca2fl(buffer_size=M)
FULL = raising(StoreError, "[store] cannot write: database or disk is full")


def vector(client):
    return np.full(SIZE, client + 1, np.float32)


@pytest.fixture
def path(tmp_path):
    """A store with rows of clients 0 to 8, and its params."""
    with Server(RULE, np.zeros(SIZE), num_clients=CLIENTS, store=tmp_path / "store") as server:
        push_all(server, range(9), vector)
    return tmp_path / "store"


def refused(path, message, rule=RULE):
    before = {file: file.read_bytes() for file in path.rglob("*") if file.is_file() and "sqlite" not in file.name}
    check_error(message, Server.open, path, rule, error=StoreError)
    assert {file: file.read_bytes() for file in before} == before


@pytest.mark.parametrize("where", [0, 4 * 65536 + 100, 4 * SIZE - 4])
def test_a_damaged_row_is_found_when_its_client_pushes(path, where):
    file, offset = place(path, 4)
    damage(file, offset + where, 4)
    server = Server.open(path, RULE)
    before = server.joins
    said = rf"\[push\] client 4's row is damaged: .*does not agree with its checksum; `afflux store repair {path}`, "
    check_error(said, server.push, client=4, update=vector(4), version=server.version, error=StoreError)
    check_error(r"\[row\] client 4's row is damaged", server.rows.row, 4, error=StoreError)
    assert (server.joins, slots_taken(server)) == (before, 0)
    push_all(server, (3, 5, 20), vector)
    assert server.version == 4


REMEDIES = {"params": BACKUP, "sum": "`afflux store repair .*` computes it again"}


@pytest.mark.parametrize("name", REMEDIES)
def test_damaged_vectors_are_found_at_opening(path, name):
    damage_vectors(path, name)
    refused(path, f"{name} is damaged: slot [01] does not agree with its checksum; {REMEDIES[name]}")


def test_truncated_segments(path):
    for name, remedy in REMEDIES.items():
        file = path / name / "c" / "0" / "0"
        whole = file.read_bytes()
        os.truncate(file, len(whole) - 1)
        refused(path, rf"{file} is truncated: {len(whole) - 1} of {len(whole)} bytes; {remedy}$")
        file.write_bytes(whole)
    file, _ = place(path, 0)
    os.truncate(file, 4096)
    refused(path, rf"{file} is truncated: .*; `afflux store repair {path}`, .* drops the rows that are lost$")
    file.unlink()
    refused(path, rf"{file} is missing; `afflux store repair {path}`, .* drops the rows that are lost$")


@pytest.mark.parametrize("name", ["rows", "sum", "params"])
def test_a_segment_that_is_cut_off_while_it_is_mapped(path, name):
    """Not a SIGBUS."""
    (out,) = result(lambda tell: tell(cut_off(path, name)))
    assert "was replaced or truncated" in out or "is truncated" in out


def cut_off(path, name):
    server = Server.open(path, RULE)
    push_all(server, (0, 1), vector)
    os.truncate(path / name / "c" / "0" / "0", 4096)
    try:
        push_all(server, (2, 3, 4), vector)
    except StoreError as error:
        assert server.version == 3
        return str(error).replace("\n", " ")
    return "nothing was noticed"


def test_a_vanished_folder(path, tmp_path):
    server = Server.open(path, RULE)
    push_all(server, range(2), vector)
    path.rename(tmp_path / "elsewhere")
    check_error("has vanished", server.push, client=2, update=vector(2), version=server.version, error=StoreError)
    assert server.arrivals_waiting == 2
    (tmp_path / "elsewhere").rename(path)
    server.push(client=2, update=vector(2), version=server.version)
    assert server.version == 4


def test_a_second_writer(path, monkeypatch):
    """It waits only for other processes: this process would wait for itself."""
    with Server.open(path, RULE), monkeypatch.context() as patch:
        patch.delattr("afflux.store.lock.sleep")
        refused(path, "is in use: one process at a time writes to a store, and this process has a server there: cl")
    Server.open(path, RULE).close()


def test_a_damaged_index(path):
    shutil.copytree(path, path.parent / "copy")
    size = (path / "index.sqlite").stat().st_size
    for offset in (0, 4096 + 8, size // 2):
        shutil.copy(path.parent / "copy" / "index.sqlite", path / "index.sqlite")
        damage(path / "index.sqlite", offset, 2000)
        with pytest.raises(StoreError, match=r"index\.sqlite"):
            server = Server.open(path, RULE)
            push_all(server, range(30), vector)  # what opening does not read
    shutil.copy(path.parent / "copy" / "index.sqlite", path / "index.sqlite")
    (path / "index.sqlite").write_bytes(b"no database at all, but long enough to be looked at" * 100)
    refused(path, "damaged")


@pytest.mark.parametrize(
    ("statement", "message"),
    [
        ("PRAGMA user_version = 99", "has format 99, this afflux reads 6 and 7: install a newer afflux"),
        ("PRAGMA user_version = 3", "has format 3, .*: open it once with an afflux that reads both formats"),
        ("PRAGMA application_id = 7", "is not an index of afflux"),
        ("UPDATE facts SET value = '2' WHERE name = 'order_version'", "has order_version 2, this afflux 1"),
        ("UPDATE state SET meta = replace(meta, '3', '4')", "does not agree with its checksum"),
        ("DELETE FROM state", "is damaged: it has more than 0 rows"),
        ("DROP TABLE vectors", "its schema differs"),
    ],
)
def test_a_foreign_index(path, statement, message):
    change(path, statement)
    refused(path, message)


def grid(meta):
    return meta["chunk_grid"]["configuration"]


def slots(text):
    return f"zarr.json is damaged: it has {text} in a file, and the index 33 slots of "


LAYOUT = "zarr.json is damaged: it has no layout of afflux; `afflux store repair .*` writes it again$"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda meta: meta["codecs"][0]["configuration"].update(endian="big"), LAYOUT),
        (lambda meta: meta["codecs"].append({"name": "gzip"}), LAYOUT),
        (lambda meta: meta.update(data_type="int8"), slots("33 slots of 70656 int8")),
        (lambda meta: grid(meta).update(chunk_shape=[12, 64]), slots("12 slots of 64 float32")),
        (lambda meta: grid(meta)["chunk_shape"].__setitem__(0, 12), slots("12 slots of 70656 float32")),
        (lambda meta: meta["shape"].__setitem__(0, 2), "zarr.json is damaged: it has 2 slots, and slot 8 is in use; "),
        (lambda meta: meta.pop("codecs"), LAYOUT),
        (lambda meta: meta.pop("chunk_grid"), "zarr.json is damaged: KeyError"),
    ],
)
def test_foreign_arrays(path, change, message):
    file = path / "rows" / "zarr.json"
    meta = json.loads(file.read_text())
    change(meta)
    file.write_text(json.dumps(meta))
    refused(path, message)


def test_other_rules_and_no_stores(path, tmp_path):
    refused(path, "holds a server whose rule is 'ca2fl', not 'fedbuff'", fedbuff())
    check_error("there is no folder", Server.open, tmp_path / "nowhere", RULE, error=StoreError)
    (tmp_path / "empty").mkdir()
    for call in (Server.open, check, repair):
        check_error(r"empty holds no store: index\.sqlite is missing$", call, tmp_path / "empty", error=StoreError)
        (tmp_path / "empty" / "lock").touch()
        check_error(r"is missing\. If a process was killed .* remove the", call, tmp_path / "empty", error=StoreError)
        (tmp_path / "empty" / "lock").unlink()
    assert list((tmp_path / "empty").iterdir()) == []
    check_error("is not empty; Server.open", Server, RULE, np.zeros(3), num_clients=5, store=path, error=StoreError)
    (tmp_path / "empty" / "rows").mkdir()
    with pytest.raises(StoreError, match=r"is not empty, and holds no store: index\.sqlite is missing.* remove what"):
        Server(RULE, np.zeros(3), num_clients=5, store=tmp_path / "empty")
    (tmp_path / "file").write_text("x")
    check_error("cannot make", Server, RULE, np.zeros(3), num_clients=5, store=tmp_path / "file", error=StoreError)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"durability": "fsync"}, "durability is 'fsync', must be 'process' or 'power'"),
        ({"commit_every": 0}, "commit_every is 0, must be an int of at least 1"),
    ],
)
def test_wrong_options(options, message, path, tmp_path):
    check_error(rf"\[Server\] {message}", Server, RULE, np.zeros(3), num_clients=5, store=tmp_path / "new", **options)
    assert not (tmp_path / "new").exists()
    check_error(rf"\[open\] {message}", Server.open, path, RULE, **options)


def test_a_folder_with_a_lock_alone_is_empty(tmp_path):
    """An attempt to make a store leaves it, if it fails early."""
    (tmp_path / "lock").touch()
    Server(RULE, np.zeros(3), num_clients=5, store=tmp_path).close()
    Server.open(tmp_path).close()


def test_two_who_make_a_store_in_one_folder(tmp_path, monkeypatch):
    """The second one finds it empty, and then has to wait."""
    first = []

    class Slow(Lock):
        def __init__(self, folder, **options):
            if not first:
                first.append(folder)
                Server(RULE, np.zeros(3), num_clients=5, store=folder).close()
            super().__init__(folder, **options)

    monkeypatch.setattr("afflux.store.lock.Lock", Slow)
    check_error("is not empty", Server, RULE, np.zeros(4), num_clients=5, store=tmp_path, error=StoreError)
    with Server.open(tmp_path) as server:
        assert server.params.size == 3


def test_arguments_of_a_wrong_kind(path, tmp_path):
    check_error(r"\[open\] path is of type Rule, must be a folder's path", Server.open, RULE, path)
    check_error(r"\[open\] rule is .*, must be a Rule such as", Server.open, path, str(path))
    check_error(r"\[Server\] rule is of type ndarray, must be a Rule such as", Server, np.zeros(1000), RULE)
    check_error(r"\[Server\] store is 7, must be a folder's path", Server, RULE, np.zeros(3), num_clients=5, store=7)
    for no_path in ("a\0b", "\ud800"):
        check_error(r"\[Server\] store is '.*', must be", Server, RULE, np.zeros(3), num_clients=5, store=no_path)
        check_error(r"\[open\] path is '.*', must be a folder's path", Server.open, no_path)
    with Server.open(path) as server:
        pulled, before = server.pull(), server.notes
        for keep, message in [
            ([pulled, 3], r"keep\[1\] is of type int, must be one that pull\(\) gave"),
            (pulled, r"keep is of type Pulled, must be a list of pulled versions"),
        ]:
            check_error(rf"\[checkpoint\] {message}", server.checkpoint, "mine", keep=keep)
        for notes, message in [({"a": np.zeros(2)}, "ndarray is not JSON"), ({(1, 2): 3}, "keys must be str")]:
            check_error(rf"\[checkpoint\] notes cannot be kept as JSON: .*{message}", server.checkpoint, notes)
        assert (server.notes, server.retained_versions) == (before, {})


def test_errors_of_open_name_open(tmp_path):
    folder = tmp_path / "store"
    with Server(fedbuff(buffer_size=2), np.zeros(3), accumulate=True, max_versions=2, store=folder) as server:
        push_all(server, range(3), np.ones(3), version=0)  # the third one is in the sum, with staleness 1
    with pytest.raises(StoreError, match=rf"^\[open\] {folder}: client 2 is in the sum with the raw weight"):
        Server.open(folder, fedbuff(buffer_size=2, staleness=Constant()))
    check_error(r"^\[open\] max_versions is 2, must be at least 3", Server.open, folder, commit_every=2)


def test_a_first_commit_that_fails_lets_go_of_the_folder(tmp_path, monkeypatch):
    with monkeypatch.context() as failing, pytest.raises(StoreError, match="disk is full"):
        failing.setattr("afflux.store.index.Index.commit", FULL)
        Server(RULE, np.zeros(3), num_clients=5, store=tmp_path / "new")
    assert not (tmp_path / "new").exists()
    Server(RULE, np.zeros(3), num_clients=5, store=tmp_path / "new").close()


def test_reads_that_are_cut_short_go_on(path, monkeypatch):
    """One call reads 2 GiB at most."""
    whole = check(path)
    read = os.preadv

    def short(file, buffers, offset):
        return read(file, [buffers[0][:1000]], offset)

    monkeypatch.setattr("os.preadv", short)
    assert check(path) == whole
    assert whole.sound


def limited(path, size):
    """What a push says when no file may grow beyond a size, and that all is as before."""
    server = Server.open(path, RULE)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    before = server.version
    try:
        push_all(server, range(9, 30), vector)
    except StoreError as error:
        assert before <= server.version < before + 7
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        push_all(server, [29], vector)  # and with space again it goes on
        server.close()
        with Server.open(path, RULE) as again:
            push_all(again, [28], vector)
        return str(error)
    return "nothing was noticed"


@pytest.mark.parametrize("size", [1, 20_000, 800_000])
def test_a_disk_without_space(path, size, monkeypatch):
    """A limit on the size of files stands for a full disk: both fail when space is allocated."""
    monkeypatch.setattr("afflux.store.metadata.SEGMENT_BYTES", 1 << 20)
    shutil.rmtree(path)
    with Server(RULE, np.zeros(SIZE), num_clients=CLIENTS, store=path) as server:
        push_all(server, range(3), vector)
    (out,) = result(lambda tell: tell(limited(path, size)))
    assert "no space for" in out or "cannot write" in out


def test_a_version_that_cannot_be_committed_is_not_told(path, monkeypatch):
    """The round stays, and is committed as soon as that is possible."""
    server = Server.open(path, RULE)
    before = server.pull()
    with monkeypatch.context() as failing:
        failing.setattr(index_of(server), "commit", FULL)
        push_all(server, (0, 1), vector, version=3)
        for client in (2, 3):  # the one that completes the buffer; then one that waits beside the round
            with pytest.raises(StoreError, match="disk is full") if client == 2 else nullcontext():
                server.push(client=client, update=vector(client), version=3)
        assert server.version == before.version == 3
        assert server.pull().params is before.params
    server.close()
    again = Server.open(path, RULE)
    assert (again.version, again.arrivals_waiting, again.counts["joined"]) == (4, 1, 13)


def test_foreign_versions_are_not_kept(path):
    """A checkpoint keeps versions of this server; after an error, the versions of the last checkpoint."""
    with Server.open(path, RULE) as server:
        mine, foreign = server.pull(), Server(fedbuff(), np.zeros(SIZE)).pull()
        server.checkpoint(1, keep=[mine])
        check_error(r"\[checkpoint\] keep: version 0 is not a version of this", server.checkpoint, 2, keep=[foreign])
    with Server.open(path, RULE) as again:
        assert (again.notes, [*again.retained_versions]) == (1, [mine.version])


def somebody(path):
    """What one hears who may read a store, and not write to it, file by file."""
    if os.geteuid() == 0:
        import fcntl  # noqa: F401  that nobody may not be able to find

        os.setgid(65534)
        os.setuid(65534)
    with pytest.raises(StoreError) as caught, Server.open(path, RULE) as server:
        push_all(server, range(9), vector)
    return str(caught.value).replace("\n", " ")


@pytest.mark.parametrize("name", ["lock", "index.sqlite", "rows/c/0/0", "sum/c/0/0", "params/c/0/0", "."])
def test_a_file_that_cannot_be_written(name, path):
    with tempfile.TemporaryDirectory() as folder:  # that everybody may enter
        os.chmod(folder, 0o777)
        here = Path(shutil.copytree(path, f"{folder}/store"))
        for place in (here, *here.rglob("*")):
            place.chmod(0o777)
        (here / name).chmod(0o555)
        (said,) = result(lambda tell: tell(somebody(here)))
        (here / name).chmod(0o777)
        assert "Permission denied" in said or "readonly" in said or "unable to open" in said
        Server.open(here, RULE).close()


def test_sqlite_fails_at_a_birth(tmp_path, monkeypatch):

    monkeypatch.setattr(sqlite3, "connect", raising(sqlite3.OperationalError, "disk I/O error"))
    with pytest.raises(StoreError, match=r"cannot make .*index\.sqlite: disk I/O error"):
        Server(RULE, np.zeros(9), num_clients=CLIENTS, store=tmp_path / "store")


def test_sqlite_keeps_no_log(path, monkeypatch):
    """It says so in passing, and would commit in another way, which nobody looks for."""

    def in_memory(path, mode):
        copy = sqlite3.connect(":memory:")
        with closing(sqlite3.connect(path)) as original:
            original.backup(copy)
        return copy

    monkeypatch.setattr(afflux.store.index, "connect", in_memory)
    refused(path, r"cannot open .*index\.sqlite: SQLite has not made its log")
