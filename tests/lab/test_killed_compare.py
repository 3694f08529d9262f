"""A comparison that ends anyhow leaves a folder that the same command fills, and another one refuses."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool
from functools import partial

import pytest

import made_runs
from afflux.lab import read_results
from afflux.lab.publishing import Page, publish
from afflux.lab.results import figures, run_folder
from afflux.lab.results.finished_runs import FILE
from afflux.lab.runs import compare
from afflux.sim import ConfigError
from afflux.sim.errors import ProcessKilledError
from afflux.store.lock import LOCK
from conftest import FORKS, check_raises, check_refused
from crashes import in_child
from pairwise import soak

pytestmark = [pytest.mark.filterwarnings(FORKS), pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")]
FILES = {"audit", "models", FILE, *run_folder.FILES} - {"clients.csv"}


RULES = ["fedbuff:buffer_size=3", "fedasync"]
simulation = partial(made_runs.simulation, rules=RULES, concurrency=4, arrivals=12, eval_every=4)


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def killed(out, point):
    """The command in a child that is killed at this point: (run, arrival), or the function of `run_folder`."""

    def watch(run, progress):
        if (run, progress.arrivals) == point:
            die()

    def command(tell):
        if isinstance(point, str):
            setattr(run_folder, point, lambda *arguments, **options: die())
        simulation().run(out=out, watch=watch)

    child, reading = in_child(command)
    os.close(reading)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


MORE = ("remove_run_files", (0, 1), "describe_setting")


def statuses(out):
    """The last status of each run in the record."""
    lines = map(json.loads, (out / FILE).read_text().splitlines())
    return list({(line["rule"], line["seed"]): line.get("status", "ended") for line in lines}.values())


@pytest.mark.parametrize("point", [(1, 3), "_summary", *(row for point in MORE for row in soak(point))])
def test_the_same_command_goes_on_after_a_kill(point, tmp_path):
    out, made = tmp_path / "out", []
    killed(out, point)
    ended = statuses(out).count("ended") if (out / FILE).exists() else 0
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file() and path.name != "lock"}
    if ended:
        assert set(statuses(out)) <= {"ended", "open"}
        other = simulation(arrivals=16)
        check_refused("out holds the runs of another command, or of files that have changed", other.run, out=out)
        (out / "notes.txt").touch()
        check_refused("is not an empty folder", simulation().run, out=out)
        (out / "notes.txt").unlink()
        assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file() and path.name != "lock"} == before
        assert len(read_results(out)) == ended, "a reader is not kept out"
    results = simulation().run(out=out, watch=lambda run, progress: made.append(run))
    assert {path.name for path in out.iterdir()} == FILES
    whole = simulation().run()
    assert [run.digest for run in results] == [run.digest for run in whole]
    evaluations = [[run.evaluations for run in runs] for runs in (results, whole, read_results(out))]
    assert evaluations[0] == evaluations[1] == evaluations[2]
    made.clear()
    again = simulation().run(out=out, watch=lambda run, progress: made.append(run))
    assert made == [0, 1], "both were finished"
    assert [run.digest for run in again] == [run.digest for run in whole]


COMMANDS = (lambda out: simulation().run(out=out), lambda out: publish(out, lambda _: Page("page", "", {}), []))


@pytest.mark.parametrize("command", COMMANDS, ids=["compare", "grid"])
def test_a_kill_that_left_nothing_but_the_lock(command, tmp_path):
    """A grid has no record before the end of its first run."""
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / LOCK).touch()
    command(tmp_path / "out")
    assert not (tmp_path / "out" / LOCK).exists()


def test_a_second_command_is_refused_and_a_reader_is_not(tmp_path):
    out = tmp_path / "out"
    seen = []

    def watch(run, progress):
        if progress.arrivals == 3 and run == 1:
            check_refused(rf"{out} is in use: (this process|process \d+) writes to it", simulation().run, out=out)
            seen.append(len(read_results(out)))

    simulation().run(out=out, watch=watch)
    assert seen == [1]
    assert {path.name for path in out.iterdir()} == FILES


def test_the_lock_of_a_folder_that_was_made_anew_is_not_removed(tmp_path):
    """The first command has removed its empty folder, and a second one has made it before the first one ends."""
    out = tmp_path / "out"
    out.mkdir()
    first = run_folder.locked(out)
    with first:
        (out / run_folder.LOCK).unlink()
        second = run_folder.locked(out)
        second.__enter__()
    with pytest.raises(ConfigError, match="is in use"), run_folder.locked(out):
        pass
    second.__exit__(None, None, None)
    assert [*out.iterdir()] == []


def test_a_killed_process_of_a_run_ends_that_run_alone(tmp_path, monkeypatch, caplog):
    """The killed run is made again by the same command."""
    out = tmp_path / "out"
    monkeypatch.setattr(figures, "draw_comparison", lambda *arguments: arguments[3].touch())

    def watch(run, progress):
        if (run, progress.arrivals) == (0, 3):
            raise ProcessKilledError("killed")

    results = simulation().run(out=out, watch=watch)
    assert [str(run) for run in results.failures] == ["fedbuff:buffer_size=3, seed 0 was killed"]
    assert [run.spec.label for run in results] == ["fedasync"]
    assert statuses(out) == ["killed", "ended"]
    assert json.loads((out / "summary.json").read_text())["failed"][0]["reason"] == "killed"
    assert caplog.messages == ["fedbuff:buffer_size=3, seed 0 was killed: killed; the other runs go on"]
    assert read_results(out).failures[0][:3] == results.failures[0][:3]
    assert not simulation().run(out=out).failures
    assert statuses(out) == ["ended", "ended"]
    assert "failed" not in json.loads((out / "summary.json").read_text())


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
def test_an_interrupt_keeps_the_finished_runs(error, tmp_path):
    out = tmp_path / "out"

    def watch(run, progress):
        if (run, progress.arrivals) == (1, 3):
            raise error

    assert check_raises(error, simulation().run, out=out, watch=watch).__notes__ == [
        f"1 of 2 runs were finished; kept {out}/; the same command with --out {out} continues"
    ]
    assert statuses(out) == ["ended", "interrupted" if error is KeyboardInterrupt else "open"]
    assert (out / "metrics.csv").read_text().count("fedbuff") == 4
    assert len(simulation().run(out=out)) == 2


class BrokenPool:
    """A process whose second job is killed."""

    jobs = 0

    def __init__(self, *arguments):
        pass

    def __enter__(self):
        return self

    def __exit__(self, kind, *error):
        assert kind is None

    def job(self, run, index, *arguments):
        future = Future()
        if index == 1:
            future.set_exception(BrokenProcessPool("terminated abruptly"))
        else:
            future.set_result([f"result {index}"])
        return future


def test_a_killed_process_of_several_ends_its_run_alone(monkeypatch):
    monkeypatch.setattr(compare, "ProcessPool", BrokenPool)
    finished, jobs = {}, simulation(rules=[*RULES, "fedasync:alpha=0.5"]).jobs
    results = compare.compare(jobs, simulation().config, processes=2, finished=finished)
    assert results == ["result 0", "result 2"]
    assert (finished[1].status, type(finished[1].error)) == ("killed", ProcessKilledError)


@pytest.mark.soak
def test_a_process_is_terminated_when_a_run_is_finished(tmp_path):
    """By the command line, with two processes."""
    out = tmp_path / "out"
    command = [sys.executable, "-m", "afflux", "compare", "--rules", "fedbuff", "--seeds", "0,1,2", "--jobs", "2"]
    command += ["--model", "logreg", "--arrivals", "1500", "--eval-every", "20", "--out", str(out)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while process.poll() is None and not (out / "audit" / "fedbuff-seed2.jsonl").exists():
        time.sleep(0.05)
    children = subprocess.run(["pgrep", "-P", str(process.pid), "-f", "spawn_main"], capture_output=True, text=True)
    os.kill(int(children.stdout.split()[0]), signal.SIGTERM)
    _, errors = process.communicate(timeout=1800)
    assert process.returncode == 0
    assert re.search("fedbuff, seed [012] was killed: its process was killed, .*; the other runs go on", errors)
    assert statuses(out).count("killed") == 1
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    assert {path.name for path in out.iterdir()} == FILES


@pytest.mark.soak
def test_killed_at_random_moments(tmp_path):
    """The command line with two processes: until one of 14 kills comes too late."""
    out, rng = tmp_path / "out", random.Random(45)
    words = "compare --rules fedbuff,fedasync --seeds 0,1 --jobs 2 --model logreg --arrivals 300 --eval-every 20"
    command = [sys.executable, "-m", "afflux", *words.split(), "--out", str(out)]
    for _ in range(14):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        time.sleep(rng.uniform(1, 8))
        process.kill()
        _, errors = process.communicate(timeout=1800)
        assert "error" not in errors
        if process.returncode == 0:
            break
    else:
        assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    assert {path.name for path in out.iterdir()} == FILES
