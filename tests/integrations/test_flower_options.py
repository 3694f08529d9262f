"""Options of AsyncStrategy and arguments of `start`: which are refused, and what docs/guides/flower.md says of them."""

import os
import re
from dataclasses import fields
from importlib.metadata import version
from types import SimpleNamespace

import numpy as np
import pytest
from flwr.app import ConfigRecord

from afflux.integrations._settings import RunSettings
from afflux.integrations.flower import AsyncStrategy, model_of
from afflux.rules import ca2fl, fedbuff
from conftest import ROOT, check_error
from flower_grid import FakeGrid, adds, grid_of, initial, logged, strategy

__all__ = ["logged"]


def test_the_installed_version_is_one_that_the_page_names():
    """`make test-integrations` has the newest one, and `make soak-integrations` also the oldest one."""
    page = (ROOT / "docs" / "guides" / "flower.md").read_text()
    tested = re.findall(r"\d+\.\d+\.\d+", page.partition("Tested with flwr ")[2].partition(":")[0])
    assert version("flwr") in tested
    assert version("flwr").startswith(os.environ.get("AFFLUX_FLWR", tested[-1]))


def test_options_that_are_none():
    check_error("concurrent", strategy, fedbuff(), concurrent=3, error=TypeError)
    check_error(r"\[settings\] concurrency is 0", strategy, fedbuff(), concurrency=0)


def test_a_relative_store_is_refused():
    check_error("store is 'runs/one', must be an absolute path", strategy, fedbuff(), store="runs/one")


def test_options_of_the_sample_have_no_effect(logged):
    own = strategy(fedbuff(buffer_size=2), fraction_train=0.0, min_train_nodes=3)
    for name in ("fraction_train", "min_train_nodes"):
        assert f"{name} has no effect on AsyncStrategy: concurrency= says how many nodes train" in logged
    logged.clear()
    own.start(grid_of(1.0, 2.0), initial(), num_rounds=1)
    assert own.server.version == 1
    assert not any("train (" in line or "no effect" in line or "skipped" in line for line in logged)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"timeout": 0}, r"\[start\] timeout is 0, must be finite and positive"),
        ({"timeout": float("nan")}, r"\[start\] timeout is nan"),
        ({"timeout": "x"}, r"\[start\] timeout is 'x', must be a number"),
        ({"num_rounds": "3"}, r"\[start\] num_rounds is '3', must be an int"),
        ({"num_rounds": -1}, r"\[start\] num_rounds is -1, must be an int of at least 0"),
        ({"num_rounds": 2.5}, r"\[start\] num_rounds is 2\.5, must be an int"),
        ({"train_config": ConfigRecord({"roles": ["bn"]})}, r"roles is \['bn'\], must be a list such as"),
    ],
)
def test_arguments_of_start_are_checked_before_anything_else(given, message, tmp_path):
    grid = grid_of(1.0, 2.0)
    check_error(message, strategy(fedbuff(buffer_size=2), store=tmp_path / "store").start, grid, initial(), **given)
    assert not grid.sent
    assert not (tmp_path / "store").exists()


def test_the_settings_of_the_page_are_those_of_the_class():
    page = (ROOT / "docs" / "reference" / "adapters.md").read_text()
    table = page.split("## Settings")[1].split("\n## ")[0]
    named = {name for row in re.findall(r"^\| (`.*?) \|", table, re.MULTILINE) for name in re.findall(r"`(\w+)`", row)}
    assert named == {field.name for field in fields(RunSettings)}


def test_the_page_runs():
    """Its blocks define apps; here they get a strategy that notes how it is used, and the training of a client."""
    pytest.importorskip("torch")
    page = (ROOT / "docs" / "guides" / "flower.md").read_text()
    server, functions, best, client = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names = {}
    exec(compile(server, "flower.md", "exec"), names)
    assert names["AsyncStrategy"] is AsyncStrategy
    started = []

    class Noted(AsyncStrategy):
        def start(self, grid, initial_arrays, num_rounds):
            started.append((self.rule.name, self.settings.concurrency, num_rounds))

    names["AsyncStrategy"] = Noted
    names["main"](grid_of(1.0), None)
    assert started == [("fedbuff", 5, 100)]
    names = {}
    exec(compile(client, "flower.md", "exec"), names)
    names["trained"] = adds(1.0)

    def node(partition):
        context = SimpleNamespace(node_config={"partition-id": partition})
        return lambda message: names["train"](message, context).content

    own = strategy(ca2fl(buffer_size=2), client_key="partition-id")
    own.start(FakeGrid({11: node(0), 12: node(1)}), initial(), num_rounds=2)
    assert own.server.rows.client_ids == [0, 1]
    names = {}
    exec(compile(functions, "flower.md", "exec"), names)
    own, grid = names["strategy"], FakeGrid({node: adds(1.0) for node in (7, 123, 8, 456, 9, 10)})
    own.fraction_evaluate = 0.0
    own.start(grid, initial(), num_rounds=1, train_config=names["schedule"])
    configs = {message.metadata.dst_node_id: message.content["config"] for message in grid.sent[:5]}
    assert sorted([*configs][:2]) == [123, 456]
    assert all(config["local-epochs"] == (5 if node in (123, 456) else 1) for node, config in configs.items())
    assert all(config["lr"] == 0.1 * 0.99 for config in configs.values())
    names = {}
    exec(compile(best, "flower.md", "exec"), names)
    own = names["Best"](fedbuff(buffer_size=2), min_available_nodes=1)

    def node(message):
        reply = adds(1.0)(message)
        reply["metrics"]["accuracy"] = reply["metrics"].pop("mean", 0.5)
        return reply

    own.start(FakeGrid({1: node, 2: node}), initial(), num_rounds=3)
    assert np.mean([array.mean() for array in model_of(own.arrays).values()]) == pytest.approx(own.accuracy)
