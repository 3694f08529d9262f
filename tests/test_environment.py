"""What the environment asks for, and what import does not do."""

import os
import subprocess
import sys

import pytest


def python(code, *arguments, **environment):
    command = [sys.executable, "-c", code, *arguments]
    return subprocess.run(command, env=os.environ | environment, capture_output=True, text=True)


@pytest.mark.parametrize("name", ["AVX512", "avx1024", "cuda", " "])
def test_an_unknown_isa_raises_at_first_use(name):
    done = python("import afflux; afflux.ops.backends()", AFFLUX_ISA=name)
    assert done.returncode == 1
    assert f"UnavailableError: AFFLUX_ISA asks for '{name}', which is unknown here; known: " in done.stderr


def test_the_command_line_says_so_in_one_line():
    pytest.importorskip("typer")
    done = subprocess.run(
        [sys.executable, "-m", "afflux.cli", "backends"],
        env=os.environ | {"AFFLUX_ISA": "x"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("error: AFFLUX_ISA asks for 'x'")
    assert "Traceback" not in done.stderr


def test_import_does_no_work():
    """No thread, no torch, no decision on the instruction set."""
    code = (
        "import threading, sys, os, afflux\n"
        "assert threading.active_count() == 1\n"
        "assert len(os.listdir('/proc/self/task')) == before\n"
        "assert not {'torch', 'sklearn', 'matplotlib', 'typer', 'rich'} & set(sys.modules)\n"
    )
    start = "import os, numpy; before = len(os.listdir('/proc/self/task'))\n"
    if not os.path.isdir("/proc/self/task"):
        pytest.skip("needs /proc")
    done = python(start + code, AFFLUX_ISA="nonsense")
    assert done.returncode == 0, done.stderr


def test_no_thread_outlives_a_call_and_fork_is_safe():
    code = """
import os, numpy as np
from afflux import ops
x = np.ones(300_000, np.float32)
before = len(os.listdir('/proc/self/task'))
expected = ops.gram([x], num_threads=3)
assert len(os.listdir('/proc/self/task')) == before
child = os.fork()
if child == 0:
    os._exit(0 if (ops.gram([x], num_threads=3) == expected).all() else 1)
assert os.waitpid(child, 0)[1] == 0
"""
    if not hasattr(os, "fork") or not os.path.isdir("/proc/self/task"):
        pytest.skip("needs fork and /proc")
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_threads_are_started_where_they_are_worth_it():
    """Numbers of threads are given in turn: two in a row differ by one, unless something was started between them."""
    code = """
import sys, threading, time, numpy as np
from afflux import ops
def started(size, num_threads, expected):
    vectors, out, weights = [np.ones(size, np.float32)] * 4, np.ones(size, np.float32), np.ones(4)
    number = lambda: [t.start() or t.join() or t.native_id for t in [threading.Thread()]][0]
    def once():
        before = number()
        ops.apply(ops.Pass(vectors[0], out, ops.Combine(vectors, weights)), num_threads=num_threads)
        return number() - before - 1
    least, end = once(), time.monotonic() + 10
    while least > expected and time.monotonic() < end:  # other processes take numbers too
        least = min(least, once())
    return least
cases = (30_000, 3), (300_000, 3), (1_000_000, 3), (1_000_000, 1)
print(*(started(*case, int(n)) for case, n in zip(cases, sys.argv[1])))
"""
    if not sys.platform.startswith("linux"):
        pytest.skip("needs Linux's numbers of threads")
    for each, expected in (("", "0120"), ("1", "2220"), ("1500000", "0220")):
        done = python(code, expected, AFFLUX_THREAD_BYTES=each)
        assert done.stdout.split() == list(expected), (each, done.stderr)
    done = python(code, expected, AFFLUX_THREAD_BYTES="2 MB")
    assert "AffluxError: AFFLUX_THREAD_BYTES is '2 MB', must be a number of bytes, at least 1" in done.stderr
