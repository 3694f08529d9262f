"""APPFL's own virtual-time driver: the example, killed and resumed, and three rules. Needs appfl and scikit-learn."""

import ast
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("appfl", reason="needs appfl: make test-integrations")
pytest.importorskip("sklearn", reason="needs scikit-learn: make test-integrations")

from afflux import Server

ROOT = Path(__file__).parents[2]


def started(*arguments, folder=ROOT / "examples" / "appfl"):
    """The process of the example, or of a copy of it in another folder."""
    command = [sys.executable, folder / "digits.py", *map(str, arguments)]
    path = os.pathsep.join(map(str, (ROOT / "python", ROOT / "tests" / "integrations" / "stubs")))
    env = {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1"}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env)


def said(process):
    """What the example says at its end: APPFL's checks, counts of models, the accuracy, the first and the last step."""
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output[-3000:]
    checks, counts = (ast.literal_eval(re.search(rf"^{name}: (.*)$", output, re.M)[1]) for name in ("checks", "counts"))
    accuracy, first, last = re.search(r"accuracy ([\d.]+) % after steps (\d+) to (\d+)", output).groups()
    return checks, counts, float(accuracy), int(first), int(last), output


@pytest.mark.soak  # the last test asserts the same of a run in two parts
@pytest.mark.parametrize("rule", ["fedbuff", "ca2fl", "fadas"])
def test_the_example_learns_and_appfl_verifies_it(rule):
    checks, counts, accuracy, first, last, output = said(started("--rule", rule, "--models", 150))
    assert checks
    assert all(value is True for value in checks.values()), checks
    joined, replaced = counts.pop("joined"), counts.pop("replaced", 0)
    assert not counts
    assert joined + replaced == 150
    assert (replaced > 0) <= (rule == "ca2fl")
    assert (first, last) == (1, joined // 5)
    assert accuracy > 50
    assert "'val_accuracy'" in output


@pytest.mark.soak
def test_a_run_in_which_nothing_joins_ends_with_an_error(tmp_path):
    """With a learning rate that makes all models NaN."""
    folder = shutil.copytree(ROOT / "examples" / "appfl", tmp_path / "appfl")
    config = (folder / "digits.yaml").read_text()
    (folder / "digits.yaml").write_text(config.replace("lr: 0.1}", "lr: 1.0e+38}"))
    process = started("--models", 60, folder=folder)
    output, _ = process.communicate(timeout=400)
    assert process.returncode != 0
    assert re.search(r"RuntimeError: none of \d+ clients is of use: .*non-finite", output), output[-3000:]


def test_a_run_is_killed_and_goes_on_and_learns(tmp_path):
    """The clients end with the driver: those that trained train again, and what has joined stays."""
    store = tmp_path / "store"
    process = started("--rule", "ca2fl", "--models", 10_000, "--store", store)
    for line in process.stdout:
        if "afflux: step 7:" in line:
            break
    time.sleep(0.3)  # somewhere
    process.send_signal(signal.SIGKILL)
    process.communicate()
    with Server.open(store) as server:
        before, arrived = server.version, server.counts["joined"] + server.counts["replaced"]
        assert before >= 7
        assert len(server.rows) > 0
        assert server.tasks
        assert len(server.notes["own"]["metrics"]) in (before // 2 * 2, before // 2 * 2 - 2)
    models = max(60, 150 - arrived)
    checks, counts, accuracy, first, last, output = said(
        started("--rule", "ca2fl", "--models", models, "--store", store)
    )
    assert checks
    assert all(value is True for value in checks.values()), checks
    assert counts["joined"] + counts.get("replaced", 0) == arrived + models
    assert accuracy > 50
    assert "'val_accuracy'" in output
    assert first == before + 1
    assert last - before >= models // 5 - 2
    assert "unknown" not in counts
    assert "faulty" not in counts
    with Server.open(store) as server:
        assert server.version == last
        assert server.tasks  # of clients that trained when the run ended
        assert sorted(map(int, server.notes["own"]["metrics"]))[-1] == last
