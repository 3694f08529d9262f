"""Flower's own driver: the example in its simulation engine, with three rules, and resumed. Needs flwr and ray."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

for package in ("flwr", "ray", "torch", "sklearn"):
    pytest.importorskip(package, reason=f"needs {package}: make test-integrations")

ROOT = Path(__file__).parents[2]


def run(*arguments):
    """The accuracies that the example reports, by step."""
    command = [sys.executable, ROOT / "examples" / "flower" / "digits.py", *map(str, arguments)]
    env = {**os.environ, "PYTHONPATH": str(ROOT / "python"), "RAY_DISABLE_IMPORT_WARNING": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    said = re.findall(r"evaluation of step (\d+): {'accuracy': ([0-9.]+)", done.stdout + done.stderr)
    assert "Made" in done.stdout + done.stderr
    return {int(step): float(accuracy) for step, accuracy in said}


@pytest.mark.parametrize("rule", ["fedbuff", "ca2fl", "fadas"])
def test_the_example_learns(rule):
    accuracies = run("--rule", rule, "--steps", 30)
    assert sorted(accuracies) == [0, 10, 20, 30]
    assert accuracies[0] < 0.2
    assert max(accuracies.values()) > 0.5  # which replies come first is not the same in each run


def test_a_second_run_goes_on(tmp_path):
    assert sorted(run("--steps", 5, "--store", tmp_path / "store")) == [0, 5]
    assert sorted(run("--steps", 10, "--store", tmp_path / "store")) == [10]
