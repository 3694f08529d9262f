"""The memory of a run agrees with the formulas in Server's docstring."""

import gc
import subprocess
import sys
import textwrap
import tracemalloc
import weakref
from pathlib import Path

import numpy as np
import pytest

from afflux import Server
from afflux.rules import ca2fl, fadas, fedbuff, gsgm
from conftest import push_all
from inside import aggregator_of
from processes import run_python
from surroundings import references_alone

D, M = 12_000_000, 10
MANY = 20  #: for servers that do not keep M vectors

#: Prints the resident bytes before the server is made, and the highest ones after three rounds.
RUN = """
import numpy as np
from afflux import Server
from afflux.rules import ca2fl, fadas, fedbuff

def peak():
    # Not getrusage: its maximum begins with that of the process that started this one.
    line = next(line for line in open("/proc/self/status") if line.startswith("VmHWM:"))
    return 1024 * int(line.split()[1])

d, m = {d}, {m}
vector = np.ones(d, np.float32)
small = Server({rule}, np.zeros(1, np.float32), num_clients=m)  # what is loaded at first use
small.push(client=0, update=np.zeros(1), version=0)
before = peak()
server = Server({rule}, np.zeros(d, np.float32), num_clients=m, {options})
for i in range(3 * m):
    server.push(client=i % m, update=vector, version=server.version)
assert server.version == 3
print(before, peak())
"""

#: bytes of an element of d: two versions, M slots, and for rules that cache rows their sum and M rows; one slot and the
#: sum if it streams
CASES = {
    "fedbuff": ("fedbuff(buffer_size=m)", "", M, 2 * 4 + 4 * M),
    "fedbuff in place, 16 bits": ("fedbuff(buffer_size=m)", "inplace=True, slot_dtype='bfloat16'", M, 4 + 2 * M),
    "ca2fl": ("ca2fl(buffer_size=m)", "", M, 2 * 4 + 4 * M + 8 + 4 * M),
    "fedbuff, streaming": ("fedbuff(buffer_size=m)", "accumulate=True", MANY, 2 * 4 + 4 + 8),
    "fadas, streaming": ("fadas(buffer_size=m)", "accumulate=True", MANY, 2 * 4 + 4 + 8 + 12),
}


def available():
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return 1024 * int(line.split()[1])
    return 0


@pytest.mark.skipif(not Path("/proc/meminfo").exists(), reason="resident memory is read as Linux counts it")
@pytest.mark.parametrize("case", CASES)
def test_peak_resident_memory(case):
    rule, options, m, per_element = CASES[case]
    planned = per_element * D
    if available() < 1.5 * planned + 2e9:
        pytest.skip(f"needs {planned / 1e9:.1f} GB and some room; {available() / 1e9:.1f} GB are available")
    code = textwrap.dedent(RUN).format(d=D, m=m, rule=rule, options=options)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stderr
    before, after = map(int, done.stdout.split())
    assert abs(after - before - planned) <= 0.05 * planned, f"planned {planned:_}, took {after - before:_}"


@pytest.mark.parametrize(("rule", "vectors"), [(fedbuff, 1), (fadas, 4)], ids=["params", "params and three moments"])
def test_steps_allocate_at_most_twice_what_the_rule_keeps(rule, vectors):
    """At the peak, beside the trees of the caller, and no slot. NumPy's memory and the engine's pools are counted."""
    size = 300_000
    trees = [dict(zip("abc", np.array_split(np.full(size, 0.1 * k, np.float32), 3), strict=True)) for k in range(11)]
    tracemalloc.start()
    try:
        server = Server(rule(buffer_size=10), trees[0])
        for version in range(3):
            server.step([(client, version, trees[client]) for client in range(1, 11)], out=trees[0])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    plane = aggregator_of(server).plane
    versions, slots = ([pool.allocated for pool in pools] for pools in ([plane.versions], plane.slot_pools))
    assert (server.version, versions, slots) == (3, [2], [0])
    assert peak + 2 * 4 * size <= 2 * vectors * 4 * size + 100_000


@pytest.mark.parametrize(
    ("rule", "options"),
    [(fadas, {}), (ca2fl, {}), (gsgm, {}), (fadas, {"on_step": lambda report: None}), (fadas, {"accumulate": True})],
    ids=["fadas", "ca2fl", "gsgm", "on_step", "accumulate"],
)
def test_a_deleted_server_frees_its_memory_without_the_garbage_collector(rule, options):
    gc.collect()
    with references_alone():
        server = Server(rule(buffer_size=2), np.zeros(8), num_clients=4, **options)
        push_all(server, range(4), np.ones(8))
        plane = weakref.ref(server._aggregator.plane)
        del server
        assert plane() is None


def test_a_task_outlives_its_server():
    task = Server(fadas(buffer_size=1), np.zeros(8)).checkout(client=1)
    assert task.params.tolist() == [0.0] * 8
    assert (task.cancel(), task.cancel()) == (True, False)


def test_the_collector_may_come_amid_the_making_of_a_process_first_server():
    """At each allocation: also between that of the ledger and that of what the bindings keep in it."""
    made = "gc.set_threshold(1); server = Server(rules.fedbuff(), numpy.zeros(3)); server.step([(0, 0, numpy.ones(3))])"
    done = run_python("-c", f"import gc, numpy; from afflux import Server, rules; {made}; print(server.version)")
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr
