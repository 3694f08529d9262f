"""Runs of the benchmark, in processes of their own."""

import os
import subprocess
import sys

import pytest

from conftest import ROOT

D, M, THREADS = 100_003, 7, 2


def bench(*arguments):
    env = {k: v for k, v in os.environ.items() if k not in ("FORCE_COLOR", "GITHUB_ACTIONS")}
    return subprocess.run(
        [sys.executable, "-m", "bench", *map(str, arguments)],
        capture_output=True,
        text=True,
        encoding="utf-8",
        timeout=300,
        cwd=ROOT,
        env=env | {"COLUMNS": "200", "NO_COLOR": "1", "PYTHONIOENCODING": "utf-8"},
    )


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """Where probes are compiled to: once for all tests of this file."""
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder
