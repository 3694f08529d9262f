"""Metrics of nodes: bounded, averaged without those that differ, and logged."""

from functools import partial

import numpy as np
import pytest
from flwr.app import MetricRecord, RecordDict
from flwr.serverapp.strategy.strategy_utils import aggregate_metricrecords

from afflux.integrations._flower_metrics import mean_of
from afflux.rules import fedbuff
from flower_grid import FakeGrid, adds, all_of, grid_of, initial, logged, strategy

__all__ = ["logged"]


def test_metrics_without_the_weight_are_not_aggregated():
    def node(message):
        reply = adds(1.0)(message)
        return RecordDict({"arrays": reply["arrays"]})

    own = strategy(fedbuff(buffer_size=2))
    assert not own.start(FakeGrid({1: node, 2: node}), initial(), num_rounds=2).train_metrics_clientapp
    assert own.server.counts["joined"] == 4


def test_metrics_of_a_node_are_bounded(tmp_path):
    def chatty(message):
        reply = adds(1.0)(message)
        reply["metrics"]["num-examples"] = reply["metrics"].pop("num-examples")
        more = {"x" * 101: 1.0, "list": [1.0] * 1001, "huge": 10**400, **{f"k{i}": 1.0 for i in range(2000)}}
        named = {"num-examples": 10, **more, **reply["metrics"]}
        return RecordDict({**reply, "metrics": MetricRecord(named)})

    own = strategy(fedbuff(buffer_size=2), fraction_evaluate=1.0, store=tmp_path / "store", checkpoint_every=1)
    result = own.start(FakeGrid({1: chatty, 2: chatty}), initial(), num_rounds=3)
    assert sorted(result.evaluate_metrics_clientapp)[-1] == 3
    assert sorted(result.train_metrics_clientapp) == [1, 2, 3]
    for means in (result.train_metrics_clientapp, result.evaluate_metrics_clientapp):
        for mean in means.values():
            assert dict(mean) == pytest.approx({f"k{i}": 1.0 for i in range(100)})
    again = strategy(fedbuff(buffer_size=2), store=tmp_path / "store")
    assert again.start(FakeGrid({1: chatty}), initial(), 3).train_metrics_clientapp == result.train_metrics_clientapp


@pytest.mark.parametrize("odd", [{"train_loss": [1.0, 2.0], "mean": [1.0]}, {"num-examples": None}, {"other": 3.0}])
def test_a_record_that_differs_is_left_out_instead_of_the_step(odd, logged):
    def node(message):
        reply = adds(1.0)(message)
        named = {**reply["metrics"], **odd}
        reply["metrics"] = MetricRecord({name: value for name, value in named.items() if value is not None})
        return reply

    grid = FakeGrid({1: adds(1.0), 2: node, 3: adds(1.0)})
    grid.pull_messages = partial(all_of, grid)
    own = strategy(fedbuff(buffer_size=3), fraction_evaluate=1.0)
    result = own.start(grid, initial(), num_rounds=3)
    assert [mean["train_loss"] for mean in result.train_metrics_clientapp.values()] == pytest.approx([1.0] * 3)
    assert sorted(result.train_metrics_clientapp) == sorted(result.evaluate_metrics_clientapp) == [1, 2, 3]
    assert all(isinstance(mean["mean"], float) for mean in result.evaluate_metrics_clientapp.values())
    assert "Evaluation of step 3: 1 replies differ from the others and are left out" in logged
    if "other" not in odd:  # which train_metrics_aggr_fn takes
        assert "Metrics of step 3: 1 replies differ from the others and are left out" in logged


@pytest.mark.parametrize(
    ("records", "expected"),
    [
        ([{"n": 1, "loss": 2.0}, {"loss": 5.0}, {"loss": 5.0}], {"loss": 2.0}),  # most lack the weight
        ([{"n": 1, "loss": [1.0, 1.0]}, {"n": 1, "loss": 3.0}], {"loss": 3.0}),  # of as many, those of fewer numbers
        ([{"n": [1, 1], "loss": 2.0}, {"n": 3, "loss": 4.0}], {"loss": 4.0}),
        ([{"loss": 2.0}, {"loss": 4.0}], None),
        ([None, None], None),
        ([], None),
    ],
)
def test_the_mean_is_over_the_records_of_the_most_frequent_form(records, expected, logged):
    contents = [RecordDict({} if each is None else {"metrics": MetricRecord(each)}) for each in records]
    mean = mean_of("Metrics", contents, contents, "n", lambda some: aggregate_metricrecords(some, "n"))
    assert (None if mean is None else dict(mean)) == expected
    assert len(logged) == bool(records)
    reason = "cannot be aggregated" if expected is None else "differ from the others and are left out"
    assert all(reason in line for line in logged)


def test_steps_and_evaluations_are_logged(logged):
    own = strategy(fedbuff(buffer_size=2), fraction_evaluate=1.0, concurrency=3, server_options={"log": True})
    result = own.start(grid_of(1.0, 2.0, 3.0), initial(), num_rounds=4)
    staleness = {}
    for entry in own.server.log:
        if hasattr(entry, "staleness"):
            staleness.setdefault(len(staleness.get("all", [])) // 2 + 1, []).append(entry.staleness)
            staleness.setdefault("all", []).append(entry.staleness)
    for step in range(1, 5):
        (line,) = [line for line in logged if line.startswith(f"[STEP {step}]")]
        mean, largest = np.mean(staleness[step]), max(staleness[step])
        assert line.endswith(f"staleness: mean {mean:.1f}, largest {largest}")
        assert f"Evaluation of step {step} by nodes: {result.evaluate_metrics_clientapp[step]}" in logged
