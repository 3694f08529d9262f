"""Tasks and rounds under way never make a step fail, and versions are as pulled ones are, whatever holds them."""

import threading
from concurrent.futures import wait

import numpy as np
import pytest

from afflux import AffluxError, Server
from afflux.aggregation.local_plane import LocalRound
from afflux.rules import fedbuff
from afflux.server import checkout
from afflux.server.inputs import InputAdapter
from conftest import check_error, push_all
from held_up import HeldUp, start
from inside import monitor_of

D = 4


def ones():
    return np.ones(D, np.float32)


class SlowMutex:
    """The mutex of a monitor, for which the thread named A waits once it has made its round."""

    def __init__(self, monitor):
        self.lock = monitor.mutex
        self.waits, self.go = threading.Event(), threading.Event()
        self.made = False
        run = monitor._run

        def noted(job):
            run(job)
            self.made = self.made or threading.current_thread().name == "A"

        monitor._run, monitor.mutex = noted, self

    def __getattr__(self, name):
        return getattr(self.lock, name)

    def __setattr__(self, name, value):
        if name in ("handed_out", "driver", "awaited"):
            setattr(self.lock, name, value)
        else:
            super().__setattr__(name, value)

    def __enter__(self):
        if self.made and threading.current_thread().name == "A":
            self.waits.set()
            assert self.go.wait(600)
        self.lock.acquire(True)

    def __exit__(self, *_):
        self.lock.release()

    def acquire(self, blocking):
        return self.lock.acquire(blocking)

    def release(self):
        self.lock.release()

    def locked(self):
        return self.lock.locked()


def test_a_push_that_waits_for_the_mutex_holds_no_version():
    """Another thread has published its round meanwhile."""
    server = Server(fedbuff(buffer_size=1), np.zeros(D, np.float32), max_versions=3)
    mutex = SlowMutex(monitor_of(server))
    slow = threading.Thread(target=lambda: server.push(client="a", version=0, update=ones()), name="A")
    slow.start()
    assert mutex.waits.wait(600)
    for _ in range(4):
        assert server.push(client="b", version=server.version, update=ones()).status == "joined"
    assert server.versions_held == 1
    mutex.go.set()
    slow.join()
    assert server.version == 5


class Switch:
    """Makes each call of a function end with a switch to another thread, which pushes meanwhile as often as `pushes`.

    The frames of the call's thread are as they are when the operating system switches threads there.
    """

    def __init__(self, monkeypatch, target, name, push, waits=False):
        self.call, self.push, self.waits, self.thread = getattr(target, name), push, waits, None
        monkeypatch.setattr(target, name, lambda *arguments, **options: self.switched(*arguments, **options))

    def switched(self, *arguments, **options):
        output = self.call(*arguments, **options)
        if self.thread is None:
            self.thread = threading.Thread(target=self.push)
            self.thread.start()
            self.thread.join(0.2 if self.waits else 60)
        return output


@pytest.mark.parametrize("place", ["checkout", "make", "pull", "step"])
@pytest.mark.parametrize("hold", [True, False])
def test_frames_of_other_threads_hold_no_version(place, hold, monkeypatch):
    """Nobody but the server holds a version: no push fails, wherever another thread was switched away from."""
    server, outcomes = Server(fedbuff(buffer_size=1), np.zeros(D, np.float32), max_versions=2), []

    def push(name="bob", times=3):
        for _ in range(times):
            try:
                outcomes.append(server.push(task=server.checkout(name, hold=hold), update=ones()).status)
            except AffluxError as error:
                outcomes.append(str(error))

    if place == "checkout":
        switch = Switch(monkeypatch, checkout, "Task", push)
    else:  # the round of the other thread waits for this one, or for the end of the copy
        target = (LocalRound, "make") if place == "make" else (InputAdapter, "copy_out")
        switch = Switch(monkeypatch, *target, push, waits=True)
    if place == "pull":
        assert server.pull(out=ones()) == 0
    if place == "step":
        server.step([], out=ones())
    push("ann", 1)
    switch.thread.join(600)
    assert (outcomes, server.version) == (["joined"] * 4, 4)


@pytest.mark.parametrize("make", ["push", "set_params", "load_state_dict"])
@pytest.mark.parametrize("read", ["load", "tree"])
def test_a_version_waits_until_a_task_is_read(read, make, monkeypatch):
    server = Server(fedbuff(buffer_size=1), [np.zeros(D, np.float32)], max_versions=2)
    calls = {
        "push": {"client": "bob", "version": 1, "update": [ones()]},
        "set_params": {"params": [ones()]},
        "load_state_dict": {"state": server.state_dict()},
    }
    task = server.checkout("ann")
    server.push(client="bob", version=0, update=[ones()])  # the base of ann's task is the older one of two
    name = {"load": "copy_out", "tree": "copied_tree"}[read]
    held, target = HeldUp(monkeypatch, InputAdapter, name), [np.full(D, 7, np.float32)]
    reader = start(lambda: task.tree() if read == "tree" else task.load(target) or target)
    assert held.reached.wait(600)
    maker = start(lambda: getattr(server, make)(**calls[make]))
    assert not wait([maker], 0.2).done
    held.go.set()
    assert reader.result(600)[0].tolist() == [0] * D
    maker.result(600)
    assert server.version == (0 if make == "load_state_dict" else 2)


@pytest.mark.parametrize("call", ["flush", "poll"])
def test_a_flush_waits_until_a_conversion_is_done(call, monkeypatch):
    server = Server(fedbuff(buffer_size=9), np.zeros(D, np.float32), max_versions=2, flush_after=1e-9)
    task = server.checkout("ann")
    server.push(client="bob", version=0, update=ones())
    server.flush()
    server.push(client="bob", version=1, update=ones())
    held = HeldUp(monkeypatch, InputAdapter, "ingest", lambda *arguments: arguments[4:5] not in ((), (None,)))
    push = start(lambda: server.push(task=task, model=ones()))
    assert held.reached.wait(600)
    made = start(getattr(server, call))
    assert not wait([made], 0.2).done
    held.go.set()
    assert made.result(600).version == 2
    assert push.result(600).status == "joined"


def test_in_place_a_listed_task_gives_copies():
    server = Server(fedbuff(buffer_size=1), np.zeros(D, np.float32), inplace=True)
    server.checkout("ann", hold=False)
    (task,) = server.tasks
    params = task.params
    assert not params.flags.writeable
    server.push(client="bob", version=0, update=ones())
    assert (params.tolist(), server.params.tolist()) == ([0] * D, [1] * D)
    check_error("version 0 is no longer held", lambda: task.params)


@pytest.mark.parametrize("newest_too", [False, True])
def test_a_commit_keeps_what_there_is_room_for(newest_too, tmp_path):
    """A task of the newest version takes no place: the server holds that anyway."""
    with Server(fedbuff(buffer_size=1), np.zeros(D, np.float32), max_versions=4, store=tmp_path / "store") as server:
        old = server.checkout("ann").id
        server.push(client="bob", version=0, update=ones())
        if newest_too:
            server.checkout("eve")
        server.checkpoint()
    with Server.open(tmp_path / "store") as server:
        assert server.push(task=old, model=ones()).status == "joined"


def test_a_store_with_too_few_versions_is_refused(tmp_path):
    for commit_every in (3, None):
        with pytest.raises(AffluxError, match="max_versions is 2, must be at least 3"):
            Server(fedbuff(), np.zeros(D), max_versions=2, commit_every=commit_every, store=tmp_path / "store")
    with Server(fedbuff(buffer_size=1), np.zeros(D), max_versions=2, store=tmp_path / "store") as server:
        push_all(server, [1] * 5, np.ones(D))
    with Server(
        fedbuff(buffer_size=1), np.zeros(D), max_versions=3, commit_every=3, store=tmp_path / "other"
    ) as server:
        push_all(server, [1] * 8, np.ones(D))
