"""Eight threads push valid and invalid updates: each is counted once, no pull is torn, the log determines every bit."""

import os
import sys
import threading
import zlib

import numpy as np
import pytest

from afflux import AffluxError, Server, replay
from afflux.aggregation.reports import DECISIONS
from afflux.rules import ca2fl, fedbuff
from conftest import same_state

THREADS = 8
#: Pushes of the large case; a sanitizer's run takes fewer, `make soak` more.
PUSHES = int(os.environ.get("AFFLUX_STRESS", "30000"))


def pool(size):
    """Vectors that clients push: most are fine, the last ones are not."""
    rng = np.random.default_rng(3)
    vectors = [rng.standard_normal(size).astype(np.float64 if i % 3 else np.float32) for i in range(61)]
    holed = vectors[0].copy()
    holed[size // 2] = np.nan
    return [*vectors, holed, np.zeros(size + 1, np.float32), np.zeros(size, np.int64)]


class Worker(threading.Thread):
    def __init__(self, number, server, vectors, pushes):
        super().__init__(daemon=True)
        self.rng = np.random.default_rng(number)
        self.server, self.vectors, self.pushes = server, vectors, pushes
        self.picks, self.refused, self.seen, self.failure = {}, 0, [], None

    def run(self):
        try:
            for turn in range(self.pushes):
                self.turn(turn)
        except BaseException as error:  # reported by the test
            self.failure = error

    def turn(self, turn):
        server = self.server
        pulled = server.pull()
        if turn % 16 == 0:
            self.seen.append((pulled.version, zlib.crc32(pulled.params)))
        pick, lag, client = (int(self.rng.integers(0, high)) for high in (len(self.vectors), 12, 23))
        version = pulled.version - lag + 1  # now and then from the future, or too old
        try:
            facts = dict(version=version, num_examples=1 + pick, loss=float(pick))
            receipt = server.push(client=client, **{server.rule.kind: self.vectors[pick]}, **facts)
        except AffluxError:
            self.refused += 1
        else:
            if receipt.join is not None:
                assert receipt.join not in self.picks
                self.picks[receipt.join] = pick


@pytest.fixture
def restless():
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    yield
    sys.setswitchinterval(before)


@pytest.mark.parametrize(
    ("rule", "size", "pushes"),
    [
        (fedbuff(buffer_size=7), 331, PUSHES),
        (ca2fl(buffer_size=5), 331, PUSHES // 3),
        (fedbuff(buffer_size=3), 70_001, max(PUSHES // 40, 500)),
        (ca2fl(buffer_size=3), 70_001, max(PUSHES // 40, 500)),
    ],
    ids=["fedbuff", "ca2fl", "fedbuff, long vectors", "ca2fl, long vectors"],
)
def test_eight_threads(restless, rule, size, pushes):
    def fresh():
        options = dict(num_clients=23, num_threads=2, max_staleness=8, faults="record", max_slots=rule.buffer_size + 4)
        return Server(rule, np.linspace(-1, 1, size), log=True, **options)

    vectors, server = pool(size), fresh()
    workers = [Worker(i, server, vectors, pushes // THREADS) for i in range(THREADS)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(600)
        assert not worker.is_alive()
        if worker.failure is not None:
            raise worker.failure

    # Every arrival is counted once.
    counts = server.counts
    picks = {join: pick for worker in workers for join, pick in worker.picks.items()}
    assert counts["refused"] == sum(worker.refused for worker in workers)
    assert sum(counts.values()) == THREADS * (pushes // THREADS)
    assert sorted(picks) == list(range(len(picks)))
    assert [entry.number for entry in server.log] == list(range(len(picks)))
    assert sum(counts[status] for status in DECISIONS) == len(picks)
    for status in DECISIONS:
        assert counts[status] == sum(entry.status == status for entry in server.log), status
    # Whether a client meets itself in a buffer depends on how the threads run: certain only over many pushes.
    met = ["replaced", "superseded"] if rule.calibrate.cached and pushes >= 10_000 else []
    for status in ("joined", "faulty", "dropped", *met):
        assert counts[status] > 0, status

    # The log, replayed by one thread, gives every version that a thread has pulled, and the same end.
    seen = {}
    for version, checksum in (pair for worker in workers for pair in worker.seen):
        assert seen.setdefault(version, checksum) == checksum, f"version {version} looked different to two threads"
    assert len(seen) > 10
    again = fresh()

    def vector(join):
        if again.version in seen:
            assert zlib.crc32(again.params) == seen.pop(again.version), f"version {again.version} was torn"
        return vectors[picks[join.number]]

    replay(server.log, again, vector)
    seen.pop(server.version, None)
    assert not seen
    ours, theirs = server.state_dict(), again.state_dict()
    for state in (ours, theirs):  # the log holds no push that made no arrival
        state["meta"]["counts"] = {status: state["meta"]["counts"][status] for status in DECISIONS}
    same_state(ours, theirs)
