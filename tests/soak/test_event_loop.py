"""The simulator's event loop alone: a million virtual clients, a million arrivals, training that returns at once.

Prints the seconds, and the memory beside the interpreter with its libraries. AFFLUX_ARRIVALS=10000 is a short run.
"""

import os
import subprocess
import sys

import pytest

ARRIVALS = int(os.environ.get("AFFLUX_ARRIVALS", "1000000"))
PROGRAM = """
import resource, sys, time
import torch
from afflux.lab import Simulation

class Vector(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.params = torch.nn.Parameter(torch.zeros(100))

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

arrivals = int(sys.argv[1])
simulation = Simulation(
    Vector,
    lambda client: None,
    lambda model, data, rng: (0.5, 1, 1),
    lambda model: (0.0, 0.0),
    num_clients=1_000_000,
    rules="fedbuff:buffer_size=10",
    arrivals=arrivals,
    eval_every=arrivals,
    concurrency=1000,
    delays="exponential",
)
before, start = peak(), time.perf_counter()
(result,) = simulation.run()
print(time.perf_counter() - start, peak() - before, len(result.staleness))
"""


@pytest.mark.soak
def test_a_million_arrivals_of_a_million_clients(capsys):
    command = [sys.executable, "-c", PROGRAM, str(ARRIVALS)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    seconds, size, count = map(float, done.stdout.split())
    with capsys.disabled():
        print(
            f"\n{count:,.0f} arrivals: {seconds:.1f} s, {1e6 * seconds / count:.1f} us each, {size / 1e6:.0f} MB more"
        )
    assert count == ARRIVALS
    assert size < 1e9
