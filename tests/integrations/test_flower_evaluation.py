"""Evaluation beside training: here, and by nodes that are slow, silent or gone."""

from functools import partial
from itertools import count

import numpy as np
import pytest
from flwr.app import Error, MetricRecord

from afflux import AffluxError, Server
from afflux.integrations import _flower_run, _loop
from afflux.integrations._core import TrainingRun
from afflux.rules import fedbuff
from flower_grid import FakeGrid, adds, all_of, flat, grid_of, initial, strategy


def test_evaluation_goes_on_beside_training():
    own = strategy(fedbuff(buffer_size=2), fraction_evaluate=1.0, min_evaluate_nodes=2, evaluate_every=2)
    evaluated = []

    def central(step, arrays):
        evaluated.append(step)
        return MetricRecord({"mean": float(flat(arrays).mean())})

    result = own.start(grid_of(1.0, 1.0, 1.0), initial(), num_rounds=5, evaluate_fn=central)
    assert evaluated == [0, 2, 4, 5] == sorted(result.evaluate_metrics_serverapp)
    assert sorted(result.evaluate_metrics_clientapp) == [2, 4, 5]
    for step in (2, 4, 5):  # the mean over the two arrays' means, of the same version
        assert result.evaluate_metrics_clientapp[step]["mean"] == pytest.approx(step, abs=2.0)


@pytest.mark.parametrize("wrong", [0.5, [1], {"acc": np.float32(0.5)}, "good"])
def test_the_result_of_evaluate_fn_is_checked(wrong, tmp_path):
    own = strategy(fedbuff(buffer_size=2), store=tmp_path / "store")
    message = r"the result of evaluate_fn for step 2 is .*, must be a MetricRecord or None"
    with pytest.raises(AffluxError, match=message):
        own.start(grid_of(1.0, 2.0), initial(), 5, evaluate_fn=lambda step, arrays: wrong if step == 2 else None)
    with Server.open(tmp_path / "store") as server:
        assert server.version == 2
    assert strategy(fedbuff(buffer_size=2), store=tmp_path / "store").start(grid_of(1.0, 2.0), initial(), 5).arrays


@pytest.mark.parametrize("gone", ["error", "unreadable", "silent"])
def test_an_evaluation_ends_when_its_replies_have_come_or_never_will(gone, monkeypatch):
    """Errors of Flower's own are of the type "system"; of one that cannot be read nothing else is lost."""
    node = adds(1.0, 10)

    def replies(message):
        if message.metadata.message_type == "train":
            return node(message)
        return None if gone == "silent" else Error(3, "unavailable")

    class Grid(FakeGrid):
        def pull_messages(self, message_ids):
            if gone == "unreadable":
                for key in message_ids:
                    if key in self.under_way and self.under_way[key].has_error():
                        if len(list(message_ids)) == 1:
                            self.under_way.pop(key)
                        raise ValueError("not the bytes of a message")
            found = super().pull_messages(message_ids)
            for message in found:
                if message.has_error():
                    message.metadata.__dict__["_message_type"] = "system"
            return found

    clock = partial(next, count(0.0, 0.01))  # of the run: 10 ms each time that it is read
    monkeypatch.setattr(TrainingRun, "clock", staticmethod(clock))
    options = {"timeout": 3.0, "poll_interval": 0.001}
    own = strategy(fedbuff(buffer_size=2), fraction_evaluate=1.0, min_evaluate_nodes=1, **options)
    result = own.start(Grid({1: replies, 2: adds(1.0, 10)}), initial(), num_rounds=2)
    assert (clock() < 2.5) is (gone != "silent")
    assert own.lost["failed"] == own.lost["unknown"] == 0
    assert sorted(result.evaluate_metrics_clientapp) == [1, 2]
    assert own.server.counts["joined"] >= 4


def test_training_goes_on_when_nodes_for_the_evaluation_have_left():
    """FedAvg would wait until as many nodes are there again."""
    grid = FakeGrid({1: adds(1.0), 2: adds(1.0)})
    grid.pull_messages = partial(all_of, grid)
    own = strategy(fedbuff(buffer_size=2), fraction_evaluate=1.0, min_evaluate_nodes=2, min_available_nodes=2)

    def central(step, arrays):
        if step == 3:
            del grid.nodes[2]

    result = own.start(grid, initial(), num_rounds=8, evaluate_fn=central)
    assert sorted(result.evaluate_metrics_clientapp) == [1, 2]


def trains_only(message):
    return None if message.metadata.message_type == "evaluate" else adds(1.0)(message)


@pytest.fixture
def slept(monkeypatch):
    """A clock that only sleeping moves: the seconds that have passed."""
    passed = [0.0]
    monkeypatch.setattr(TrainingRun, "clock", lambda run: passed[0])
    monkeypatch.setattr(_loop, "sleep", lambda seconds: passed.__setitem__(0, passed[0] + max(seconds, 0.5)))
    return passed


def test_nodes_that_do_not_evaluate_are_asked_twice_at_most(slept):
    """Once, and once more for the last step; and the end does not wait for them as long as a reply may take."""
    grid = FakeGrid(dict.fromkeys(range(1, 11), trains_only))
    own = strategy(fedbuff(buffer_size=1), fraction_evaluate=1.0)
    result = own.start(grid, initial(), num_rounds=100)
    asked = [message.metadata.dst_node_id for message in grid.sent if message.metadata.message_type == "evaluate"]
    assert sorted(asked) == sorted([*range(1, 11)] * 2)
    assert result.evaluate_metrics_clientapp == {}
    assert 10.0 <= slept[0] <= 11.0


def test_one_node_that_does_not_evaluate_holds_up_nothing(slept):
    grid = FakeGrid({1: trains_only, 2: adds(1.0), 3: adds(1.0)})
    grid.pull_messages = partial(all_of, grid)
    own = strategy(fedbuff(buffer_size=3), fraction_evaluate=1.0)
    result = own.start(grid, initial(), num_rounds=20)
    assert sorted(result.evaluate_metrics_clientapp) == [*range(1, 21)]
    assert sum(message.metadata.message_type == "evaluate" for message in grid.sent) == 2 + 2 * 20
    assert slept[0] <= 11.0


def test_the_end_waits_for_evaluations_in_proportion_to_the_slowest_reply(slept):
    class Grid(FakeGrid):
        def pull_messages(self, keys):
            slept[0] += 20.0
            return super().pull_messages(keys)

    grid = Grid({1: trains_only, 2: trains_only})
    strategy(fedbuff(buffer_size=1), fraction_evaluate=1.0, concurrency=1).start(grid, initial(), num_rounds=1)
    assert 20.0 + 60.0 <= slept[0] <= 20.0 + 60.0 + 20.0 + 1.0


def test_the_time_of_evaluations_is_no_nodes(slept):
    """evaluate_fn and the aggregation of evaluations take longer than the timeout, and no node is late."""

    def slow(value):
        slept[0] += 100.0
        return MetricRecord({"mean": value})

    grid = FakeGrid({1: adds(1.0), 2: adds(1.0)})
    grid.pull_messages = partial(all_of, grid)
    options = {"fraction_evaluate": 1.0, "evaluate_metrics_aggr_fn": lambda contents, key: slow(2.0)}
    own = strategy(fedbuff(buffer_size=2), timeout=5.0, max_failures=2, **options)
    result = own.start(grid, initial(), num_rounds=8, evaluate_fn=lambda step, arrays: slow(1.0))
    assert set(own.lost.values()) == {0}
    assert len([sent for sent in grid.sent if sent.metadata.message_type == "train"]) <= 8 * 2 + 1
    assert [*result.evaluate_metrics_serverapp] == [*range(9)]
    assert [*result.evaluate_metrics_clientapp] == [*range(1, 9)]
    assert min(sent.metadata.ttl for sent in grid.sent) > 100.0  # else the SuperLink would have deleted replies


def test_evaluations_of_many_steps_are_bounded(monkeypatch, slept):
    """Nodes that come, withhold an evaluation and go: the oldest evaluation ends with the replies that it has."""
    most, evaluate = [], _flower_run.FlowerTransport.evaluate

    def noted(self, step):
        evaluate(self, step)
        most.append(len(self.evaluated))

    monkeypatch.setattr(_flower_run.FlowerTransport, "evaluate", noted)
    monkeypatch.setattr(_flower_run, "_MOST_STEPS", 5)
    grid = FakeGrid({1: adds(1.0), 2: trains_only})
    grid.pull_messages = partial(all_of, grid)

    def central(step, arrays):
        del grid.nodes[max(grid.nodes)]
        grid.nodes[step + 100] = trains_only
        before_the_end.append(sorted(own.result.evaluate_metrics_clientapp))

    before_the_end = []
    own = strategy(fedbuff(buffer_size=1), fraction_evaluate=1.0, min_evaluate_nodes=1)
    result = own.start(grid, initial(), num_rounds=30, evaluate_fn=central)
    assert max(most[:-1]) == 5
    assert most[-1] == 6  # the last step is evaluated in any case
    assert len(before_the_end[-1]) > 10
    assert before_the_end[-1] == sorted(result.evaluate_metrics_clientapp)[: len(before_the_end[-1])]
    assert sorted(result.evaluate_metrics_clientapp)[-1] == 30
