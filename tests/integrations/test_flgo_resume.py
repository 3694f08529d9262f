"""A run of FLGo is killed, and goes on from a store."""

import hashlib
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import flgo_points as points
from afflux import Server
from afflux.integrations import flgo as adapter
from afflux.integrations.flgo import algorithm
from afflux.rules import ca2fl, fedbuff
from conftest import check_error, check_raises
from flgo_points import OPTIONS, Latencies, flgo
from flgo_runs import flat, in_a_folder, started  # noqa: F401

pytestmark = pytest.mark.filterwarnings("default")  # FLGo's and torch's own

ROOT = Path(__file__).parents[2]
KILLED = """
import hashlib, os, signal, sys
sys.path[:0] = {paths!r}
import flgo_points as points
from pathlib import Path
from afflux.integrations.flgo import BasicClient, algorithm
from afflux.rules import ca2fl

class Client(BasicClient):
    trained = 0
    def train(self, model):
        super().train(model)
        Client.trained += 1
        if Client.trained == {trained}:
            os.kill(os.getpid(), signal.SIGKILL)

folder = Path({folder!r})
chosen = algorithm(ca2fl(buffer_size=3), client=Client, store=folder / "store")
runner = points.flgo.init(points.make_task(folder, 6), chosen, points.OPTIONS, Simulator=points.Latencies)
take = chosen.Server._take
def noted(self, package):
    stepped = take(self, package)
    if stepped:
        print(self.server.version, hashlib.sha256(self.server.params).hexdigest(), flush=True)
    return stepped
chosen.Server._take = noted
runner.run()
"""


def test_a_run_is_killed_and_goes_on(tmp_path, monkeypatch):
    paths = [str(ROOT / "python"), str(Path(__file__).parent)]
    script = KILLED.format(paths=paths, folder=str(tmp_path), trained=16)
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=1800, check=False)
    assert done.returncode == -signal.SIGKILL, done.stderr[-3000:]
    version, digest = done.stdout.split()[-2:]
    with Server.open(tmp_path / "store") as server:
        assert server.version == int(version) >= 2
        assert hashlib.sha256(server.params).hexdigest() == digest
        assert server.tasks
        noted = server.notes["own"]
        assert noted["round"] == server.version
        joined = server.counts["joined"]
        rows = {client: np.array(server.rows.row(client)) for client in server.rows.client_ids}
        assert len(rows) > 1
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])

    def go_on(rounds, rule=None):
        chosen = algorithm(rule or ca2fl(buffer_size=3), store=tmp_path / "store")
        options = {**OPTIONS, "num_rounds": rounds}
        return flgo.init(points.make_task(tmp_path, 6), chosen, options, Simulator=Latencies)

    runner = go_on(8)
    assert runner.server.version == int(version)
    assert np.array_equal(flat(runner.model), runner.server.params)
    assert not runner.server.tasks
    assert all(np.array_equal(runner.server.rows.row(client), row) for client, row in rows.items())
    runner.run()
    output = runner.gv.logger.output
    assert output["step_version"] == [*range(1, 9)]
    assert len(output["test_distance"]) == len(output["time"]) == 9
    assert output["time"] == sorted(output["time"])
    assert output["time"][int(version)] == noted["output"]["time"][-1]
    assert runner.server.counts["joined"] == 24 > joined
    check_error("ca2fl", go_on, 9, fedbuff(buffer_size=3))

    again = go_on(8)  # nothing is left to do
    before = again.server.params.tobytes()
    again.run()
    assert again.server.params.tobytes() == before
    assert again.gv.logger.output["step_version"] == [*range(1, 9)]


@pytest.mark.parametrize("interval", [1, 2])
def test_a_step_that_was_stored_but_not_logged_is_evaluated(interval, tmp_path):
    """The learning rate, too, is that of a run without an interruption."""

    class Killed(Exception):
        pass

    decay = {"lr_scheduler": "0", "learning_rate_decay": 0.5, "check_interval": interval}
    whole = started(algorithm(fedbuff(buffer_size=2)), num_rounds=5, **decay)
    whole.run()
    runner = started(algorithm(fedbuff(buffer_size=2), store=tmp_path / "store"), num_rounds=9, **decay)
    log_once, runs = runner.gv.logger.log_once, []

    def stopping():
        runs.append(1)
        if len(runs) == 5:
            raise Killed
        log_once()

    runner.gv.logger.log_once = stopping
    runner.training.close = lambda notes: runner.server.close(checkpoint=False)  # as if the process had ended
    check_raises(Killed, runner.run)
    runner = started(algorithm(fedbuff(buffer_size=2), store=tmp_path / "store"), num_rounds=5, **decay)
    assert runner.server.version == 4
    runner.run()
    assert runner.server.version == 5
    output = runner.gv.logger.output
    assert len(output["test_distance"]) == 7 - interval  # with two rounds a checkpoint, that of round 3 is missing
    assert runner.learning_rate == whole.learning_rate < 0.01
    assert {client.learning_rate for client in runner.clients} == {whole.learning_rate}


def test_clients_that_wait_in_the_buffer_are_not_drawn_after_a_resume(tmp_path):
    def make():
        return started(algorithm(fedbuff(buffer_size=4), store=tmp_path / "store"))

    runner = make()
    for client in (1, 4, 5):
        key = runner.open_task(client)
        runner.package_handler({"model": [runner.model], "__cid": [client], adapter.TASK: [key]})
    assert runner.server.arrivals_waiting == 3
    runner.training.close(runner._notes(0))
    runner = make()
    assert runner.server.arrivals_waiting == 3
    drawn, pack = [], runner.pack

    def noted(client, *args, **kwargs):
        if runner.server.version == 0:
            drawn.append(client)
        return pack(client, *args, **kwargs)

    runner.pack = noted
    runner.run()
    assert sorted(set(drawn)) == [0, 2, 3]
    assert runner.server.version == 6
