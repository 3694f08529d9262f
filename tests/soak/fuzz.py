"""Hostile calls of the public Python API, of which each must give a result or an error of the documented family.

python tests/soak/fuzz.py 1000000           as many calls, from seed 0
python tests/soak/fuzz.py 1000000 SEED

A call is drawn from tests/support/calls.py with sound arguments; then some of them, or something inside them, are
replaced by values of tests/support/hostile.py. Calls of servers go to the same few servers, whose state is compared
before and after an error. A batch of calls runs in a process of its own: one that ends by a signal is a crash; a call
hangs that takes 5 seconds of CPU, or on a busy machine a minute; both show where. Prints the figures, and fails on any
finding.
"""

import ctypes
import faulthandler
import multiprocessing
import os
import resource
import signal
import sys
import time
import warnings
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "support")]

import torch._dynamo  # noqa: E402, F401 - which torch imports amid a call, for seconds

from calls import STARTED  # noqa: E402
from hostile_call import hostile_call  # noqa: E402

BATCH, SECONDS, MINUTE = 5_000, 5.0, 60.0
MEMORY = 5 << 30


def batch(seed, number, progress, results, stacks):
    """Makes the calls of one batch, on fresh servers."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    warnings.simplefilter("ignore")
    os.dup2(os.open(stacks, os.O_WRONLY | os.O_CREAT), 2)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    rng, servers, counts = Random(f"{seed}/{number}"), {name: make() for name, make in STARTED.items()}, {}
    loaded = set()
    for call in range(BATCH):
        progress.value = call
        found = hostile_call(rng, servers, loaded)
        counts[found] = counts.get(found, 0) + 1
    progress.value = BATCH
    results.put(counts)


def main(calls, seed):
    with TemporaryDirectory() as folder:
        return run(calls, seed, Path(folder))


class Batch:
    """A batch in a process of its own."""

    def __init__(self, context, seed, number, folder):
        self.name, self.stacks = f"batch {number} of seed {seed}", folder / str(number)
        self.progress, self.results = context.Value(ctypes.c_long, -1, lock=False), context.SimpleQueue()
        arguments = (seed, number, self.progress, self.results, self.stacks)
        self.process = context.Process(target=batch, args=arguments, daemon=True)
        self.stacks.touch()
        self.process.start()
        self.seen, self.waited, self.used = -1, 0.0, 0.0

    def _cpu(self):
        """Seconds of CPU that the process has used."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def _stack(self):
        return self.stacks.read_text(errors="replace")

    def found(self, seconds):
        """Waits for this number of seconds; returns the counts by finding if it has ended, else None."""
        if self.progress.value != self.seen:
            self.seen, self.waited = self.progress.value, 0.0
            self.used = self._cpu() if self.process.is_alive() else 0.0
        elif self.process.is_alive() and 0 <= self.seen < BATCH:
            self.waited += seconds
            if self.waited > MINUTE or (self.waited > SECONDS and self._cpu() - self.used > SECONDS):
                os.kill(self.process.pid, signal.SIGUSR1)
                time.sleep(0.5)
                self.process.kill()
                return {f"{self.name}: call {self.seen} hangs\n{self._stack()}": 1}
        if not self.results.empty():
            counts = self.results.get()
            self.process.join()
            return counts
        if self.process.is_alive():
            return None
        ended = f"call {self.progress.value} ends the process: {self.process.exitcode}"
        return {f"{self.name}: {ended}\n{self._stack()}": 1}


def run(calls, seed, folder):
    context = multiprocessing.get_context("fork")
    totals, slowest, started = {}, 0.0, time.monotonic()
    waiting, running, before = list(range(-(-calls // BATCH))), [], started
    while waiting or running:
        while waiting and len(running) < (os.cpu_count() or 1):
            running.append(Batch(context, seed, waiting.pop(0), folder))
        time.sleep(0.02)
        # Time in which this process was stopped or had no CPU, too, is not the time of a call.
        seconds, before = min(time.monotonic() - before, 0.1), time.monotonic()
        for each in [*running]:
            found = each.found(seconds)
            slowest = max(slowest, each.waited)
            if found is None:
                continue
            running.remove(each)
            for finding, many in found.items():
                totals[finding] = totals.get(finding, 0) + many
                if finding not in ("done", "refused"):
                    print(finding, flush=True)
    findings = sum(many for what, many in totals.items() if what not in ("done", "refused"))
    print(
        f"{sum(totals.values()):,} calls in {time.monotonic() - started:.0f} s: {totals.get('done', 0):,} done, "
        f"{totals.get('refused', 0):,} refused with an error of the family, the slowest {slowest:.1f} s; "
        f"{findings} findings"
    )
    return findings > 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0))
