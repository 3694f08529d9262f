"""afflux-cuda13: `import afflux` takes its library if a GPU answers, and `afflux backends` says whether it did.

A copy of the tree's library takes the place of the one with CUDA, and a library of two functions that of NVML.
"""

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from afflux import _engine
from conftest import ROOT

NVML = "int nvmlInit_v2(void) { return %d; } int nvmlDeviceGetCount_v2(unsigned* n) { *n = %d; return 0; }"
LOADED = """
from afflux import ops
from afflux._engine_library import CUDA_STATE
from pathlib import Path
print({line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if line.endswith("libafflux.so")})
print(CUDA_STATE if "is loaded" in CUDA_STATE else ops.backends()[-1].why_not)
"""

pytestmark = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="this system has no /proc/self/maps")


def loaded(folder, status=0, count=1, installed=True, nvml=NVML, library=None, first=""):
    """The libraries that a process loads, and what it says of CUDA."""
    if installed:
        (folder / "afflux_cuda13").mkdir()
        shutil.copy(library or Path(_engine.__file__).parent / "libafflux.so", folder / "afflux_cuda13/libafflux.so")
    (folder / "nvml.c").write_text(nvml % (status, count))
    subprocess.run(["cc", "-shared", "-fPIC", "-o", folder / "libnvidia-ml.so.1", folder / "nvml.c"], check=True)
    path = os.pathsep.join([str(folder), str(Path(_engine.__file__).parents[1])])
    environment = os.environ | {"PYTHONPATH": path, "LD_LIBRARY_PATH": str(folder)}
    command = [sys.executable, "-c", first + LOADED]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True, cwd=folder)
    libraries, state = done.stdout.splitlines()
    return eval(libraries), state


def test_its_library_is_the_only_one_where_a_gpu_answers(tmp_path):
    libraries, state = loaded(tmp_path)
    assert libraries == {str(tmp_path / "afflux_cuda13" / "libafflux.so")}
    assert state == "afflux-cuda13 is loaded"


def test_the_own_library_is_loaded_where_no_gpu_answers(tmp_path):
    libraries, state = loaded(tmp_path, count=0)
    assert libraries == {str(Path(_engine.__file__).parent / "libafflux.so")}
    assert state == "afflux-cuda13 is installed, but no GPU answers (NVML: status 0, 0 GPUs)"


def test_a_driver_that_fails_and_a_missing_package_are_told_apart(tmp_path):
    (tmp_path / "fails").mkdir()
    assert (
        loaded(tmp_path / "fails", status=9)[1]
        == "afflux-cuda13 is installed, but no GPU answers (NVML: status 9, 0 GPUs)"
    )
    (tmp_path / "missing").mkdir()
    assert loaded(tmp_path / "missing", installed=False)[1] == "this build has no CUDA kernels"


STUB = "import sys, types; sys.modules['afflux_cuda13'] = types.ModuleType('afflux_cuda13')"
BROKEN = {  # the arguments of `loaded`, and why CUDA is not loaded
    "library": ({"library": __file__}, "cannot be loaded: .*libafflux.so: "),
    "nvml": ({"nvml": "int status = %d, count = %d;"}, r"the NVIDIA driver is too old \(.*nvmlInit_v2\)"),
    "spec": ({"first": STUB}, r"cannot be loaded: afflux_cuda13\.__spec__ is None"),
}


@pytest.mark.parametrize("part", BROKEN)
def test_a_broken_installation_leaves_the_own_library_and_a_reason(part, tmp_path):
    options, reason = BROKEN[part]
    libraries, state = loaded(tmp_path, **options)
    assert libraries == {str(Path(_engine.__file__).parent / "libafflux.so")}
    assert re.match(f"afflux-cuda13 is installed, but {reason}", state)


def test_it_requires_afflux_of_its_version():
    project, own = (
        tomllib.loads((ROOT / folder / "pyproject.toml").read_text())["project"] for folder in ("", "cuda13")
    )
    assert (own["version"], own["dependencies"]) == (project["version"], [f"afflux=={project['version']}"])
