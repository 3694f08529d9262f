"""Each call to the disk in turn fails, is cut short, or is the last (`faults.py`); here some of them, by steps that are
prime, and `make kills` has all.
"""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CXX = shutil.which(os.environ.get("CXX", "c++"))
STEP = int(os.environ.get("AFFLUX_FAULT_STEP", "7"))

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="stands before the C library of Linux"),
    pytest.mark.skipif(CXX is None, reason="there is no C++ compiler"),
]


@pytest.fixture(scope="session")
def before_libc(tmp_path_factory):
    library = tmp_path_factory.mktemp("faults") / "faults.so"
    command = [CXX, "-std=c++17", "-O1", "-fPIC", "-shared", HERE / "faults.cpp", "-o", library, "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return library


def faults(library, phase, rule, how, step):
    environment = {**os.environ, "LD_PRELOAD": str(library)}
    command = [sys.executable, HERE / "faults.py", phase, rule, how, str(step)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("rule", "how", "least"),
    [
        ("ca2fl", "once", 20),
        ("ca2fl", "full", 10),
        ("ca2fl", "stop", 0),
        ("ca2fl", "tear", 0),
        ("ca2fl", "short", 0),
        ("ca2fl", "power", 0),
        ("gsgm", "once", 10),
        ("wkafl", "full", 5),
    ],
)
def test_a_life_with_a_fault_at_each_call(rule, how, least, before_libc):
    seen = faults(before_libc, "life", rule, how, STEP)
    assert seen["calls"] > 70
    assert seen["errors"] >= least


@pytest.mark.parametrize("how", ["once", "full", "stop", "power"])
def test_a_birth_with_a_fault_at_each_call(how, before_libc):
    assert faults(before_libc, "birth", "ca2fl", how, 3 * STEP)["calls"] > 200
