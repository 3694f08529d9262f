"""Each call to the disk in turn fails, is cut short, or is the last (`faults.py`); here some of them, by steps that are
prime, and `make soak` has all.
"""

import errno
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


LACKING = """
import ctypes, errno, os, sys, tempfile
import numpy as np
from afflux import Server, StoreError, store
from afflux.rules import ca2fl

folder = os.path.realpath(tempfile.mkdtemp())
made = lambda name: Server(ca2fl(buffer_size=1), np.zeros(3), num_clients=2, store=f"{folder}/{name}")
made("old").close()
how, number = map(int, sys.argv[1:])
ctypes.CDLL(None).faults_arm(folder.encode(), ctypes.c_long(0), how, number, b"")
for call in (lambda: Server.open(f"{folder}/old"), lambda: made("new")):
    try:
        call()
    except StoreError as error:
        print(error)
try:
    print(store.info(f"{folder}/old").version)
except StoreError as error:
    print(error)
"""


@pytest.mark.soak
@pytest.mark.parametrize(
    ("how", "number", "lack"),
    [(6, errno.ENOLCK, "locks"), (7, errno.ENOLCK, "locks"), (8, errno.ENODEV, "memory maps that processes share")],
)
def test_a_file_system_that_lacks_something(how, number, lack, before_libc):
    """The words are those of SQLite and the C library. A closed index is read without shared memory."""
    environment = {**os.environ, "LD_PRELOAD": str(before_libc)}
    command = [sys.executable, "-c", LACKING, str(how), str(number)]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    *said, info = done.stdout.splitlines()
    assert len(said) == 2
    for line in said if how == 8 else (*said, info):
        assert f"has no {lack}: put the store on a local disk" in line
    assert info == "0" or how != 8
