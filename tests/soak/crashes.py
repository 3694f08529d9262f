"""A server whose process is killed again and again: what a reopened store holds, against a run that nothing disturbs.

Children are forked from a process that has imported afflux and never used it, so that each begins in milliseconds. A
child opens the store, compares all that it finds with the undisturbed run, and goes on from there: its pushes follow
from their number alone.

python tests/soak/crashes.py 2000 FILE      so many kills in all; goes on where the one that left FILE was stopped
"""

import contextlib
import ctypes
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

import afflux
from afflux import Server, StoreError
from afflux.ops import codecs
from afflux.rules import RULES
from afflux.selftest.pushes import state_digest as digest

CLIENTS, M = 9, 3
#: The message about the folder of a store that was never finished.
UNBORN = ("there is no folder", "was making it", "index.sqlite is missing")
#: A folder in memory, if there is one: nothing waits for a disk there, and a new file has a new inode.
MEMORY = "/dev/shm" if os.path.isdir("/dev/shm") else None
#: The messages of a child, besides numbers of joins.
SEEN, FINISHED = "seen", "finished"
STORE = str(Path(afflux.__file__).parent / "store")


@dataclass(frozen=True)
class Case:
    """What is run."""

    rule: str
    d: int = 300
    pushes: int = 400
    durability: str = "process"
    commit_every: int | None = 1
    accumulate: bool = False
    checkpoints: float = 0.05  #: the share of pushes that are followed by one
    codec: str | None = None

    def make_rule(self):
        rule = RULES[self.rule](buffer_size=M)
        if self.codec is None:
            return rule
        return replace(rule, calibrate=replace(rule.calibrate, codec=codecs.named(self.codec)))

    def server(self, path=None):
        store = {} if path is None else {"store": path, **self.settings()}
        options = {"num_clients": CLIENTS, "max_staleness": 6, "log": True, "accumulate": self.accumulate}
        return Server(self.make_rule(), np.ones(self.d, np.float32), num_threads=1, **options, **store)

    def open(self, path):
        return Server.open(path, self.make_rule(), num_threads=1, **self.settings())

    def settings(self):
        return {"durability": self.durability, "commit_every": self.commit_every}

    def push(self, server, newest=None):
        """The push that comes next: the same after the same joins, whoever asks. Pulled from the newest version, or
        from an older one.
        """
        rng = np.random.default_rng([server.joins, self.d])
        client, age = int(rng.integers(CLIENTS)), int(rng.integers(8))
        vector = rng.standard_normal(self.d).astype(np.float32)
        version = max(0, (server.version if newest is None else newest) - age)
        receipt = server.push(client=client, **{server.rule.kind: vector}, version=version, num_examples=client + 1)
        return receipt, rng.random() < self.checkpoints


def undisturbed(case):
    """The version and the digest after each number of joins."""
    server = case.server()
    states = [(0, digest(server))]
    while server.joins < case.pushes:
        case.push(server)
        states.append((server.version, digest(server)))
    return states


def check(server, states, least):
    """What a server finds when it opens the store."""
    assert server.joins >= least, f"{least} joins were acknowledged as safe, {server.joins} are there"
    own = digest(server)  # which makes a round that was due as its pass began
    assert [server.version, own] == states[server.joins], f"other bits after {server.joins} joins"
    rows = server.rows
    if rows is not None:
        decoded = [rows.row(client).astype(np.float64) for client in rows.client_ids]
        total = np.sum(decoded, axis=0) if len(rows) else 0.0
        largest = max((float(np.linalg.norm(row)) for row in decoded), default=0.0)
        assert np.linalg.norm(rows.sum - total) / CLIENTS <= 1e-12 * largest


def remove(path):
    """Removes a store that was never finished. It is renamed first: a kill must not leave half a store in its place."""
    gone = f"{path}.gone"
    shutil.rmtree(gone, ignore_errors=True)
    with contextlib.suppress(FileNotFoundError):
        os.rename(path, gone)
    shutil.rmtree(gone, ignore_errors=True)


def go_on(case, path, tell):
    """Opens or makes the store, and pushes; sends the number of safe joins."""
    try:
        server = case.open(path)
    except StoreError as error:
        if not any(text in str(error) for text in UNBORN):
            raise
        remove(path)
        server = case.server(path)
    yield server
    waiting = []
    while server.joins < case.pushes:
        receipt, checkpoint = case.push(server)
        if checkpoint:
            server.checkpoint()
            tell(receipt.join + 1)
        waiting, safe = acknowledged([*waiting, receipt], server.version)
        if safe:
            tell(safe)
        yield server
    server.close()
    tell(case.pushes)


def acknowledged(waiting, version):
    """Of these receipts: those that are not safe yet, and how many joins are, if that has become known."""
    safe = [receipt.join + 1 for receipt in waiting if receipt.durable is not None and receipt.durable <= version]
    # A version is committed with all that was decided before its round.
    known = max(safe, default=0)
    return [receipt for receipt in waiting if receipt.join >= known], known


def in_child(body):
    """Runs `body(tell)` in a forked child; returns the child's process id and the pipe of its messages."""
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        return child, reading
    os.close(reading)

    def tell(word):
        os.write(writing, f"{word}\n".encode())

    tell.pipe = writing
    try:
        body(tell)
    except BaseException:
        import traceback

        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)


def told(reading):
    with os.fdopen(reading) as file:
        return file.read().splitlines()


def result(body):
    child, reading = in_child(body)
    words = told(reading)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    return words


def reference(case):
    (text,) = result(lambda tell: tell(json.dumps(undisturbed(case))))
    return json.loads(text)


def leave_child(tell, end, by_c):
    """Forks a child, by Python or by C code, that has the server and stays until the pipe `end` is closed."""
    if (ctypes.PyDLL(None).fork() if by_c else os.fork()) == 0:
        os.close(tell.pipe)
        os.read(end, 1)
        os._exit(0)


class Driver:
    """Kills one server again and again, in whatever way; each child first checks what the last one has left.

    A child tells how many joins are safe, and SEEN after its check and after each push. It leaves a child of its own,
    which stays until the next one has ended.
    """

    def __init__(self, case, path):
        self.case = case
        self.path = path
        self.states = reference(case)
        self.least = 0  #: joins that were acknowledged as safe
        self.lives = 0
        self.previous = []  #: the pipe whose end ends the child of the last child

    def __enter__(self):
        return self

    def __exit__(self, *_):
        """Ends the child of the last child."""
        for pipe in self.previous:
            os.close(pipe)

    def life(self, kill=None, prepare=lambda: None, enough=lambda server: False):
        """One child, which prepares itself as soon as it has checked, and ends when that is enough. Whether it died.

        `kill(child, seen)` is called at its start; `seen(count)` waits until the child has told SEEN so often, or has
        finished. A child that will be killed does not end before.
        """

        end, beginning = os.pipe()
        self.lives += 1

        def body(tell):
            for pipe in (beginning, *self.previous):
                os.close(pipe)
            run = go_on(self.case, self.path, tell)
            server = next(run)
            check(server, self.states, self.least)
            leave_child(tell, end, by_c=self.lives % 2)
            tell(SEEN)
            prepare()
            for server in run:
                tell(SEEN)
                if enough(server):
                    return
            check(self.case.open(self.path), self.states, self.case.pushes)
            tell(FINISHED)
            if kill is not None:
                signal.pause()

        child, reading = in_child(body)
        words = []
        with os.fdopen(reading) as pipe:

            def seen(count):
                while words.count(SEEN) < count and FINISHED not in words and (line := pipe.readline()):
                    words.append(line.strip())

            if kill is not None:
                kill(child, seen)
            words += pipe.read().splitlines()
        self.least = max([self.least, *(int(word) for word in words if word.isdigit())])
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        for pipe in (end, *self.previous):
            os.close(pipe)
        self.previous = [beginning]
        assert status in (0, -signal.SIGKILL), status
        if self.least == self.case.pushes:  # it has finished: once more, from the beginning
            shutil.rmtree(self.path)
            self.least = 0
        return status != 0


def kills(case, path, count, seed=0, most=40):
    """Kills the server so many times, each amid an opening or a push that chance has counted out, and lets it finish.

    Where in that call it ends depends on how fast it runs; that it ends there does not.
    """
    chance = random.Random(seed)

    def kill(child, seen):
        calls = max(0, chance.randrange(-most // 4, most))  # one in five while it opens the store
        seen(calls)
        time.sleep(chance.uniform(0, 0.02 if calls == 0 else 0.002))
        os.kill(child, signal.SIGKILL)

    with Driver(case, path) as driver:
        for _ in range(count):
            assert driver.life(kill)
        assert not driver.life()


def killing(folder, lines):
    """A trace function that kills the process when so many lines of the sources in a folder have been executed."""

    def trace(frame, event, _):
        nonlocal lines
        if not frame.f_code.co_filename.startswith(folder):
            return None
        lines -= event == "line"
        if lines < 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    return trace


def each_step(case, path, step=1):
    """Kills the server before each line of the store's code that two rounds run, in turn. Returns their number."""
    lines = 0

    def two_rounds():
        first = None

        def enough(server):
            nonlocal first
            first = server.version if first is None else first
            return server.version >= first + 2

        return enough

    with Driver(case, path) as driver:
        while driver.life(None, lambda left=lines: sys.settrace(killing(STORE, left)), two_rounds()):
            lines += step
    return lines


#: What is killed at random moments.
CASES = [
    Case("ca2fl"),
    Case("ca2fl", d=140_001, pushes=60),
    Case("ca2fl", commit_every=3),
    Case("ca2fl", d=5000, pushes=200, codec="affine-4"),
    Case("afa_cs", commit_every=2, codec="rotated-2", checkpoints=0.2),
    Case("afa_cs", durability="power", pushes=120),
    Case("fadas", commit_every=2),
    Case("wkafl"),
    Case("gsgm", pushes=150),
    Case("fedbuff", accumulate=True),
    Case("fedams", commit_every=None, checkpoints=0.2),
]
PIECE = 10


def name(case):
    """Short, and one for each case."""
    return f"{case.rule}-{case.d}-{case.durability}-{case.commit_every}-{case.codec}"


def many(count, file):
    """Kills in pieces, case by case, each with its own moments; `file` counts them."""
    done = json.loads(file.read_text()) if file.exists() else {name(case): 0 for case in CASES}
    while sum(done.values()) < count:
        case = min(CASES, key=lambda case: done[name(case)])
        with tempfile.TemporaryDirectory() as folder:
            kills(case, f"{folder}/store", PIECE, seed=done[name(case)])
        done[name(case)] += PIECE
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(done))
        print(f"{sum(done.values())} of {count} kills, the last {PIECE} of {name(case)}", flush=True)


if __name__ == "__main__":
    many(int(sys.argv[1]), Path(sys.argv[2]))
