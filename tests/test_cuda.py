"""The CUDA kernels' bodies, run on the host in their own order of indices and sums, give the CPU's bits."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from afflux import ops

TESTS = Path(__file__).parent
PATH = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
CMAKE = shutil.which("cmake", path=PATH)


@pytest.fixture(scope="module")
def emulated(tmp_path_factory):
    """The environment in which the engine's device is emulated."""
    if CMAKE is None:
        pytest.skip("cmake is not installed")
    folder, env = tmp_path_factory.mktemp("emulated"), os.environ | {"PATH": PATH}
    options = ["-DAFFLUX_PYTHON=ON", "-DAFFLUX_CUDA=emulated", f"-DPython_EXECUTABLE={sys.executable}"]
    for command in (["-S", TESTS.parent, "-B", folder, *options], ["--build", folder, "--parallel", "2"]):
        done = subprocess.run([CMAKE, *command], env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
    (engine,) = folder.glob("csrc/_engine*.so")
    paths = os.pathsep.join([str(TESTS.parent / "python"), str(TESTS)])
    return env | {"AFFLUX_EMULATED": str(engine), "PYTHONPATH": paths}


def python(env, *arguments):
    done = subprocess.run([sys.executable, *arguments], env=env, capture_output=True, text=True, cwd=TESTS.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_operation_and_rule_gives_the_bits_of_the_cpu(emulated):
    golden = json.loads((TESTS / "golden.json").read_text())
    assert golden.pop("order_version") == 1
    assert json.loads(python(emulated, TESTS / "emulated.py")) == golden


def test_the_backend_is_listed():
    """It serves the vectors that are on a GPU, so no call chooses it."""
    (cuda,) = [backend for backend in ops.backends() if backend.name == "cuda"]
    assert (cuda.device, cuda.chosen) == ("cuda", False)
    assert cuda.runs == (cuda.why_not == "")
    assert cuda.compiled or cuda.why_not == "this build has no CUDA kernels"
