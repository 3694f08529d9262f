"""Processes that tests start: whether any remain, and whether Ctrl-C reaches them."""

import ctypes
import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from multiprocessing import resource_tracker
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36
HAS_PROC = Path("/proc/self/stat").exists()


def adopt_orphans():
    """On Linux, a process whose parent ends before it becomes a child of this process, instead of process 1."""
    if HAS_PROC:
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def children():
    """{process: its command} of the children that run."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, parent = (folder / "stat").read_text().rpartition(")")[2].split()[:2]
            command = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended meanwhile
        if int(parent) == os.getpid() and state not in "ZX":
            found[int(folder.name)] = command
    found.pop(getattr(resource_tracker._resource_tracker, "_pid", None), None)  # ends with its parent
    return found


def remaining(seconds=60.0):
    """The children that still run after that time: one that was killed takes a moment to end."""
    deadline = time.monotonic() + seconds
    while (found := children()) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


@contextmanager
def default_interrupts():
    """Ctrl-C is not ignored, as it is where `nohup` or a script in the background started this process.

    The children that are started meanwhile inherit that.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:
        yield
        return
    signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.SIG_IGN)


def run_python(*arguments, check=False, **environment):
    """Run Python in a process of its own, with these variables in its environment; its output is text."""
    command, environment = [sys.executable, *map(str, arguments)], os.environ | environment
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=1800, check=check)


def end_by_sigkill(*arguments):
    """What another process does in place of its work."""
    os.kill(os.getpid(), signal.SIGKILL)
