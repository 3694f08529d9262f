"""Files of a store that are lost, too long or say what is wrong: what can be read is read, and `repair` makes them
again, of what the store knows.
"""

import errno
import json
import os
import re
import shutil

import numpy as np
import pytest
import zarr

import afflux.store.metadata
from afflux import Server, StoreError, store
from conftest import check_error, raising
from nine_rows import RULE, contents, place, pushes, run


def edit(file, change):
    meta = json.loads(file.read_text())
    change(meta)
    file.write_text(json.dumps(meta))


@pytest.mark.parametrize("name", ["rows", "params", "sum", "arrivals"])
def test_a_file_that_is_too_long(name, path):
    """All that it should have is there: it is read, and cut to size when the store is mended."""
    file = path / name / "c" / "0" / "0"
    before, size = contents(path), file.stat().st_size
    os.truncate(file, size + 10)
    line = f"{file} is too long: {size + 10} of {size} bytes"
    health = store.check(path)
    assert (health.mendable, health.keeps_bits, health.damaged) == (True, True, ())
    assert health.problems == store.info(path).problems == (line,)
    copy = shutil.copytree(path, path.parent / "copy")
    with Server.open(copy, RULE) as server:
        pushes(server, [0, 5, 25, 8])
        assert server.rows.client_ids
    assert store.check(copy).problems == (line.replace(str(path), str(copy)),)
    assert "repair these files? No row is lost." in run("repair", path, input="n\n").stdout
    assert file.stat().st_size == size + 10
    told = run("repair", path, "--yes")
    assert (told.exit_code, told.stdout.splitlines()[-1]) == (0, "repaired: every file is whole again; no row was lost")
    assert contents(path) == before
    assert store.check(path).sound


@pytest.mark.parametrize("whole", [False, True])
def test_repair_of_a_file_that_is_missing(whole, path, monkeypatch):
    """One of several, or the folder of the array: one line for all of its rows, and the others stay."""
    rows = path / "rows"
    meta = json.loads((rows / "zarr.json").read_text())
    if whole:
        shutil.rmtree(rows)
    else:
        (rows / "c" / "0" / "0").unlink()
    lines = [f"{rows / 'c' / '0' / '0'} is missing: 9 clients' rows", "damaged: 9 of 9 rows lost"]
    if whole:
        lines.insert(0, f"cannot read {rows / 'zarr.json'}: No such file or directory")
    asked = run("repair", path, input="n\n")
    assert asked.stdout.splitlines()[: len(lines)] == lines
    assert "drop 9 rows and recompute the sum?" in asked.stdout
    assert store.repair(path).dropped == tuple(range(9))
    assert store.check(path).sound
    assert json.loads((rows / "zarr.json").read_text()) == meta
    with Server.open(path, RULE) as server:
        assert len(server.rows) == 0
        pushes(server, range(9))


@pytest.mark.parametrize("name", ["rows", "params", "sum", "arrivals", ""])
@pytest.mark.parametrize("text", [None, "", '{"node_type": "array"}'])
def test_what_zarr_knew_is_written_again(name, text, path):
    file = path / name / "zarr.json"
    before, state = file.read_bytes(), contents(path)
    if text is None:
        file.unlink()
    else:
        file.write_text(text)
    said = f"cannot read {file}: No such file or directory" if text is None else f"{file} is damaged: "
    for found in (store.info(path), store.check(path)):
        (problem,) = found.problems
        assert problem.startswith(said)
    if name:
        check_error(rf"{said}.*; `afflux store repair {path}` writes it again$", Server.open, path, error=StoreError)
    assert run("check", path).stdout.endswith(f"damaged: no row lost; `afflux store repair {path}` repairs it\n")
    assert store.repair(path) is None
    assert json.loads(file.read_bytes()) == json.loads(before)
    assert {place: data for place, data in contents(path).items() if place != file} == {
        place: data for place, data in state.items() if place != file
    }
    assert store.check(path).sound
    assert zarr.open_group(path, mode="r")["rows"].shape[0] >= 9
    Server.open(path).close()


def chunk(meta):
    return meta["chunk_grid"]["configuration"]["chunk_shape"]


WRONG = {
    "fewer slots in a file": lambda meta: chunk(meta).__setitem__(0, chunk(meta)[0] // 2),
    "more of them": lambda meta: chunk(meta).__setitem__(0, chunk(meta)[0] + 16),
    "wider": lambda meta: chunk(meta).__setitem__(1, chunk(meta)[1] + 1),
    "narrower": lambda meta: chunk(meta).__setitem__(1, chunk(meta)[1] - 64),
    "dtype": lambda meta: meta.update(data_type="float16"),
    "endian": lambda meta: meta["codecs"][0]["configuration"].update(endian="big"),
    "codec": lambda meta: meta["codecs"].append({"name": "gzip"}),
    "no slots": lambda meta: meta["shape"].__setitem__(0, 0),
    "elements": lambda meta: meta["shape"].__setitem__(1, 9),
    "keys": lambda meta: meta["chunk_key_encoding"]["configuration"].update(separator="."),
    "kind": lambda meta: meta.update(node_type="group"),
}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("name", ["rows", "params", "sum"])
def test_metadata_that_can_be_read_and_are_wrong(name, wrong, path):
    """They count as lost: no file is cut, no row is dropped."""
    before, file = contents(path), path / name / "zarr.json"
    edit(file, WRONG[wrong])
    health = store.check(path)
    assert (health.mendable, health.keeps_bits, health.damaged) == (True, True, ())
    (problem,) = health.problems
    assert problem.startswith(f"{file} is damaged: it ")
    assert store.info(path).problems == (problem,)
    said = f"[store] {problem}; `afflux store repair {path}` writes it again"
    check_error(f"^{re.escape(said)}$", Server.open, path, error=StoreError)
    assert store.repair(path) is None
    assert contents(path) == before
    assert store.check(path).sound


def test_rows_that_are_lost_beside_metadata_that_are_wrong(path):
    """Only they are dropped."""
    file, offset = place(path, 4)
    os.truncate(file, offset)
    lost = store.check(path).damaged
    edit(path / "rows" / "zarr.json", WRONG["fewer slots in a file"])
    assert 0 < len(lost) < 9
    assert store.check(path).damaged == lost
    assert store.repair(path).dropped == lost
    assert store.check(path).sound


def test_a_full_disk_amid_a_repair(path, monkeypatch):
    (path / "rows" / "zarr.json").unlink()
    before, tried = contents(path), []

    def full(*arguments):
        tried.append(arguments)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(afflux.store.metadata, "_replace", full)
        check_error(rf"cannot write zarr.json in {path} again: No space left", store.repair, path, error=StoreError)
    assert tried
    assert contents(path) == before
    assert store.repair(path) is None
    assert store.check(path).sound


def test_a_file_that_cannot_be_cut(path, monkeypatch):
    file = path / "params" / "c" / "0" / "0"
    os.truncate(file, file.stat().st_size + 10)

    monkeypatch.setattr(os, "ftruncate", raising(OSError, errno.EROFS, os.strerror(errno.EROFS)))
    check_error(rf"cannot cut {file} to size: Read-only file system$", store.repair, path, error=StoreError)


def test_a_repair_needs_no_other_folder(path, monkeypatch):
    """Nor minds what one that was ended has left."""
    monkeypatch.setattr("tempfile.tempdir", "/nowhere/to/be/found")
    (path / "rows" / "zarr.json").unlink()
    (path / "rows" / "zarr.json.new").write_text("{")
    assert store.repair(path) is None
    assert store.check(path).sound
    assert not (path / "rows" / "zarr.json.new").exists()


def test_a_folder_that_is_made_again_is_on_the_disk(path, monkeypatch):
    """Its name is in the store's folder, which is flushed after it."""
    done, real = [], afflux.store.metadata.sync

    def sync(place):
        done.append((place, (path / "rows").exists()))
        real(place)

    monkeypatch.setattr(afflux.store.metadata, "sync", sync)
    shutil.rmtree(path / "rows")
    assert store.repair(path).dropped == tuple(range(9))
    assert (path, True) in done


def test_files_have_the_umask_of_the_process(path, tmp_path):
    before = os.umask(0o027)
    try:
        with Server(RULE, np.zeros(4), num_clients=9, store=tmp_path / "new") as server:
            server.push(client=1, version=0, update=np.ones(4))
            server.checkpoint()
            modes = {(entry.is_dir(), entry.stat().st_mode & 0o777) for entry in (tmp_path / "new").rglob("*")}
        store.export(path, tmp_path / "rows.npy")
    finally:
        os.umask(before)
    assert modes == {(True, 0o750), (False, 0o640)}
    assert (tmp_path / "rows.npy").stat().st_mode & 0o777 == 0o640
