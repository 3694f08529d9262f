"""A comparison that is killed anywhere leaves a folder that the same command fills, and another one refuses."""

import os
import random
import re
import signal
import subprocess
import sys
import time
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool

import pytest

import own_tasks
from afflux.sim import ConfigError, Simulation, partitioned
from afflux.sim.errors import ProcessKilledError
from afflux.sim.results import figures, run_folder
from afflux.sim.runs import compare
from conftest import FORKS
from crashes import in_child
from pairwise import soak

pytestmark = [
    pytest.mark.filterwarnings(FORKS),
    pytest.mark.skipif(not hasattr(os, "fork"), reason="forks"),
]
FILES = {"audit", "models", *run_folder.FILES} - {"clients.csv"}


def simulation(rules=("fedbuff:buffer_size=3", "fedasync"), **changes):
    clients = partitioned(own_tasks.X, own_tasks.Y, 12, "iid")
    settings = {"concurrency": 4, "arrivals": 12, "eval_every": 4} | changes
    return Simulation(own_tasks.linear, clients, None, own_tasks.TEST, rules=list(rules), **settings)


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
        simulation().run(out=out, keep_updates=True, watch=watch)

    child, reading = in_child(command)
    os.close(reading)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL


MORE = ("create_audit_folder", (0, 1), "describe_setting")


@pytest.mark.parametrize("point", [(1, 3), "_summary", *(row for point in MORE for row in soak(point))])
def test_the_same_command_replaces_the_folder_of_one_that_was_killed(point, tmp_path, caplog):
    out = tmp_path / "out"
    killed(out, point)
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    with pytest.raises(
        ConfigError, match="out holds the logs of another command, which was killed; choose another --out"
    ):
        simulation(arrivals=16).run(out=out, keep_updates=True)
    (out / "notes.txt").touch()
    with pytest.raises(ConfigError, match="is not an empty folder"):
        simulation().run(out=out, keep_updates=True)
    (out / "notes.txt").unlink()
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    digests = [run.digest for run in simulation().run(out=out, keep_updates=True)]
    assert caplog.messages == [f"{out}: this command was killed; it makes its runs again"]
    assert {path.name for path in out.iterdir()} == FILES
    assert digests == [run.digest for run in simulation().run()]
    with pytest.raises(ConfigError, match="is not an empty folder"):
        simulation().run(out=out, keep_updates=True)


def test_a_command_that_runs_is_not_replaced(tmp_path):
    out = tmp_path / "out"

    def watch(run, progress):
        if progress.arrivals == 3 and run == 1:
            with pytest.raises(ConfigError, match=f"another command writes to {out}; choose another --out"):
                simulation().run(out=out)

    simulation().run(out=out, watch=watch)
    assert {path.name for path in out.iterdir()} == FILES


def test_the_same_command_replaces_the_folder_if_one_of_its_processes_was_killed(tmp_path, monkeypatch, caplog):
    out = tmp_path / "out"
    monkeypatch.setattr(figures, "draw_comparison", lambda *arguments: arguments[3].touch())

    def watch(run, progress):
        if (run, progress.arrivals) == (1, 3):
            raise ProcessKilledError("killed")

    with pytest.raises(ProcessKilledError):
        simulation().run(out=out, watch=watch)
    assert {path.name for path in out.iterdir()} == FILES | {run_folder.UNFINISHED}
    assert (out / "metrics.csv").read_text().count("fedbuff") == 4
    with pytest.raises(ConfigError, match="out holds the logs of another command"):
        simulation(arrivals=16).run(out=out)
    simulation().run(out=out)
    assert caplog.messages == [f"{out}: this command was killed; it makes its runs again"]
    assert {path.name for path in out.iterdir()} == FILES


class BrokenPool:
    """A pool of processes whose second job was killed."""

    def __init__(self, *arguments):
        pass

    def __enter__(self):
        return self

    def __exit__(self, kind, *error):
        assert kind is BrokenProcessPool

    def job(self, run, index, *arguments):
        future = Future()
        if index:
            future.set_exception(BrokenProcessPool("terminated abruptly"))
        else:
            future.set_result(["result"])
        return future


def test_a_killed_process_of_several_is_an_error_and_the_others_results_are_kept(monkeypatch):
    monkeypatch.setattr(compare, "ProcessPool", BrokenPool)
    finished = {}
    with pytest.raises(ProcessKilledError, match="a process of the runs was killed"):
        compare.compare(simulation().jobs, simulation().config, processes=2, finished=finished)
    assert finished == {0: ["result"]}


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
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2
    assert "Traceback" not in errors
    assert re.search("[12] of 3 runs were finished; kept .*/out/; the same command replaces it\n", errors)
    assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    assert {path.name for path in out.iterdir()} == FILES


@pytest.mark.soak
def test_killed_at_random_moments(tmp_path):
    """The command line with two processes: until one of 14 kills comes too late."""
    out, rng = tmp_path / "out", random.Random(45)
    command = [
        sys.executable,
        "-m",
        "afflux",
        "compare",
        "--rules",
        "fedbuff,fedasync",
        "--seeds",
        "0,1",
        "--jobs",
        "2",
    ]
    command += ["--model", "logreg", "--arrivals", "300", "--eval-every", "20", "--out", str(out)]
    for _ in range(14):
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        time.sleep(rng.uniform(1, 8))
        process.kill()
        _, errors = process.communicate(timeout=60)
        assert "error" not in errors
        if process.returncode == 0:
            break
    else:
        assert subprocess.run(command, capture_output=True, check=False).returncode == 0
    assert {path.name for path in out.iterdir()} == FILES
