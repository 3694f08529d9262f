"""A task ends once: an interrupt at any call of a push, a cancel or a checkout, then a commit and a reopening.

Errors are raised where a signal handler could raise them: on entry to a function of Python, and after one of C.
"""

import signal
import sys
from contextlib import nullcontext
from functools import partial

import numpy as np
import pytest

from afflux import AffluxError, Closed, Opened, Server
from afflux.rules import fedbuff
from conftest import check_error
from inside import without_fast_path

D = 4


def interrupted(call, error, k, events=("call", "c_return")):
    """Raises an error at the k-th moment of a call at which a signal handler could; whether there was one."""
    moments, hit = 0, False

    def profile(frame, event, _):
        nonlocal moments, hit
        if event in events and "afflux" in frame.f_code.co_filename:
            moments += 1
            if moments == k:
                hit = True
                sys.setprofile(None)
                raise error

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        call()
    except (error, AffluxError):  # one that comes while a vector is read is taken for the vector's
        pass
    finally:
        sys.setprofile(before)
    return hit


ACTIONS = {
    "push": lambda server, task: server.push(task=task, update=np.ones(D, np.float32)),
    "cancel": lambda server, task: task.cancel(),
    "checkout": lambda server, task: server.checkout("bob"),
}


@pytest.mark.parametrize("action", ACTIONS)
def test_at_every_call(action, tmp_path):
    for k in range(1, 400):
        path = tmp_path / f"{k}"
        server = Server(fedbuff(buffer_size=5), np.zeros(D, np.float32), store=path, commit_every=None, log=True)
        without_fast_path(server)
        task = server.checkout("ann")
        task_id, hit = task.id, interrupted(partial(ACTIONS[action], server, task), KeyboardInterrupt, k, ("call",))
        logged, ended = ({entry.task for entry in server.log if isinstance(entry, kind)} for kind in (Opened, Closed))
        assert {task.id for task in server.tasks} <= logged - ended
        waiting, counts = server.arrivals_waiting, server.counts
        closed = task_id in ended
        server.close()
        with Server.open(path) as server:
            status = server.push(task=task_id, update=np.ones(D, np.float32)).status
            assert status == ("expired" if closed else "joined")
            assert server.arrivals_waiting == waiting + (not closed)
            assert server.counts["joined"] == counts["joined"] + (not closed)
        if not hit:
            assert k > 5
            return
    pytest.fail("the action never ended")


@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError])
@pytest.mark.parametrize("way", ["fast", "general"])
@pytest.mark.parametrize("store", [False, True])
def test_a_push_that_has_joined_is_not_refused_and_holds_no_version(error, way, store, tmp_path):
    joined = []
    for k in range(1, 400):
        server = Server(fedbuff(buffer_size=5), np.zeros(D, np.float32), store=tmp_path / f"{k}" if store else None)
        if way == "general":
            without_fast_path(server)
        task = server.checkout("ann")
        server.push(client="bob", version=0, update=np.ones(D, np.float32))
        server.flush()
        assert server.versions_held == 2
        hit = interrupted(partial(ACTIONS["push"], server, task), error, k)
        joined.append(server.arrivals_waiting == 1)
        assert len(server.tasks) == (not joined[-1])
        assert server.versions_held == 2 - joined[-1]
        assert not (joined[-1] and server.counts["refused"])
        assert server.push(task=task, update=np.ones(D, np.float32)).status == ("expired" if joined[-1] else "joined")
        if store:
            server.close(checkpoint=False)
        if not hit:
            assert sum(joined) > (1 if way == "fast" else 3)  # moments after the arrival has joined
            assert not all(joined)
            return
    pytest.fail("the push never ended")


@pytest.mark.parametrize("error", [KeyboardInterrupt, TimeoutError])
def test_a_push_without_examples_is_counted_once(error):
    empty = []
    for k in range(1, 400):
        server = Server(fedbuff(buffer_size=5), np.zeros(D, np.float32))
        hit = interrupted(partial(server.push, task=server.checkout("ann"), num_examples=0), error, k)
        empty.append(server.counts["empty"] == 1)
        assert len(server.tasks) == (not empty[-1])
        assert not (empty[-1] and server.counts["refused"])
        if not hit:
            assert sum(empty) > 3
            assert not all(empty)
            return
    pytest.fail("the push never ended")


class Timeout(Exception):
    """Raised by a handler of a signal."""


class Slow:
    """A vector during whose reading signals arrive, at the k-th call of its attributes and methods."""

    def __init__(self, k):
        self.vector, self.left = np.ones(D, np.float32), k

    def __getattr__(self, name):
        if name.startswith("__array") and name != "__array_interface__":
            raise AttributeError(name)
        self.left -= 1
        if self.left == 0:
            signal.raise_signal(signal.SIGUSR1)
        return getattr(self.vector, name)

    def __dlpack__(self, **options):
        return self.__getattr__("__dlpack__")(**options)

    def __dlpack_device__(self):
        return self.__getattr__("__dlpack_device__")()


class Number:
    """A number of examples whose reading is interrupted, and then raises an error of its own."""

    def __index__(self):
        try:
            signal.raise_signal(signal.SIGUSR1)
        finally:
            raise ValueError("no number")


def handle(error):
    raise error


class Handler:
    def __init__(self, error):
        self.error = error

    def raised(self, *_):
        raise self.error

    __call__ = raised


HANDLERS = {
    "function": lambda error: lambda *_: handle(error),
    "method": lambda error: Handler(error).raised,
    "object": Handler,
    "partial": lambda error: partial(Handler(error).raised, 1),
}


@pytest.fixture
def handler():
    before = signal.getsignal(signal.SIGUSR1)
    yield lambda made: signal.signal(signal.SIGUSR1, made)
    signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("kind", HANDLERS)
@pytest.mark.parametrize("error", [Timeout, TypeError, ValueError])
@pytest.mark.parametrize("faults", ["raise", "record"])
def test_an_exception_of_a_signals_handler_is_not_the_clients(kind, error, faults, handler):
    handler(HANDLERS[kind](error("timeout")))
    counting = Slow(0)
    Server(fedbuff(buffer_size=5), np.zeros(D, np.float32)).push(client=1, update=counting, version=0)
    reads = -counting.left
    assert reads > 2
    for k in range(1, reads + 2):
        server = Server(fedbuff(buffer_size=5), np.zeros(D, np.float32), faults=faults)
        vector = Slow(k)
        with pytest.raises(error, match=r"^timeout$") if k <= reads else nullcontext():
            assert server.push(client=1, update=vector, version=0).status == "joined"
        assert (server.counts["faulty"], len(server.faults)) == (0, 0)
    with pytest.raises(ValueError, match="no number"):
        server.push(client=1, update=vector.vector, version=0, num_examples=Number())
    assert server.counts["faulty"] == 0


@pytest.mark.parametrize("faults", ["raise", "record"])
def test_an_error_of_an_array_is_the_clients_whatever_handlers_there_are(faults, handler):
    class Broken(Slow):
        def __getattr__(self, name):
            raise TimeoutError("the array's own")

    handler(HANDLERS["function"](Timeout()))
    server = Server(fedbuff(buffer_size=5), np.zeros(D, np.float32), faults=faults)
    if faults == "raise":
        check_error("client 1's update cannot be read: Timeout", server.push, client=1, update=Broken(1), version=0)
    else:
        assert server.push(client=1, update=Broken(1), version=0).status == "faulty"
