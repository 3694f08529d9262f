"""`afflux.store.info` and its command; who has a store, and who may only read it."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest

from afflux import Server, StoreError, store
from afflux._engine import close_descriptor
from afflux.rules import ca2fl, fedams
from afflux.store.files import open_regular
from afflux.store.index import Index
from afflux.store.lock import Lock, _holder
from conftest import FORKS, ROOT, check_error, check_raises, needs_fork
from crashes import in_child, result, told
from damage import damage, place
from held_up import start
from inside import index_of, store_of
from nine_rows import CLIENTS, RULE, SIZE, change, contents, pushes, run


def test_info_says_what_the_server_was(nine_rows):
    found = store.info(nine_rows)
    assert (found.rule, found.kind, found.d) == ("ca2fl", "update", SIZE)
    assert (found.dtype, found.slot_dtype) == ("float32", "float32")
    assert (found.version, found.joins, found.waiting, found.counts["joined"]) == (3, 10, 1, 10)
    assert (found.num_clients, found.clients, found.codec, found.bits) == (CLIENTS, 9, "float32", 32)
    assert (found.bytes_per_client, found.durability) == (4 * SIZE, "process")
    assert (found.in_use, found.problems, found.repairs, found.notes) == (False, (), (), {"epoch": 3})
    for name in ("params", "rows", "sum", "arrivals"):
        segments = [file.stat().st_size for file in (nine_rows / name / "c").rglob("0") if file.is_file()]
        assert found.disk_bytes[name] == sum(segments) > 0
    assert found.disk_bytes["index"] >= 4096


def test_info_while_a_server_is_at_work(path):
    with Server.open(path, RULE, durability="power") as server:
        assert store.info(path).in_use
        pushes(server, [21, 22])
        found = store.info(path)
        assert (found.version, found.clients, found.durability) == (4, 12, "power")
        for call in (store.check, store.repair, lambda path: store.export(path, path.parent / "out.npy")):
            check_error("is in use", call, path, error=StoreError)
    assert not store.info(path).in_use


def test_info_amid_a_commit(path, monkeypatch):
    """What it reads is of one commit, whichever of its parts are read after the next one."""
    read = Index._read
    with Server.open(path, RULE) as server:

        def reads(index, statement, values=()):
            found = read(index, statement, values)
            if index is not index_of(server) and "FROM state" in statement:
                pushes(server, [21, 22])
            return found

        monkeypatch.setattr(Index, "_read", reads)
        found = store.info(path)
        assert (found.version, found.waiting, found.clients, found.problems) == (3, 1, 9, ())
        assert server.version == 4


def test_a_server_opens_beside_info(path):
    """Which holds the store for a moment, again and again."""
    ended = threading.Event()

    def polls():
        while not ended.is_set():
            store.info(path)

    poller = start(polls)
    try:
        for _ in range(10):
            Server.open(path, RULE).close()
    finally:
        ended.set()
    assert poller.result(600) is None


def test_a_writer_waits_for_a_moment_alone(path):
    reader = Lock(path, shared=True)
    check_error("is in use", Lock, path, error=StoreError)
    later = threading.Timer(0.05, reader.close)
    later.start()
    Lock(path).close()
    later.join()


@needs_fork
def test_a_child_does_not_keep_what_its_parent_has_closed(path):
    def close(tell):
        store_of(server).close()
        tell("closed")
        time.sleep(60)  # until it is killed

    server = Server.open(path)
    child, telling = in_child(close)
    with os.fdopen(telling) as pipe:
        assert pipe.readline() == "closed\n"
        assert result(lambda tell: tell(opens(path))) == ["False"]  # what the child has closed is still its parent's
        sleeper, _ = in_child(lambda tell: time.sleep(60))
        server.close()
        Server.open(path).close()
        for each in (child, sleeper):
            os.kill(each, signal.SIGKILL)
            os.waitpid(each, 0)


FORK = {"Python": "os.fork()", "C": "ctypes.PyDLL(None).fork()"}
STAYING = """
import ctypes, gc, os, sys, time
import numpy as np
from afflux import Server, StoreError
server = Server.open({path!r})
lock = server._store._lock
descriptor = lock._descriptor
child = {fork}
if child == 0:
    {body}
"""


def staying(path, fork, body, tail=""):
    """Runs a program that opens the store and forks a child; returns the process after its first line of output."""
    code = STAYING.format(path=str(path), fork=FORK[fork], body=body) + tail
    program = subprocess.Popen([sys.executable, "-W", "ignore", "-c", code], stdout=subprocess.PIPE, text=True)
    return program, program.stdout.readline().strip()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.parametrize("fork", FORK)
def test_a_child_that_survives_its_killed_parent_keeps_no_lock(fork, path):
    """Else the store could not be opened before the child ends, and the error named the dead process."""
    program, child = staying(
        path, fork, "print(os.getpid(), flush=True); time.sleep(60); os._exit(0)", "time.sleep(60)"
    )
    assert not opens(path)
    program.kill()
    program.wait()
    try:
        assert opens(path)
        assert os.kill(int(child), 0) is None, "the child still runs"
    finally:
        os.kill(int(child), signal.SIGKILL)
        program.stdout.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system cannot fork")
@pytest.mark.parametrize("fork", FORK)
def test_a_child_never_closes_another_file_with_the_number_of_the_locks(fork, path):
    body = """
    file = os.open(os.devnull, os.O_RDONLY)
    assert file == descriptor, (file, descriptor)
    try:
        Server.open({path!r})
        os._exit(2)
    except StoreError as error:
        assert f"process {{os.getppid()}} writes to it" in str(error) or "another process" in str(error), error
    server._store.close()
    lock.close()
    del server, lock
    gc.collect()
    os.fstat(file)
    os._exit(0)"""
    tail = """
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
try:
    Server.open({path!r})
except StoreError as error:
    print("this process has a server there" in str(error), flush=True)
"""
    program, status = staying(path, fork, body.strip().format(path=str(path)), tail.format(path=str(path)))
    assert status == "0"
    assert program.communicate()[0] == "True\n"


@needs_fork
def test_a_fork_while_the_locks_file_is_opened(path, monkeypatch):
    """The child may have the first descriptor, so the lock is taken with another one."""
    numbers = []

    def open_and_fork(*args):
        descriptor = open_regular(*args)
        numbers.append(descriptor)
        if len(numbers) == 1:
            pipe, end = os.pipe()
            child = os.fork()
            if child == 0:
                os.close(end)
                os.read(pipe, 1)
                os._exit(0)
            os.close(pipe)
            children.append((child, end))
        return descriptor

    children = []
    monkeypatch.setattr("afflux.store.lock.open_regular", open_and_fork)
    lock = Lock(path)
    monkeypatch.undo()
    assert len(numbers) == 2
    close_descriptor(lock._descriptor)  # as the end of the process does, which unlocks nothing
    Lock(path).close()
    for child, end in children:
        os.close(end)
        os.waitpid(child, 0)


def opens(path):
    try:
        Server.open(path).close()
    except StoreError:
        return False
    return True


def test_an_interrupt_amid_the_lock_leaves_none(path, monkeypatch):
    class Interrupted(dict):
        def __setitem__(self, file, process):
            super().__setitem__(file, process)
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("afflux.store.lock._WRITERS", writers := Interrupted())
        check_raises(KeyboardInterrupt, Server.open, path)
        assert writers == {}
    Server.open(path).close()


@pytest.mark.skipif(not Path("/proc/locks").exists(), reason="asks Linux who has a lock")
@pytest.mark.filterwarnings(FORKS)
@pytest.mark.parametrize("numbers", ["the system's", "its own"])
def test_who_has_a_store(numbers, path, monkeypatch):
    """No process is named where stat gives files other numbers than the list of locks does, as on btrfs."""
    if numbers == "its own":
        monkeypatch.setattr(os, "major", lambda device: 0xFFF)

    def hold(tell, shared):
        lock = Lock(path, shared=shared)
        tell("held")
        time.sleep(60)  # until it is killed
        lock.close()

    def said(call):
        return str(check_raises(StoreError, call, path)).removeprefix(f"[store] {path} is in use: ")

    def who(process, does):
        return f"process {process} {does} it" if tells else "another process has it"

    lock = Lock(path)
    tells = _holder(*lock._file) == f"process {os.getpid()} writes to it"
    lock.close()
    alone = "one process at a time writes to a store, and "
    for shared, does in ((True, "reads"), (False, "writes to")):
        child, telling = in_child(lambda tell, shared=shared: hold(tell, shared))
        with os.fdopen(telling) as pipe:
            assert pipe.readline() == "held\n"
            assert said(Server.open) == alone + who(child, does)
            if not shared:
                assert said(store.check) == who(child, "writes to")
            os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    with Server.open(path):
        assert said(store.check) == "this process has a server there: close() it"
    lock = Lock(path, shared=True)
    assert said(Server.open) == alone + who(os.getpid(), "reads")
    lock.close()
    Server.open(path).close()


@needs_fork
def test_reading_leaves_nothing_behind(path):
    """Nor does it take away the log of a server that was killed."""

    def killed(tell):
        server = Server.open(path)
        pushes(server, [21, 22])
        os.kill(os.getpid(), signal.SIGKILL)

    file, offset = place(path, 5)
    child, telling = in_child(killed)
    told(telling)
    os.waitpid(child, 0)
    (path / "index.sqlite-shm").unlink()  # as a copy may lack it
    before = contents(path).keys()
    assert path / "index.sqlite-wal" in before
    for _ in range(2):
        assert store.info(path).version == 4
        assert store.check(path).sound
        assert contents(path).keys() == before
        assert not (path / "index.sqlite-shm").exists()
    closed = shutil.copytree(path, path.with_name("closed"))
    Server.open(closed).close()
    assert not [*closed.glob("index.sqlite-*")]
    damage(file, offset + 1000, 4)
    assert store.repair(path).dropped == (5,)
    assert not (path / "index.sqlite-wal").exists()


def test_info_of_a_rule_without_rows(tmp_path):
    with Server(fedams(buffer_size=1), np.zeros(5), store=tmp_path / "store") as server:
        server.push(client="ann", update=np.ones(5), version=0)
    found = store.info(tmp_path / "store")
    assert (found.codec, found.bits, found.bytes_per_client, found.clients) == (None, None, 0, 0)
    assert len(found.disk_bytes) == 3 + len(fedams().rule_vectors)
    assert store.check(tmp_path / "store").sound
    check_error("no rows: fedams keeps none", store.export, tmp_path / "store", tmp_path / "out.npy", error=StoreError)


def test_info_sees_a_segment_that_was_cut_off(path):
    file = path / "rows" / "c" / "0" / "0"
    size = file.stat().st_size
    os.truncate(file, 4096)
    assert store.info(path).problems == (f"{file} is truncated: 4096 of {size} bytes",)
    file.unlink()
    assert store.info(path).problems == (f"{file} is missing",)


@needs_fork
def test_a_folder_that_can_only_be_read(nine_rows):
    """As on a read-only disk: no file is nine_rows beside the index."""

    def look(tell):
        if os.getuid() == 0:  # who may write anywhere
            os.setuid(65534)
        tell(store.info(path).problems == () and store.check(path).sound)
        tell(len(store.export(path, root / "out" / "rows.npy")))
        for call in (store.repair, Server.open):
            try:
                call(path)
            except StoreError as error:
                tell("Permission denied" in str(error))

    with TemporaryDirectory() as folder:
        root = Path(folder)
        path = shutil.copytree(nine_rows, root / "store")
        (root / "out").mkdir()
        before = contents(path)
        for each in (*path.rglob("*"), path):
            each.chmod(0o555 if each.is_dir() else 0o444)
        root.chmod(0o755)
        (root / "out").chmod(0o777)
        assert result(look) == ["True", "9", "True", "True"]
        assert contents(path) == before
        for each in (path, *path.rglob("*")):
            each.chmod(0o755)


def test_a_store_that_cannot_be_opened(path, tmp_path):
    for call in (store.info, store.check, store.repair):
        check_error("there is no folder", call, tmp_path / "nowhere", error=StoreError)
    change(path, "UPDATE facts SET value = '9' WHERE name = 'order_version'")
    for call in (store.info, store.check, store.repair):
        check_error("has order_version 9, this afflux 1", call, path, error=StoreError)


def test_the_info_command(path):
    result = run("info", path)
    assert (result.exit_code, result.stderr) == (0, "")
    lines = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
    assert lines["store"] == str(path)
    assert lines["rule"].startswith("ca2fl")
    assert lines["clients"] == "9 of 30 with a stored row"
    assert lines["rows"] == "float32: 32 bits an element, 280 kB a client"
    assert lines["version"] == "3 after 10 pushes, 1 arrivals wait"
    assert lines["durability"].startswith("process, commit_every 1: ")
    assert lines["health"].startswith("all files exist; their content was not read")
    found = json.loads(run("info", path, "--json").stdout)
    assert (found["clients"], found["path"], found["notes"]) == (9, str(path), {"epoch": 3})


def test_the_page_shows_what_info_prints(tmp_path, monkeypatch):
    """But for sizes: those of an index differ by the version of SQLite."""
    monkeypatch.chdir(tmp_path)
    rng = np.random.default_rng(0)
    with Server(ca2fl(buffer_size=10), np.zeros(650, np.float32), num_clients=19, store="my.store") as server:
        for _ in range(400):
            client, update = int(rng.integers(19)), rng.standard_normal(650)
            server.push(client=client, update=update, version=server.version)
    page = (ROOT / "docs/reference/store.md").read_text()
    lines = page.partition("$ afflux store info my.store\n")[2].partition("$")[0]
    printed = run("info", "my.store").stdout.splitlines()
    assert [line for line in lines.splitlines() if "on disk" not in line] == [
        line for line in printed if "on disk" not in line
    ]


def test_the_info_command_fails_with_a_missing_file(path):
    (path / "rows" / "c" / "0" / "0").unlink()
    result = run("info", path)
    assert result.exit_code == 1
    assert "health      " in result.stdout
    assert "is missing" in result.stdout
    result = run("info", path, "--json")
    assert result.exit_code == 1
    assert len(json.loads(result.stdout)["problems"]) == 1


def test_names_of_a_store_are_printed_with_escapes(tmp_path):
    name = "\x1b[2Jmine\nhealth      all files exist \u202e\x9b1m"
    path = tmp_path / "store"
    Server(replace(fedams(buffer_size=1), name=name), np.zeros(5), store=path).close()
    result = run("info", path)
    assert "rule        \\x1b[2Jmine\\nhealth      all files exist \\u202e\\x9b1m, kind update" in result.stdout
    assert all(line.isprintable() for line in result.stdout.split("\n"))
    assert store.info(path).rule == name
    (path / "\x1b[2J").symlink_to("elsewhere")
    result = run("info", path)
    assert result.exit_code == 2
    assert "\\x1b[2J is a symbolic link" in result.stderr
    assert "\x1b" not in result.stderr


@pytest.mark.parametrize("command", ["info", "check", "repair", "export"])
def test_the_commands_help_and_mistakes(command, tmp_path):
    assert f"afflux store {command} runs/" in run(command, "--help").stdout
    out = ["--out", tmp_path / "out.npy"] if command == "export" else []
    result = run(command, tmp_path / "nowhere", *out)
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: [store] ")
    assert result.stderr.count("\n") == 1
