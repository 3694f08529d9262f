"""A long run of a table that was interrupted or killed goes on in the middle, or begins again where it cannot."""

import json
import os
import re
import shutil
import signal
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import Mock

import pytest

from afflux.lab.runs import run_checkpoint
from afflux.ops.errors import StoreError
from bench.papers import long_runs
from bench.papers.reproduction import UNFINISHED, Budget, reproduce
from pairwise import soak
from small_tables import CELLS, SMALL

LONG = replace(SMALL, long=True)


def lines(folder):
    records = map(json.loads, (folder / "small.jsonl").read_text().splitlines())
    return [{name: value for name, value in record.items() if name != "seconds"} for record in records]


def interrupt(folder, arrivals=7, table=LONG):
    """Make the first run of a table, and the second one up to an arrival; return the arrivals seen and what is kept."""
    seen = []

    @contextmanager
    def show(_titles, _most):
        def watch(index, progress):
            seen.append((index, progress.arrivals))
            if (index, progress.arrivals) == (1, arrivals):
                signal.raise_signal(signal.SIGINT)

        yield watch

    with pytest.raises(KeyboardInterrupt) as raised:
        reproduce(table, folder, (0,), limits=Budget(processes=1), show=show)
    assert raised.value.__notes__ == ["1 of 2 runs were finished; the same command continues"]
    (kept,) = (folder / UNFINISHED).iterdir()
    assert kept.name.startswith("fedasync_alpha=0.5-seed0-")
    return [count for index, count in seen if index == 1], kept


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("whole")
    reproduce(SMALL, folder, (0,), limits=Budget(processes=1))
    return lines(folder)


def test_a_long_run_that_was_interrupted_goes_on_to_the_same_line(tmp_path, monkeypatch, whole, caplog):
    monkeypatch.setattr(long_runs, "CHECKPOINT_SECONDS", 0.0)
    assert interrupt(tmp_path)[0][-1] == 7
    assert lines(tmp_path) == whole[:1]
    seen, kept = interrupt(tmp_path, 9)
    assert seen == [8, 9]
    shutil.copytree(kept, tmp_path / "copy")
    reproduce(LONG, tmp_path, (0,), limits=Budget(processes=1))
    assert lines(tmp_path) == whole
    assert not (tmp_path / UNFINISHED).exists()
    shutil.copytree(tmp_path / "copy", kept)  # as after a kill between the run's line and the end of the command
    reproduce(LONG, tmp_path, (0,), limits=Budget(processes=1))
    assert not kept.exists()
    assert not caplog.records


def damage(part, make):
    def damaged(kept):
        paths = [*kept.glob(part)]
        assert paths
        for path in paths:
            make(path)

    return damaged


def without_stores(kept):
    """No store can be written, and the run was killed before its first checkpoint."""
    shutil.rmtree(kept)


@pytest.mark.parametrize(
    ("damaged", "told"),
    [
        (damage("store/index.sqlite", lambda path: path.write_bytes(b"damaged")), "begins again, and .* is set aside"),
        *soak(damage("store/params/c/*/*", lambda path: os.truncate(path, 2)), "is truncated"),
        *soak(damage("audit/*.jsonl", lambda path: os.truncate(path, 900)), "is shorter than"),
        (without_stores, "is made without checkpoints: .*no locks"),
    ],
)
def test_a_long_run_that_cannot_go_on_begins_again(damaged, told, tmp_path, monkeypatch, whole, caplog):
    _, kept = interrupt(tmp_path)
    damaged(kept)
    if damaged is without_stores:
        monkeypatch.setattr(run_checkpoint.StoredRun, "server", Mock(side_effect=StoreError("no locks")))
    reproduce(LONG, tmp_path, (0,), limits=Budget(processes=1))
    assert re.search(f"fedasync:alpha=0.5, seed 0 .*{told}", caplog.text)
    assert lines(tmp_path) == whole
    assert not (tmp_path / UNFINISHED).exists()


def test_a_long_run_does_not_go_on_from_that_of_other_settings(tmp_path, whole, caplog):
    cells = tuple(cell._replace(settings=cell.settings | {"client_lr": 0.3}) for cell in CELLS)
    _, other = interrupt(tmp_path / "other", table=replace(LONG, cells=cells))
    _, kept = interrupt(tmp_path)
    assert kept.name != other.name
    shutil.rmtree(kept)
    shutil.copytree(other, kept)
    reproduce(LONG, tmp_path, (0,), limits=Budget(processes=1))
    assert "store holds a run with another client_lr" in caplog.text
    assert lines(tmp_path) == whole
