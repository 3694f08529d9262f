"""Each call to the disk in turn fails, is cut short, or is the last (`faults.py`); here some of them, by steps that are
prime, and `make soak` has all.
"""

import json
import os
import shutil
import subprocess
import sys

import pytest

from builds import once, run
from conftest import found
from pairwise import soak

CXX = shutil.which(os.environ.get("CXX", "c++"))

pytestmark = [
    pytest.mark.skipif(sys.platform != "linux", reason="stands before the C library of Linux"),
    pytest.mark.skipif(CXX is None, reason="there is no C++ compiler"),
]


@pytest.fixture(scope="session")
def before_libc(tmp_path_factory):
    command = [CXX, "-std=c++17", "-O1", "-fPIC", "-shared", found("faults.cpp"), "-ldl"]
    folder = once(tmp_path_factory, "faults", lambda folder: run(*command, "-o", folder / "faults.so"))
    return folder / "faults.so"


def faults(library, phase, rule, how, step):
    environment = {**os.environ, "LD_PRELOAD": str(library)}
    command = [sys.executable, found("faults.py"), phase, rule, how, str(step)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("step", [13, *soak(1)])
@pytest.mark.parametrize(
    ("rule", "how", "least"),
    [
        ("ca2fl", "once", 140),
        ("ca2fl", "full", 70),
        ("ca2fl", "stop", 0),
        ("ca2fl", "tear", 0),
        ("ca2fl", "short", 0),
        ("ca2fl", "power", 0),
        ("gsgm", "once", 70),
        ("wkafl", "full", 35),
    ],
)
def test_a_life_with_a_fault_at_each_call(rule, how, least, step, before_libc):
    seen = faults(before_libc, "life", rule, how, step)
    assert seen["calls"] > 60
    assert seen["errors"] * step >= least


@pytest.mark.parametrize("step", [37, *soak(3)])
@pytest.mark.parametrize("how", ["once", "full", "stop", "power"])
def test_a_birth_with_a_fault_at_each_call(how, step, before_libc):
    assert faults(before_libc, "birth", "ca2fl", how, step)["calls"] > 200
