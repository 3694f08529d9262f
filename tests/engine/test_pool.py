"""The pool of threads: nested calls, exceptions, many callers, forks, signals, no memory, exit, unloading, its CPUs."""

import os
import shutil
import sys
import time

import pytest

from builds import once, run
from conftest import ROOT, found
from sanitize import library

ENGINE = ROOT / "engine"
CXX = shutil.which(os.environ.get("CXX", "c++"))
CASES = ["counts", "nested", "throwing", "callers", "awake", "forks", "signals", "no_threads", "leave"]
CASES += ["late", "moved", "pinned_caller", "own_signals", "bare_fork", "leave_soon"]
needs_compiler = pytest.mark.skipif(CXX is None, reason="there is no C++ compiler")
needs_proc = pytest.mark.skipif(not os.path.isdir("/proc/self/task"), reason="needs /proc")


def compiled(folder, source, *options):
    target = folder / source.removesuffix(".cpp")
    files = [found("pool") / source, ENGINE / "cpu" / "parallel_for.cpp", ENGINE / "cpu" / "pool.cpp"]
    includes = [f"-I{ENGINE}", f"-I{ENGINE / 'include'}"]
    run(CXX, "-std=c++17", "-O1", "-g", "-fPIC", "-pthread", *options, *includes, *files, "-o", target, "-ldl")
    return target


@pytest.fixture(scope="module")
def program(tmp_path_factory):
    return once(tmp_path_factory, "pool", lambda folder: compiled(folder, "main.cpp")) / "main"


@pytest.fixture(scope="module")
def watched(tmp_path_factory):
    if library("libtsan.so") is None:
        pytest.skip("the compiler has no ThreadSanitizer")
    flag = "-fsanitize=thread"
    return once(tmp_path_factory, "watched", lambda folder: compiled(folder, "main.cpp", flag)) / "main"


@needs_compiler
@pytest.mark.parametrize("spin", ["0", "50", "1000"])
@pytest.mark.parametrize("case", CASES)
def test_parallel_for(program, case, spin):
    assert run(program, case, AFFLUX_SPIN_US=spin) == "done\n"


@needs_compiler
@pytest.mark.parametrize("spin", ["0", "50"])
@pytest.mark.parametrize("case", ["counts", "nested", "throwing", "callers", "awake"])
def test_under_thread_sanitizer(watched, case, spin):
    assert run(watched, case, AFFLUX_SPIN_US=spin) == "done\n"


@needs_compiler
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs a linker's version script")
def test_its_threads_leave_a_library_that_is_unloaded(program, tmp_path):
    exports = tmp_path / "exports"  # only its own function: what libraries share is never unloaded
    exports.write_text("{ global: run; local: *; };")
    carried = compiled(tmp_path, "library.cpp", "-shared", f"-Wl,--version-script={exports}")
    for spin in ("0", "1000"):
        assert run(program, "unload", carried, AFFLUX_SPIN_US=spin) == "done\n"


@needs_compiler
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs LD_PRELOAD")
@pytest.mark.parametrize("case", ["asks", "looks_for_its_quota"])
def test_a_fork_amid_the_first_look_at_the_system(program, tmp_path, case):
    slow = tmp_path / "slow_looks.so"
    run(CXX, "-std=c++17", "-fPIC", "-shared", found("pool") / "slow_looks.cpp", "-o", slow, "-ldl")
    assert run(program, case, LD_PRELOAD=str(slow)) == "done\n"


START = """
import os, sys, time, numpy as np
from afflux import ops
x = np.ones(300_000, np.float32)
main = str(os.getpid())
def helpers(name):
    tasks = [task for task in os.listdir("/proc/self/task") if task != main]
    lines = [open(f"/proc/self/task/{task}/status").read().splitlines() for task in tasks if task not in before]
    return [line.split()[1] for each in lines for line in each if line.startswith(name + ":")]
def reached(fact, seconds=300):
    end = time.monotonic() + seconds
    while not fact() and time.monotonic() < end:
        time.sleep(0.01)
    return fact()
before = os.listdir("/proc/self/task")
"""


@needs_proc
@pytest.mark.parametrize(("spin", "cpus", "states"), [("0", 2, ["S"]), ("10000000", 1, ["S"]), ("10000000", 2, ["R"])])
def test_helpers_sleep_or_spin(spin, cpus, states):
    """A helper with its own CPU spins for work for the configured time, and does not delay the exit."""
    usable = sorted(getattr(os, "sched_getaffinity", lambda _: ())(0))
    if len(usable) < 2:
        pytest.skip("needs two CPUs")
    code = f"os.sched_setaffinity(0, {usable[:cpus]})\nops.gram([x], num_threads=2)\n"
    code += f"assert reached(lambda: helpers('State') == {states}), helpers('State')\nprint(time.monotonic())"
    at_its_end = run(sys.executable, "-c", START + code, AFFLUX_SPIN_US=spin)
    assert time.monotonic() - float(at_its_end) < 9  # it spins for 10 s


@needs_proc
def test_helpers_may_use_every_cpu():
    """They are kept off their caller's only while they wake."""
    code = """
allowed = open("/proc/self/status").read().split("Cpus_allowed:")[1].split()[0]
for _ in range(2):
    ops.gram([x], num_threads=2)  # the helper may wake only after its end
    assert reached(lambda: helpers("Cpus_allowed") == [allowed]), helpers("Cpus_allowed")
    time.sleep(0.05)  # it sleeps, and is woken again
"""
    run(sys.executable, "-c", START + code)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_the_process_ends_while_daemon_threads_are_amid_calls(num_threads):
    """They are not given Python's lock again, and must not take the process down."""
    code = """
import sys, threading, time, numpy as np
from afflux import ops
x, n = np.ones(100_000, np.float32), int(sys.argv[1])
calls = [
    lambda slot: ops.gram([x], num_threads=n),
    lambda slot: ops.ingest(x, slot, num_threads=n),
    lambda slot: ops.ingest([x[:7], x[7:]], slot, num_threads=n),
    lambda slot: ops.apply(ops.Pass(x, slot, ops.Combine([x], np.ones(1))), num_threads=n),
]
def loop(call, slot):
    while True:
        call(slot)
for call in calls:
    threading.Thread(target=loop, args=(call, np.empty_like(x)), daemon=True).start()
time.sleep(0.1)
print("done")
"""
    for _ in range(3):
        assert run(sys.executable, "-c", code, str(num_threads)) == "done\n"


@pytest.mark.parametrize("wanted", ["-1", "10000001", "1 ms", "off"])
def test_a_spin_time_that_is_none_raises_before_any_work(wanted):
    code = """
import numpy as np, afflux
from afflux import ops
x, out = np.ones(300_000, np.float32), np.zeros(300_000, np.float32)
ops.ingest(x, np.empty_like(x), num_threads=1)  # needs no helper
try:
    ops.ingest(x, out, num_threads=2)
except afflux.AffluxError as error:
    print(error, out.any())
"""
    said = f"AFFLUX_SPIN_US is '{wanted}', must be a number of microseconds from 0 to 10000000 False\n"
    assert run(sys.executable, "-c", code, AFFLUX_SPIN_US=wanted) == said


def test_a_spin_time_that_is_none_leaves_the_heads_of_rows():
    """A row's head is written before the sweep; the first sweep with a helper creates the pool."""
    code = """
import numpy as np, afflux
from afflux import ops
d = 300_000
codec = ops.codecs.affine(4)
x, row = np.linspace(-1, 1, d, dtype=np.float32), np.empty(codec.row_bytes(d), np.uint8)
ops.encode(x, row, codec=codec, facts=ops.RowFacts(7), num_threads=1)
before = row.copy()
stage = ops.CachedDifference(np.zeros(d), 10, [row], [row], codec, [ops.RowFacts(9)])
sweep = ops.Pass(x, np.empty_like(x), ops.Combine([x], np.ones(1)), stage, ops.Step("sgd"))
try:
    ops.apply(sweep, num_threads=2)
except afflux.AffluxError as error:
    print(error, (row != before).any())
"""
    said = "AFFLUX_SPIN_US is 'x', must be a number of microseconds from 0 to 10000000 False\n"
    assert run(sys.executable, "-c", code, AFFLUX_SPIN_US="x") == said
