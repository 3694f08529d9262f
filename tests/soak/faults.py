"""Every call that a server asks of the disk, in turn, fails, is cut short, or is the process' last one: no commit is
lost, whoever drives the server gets a StoreError or nothing to notice, and a second try goes on with the right bits.

The calls are those of the C library, SQLite's included: `faults.cpp` stands before it. Each is met by a child of its
own, which opens a copy of a store that was killed, plays two rounds, and closes it (`life`), or makes one (`birth`).

LD_PRELOAD=faults.so python tests/soak/faults.py life ca2fl once 1   prints how many calls there were, and errors
"""

import ctypes
import errno
import itertools
import json
import os
import shutil
import signal
import sys
import tempfile
from pathlib import Path

import afflux.store.metadata
import afflux.store.store
from afflux import StoreError
from crashes import MEMORY, UNBORN, Case, acknowledged, check, in_child, reference, result, told

#: As in faults.cpp, and the error that such a call ends with. `power` is `stop`, and what was not flushed is gone.
HOWS = {
    "once": (1, errno.EIO),
    "full": (2, errno.ENOSPC),
    "stop": (3, 0),
    "tear": (4, 0),
    "short": (5, 0),
    "power": (3, 0),
}
#: How many joins the store that is copied holds, and how many there are in the end.
BEFORE, AFTER = 11, 24


class Disk:
    """Arms and disarms what stands before the C library."""

    def __init__(self):
        library = ctypes.CDLL(None)
        self._arm, self._disarm = library.faults_arm, library.faults_disarm
        self._arm.argtypes = [ctypes.c_char_p, ctypes.c_long, ctypes.c_int, ctypes.c_int, ctypes.c_char_p]
        self._disarm.restype = ctypes.c_long

    def arm(self, path, at, how, flushed):
        self._arm(os.fsencode(path), at, *HOWS[how], os.fsencode(flushed) if how == "power" else b"")

    def disarm(self):
        return self._disarm()


class Faults:
    """One kind of fault, at each call."""

    def __init__(self, case, folder, how):
        self.case = case
        self.how = how
        self.path, self.seed, self.copy, self.flushed = (f"{folder}/{name}" for name in ("at", "seed", "copy", "disk"))
        self.disk = Disk()
        self.states = reference(case)
        self.errors = 0  #: that were raised

    def run(self, phase, step):
        """At each call, or each so many, until there is no such call. Returns how many there were."""
        if phase == "life":
            self._plant()
        for at in itertools.count(0, step):
            for path in (self.path, self.copy, self.flushed):
                shutil.rmtree(path, ignore_errors=True)
            if phase == "life":
                shutil.copytree(self.seed, self.path)
            calls = self._one(phase, at)
            if calls is not None and calls <= at:
                return calls
        return None

    def _plant(self):
        """A store that was killed: what SQLite has not merged yet is there, too."""

        def body(tell):
            server = self.case.server(self.seed)
            while server.joins < BEFORE:
                self.case.push(server)
            server.checkpoint("a note")
            os.kill(os.getpid(), signal.SIGKILL)

        child, reading = in_child(body)
        told(reading)
        os.waitpid(child, 0)

    def _one(self, phase, at):
        """A fault at one call, and what comes after it; how many calls there were, if the process has lived."""
        if self.how == "power":
            note_flushed(self.path, self.flushed)
        child, reading = in_child(lambda tell: Life(self, at, tell).go(phase))
        words = [word.split() for word in told(reading)]
        status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert status in (0, -signal.SIGKILL), f"{phase} of {self.case}, {self.how} at {at}"
        least = max([int(word[1]) for word in words if word[0] == "safe"], default=BEFORE if phase == "life" else 0)
        self.errors += sum(word[0] == "error" for word in words)
        if status:
            if self.how == "power":
                from_flushed(self.flushed, self.path)
            result(lambda tell: self._afterwards(least, phase))
        return next((int(word[1]) for word in words if word[0] == "calls"), None)

    def _afterwards(self, least, phase):
        """What is there after the end of a process; and whether it can go on."""
        server = self.opened(self.path, least, phase)
        while server.joins < AFTER:
            self.case.push(server)
        server.close()
        check(self.case.open(self.path), self.states, AFTER)

    def opened(self, path, least, phase):
        """The server that a folder holds; a new one, if it holds none yet and says so."""
        try:
            server = self.case.open(path)
        except StoreError as error:
            if phase == "life" or least or not any(text in str(error) for text in UNBORN):
                raise
            shutil.rmtree(path, ignore_errors=True)
            server = self.case.server(path)
        check(server, self.states, least)
        return server


class Life:
    """What the child does."""

    def __init__(self, faults, at, tell):
        self.faults = faults
        self.case = faults.case
        self.at = at
        self.tell = tell
        self.calls = None
        self.waiting = []  # pushes that are not safe yet
        self.least = 0

    def go(self, phase):
        faults, case = self.faults, self.case
        self.least = BEFORE if phase == "life" else 0
        faults.disk.arm(faults.path, self.at, faults.how, faults.flushed)
        server = self._tried(self._opened if phase == "life" else self._made, phase)
        while server.joins < AFTER:
            self._tried(lambda: self._push(server), phase)
        self._tried(lambda: server.checkpoint("another note"), phase)
        self._safe(server.joins)
        self._tried(server.close, phase)
        if self.calls is None:
            self.calls = faults.disk.disarm()
        check(case.open(server._store.path), faults.states, AFTER)
        self.tell(f"calls {self.calls}")

    def _opened(self):
        return self.case.open(self.faults.path)

    def _made(self):
        # A disk that fails may keep what an attempt has made.
        return self.case.server(self.faults.path if self.calls is None else self.faults.copy)

    def _push(self, server):
        newest, _ = self.faults.states[server.joins]
        if server.version < newest:  # it could not be committed: a call that needs it tries again
            server.state_dict()
        receipt, _ = self.case.push(server, newest)
        self.waiting, safe = acknowledged([*self.waiting, receipt], server.version)
        self._safe(safe)

    def _safe(self, joins):
        if joins > self.least:
            self.least = joins
            self.tell(f"safe {joins}")

    def _tried(self, call, phase):
        """What fails may fail again while the disk does, which loses nothing, and succeeds when it does not."""
        if self.calls is not None:
            return call()
        for _ in range(2 if self.faults.how == "full" else 1):
            try:
                return call()
            except StoreError as error:
                self.tell("error " + str(error).replace("\n", " "))
        self.calls = self.faults.disk.disarm()
        if phase == "life":
            self._as_if_killed()
        return call()

    def _as_if_killed(self):
        """What another process would find now."""
        faults = self.faults
        shutil.copytree(faults.path, faults.copy)
        faults.opened(faults.copy, self.least, "life").close()


def note_flushed(path, flushed):
    """All that lies in a folder is on the disk. By inode: a file's bytes, or what is in a folder."""
    os.mkdir(flushed)
    for folder, _, files in os.walk(path):
        with os.scandir(folder) as found, open(f"{flushed}/{os.stat(folder).st_ino}", "w") as names:
            names.writelines(f"{entry.is_dir():d} {entry.inode()} {entry.name}\n" for entry in found)
        for name in files:
            shutil.copy(f"{folder}/{name}", f"{flushed}/{os.stat(f'{folder}/{name}').st_ino}")


def from_flushed(flushed, path):
    """What a power cut leaves: names that were flushed with their folder, bytes that were flushed with their file."""
    left = [("1", str(os.stat(path).st_ino), path)] if os.path.exists(path) else []
    shutil.rmtree(path, ignore_errors=True)
    for is_folder, inode, here in left:
        noted = Path(flushed, inode)
        if is_folder == "1":
            os.mkdir(here)
            lines = noted.read_text().splitlines() if noted.exists() else []
            left += [(kind, number, f"{here}/{name}") for kind, number, name in map(str.split, lines)]
        else:
            Path(here).write_bytes(noted.read_bytes() if noted.exists() else b"")


def main(phase, rule, how, step):
    case = Case(rule, pushes=AFTER + 3, durability="power" if how == "power" else "process")
    afflux.store.metadata.MOST_SLOTS = 2  # new segments, again and again
    with tempfile.TemporaryDirectory(dir=MEMORY) as folder:
        faults = Faults(case, folder, how)
        calls = faults.run(phase, step)
    print(json.dumps({"calls": calls, "errors": faults.errors}))


if __name__ == "__main__":
    main(*sys.argv[1:4], int(sys.argv[4]))
