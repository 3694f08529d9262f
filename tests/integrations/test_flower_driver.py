"""Flower's own driver: the example in its simulation engine, killed, and resumed; with three rules. Needs ray."""

import os
import re
import subprocess
import sys

import pytest

pytest.importorskip("flwr", reason="needs flwr: make test-integrations")
pytest.importorskip("ray", reason="needs ray: make test-integrations")
pytest.importorskip("torch", reason="needs torch: make test-integrations")

from afflux import Server
from flower_processes import PYTHONPATH, ROOT, kill_all, version_of, wait_for


def start(log, *arguments):
    """The example's process."""
    command = [sys.executable, ROOT / "examples" / "flower" / "digits.py", *map(str, arguments)]
    env = {**os.environ, "PYTHONPATH": PYTHONPATH, "RAY_DISABLE_IMPORT_WARNING": "1"}
    with log.open("wb") as said:
        return subprocess.Popen(command, stdout=said, stderr=said, env=env)


def accuracies_in(said):
    """The accuracies that the example reports, by step."""
    found = re.findall(r"evaluation of step (\d+): {'accuracy': ([0-9.]+)", said)
    return {int(step): float(accuracy) for step, accuracy in found}


def run(folder, *arguments):
    """The accuracies of a whole run, by step."""
    log = folder / "run.log"
    process = start(log, *arguments)
    try:
        process.wait(500)
    finally:
        kill_all([process])
    said = log.read_text()
    assert process.returncode == 0, said[-3000:]
    assert "Made" in said
    return accuracies_in(said)


@pytest.mark.soak  # the next test asserts the same of a run in two parts
@pytest.mark.parametrize("rule", ["fadas", "fedbuff", "ca2fl"])
def test_the_example_learns(rule, tmp_path):
    accuracies = run(tmp_path, "--rule", rule, "--steps", 30)
    assert sorted(accuracies) == [0, 10, 20, 30]
    assert accuracies[0] < 0.2
    assert max(accuracies.values()) > 0.5  # which replies come first is not the same in each run


def test_the_process_is_killed_and_a_second_run_goes_on_and_learns(tmp_path):
    """Nodes have other ids in the second run; the example says which is which."""
    store = tmp_path / "store"
    process = start(tmp_path / "killed.log", "--rule", "ca2fl", "--steps", 10_000, "--store", store)
    try:
        wait_for(lambda: version_of(store) >= 12 or process.poll() is not None, 300)
    finally:
        kill_all([process])
    killed = version_of(store)
    assert killed >= 12
    first = accuracies_in((tmp_path / "killed.log").read_text())
    assert {0, 10} <= first.keys()
    assert first[0] < 0.2
    last = max(30, (killed // 10 + 1) * 10)
    second = run(tmp_path, "--rule", "ca2fl", "--steps", last, "--store", store)
    assert sorted(second) == [*range((killed // 10 + 1) * 10, last + 1, 10)]
    assert max(second.values()) > 0.5  # which replies come first is not the same in each run
    with Server.open(store) as server:
        assert server.version == last
        assert server.tasks == ()
        assert set(server.rows.client_ids) <= set(range(10))
        assert server.counts["faulty"] == server.counts["expired"] == 0
