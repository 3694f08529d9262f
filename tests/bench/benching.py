"""Runs of the benchmark: of its command in the process of the tests, or in a process of its own."""

import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest

import builds
from afflux import ops
from conftest import ROOT

pytest.importorskip("rich")
pytest.importorskip("typer")

D, M, THREADS = 10_007, 7, 2
TERMINAL = {"COLUMNS": "200", "NO_COLOR": "1", "FORCE_COLOR": None, "GITHUB_ACTIONS": None}


def bench(*arguments):
    """Runs the command in this process, which has imported torch already."""
    import torch
    from typer.testing import CliRunner

    from bench.__main__ import app

    isa, threads = next(b.name for b in ops.backends() if b.chosen), torch.get_num_threads()
    try:
        done = CliRunner(env=TERMINAL).invoke(app, [*map(str, arguments)])
    finally:
        ops.choose_isa(isa)
        torch.set_num_threads(threads)
    if done.exception and not isinstance(done.exception, SystemExit):
        raise done.exception
    return SimpleNamespace(returncode=done.exit_code, stdout=done.stdout, stderr=done.stderr)


def quick_cases(folder, rows, *options):
    """What a quick run of these rows printed, and its cases."""
    path = folder / "out.json"
    done = bench("--quick", "--rows", rows, *options, "--threads", THREADS, "--json", path)
    assert done.returncode == 0, done.stderr
    return done.stdout, json.loads(path.read_text(encoding="utf-8"))["cases"]


def bench_process(*arguments):
    """Runs `python -m bench`."""
    env = {k: v for k, v in (os.environ | TERMINAL).items() if v is not None}
    return run_in_project("-m", "bench", *arguments, env=env)


def run_in_project(*arguments, env):
    """Runs Python in the project's folder."""
    options = {"capture_output": True, "text": True, "encoding": "utf-8", "timeout": 1800, "cwd": ROOT}
    return subprocess.run([sys.executable, *map(str, arguments)], env=env | {"PYTHONIOENCODING": "utf-8"}, **options)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory):
    """Where probes are compiled to: once in a session."""
    from bench.measure import native_probes

    with pytest.MonkeyPatch.context() as patch:

        def compile_probes(folder):
            patch.setenv("XDG_CACHE_HOME", str(folder))
            native_probes.why_missing()

        folder = builds.once(tmp_path_factory, "probes", compile_probes)
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder
