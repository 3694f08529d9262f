"""NVFlare's own driver: the example in its simulator, killed, and resumed; with three rules. Needs nvflare, torch."""

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from afflux import Server

for package in ("nvflare.collab", "torch", "sklearn"):
    pytest.importorskip(package, reason=f"needs {package}: make test-integrations")

ROOT = Path(__file__).parents[2]


def command(folder, *arguments):
    script = ROOT / "examples" / "nvflare" / "digits.py"
    return [sys.executable, script, "--workspace", folder, "--sites", "3", *map(str, arguments)]


def start(folder, *arguments):
    """The example in a session of its own; its output goes to a file, since processes of it may outlive it."""
    env = {**os.environ, "PYTHONPATH": str(ROOT / "python"), "OMP_NUM_THREADS": "1"}
    with (folder / "output.txt").open("wb") as log:
        return subprocess.Popen(
            command(folder, *arguments), stdout=log, stderr=subprocess.STDOUT, env=env, start_new_session=True
        )


def accuracies_in(said):
    """The accuracies that the example reports, by version."""
    found = re.findall(r"Evaluation of version (\d+): {'accuracy': ([0-9.]+)", said)
    return {int(version): float(accuracy) for version, accuracy in found}


def run(folder, *arguments):
    """The accuracies of a whole run, by version, and all that it says."""
    folder.mkdir(exist_ok=True)
    process = start(folder, *arguments)
    try:
        code = process.wait(300)
    finally:
        end(process)
    said = (folder / "output.txt").read_text(errors="replace")
    assert code == 0, said[-5000:]
    assert "Made" in said, said[-5000:]
    return accuracies_in(said), said


def end(process):
    """Kills what is left of the example: the simulator and its sites are sessions of their own."""
    for pid in [] if process.poll() is not None else descendants(process.pid):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()


def descendants(pid):
    """A process and all that it has started and that still runs under it, the last ones first."""
    children = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(status.read_text().rpartition(")")[2].split()[1])
        except (OSError, ValueError):
            continue
        children.setdefault(parent, []).append(int(status.parent.name))
    found = [pid]
    for each in found:
        found += children.get(each, [])
    return found[::-1]


@pytest.mark.soak  # the next test asserts the same of a run in two parts
@pytest.mark.parametrize("rule", ["ca2fl", "fedbuff", "fadas"])
def test_the_example_learns(rule, tmp_path):
    accuracies, said = run(tmp_path, "--rule", rule, "--rounds", 30)
    assert sorted(accuracies) == [0, 10, 20, 30]
    assert accuracies[0] < 0.2
    assert max(accuracies.values()) > 0.5  # which results come first is not the same in each run
    assert "Made 30 steps: {'joined': 90" in said


def test_a_killed_job_goes_on_and_learns(tmp_path):
    """SIGKILL to the server and to all sites while they train; a second job goes on from the store."""
    if not Path("/proc/self/stat").exists():
        pytest.skip("finds the processes of the simulator in /proc")
    store = tmp_path / "store"
    process = start(tmp_path, "--rule", "ca2fl", "--rounds", 10**6, "--store", store)
    deadline = time.monotonic() + 200
    try:
        while "Evaluation of version 10" not in (tmp_path / "output.txt").read_text(errors="replace"):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
    finally:
        end(process)
    with Server.open(store) as server:
        before = server.version
        assert before >= 10
        assert server.tasks  # clients were training
    first = accuracies_in((tmp_path / "output.txt").read_text(errors="replace"))
    assert first[0] < 0.2
    last = max(30, before + 5)
    accuracies, said = run(tmp_path / "again", "--rule", "ca2fl", "--rounds", last, "--store", store)
    assert max(accuracies) == last
    assert min(accuracies) > 0
    assert max(accuracies.values()) > 0.5  # which results come first is not the same in each run
    assert f"Made {last - before} steps, after {before} of earlier runs; of all runs: {{'joined': {3 * last}" in said
    assert "'failed'" not in said
    with Server.open(store) as server:
        assert server.version == last
        assert server.tasks == ()
