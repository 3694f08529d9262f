"""A thread writes into arrays that a call reads where they are: a fault of the client or a good round, and no crash."""

import threading

import numpy as np
import pytest

from afflux import AffluxError, Server, aggregate
from afflux.rules import fadas, fedasync, fedbuff
from held_up import start

COUNT, SIZE = 5, 30_000  #: arrays of a tree, and elements of each: more than one thread sweeps them
ENOUGH, MOST = 40, 4_000  #: calls: at least, and at most until both outcomes were seen


@pytest.fixture
def disturbed():
    """Trees of ones; a thread writes a NaN into one of them, and takes it back, again and again."""
    trees = [[np.ones(SIZE, np.float32) for _ in range(COUNT)] for _ in range(3)]
    array, stop = trees[1][3], threading.Event()

    def write():
        while not stop.is_set():
            for value in (np.nan, 1.0):
                array[-7] = value
                stop.wait(1e-4)

    writer = start(write)
    yield trees
    stop.set()
    writer.result(600)


def both_outcomes(call):
    """Make calls until some have succeeded and some have failed; return the errors."""
    successes, errors = 0, []
    for number in range(MOST):
        try:
            call()
            successes += 1
        except AffluxError as error:
            errors.append(str(error))
        if number >= ENOUGH and successes and errors:
            return errors
    raise AssertionError(f"{successes} calls succeeded, {len(errors)} failed: {errors[:1]}")


RULES = [fedbuff(), fadas(), fedasync()]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
@pytest.mark.parametrize("faults", ["raise", "record"])
def test_a_step_amid_writes(rule, faults, disturbed):
    server = Server(rule, [np.zeros(SIZE, np.float32) for _ in range(COUNT)], num_threads=2, faults=faults)
    statuses = {"joined"} if faults == "raise" else {"joined", "faulty"}
    accepted = 0

    def step():
        nonlocal accepted
        version = server.version
        receipts, report = server.step([(client, version, tree) for client, tree in enumerate(disturbed)])
        status = receipts[1].status
        assert {receipts[0].status, receipts[2].status} == {"joined"}
        assert status in statuses
        assert report.version == server.version == version + 1
        assert np.isfinite(server.params).all()
        accepted += 1
        if status != "joined":
            raise AffluxError(receipts[1].reason)

    errors = both_outcomes(step)
    assert [error for error in errors if "non-finite value" not in error] == []
    assert server.version == accepted
    assert server.arrivals_waiting == 0
    assert all(np.isfinite(vector).all() for vector in server.rule_vectors.values())


def test_a_mean_amid_writes(disturbed):
    out = [np.zeros(SIZE, np.float32) for _ in range(COUNT)]

    def mean():
        aggregate(disturbed, [1, 2, 3], out=out, num_threads=2)
        assert all((array == 1).all() for array in out)

    errors = both_outcomes(mean)
    assert [error for error in errors if "non-finite value" not in error] == []
