"""Forged logs and runs: one line of error in seconds, and no file is written outside the folders."""

import json
import os
import re
import shutil
import signal
from contextlib import suppress

import msgspec
import numpy as np
import pytest

from afflux.lab.results import audit_log
from afflux.lab.results.audit_log import read_audit_log
from afflux.lab.runs import simulation
from afflux.lab.runs.run_checkpoint import refuse_other_setup
from afflux.lab.runs.setup import RunSetup
from afflux.ops.errors import ConfigError
from afflux.store.index_types import Name
from commands import check_exit, invoke
from conftest import check_raises, check_refused
from forged import DEEP, dumped, forge_state
from hostile_stores import replaced
from pairwise import soak

SMALL = ["--arrivals", "16", "--model", "logreg", "--num-clients", "10", "--concurrency", "4", "--eval-every", "8"]
LOG = "audit/fedbuff_buffer_size=4-seed0.jsonl"


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("kept") / "run"
    check_exit(0, "run", "--rule", "fedbuff:buffer_size=4", "--out", folder, *SMALL)
    return folder


@pytest.fixture
def log(kept, tmp_path):
    return shutil.copytree(kept, tmp_path / "run") / LOG


@pytest.fixture(autouse=True)
def in_seconds():
    signal.alarm(120)
    yield
    signal.alarm(0)


def change(log, number, change):
    lines = log.read_bytes().splitlines(keepends=True)
    content = json.loads(lines[number])
    lines[number] = dumped(change(content)).encode() + b"\n"
    log.write_bytes(b"".join(lines))


def read(log):
    """All that a run reads of a log with which it goes on."""
    header = read_audit_log(log).header
    refuse_other_setup(RunSetup(header.settings(log), header.seed), log, header)


def refused(log, message=""):
    assert len(str(check_refused(re.escape(message) or ".", read, log))) < 2000


HEADERS = [
    ({"num_clients": 10**9}, "the run began with other inputs"),
    ({"first_params_sha256": "0" * 64}, "the run began with other inputs"),
    ({"num_clients": -1}, "`int` >= 1 - at `$.num_clients`"),
    ({"d": 0}, "`int` >= 1 - at `$.d`"),
    ({"d": 10**30}, ""),
    ({"seed": -1}, "at `$.seed`"),
    ({"label": "\x1b[31m"}, "at `$.label`"),
    ({"leader": "a" * 100_000}, "at `$.leader`"),
    ({"options": {"buffer_size": "x"}}, "buffer_size"),
    ({"options": DEEP}, "at `$.options`"),
    ({"config": {"evil": 1}}, "unknown settings: 'evil'"),
    ({"inputs": {"\x1b[31m": "0" * 64}}, "inputs"),
    *soak({"inputs": {"data": "0" * 63}}, "inputs"),
    *soak({"versions": {"torch": "1" * 61}}, "versions"),
]
CONFIGS = [
    {"num_clients": 10**9, "concurrency": 4},
    {"num_clients": "x"},
    {"arrivals": -1},
    {"arrivals": 1.5},
    {"model": 7},
    {"data": ["digits"]},
    {"alpha": "x"},
    {"classes": None},
    {"partition": "../../victim"},
    {"batch_size": 0},
]


@pytest.mark.parametrize(("changes", "message"), HEADERS, ids=lambda value: str(value)[:40].replace("\0", ""))
def test_headers_that_cannot_be(changes, message, log):
    change(log, 0, lambda header: header | changes)
    refused(log, message)


@pytest.mark.parametrize("changes", CONFIGS, ids=str)
def test_settings_that_cannot_be(changes, log):
    change(log, 0, lambda header: header | {"config": header["config"] | changes})
    refused(log)


@pytest.mark.parametrize("line", [1, 5])
@pytest.mark.parametrize("content", [DEEP, [DEEP], {"type": DEEP}, {"type": "arrival"}, 2**70])
def test_lines_that_cannot_be(line, content, log):
    change(log, line, lambda old: content)
    refused(log, f"line {line + 1}: ")


def test_a_line_without_an_end(log, monkeypatch):
    monkeypatch.setattr(audit_log, "MOST_LINE_BYTES", 1 << 20)
    os.truncate(log, 1 << 40)  # a sparse file
    refused(log, "more than 1048576 bytes")


def test_files_of_another_kind(log, tmp_path):
    content = log.read_bytes()
    log.unlink()
    os.mkfifo(log)
    refused(log, "it is a FIFO")
    log.unlink()
    (tmp_path / "elsewhere").write_bytes(content)
    log.symlink_to(tmp_path / "elsewhere")
    refused(log, "it is a symbolic link")


@pytest.mark.parametrize("piece", [0, *soak(1), *soak(2), *soak(3)])
def test_random_changes_of_a_log(piece, kept, tmp_path):
    """What is changed anywhere is read, or is an error."""
    for seed in range(piece * 12, piece * 12 + 12):
        chance = np.random.default_rng(seed)
        log = shutil.copytree(kept, tmp_path / str(seed)) / LOG
        number = int(chance.integers(len(log.read_bytes().splitlines())))
        number = 0 if chance.integers(2) else number
        change(log, number, lambda line, chance=chance: replaced(line, chance))
        with suppress(ConfigError):
            read(log)


def command(folder):
    arguments = ["--checkpoint-every", "0", "--client-optimizer", "scaffold", "--store", folder / "store"]
    return ["run", "--rule", "fedbuff:buffer_size=4", "--out", folder / "run", *arguments, *SMALL]


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """The store of a run of clients that keep control variates, stopped after eight arrivals, and its folder."""

    def some(loop, servers, progress, after_each):
        for number, event in enumerate(loop):
            servers[0].add_event(event)
            if number == 19:
                raise KeyboardInterrupt
            after_each()

    folder = tmp_path_factory.mktemp("interrupted")
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(simulation, "record_events", some)
        result = invoke(*command(folder))
    assert result.exit_code == 130, result.output
    return folder


@pytest.fixture
def stopped(interrupted, tmp_path):
    return shutil.copytree(interrupted, tmp_path / "here")


def test_a_run_is_resumed(stopped):
    check_exit(0, *command(stopped))


NOTES = [
    {"arrays": "../../victim.npz"},
    {"arrays": "/dev/zero"},
    {"stream": DEEP},
    {"stream": {"events": 10**12, "arrivals": 8, "training": [], "models": []}},
    {"stream": {"events": 5, "arrivals": 10**12, "training": [], "models": []}},
    {"header": {}},
    {"history": {"evaluations": []}},
    {"log_bytes": -1},
    {"log_sha256": 5},
    {"server": {"__class__": 1}},
    {"evil": 1},
    {"afflux_run": [1]},
]


@pytest.mark.parametrize("changes", NOTES, ids=lambda value: str(value)[:50].replace("\0", ""))
def test_notes_that_cannot_be(changes, stopped):
    forge_state(stopped / "store", lambda found: found["notes"].update(changes))
    result = invoke(*command(stopped))
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1), result.output


@pytest.mark.parametrize("name", [LOG, "config.json", "metrics.csv", "summary.json", "curves.png", "finished.jsonl"])
def test_nothing_is_written_through_a_link_in_the_run_folder(name, stopped, tmp_path):
    victim, at = tmp_path / "victim", stopped / "run" / name
    content = at.read_bytes() if at.exists() else b"precious"
    victim.write_bytes(content)
    at.unlink(missing_ok=True)
    at.symlink_to(victim)
    with suppress(ConfigError):
        invoke(*command(stopped))
    assert victim.read_bytes() == content


def test_a_small_file_that_unpacks_to_a_large_one(stopped):
    (file,) = (stopped / "store").glob("clients-*.npz")
    np.savez_compressed(file, shifts=np.zeros(10**7))
    result = invoke(*command(stopped))
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1), result.output
    assert "its arrays are compressed" in result.stderr


@pytest.mark.parametrize("content", [b"", b"no zip", b"\x93NUMPY", "object", "shapes"])
def test_a_data_set_that_a_log_names(content, log, tmp_path):
    arrays = {"x_train": np.zeros((5, 28, 28), np.uint8), "y_train": np.zeros(5, np.uint8)}
    arrays |= {"x_test": np.zeros((5, 28, 28), np.uint8), "y_test": np.zeros(4, np.uint8)}
    if isinstance(content, bytes):
        (tmp_path / "mnist.npz").write_bytes(content)
    elif content == "object":
        np.savez(tmp_path / "mnist.npz", **arrays | {"y_test": np.array([print], object)})
    else:
        np.savez(tmp_path / "mnist.npz", **arrays)
    settings = {"data": "mnist", "data_dir": str(tmp_path)}
    change(log, 0, lambda header: header | {"config": header["config"] | settings})
    refused(log, f"{tmp_path}/mnist.npz")


@pytest.mark.parametrize(("type_", "text"), [(audit_log.Label, "fedbuff"), (audit_log.Digest, "0" * 64), (Name, "m")])
def test_a_name_does_not_end_with_a_line_end(type_, text):
    assert msgspec.convert(text, type_) == text
    check_raises(msgspec.ValidationError, msgspec.convert, text + "\n", type_)
