"""The suite's own checks of processes: whether any remain, and whether Ctrl-C reaches them."""

import os
import signal
import subprocess
import sys

import pytest

import processes
from conftest import needs_fork
from crashes import in_child, told

SLEEP = [sys.executable, "-S", "-c", "import time; time.sleep(60)"]
needs_proc = pytest.mark.skipif(not processes.HAS_PROC, reason="asks Linux for its processes")


@needs_proc
def test_a_child_that_runs_is_found():
    with subprocess.Popen(SLEEP) as child:
        assert "time.sleep(60)" in processes.children()[child.pid]
        assert child.pid in processes.remaining(0)
        child.kill()
    assert child.pid not in processes.children()


@needs_proc
def test_a_child_of_a_child_that_has_ended_is_found():
    code = f"import subprocess; print(subprocess.Popen({SLEEP}, stdout=subprocess.DEVNULL).pid)"
    done = subprocess.run([sys.executable, "-S", "-c", code], stdout=subprocess.PIPE, text=True, check=True)
    orphan = int(done.stdout)
    assert orphan in processes.children()
    os.kill(orphan, signal.SIGKILL)
    assert orphan not in processes.remaining()
    os.waitpid(orphan, 0)


@needs_fork
def test_interrupts_that_were_ignored_are_not_while_tests_run():
    """Nor in their children; afterwards they are again."""

    def body(tell):
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        code = "import signal; signal.raise_signal(signal.SIGINT)"
        with processes.default_interrupts():
            tell(subprocess.run([sys.executable, "-S", "-c", code], stderr=subprocess.DEVNULL).returncode)
        tell(signal.getsignal(signal.SIGINT).name)
        tell(subprocess.run([sys.executable, "-S", "-c", code]).returncode)

    child, reading = in_child(body)
    words = told(reading)
    assert os.waitpid(child, 0)[1] == 0
    assert words == [str(-signal.SIGINT), "SIG_IGN", "0"]


def test_this_session_takes_interrupts():
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
