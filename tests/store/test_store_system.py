"""Errors of the system that are no damage and no second process: too many open files, no locks, no threads."""

import errno
import fcntl
import mmap
import os
import resource
import shutil
import sqlite3
import sys
import threading

import numpy as np
import pytest

import afflux.store.index
import afflux.store.segments
from afflux import Server, StoreError, store
from afflux.rules import fedbuff
from conftest import FORKS, check_error, raising
from crashes import result
from inside import store_of
from nine_rows import RULE, contents

pytestmark = [pytest.mark.skipif(sys.platform == "win32", reason="needs flock"), pytest.mark.filterwarnings(FORKS)]


CALLS = {
    "open": lambda path: Server.open(path, RULE).close(checkpoint=False),
    "info": store.info,
    "check": store.check,
    "repair": store.repair,
    "make": lambda path: Server(fedbuff(), np.zeros(3), store=path.with_name("new")).close(),
}


def failing(number):

    return raising(OSError, number, os.strerror(number))


@pytest.mark.parametrize("call", CALLS)
def test_too_many_open_files(call, path):
    """Whichever file cannot be opened, the error says so; nothing is damaged, dropped or left behind."""

    def body(tell):
        CALLS[call](path)  # imports
        shutil.rmtree(path.with_name("new"), ignore_errors=True)
        most = max(map(int, os.listdir("/dev/fd"))) + 100
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
        taken = []
        with pytest.raises(OSError, match="Too many"):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        for free in range(30):
            try:
                outcome = CALLS[call](path)
            except StoreError as error:
                tell(f"{free} {error}".replace("\n", " "))
            else:
                assert call != "check" or outcome.sound
                return
            assert not path.with_name("new").exists()
            os.close(taken.pop())
        tell("30 never")

    before = contents(path)
    errors = result(body)
    assert len(errors) >= 2
    assert [error for error in errors if not error.endswith("Too many open files: raise `ulimit -n`")] == []
    assert contents(path) == before


@pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="needs /proc")
def test_the_number_of_open_files(path):
    """The lock, the index and its log for two connections, SQLite's -shm; and each mapped segment."""
    with Server.open(path, RULE) as server:
        files = [os.path.realpath(entry.path) for entry in os.scandir("/proc/self/fd")]
        mapped = sum(len(array._maps) for array in store_of(server).vectors.arrays.values())
    assert sum(file.startswith(f"{os.path.realpath(path)}/") for file in files) == 6 + mapped


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EACCES])
@pytest.mark.parametrize("call", ["check", "repair"])
def test_rows_that_cannot_be_opened_are_not_damaged(call, number, path, monkeypatch):
    before, opened = contents(path), afflux.store.segments.opened

    def refused(file, *flags):
        return failing(number)() if file.parts[-4] == "rows" else opened(file, *flags)

    monkeypatch.setattr(afflux.store.segments, "opened", refused)
    check_error(rf"cannot read {path / 'rows'}/c/0/0: {os.strerror(number)}", CALLS[call], path, error=StoreError)
    assert contents(path) == before


def test_files_that_cannot_be_looked_at_are_not_missing(path, monkeypatch):
    lstat = os.lstat

    def refused(file, **options):
        return failing(errno.EACCES)() if str(file).endswith("rows/c/0/0") else lstat(file, **options)

    monkeypatch.setattr(os, "lstat", refused)
    monkeypatch.setattr("pathlib.Path.lstat", refused)
    for call in ("open", "info", "repair"):
        check_error(rf"cannot read {path / 'rows'}/c/0/0: Permission denied$", CALLS[call], path, error=StoreError)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("lock", ["flock", "lockf"])
def test_a_file_system_without_locks(lock, call, path, monkeypatch):
    """Neither for afflux (flock) nor for SQLite (records)."""
    before = contents(path)
    monkeypatch.setattr(fcntl, lock, failing(errno.ENOLCK))
    monkeypatch.setattr("afflux.store.lock._file_system", lambda folder: "nfs4")
    check_error(r"system \(nfs4\) has no locks: put the store on a local disk$", CALLS[call], path, error=StoreError)
    assert contents(path) == before
    assert not path.with_name("new").exists()


def test_a_lock_that_fails_has_no_holder(path, monkeypatch):
    monkeypatch.setattr(fcntl, "flock", failing(errno.EIO))
    for call in ("open", "info"):
        check_error(rf"cannot lock {path / 'lock'}: Input/output error$", CALLS[call], path, error=StoreError)
    monkeypatch.undo()
    CALLS["open"](path)


def test_a_file_system_without_shared_memory(path, monkeypatch):
    """SQLite's words would be "disk I/O error"; they remain where memory maps work."""
    connect = afflux.store.index.connect

    class Failing(sqlite3.Connection):
        def execute(self, *_):
            error = sqlite3.OperationalError("disk I/O error")
            error.sqlite_errorcode = sqlite3.SQLITE_IOERR_SHMMAP
            raise error

    def connected(file, mode):
        connect(file, mode).close()
        return sqlite3.connect(file, factory=Failing)

    monkeypatch.setattr(afflux.store.index, "connect", connected)
    check_error(r"index\.sqlite: disk I/O error$", Server.open, path, RULE, error=StoreError)
    monkeypatch.setattr(mmap, "mmap", failing(errno.ENODEV))
    check_error(r"\(.+\) has no memory maps that processes share: put the", Server.open, path, RULE, error=StoreError)


def test_a_store_needs_no_thread(tmp_path, monkeypatch):
    """Where the system allows none, zarr-python's first call raises and its second one never returns."""

    monkeypatch.setattr(threading.Thread, "start", raising(RuntimeError, "can't start new thread"))
    for name in ("first", "second"):
        Server(fedbuff(), np.zeros(3), store=tmp_path / name, num_threads=1).close()
        (tmp_path / name / "params" / "zarr.json").unlink()
        assert store.repair(tmp_path / name) is None
        Server.open(tmp_path / name, num_threads=1).close()


def test_a_folder_that_cannot_be_entered(path, monkeypatch):
    monkeypatch.setattr("pathlib.Path.stat", failing(errno.EACCES))
    for call in ("open", "info", "check", "repair"):
        check_error(rf"cannot read {path}: Permission denied$", CALLS[call], path, error=StoreError)
