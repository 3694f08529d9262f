"""Links and other special files in a store's folder: nothing is read or written through one, and `check` lists them."""

import os
import re
import shutil
import signal
import stat

import numpy as np
import pytest

from afflux import Server, StoreError, store
from afflux.store.files import new_file, open_regular
from conftest import check_error
from nine_rows import RULE, pushes, run


@pytest.fixture
def path(nine_rows, tmp_path):
    signal.alarm(60)  # a FIFO that is opened waits for ever
    yield shutil.copytree(nine_rows, tmp_path / "inner" / "store")
    signal.alarm(0)


@pytest.fixture
def victim(tmp_path):
    folder = tmp_path / "victim"
    folder.mkdir()
    (folder / "file").write_bytes(b"precious")
    yield folder
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == {"file": b"precious"}


KINDS = {
    "link": (lambda at, victim: at.symlink_to(victim / "file"), "a symbolic link"),
    "dangling": (lambda at, victim: at.symlink_to(victim / "new"), "a symbolic link"),
    "folder": (lambda at, victim: at.symlink_to(victim), "a symbolic link"),
    "relative": (lambda at, victim: at.symlink_to("../../victim/new"), "a symbolic link"),
    "hard": (lambda at, victim: os.link(victim / "file", at), "a hard link"),
    "fifo": (lambda at, victim: os.mkfifo(at), "a FIFO"),
}
#: Files that are there, that a server makes when it is opened or pushed to, and that none ever makes.
PLACES = [
    *("zarr.json", "params/zarr.json", "params/c/0/0", "rows/c/0/0", "index.sqlite-wal", "index.sqlite-shm"),
    *("params/zarr.json.new", "params/c/1/0", "rows/c/7", ".again", "zarr.json.new", "other"),
]


def put(at, victim, kind):
    at.parent.mkdir(parents=True, exist_ok=True)
    at.unlink(missing_ok=True)
    KINDS[kind][0](at, victim)
    return f"{at} is {KINDS[kind][1]}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("place", PLACES)
def test_opening_refuses_it(place, kind, path, victim):
    said = put(path / place, victim, kind)
    check_error(rf"{re.escape(said)}.* remove it, or copy the folder", Server.open, path, RULE, error=StoreError)
    check_error(r"symbolic link|FIFO|hard link", store.info, path, error=StoreError)
    health = store.check(path)
    assert health.problems == (said,)
    assert (health.sound, health.mendable) == (False, False)
    told = run("check", path)
    assert (told.exit_code, said in told.stdout) == (1, True)
    check_error(r"\[repair\] ", store.repair, path, error=StoreError)


def test_a_socket(path):
    os.mknod(path / "params/c/1", stat.S_IFSOCK | 0o600)
    check_error(r"params/c/1 is a socket", Server.open, path, RULE, error=StoreError)
    assert store.check(path).problems == (f"{path}/params/c/1 is a socket",)


@pytest.mark.parametrize("kind", KINDS)
def test_a_lock_that_is_a_link(kind, path, victim):
    said = put(path / "lock", victim, kind)
    check_error(f"cannot lock {path}/lock.*{said.partition(' is ')[2]}", Server.open, path, RULE, error=StoreError)
    shutil.rmtree(path)
    path.mkdir()
    put(path / "lock", victim, kind)
    check_error("cannot lock", Server, RULE, np.zeros(4), num_clients=9, store=path, error=StoreError)


def test_an_index_that_is_a_link(path, victim):
    shutil.copy(path / "index.sqlite", path.parent / "elsewhere.sqlite")
    (path / "index.sqlite").unlink()
    (path / "index.sqlite").symlink_to(path.parent / "elsewhere.sqlite")
    check_error(r"index.sqlite is a symbolic link", Server.open, path, RULE, error=StoreError)


def test_several_are_listed(path, victim):
    lines = {put(path / place, victim, "link") for place in ("params/c/0/0", "zarr.json.new", "rows/c/1/0")}
    assert set(store.check(path).problems) == lines


def test_a_link_to_the_store_itself_is_the_users_own(path):
    path.with_name("name").symlink_to(path)
    with Server.open(path.with_name("name"), RULE) as server:
        pushes(server, [4, 5])
    assert store.check(path.with_name("name")).sound


@pytest.mark.parametrize("place", ["params/zarr.json.new", "params/c/1"])
def test_nothing_is_written_through_one_that_comes_later(place, path, victim, monkeypatch):
    """A server makes its files again. There is no guarantee against another process that writes to the folder."""
    monkeypatch.setattr("afflux.store.stored_vectors.promises_space", lambda folder: False)
    server, at = Server.open(path, RULE), path / place
    if place.endswith("1"):
        at.mkdir()
        at = at / "0"
    at.symlink_to(victim / "file")
    held = [server.pull()]

    def until_params_need_another_segment():
        for _ in range(5):
            pushes(server, [1, 2, 3])
            held.append(server.pull())

    if place.endswith("new"):  # which is replaced
        until_params_need_another_segment()
    else:
        check_error("it is a symbolic link", until_params_need_another_segment, error=StoreError)
        at.unlink()
    server.close()


def test_what_opens_a_file(tmp_path, victim):
    (tmp_path / "link").symlink_to(victim / "file")
    os.mkfifo(tmp_path / "fifo")
    os.link(victim / "file", tmp_path / "hard")
    for name, flags, what in [
        ("link", os.O_RDONLY, "a symbolic link"),
        ("link", os.O_RDWR | os.O_CREAT, "a symbolic link"),
        ("fifo", os.O_RDONLY, "a FIFO"),
        ("fifo", os.O_WRONLY, "a FIFO"),
        ("fifo", os.O_RDWR, "a FIFO"),
        ("hard", os.O_RDWR, "a hard link"),
        ("victim", os.O_RDONLY, "a folder"),
        ("victim", os.O_RDWR, "a folder"),
    ]:
        check_error(f"it is {what}", open_regular, tmp_path / name, flags, error=OSError)
    check_error("it is a device", open_regular, os.path.join(os.sep, "dev", "null"), error=OSError)
    os.close(open_regular(tmp_path / "hard"))
    for name in ("link", "hard", "fifo"):
        os.close(new_file(tmp_path / name))
        assert (tmp_path / name).stat().st_nlink == 1
    check_error("directory", new_file, victim, error=OSError)
