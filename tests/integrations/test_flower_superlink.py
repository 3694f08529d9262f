"""The example on a SuperLink with SuperNodes; its ServerApp is killed while nodes train, and a second run goes on."""

import re
import shlex
import subprocess

import pytest

pytest.importorskip("flwr", reason="needs flwr: make soak-integrations")
pytest.importorskip("torch", reason="needs torch: make soak-integrations")

from afflux import Server
from flower_processes import ROOT, SuperLink, kill_all, superlink, version_of, wait_for

__all__ = ["superlink"]


@pytest.mark.soak
def test_a_server_app_is_killed_and_a_second_run_goes_on(superlink, tmp_path):
    """A node makes a process for each message, which takes seconds: some steps are enough."""
    app, folder = ROOT / "examples" / "flower", tmp_path / "store"
    config = f"rule='ca2fl' steps={{}} store='{folder}'"
    first = superlink.run(app, config.format(10_000))
    wait_for(lambda: version_of(folder) >= 3 or superlink.status(first).startswith("finished"), 400, every=3)
    assert version_of(folder) >= 3, superlink.logs()
    superlink.server_app().kill()
    wait_for(lambda: superlink.server_app() is None)
    wait_for(lambda: superlink.status(first).startswith("finished"), 180)
    killed = version_of(folder)
    second = superlink.run(app, config.format(killed + 2))
    wait_for(lambda: superlink.status(second).startswith("finished"), 400)
    assert superlink.status(second) == "finished:completed", superlink.logs()
    with Server.open(folder) as server:
        assert server.version == killed + 2
        assert server.tasks == ()
        assert server.counts["faulty"] == server.counts["expired"] == 0
        assert sorted(server.rows.client_ids) == [0, 1, 2]
        history = server.notes["own"]["train_metrics_clientapp"]
        assert sorted(map(int, history)) == [*range(1, killed + 3)]


APP = """
import numpy as np
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp

from afflux.integrations.flower import AsyncStrategy

client = ClientApp()
server = ServerApp()


@client.train()
def train(message, context):
    content = {"arrays": message.content["arrays"]}
    content["metrics"] = MetricRecord({"num-examples": 1})
    content["who"] = ConfigRecord({"partition-id": context.node_config["partition-id"]})
    return Message(RecordDict(content), reply_to=message)


@server.main()
def main(grid, context):
    options = {"concurrency": 2, "min_available_nodes": 3, "checkpoint_every": 1, "fraction_evaluate": 0.0}
    store = context.run_config["store"]
    strategy = AsyncStrategy("ca2fl:buffer_size=1", client_key="partition-id", store=store, **options)
    strategy.start(grid, {"w": np.zeros(4, np.float32)}, num_rounds=10_000)
"""
PROJECT = """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "small"
version = "1.0.0"
description = "Replies with the model that it gets"
license = "Apache-2.0"
dependencies = ["flwr"]

[tool.hatch.build.targets.wheel]
packages = ["."]

[tool.flwr.app]
publisher = "afflux"

[tool.flwr.app.components]
serverapp = "small:server"
clientapp = "small:client"

[tool.flwr.app.config]
store = ""
"""


@pytest.mark.soak
def test_a_node_that_is_killed_and_restarted_goes_on(superlink, tmp_path):
    """Its replies under its new id join while Flower lists the old one for a minute; they were refused."""
    app, folder = tmp_path / "app", tmp_path / "store"
    app.mkdir()
    (app / "small.py").write_text(APP)
    (app / "pyproject.toml").write_text(PROJECT)
    superlink.run(app, f"store='{folder}'")
    wait_for(lambda: version_of(folder) >= 6, 400)
    kill_all([superlink.nodes[0]])
    superlink.start_node(0, 3)
    restart = version_of(folder)
    wait_for(lambda: version_of(folder) >= restart + 12, 400)
    superlink.server_app().kill()
    wait_for(lambda: superlink.server_app() is None)
    with Server.open(folder) as server:
        assert sorted(server.rows.client_ids) == [0, 1, 2]
        assert server.counts["faulty"] == server.counts["expired"] == 0


@pytest.mark.soak
def test_the_command_of_the_page_runs(tmp_path):
    """In the simulation engine of a SuperLink."""
    (command,) = re.findall(r"^flwr run .*$", (ROOT / "docs" / "guides" / "flower.md").read_text(), re.MULTILINE)
    made = SuperLink(tmp_path, nodes=0)
    try:
        done = subprocess.run(
            shlex.split(command), cwd=ROOT, env=made.env, capture_output=True, text=True, timeout=1800, check=False
        )
    finally:
        made.close()
    # A node may reply twice within a buffer: its second reply replaces the first.
    made_steps = r"Made 20 steps: \{'joined': 60(, 'replaced': \d+)?\}"
    assert re.search(made_steps, done.stdout), done.stdout[-3000:] + done.stderr
