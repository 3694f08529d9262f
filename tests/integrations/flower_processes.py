"""Processes of Flower for tests: a SuperLink with SuperNodes on this machine, and how they end."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from afflux import StoreError, store

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
#: For child processes: this afflux, and the flwr of this process, which may lie outside the environment.
PYTHONPATH = os.pathsep.join([str(ROOT / "python"), *filter(None, [os.environ.get("PYTHONPATH")])])


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def wait_for(what, seconds=120.0, every=0.2):
    """What a function returns, as soon as that is true."""
    end = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < end, f"{what} took more than {seconds} s"
        time.sleep(every)
    return found


def version_of(folder):
    """The version that a store has committed last; -1 if there is none yet. Another process may have it open."""
    try:
        return store.info(folder).version
    except StoreError:
        return -1


def kill_all(processes):
    """Ends processes and all that they have started."""
    found = []
    for process in processes:
        try:
            own = psutil.Process(process.pid)
            found += [own, *own.children(recursive=True)]
        except psutil.NoSuchProcess:
            continue
    for each in found:
        try:
            each.send_signal(signal.SIGKILL)
        except psutil.NoSuchProcess:
            continue
    psutil.wait_procs(found, timeout=10)
    for process in processes:
        process.wait(10)


class SuperLink:
    """A SuperLink, and SuperNodes that know their numbers, on free ports of 127.0.0.1; without nodes it simulates."""

    def __init__(self, folder, nodes=3):
        self.folder, self.processes = Path(folder), []
        self.port = free_port()
        home = self.folder / "flwr"
        home.mkdir()
        (home / "config.toml").write_text(
            f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "127.0.0.1:{self.port}"\ninsecure = true\n'
        )
        self.env = {
            **os.environ,
            "FLWR_HOME": str(home),
            "FLWR_TELEMETRY_ENABLED": "0",
            "PATH": f"{BIN}{os.pathsep}{os.environ['PATH']}",
            "PYTHONPATH": PYTHONPATH,
        }
        try:
            self.link = self._start(
                "flower-superlink",
                *("--insecure", "--host", "127.0.0.1", "--port", self.port),
                "--disable-runtime-dependency-installation",
                *(() if nodes else ("--simulation",)),
            )
            wait_for(self._answers)
            self.nodes = [self.start_node(number, nodes) for number in range(nodes)]
        except BaseException:
            self.close()
            raise

    def start_node(self, number, nodes):
        """A SuperNode that knows its number; its id is a new one."""
        return self._start(
            "flower-supernode",
            *("--insecure", "--superlink", f"127.0.0.1:{self.port}", "--port", free_port()),
            *("--node-config", f"partition-id={number} num-partitions={nodes}"),
        )

    def _start(self, command, *arguments):
        with (self.folder / f"{command}-{len(self.processes)}.log").open("wb") as log:
            self.processes.append(
                subprocess.Popen([BIN / command, *map(str, arguments)], env=self.env, stdout=log, stderr=log)
            )
        return self.processes[-1]

    def _answers(self):
        with socket.socket() as client:
            return client.connect_ex(("127.0.0.1", self.port)) == 0

    def run(self, app, config):
        """Starts a run of an app; returns its id."""
        done = self._flwr("run", str(app), "here", "--run-config", config, "--format", "json")
        return str(done["run-id"])

    def status(self, run):
        """Of a run: "running", "finished:completed", ..."""
        (found,) = (each for each in self._flwr("ls", "here", "--format", "json")["runs"] if str(each["run-id"]) == run)
        return found["status"]

    def _flwr(self, *arguments):
        done = subprocess.run(
            [BIN / "flwr", *arguments], env=self.env, capture_output=True, text=True, timeout=1800, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return json.loads(done.stdout)

    def server_app(self):
        """The process of the ServerApp that runs now, or None."""
        for each in psutil.Process(self.link.pid).children(recursive=True):
            with contextlib.suppress(psutil.NoSuchProcess):  # it ends now, or has ended and is still listed
                if any("flwr-serverapp" in part for part in each.cmdline()):
                    return each
        return None

    def logs(self):
        """The ends of all logs, for a test that fails."""
        return "\n".join(f"== {log.name}\n{log.read_text()[-3000:]}" for log in sorted(self.folder.glob("*.log")))

    def close(self):
        kill_all(self.processes)


@pytest.fixture
def superlink(tmp_path):
    made = SuperLink(tmp_path)
    try:
        yield made
    except BaseException:
        print(made.logs())
        raise
    finally:
        made.close()
