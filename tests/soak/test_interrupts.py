"""Ctrl-C at any moment, many thousands of times: nothing hangs, leaks, counts twice or gives other bits."""

import signal
import subprocess
import sys
import textwrap

import pytest

from pairwise import soak_all

pytestmark = pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="this system has no interval timers")

CODE = """
import faulthandler, random, signal, sys, threading, time
import numpy as np
from afflux import AffluxError, Join, NewParams, Server, replay
from afflux.rules import RULES

D, M, CLIENTS, wanted = {size}, 3, 9, {interrupts}
memory = {memory!r}
slots = 2 if memory == "streaming" else M + 2
faulthandler.dump_traceback_later(500, exit=True)  # a hang fails the test
random.seed({seed})
rules = [RULES[{rule!r}](buffer_size=size) for size in (M, M - 1)]
reported = []

def fresh(log=True, on_step=None):
    return Server(rules[0], np.zeros(D), num_clients=CLIENTS, max_staleness=5, log=log, num_threads=2, max_slots=slots,
                  accumulate=memory == "streaming", on_step=on_step, flush_after=2e-4 if memory == "late" else None)

def interrupt(*_):
    raise KeyboardInterrupt

# A join's vector follows from its client and its version.
def vector(client, version):
    return np.full(D, client + version % 7, np.float32)

def renew():
    server.flush()
    try:
        server.set_params(np.ones(D))
    except AffluxError as error:  # of another thread
        assert "arrivals wait" in str(error)

signal.signal(signal.SIGALRM, interrupt)
server, interrupts, stop = fresh(on_step=reported.append), 0, False

def other():
    while not stop:
        client, version = random.randrange(CLIENTS), server.version
        server.push(client=client, **{{server.rule.kind: vector(client, version)}}, version=version)
        time.sleep(0.0005)

threads = [threading.Thread(target=other, daemon=True) for _ in range({threads})]
for thread in threads:
    thread.start()

while interrupts < wanted:
    try:
        signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, 8e-4))
        while True:
            client, version = random.randrange(CLIENTS), max(0, server.version - random.randrange(3))
            server.push(client=client, **{{server.rule.kind: vector(client, version)}}, version=version)
            if random.random() < 0.05:
                own = [(one, version, vector(one, version)) for one in (0, 3, 1, 3)[:random.randrange(5)]]
                random.choice([server.flush, server.discard, server.state_dict, server.pull, renew,
                               lambda: server.step(own), lambda: server.replace_rule(random.choice(rules))])()
    except KeyboardInterrupt:
        interrupts += 1
    signal.setitimer(signal.ITIMER_REAL, 0)
    assert server._aggregator.admission.mutex.owner != threading.get_ident()

stop = True
for thread in threads:
    thread.join()
server.state_dict()  # finishes a round that was left
waiting = 0 if memory == "streaming" else server.arrivals_waiting
taken = server._aggregator.plane.slots_taken
assert taken == waiting and server.arrivals_waiting < M, (taken, waiting)
assert server.versions_held == 1
server.poll()  # reports what is left
state = server.state_dict()
versions = [report.version for report in reported if report.stepped]  # one that an interrupt hit may be missing
stepped = server.version - sum(isinstance(entry, NewParams) for entry in server.log)
assert versions == sorted(set(versions)) and stepped - interrupts <= len(versions) <= stepped
pushes = [entry for entry in server.log if isinstance(entry, Join)]
assert [entry.number for entry in pushes] == list(range(len(pushes)))
for status in ("joined", "replaced", "superseded", "rejected", "dropped"):
    assert server.counts[status] == sum(entry.status == status for entry in pushes)
if server.rows is not None:
    total = sum(row.astype(np.float64) for row in server.rows.values())
    assert np.array_equal(total, server.rows.sum)
given = lambda join: vector(join.client_id, join.version)
again = replay(server.log, fresh(), given, params=lambda entry: np.ones(D)).state_dict()
state["meta"]["counts"].pop("refused"), again["meta"]["counts"].pop("refused")
assert state["meta"] == again["meta"]
for name, array in state["arrays"].items():
    assert array.tobytes() == again["arrays"][name].tobytes(), name
print(interrupts, server.version)
"""


SERVERS = [(rule, "buffered") for rule in ("fedbuff", "ca2fl", "fadas", "gsgm")]
SERVERS += [("fadas", "streaming")]
#: Sizes of vectors, and how many other threads push.
LOADS = [(50, 0), (70_001, 0), (50, 3)]
FEW, MANY = 600, 10_000


@pytest.mark.parametrize(
    ("server", "load", "interrupts"),
    [(server, LOADS[k % 3], FEW) for k, server in enumerate(SERVERS)]
    + soak_all((server, load, MANY) for server in [*SERVERS, ("ca2fl", "late")] for load in LOADS),
)
def test_interrupts_at_random(server, load, interrupts):
    (rule, memory), (size, threads) = server, load
    settings = {"rule": rule, "memory": memory, "size": size, "threads": threads, "interrupts": interrupts}
    code = textwrap.dedent(CODE).format(**settings, seed=size + threads)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
