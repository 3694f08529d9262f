"""A push that is alone may use helpers that a step has left awake: the same bits, and no other thread's work waits."""

from threading import Thread

import numpy as np
import pytest

from afflux import Server, ops
from afflux._engine import AWAKE, SUPERBLOCK, ingest
from afflux.ops.errors import AffluxError
from afflux.rules import fedbuff
from conftest import bits


def step():
    """A sweep on two threads: its helper spins for work afterwards."""
    ops.gram([np.ones(1 << 20, np.float32) for _ in range(2)], num_threads=2)


@pytest.mark.parametrize("size", [0, 1, SUPERBLOCK, SUPERBLOCK + 1, 5 * SUPERBLOCK + 7])
@pytest.mark.parametrize("bad", [None, 0, -1])
def test_the_bits_are_those_of_one_thread(size, bad):
    vector = np.random.default_rng(size).standard_normal(size, dtype=np.float32)
    if bad is not None and size > 0:
        vector[bad] = np.nan
    one, helped = np.empty(size, np.float32), np.zeros(size, np.float32)
    expected = ingest(vector, one, 1)
    for given in (vector, [vector[: size // 3], vector[size // 3 :]]):
        step()
        helped[:] = 0
        assert repr(ingest(given, helped, AWAKE)) == repr(expected)  # a NaN is not equal to itself
        assert bits(helped) == bits(one)


def test_several_at_once():
    vectors = np.random.default_rng(1).standard_normal((4, 3 * SUPERBLOCK + 5), dtype=np.float32)
    slots, found = np.zeros_like(vectors), [[] for _ in vectors]

    def pushes(k):
        for _ in range(50):
            found[k].append(ingest(vectors[k], slots[k], AWAKE))

    step()
    threads = [Thread(target=pushes, args=(k,)) for k in range(len(vectors))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert bits(slots) == bits(vectors)
    assert [set(each) for each in found] == [{ingest(vector, slots[0], 1)} for vector in vectors]


def test_other_numbers_of_threads_are_refused():
    with pytest.raises(AffluxError, match="num_threads is -1, must be at least 1"):
        ingest(np.ones(3, np.float32), np.empty(3, np.float32), -1)


@pytest.mark.parametrize("given", [{}, {"push_threads": 1}, {"push_threads": 2}, {"num_threads": 1}])
def test_a_server_is_the_same_with_any_threads(given):
    size = 2 * SUPERBLOCK + 3
    vectors = np.random.default_rng(2).standard_normal((12, size), dtype=np.float32)
    server = Server(fedbuff(buffer_size=4), np.zeros(size, np.float32), **({"num_threads": 2} | given))
    plain = Server(fedbuff(buffer_size=4), np.zeros(size, np.float32), num_threads=1, push_threads=1)
    for client, vector in enumerate(vectors):
        receipts = [each.push(client=client, version=each.version, update=vector) for each in (server, plain)]
        assert receipts[0].status == receipts[1].status == "joined"
    assert (server._adapter.engine_threads == AWAKE) == (given == {})
    assert bits(server.params) == bits(plain.params)
