"""Hooks of a strategy that users override, functions that they pass, and arguments in other forms: each works, or is
refused.
"""

import numpy as np
import pytest
from flwr.app import ConfigRecord, MetricRecord, RecordDict
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping

from afflux import AffluxError, rules
from afflux.integrations import _flower_run
from afflux.integrations.flower import AsyncStrategy, model_of
from afflux.rules import ca2fl, fedbuff
from conftest import check_error, check_raises
from flower_grid import FakeGrid, adds, all_of, flat, grid_of, initial, logged, strategy

__all__ = ["logged"]


def train_configs(grid):
    """The configurations of the messages that let nodes train, with the node of each."""
    messages = [message for message in grid.sent if message.metadata.message_type == "train"]
    return [(message.metadata.dst_node_id, dict(message.content["config"])) for message in messages]


@pytest.mark.parametrize(
    ("name", "instead"), [("configure_train", "train_config=, or the constructor"), ("aggregate_train", "evaluate_fn=")]
)
def test_hooks_of_rounds_are_refused(name, instead):
    own = type("Own", (AsyncStrategy,), {name: lambda self, *arguments: None})
    check_error(rf"Own\.{name} would never be called: .*{instead}", own, fedbuff(buffer_size=2))
    check_error(rf"\[{name}\] .* has no rounds: .*{instead}", getattr(strategy(fedbuff(buffer_size=2)), name), 1, [])
    assert type("Own", (AsyncStrategy,), {"summary": lambda self: None})(fedbuff(buffer_size=2)).rule.buffer_size == 2


def test_a_hook_of_rounds_on_the_object_is_refused():
    own = strategy(fedbuff())
    own.aggregate_train = lambda *arguments: (None, None)
    check_error(r"AsyncStrategy\.aggregate_train would never be called", own.start, grid_of(1.0), initial())


def test_a_wrapper_of_rounds_is_refused():
    wrapper = DifferentialPrivacyServerSideFixedClipping(strategy(fedbuff(buffer_size=2)), 1.0, 1.0, 2)
    grid = grid_of(1.0, 2.0)
    check_error(r"\[configure_train\] AsyncStrategy has no rounds", wrapper.start, grid, initial(), num_rounds=2)
    assert not grid.sent


@pytest.mark.parametrize(
    ("rule", "expected"),
    [
        ("fedbuff", fedbuff()),
        ("ca2fl:buffer_size=3:server_lr=0.5:codec=affine-4", ca2fl(buffer_size=3, server_lr=0.5, codec="affine-4")),
        (ca2fl(buffer_size=3).to_config(), ca2fl(buffer_size=3)),
    ],
)
def test_a_rule_may_be_its_name_or_its_text(rule, expected):
    assert AsyncStrategy(rule).rule == expected


@pytest.mark.parametrize("wrong", [None, fedbuff, rules, "fedbufff", "fedbuff:size=3", "fedbuff:buffer_size", 3])
def test_a_first_argument_that_is_no_rule_is_refused(wrong):
    check_error(r"must be a [Rr]ule|no option 'size'|buffer_size is ''", AsyncStrategy, wrong)


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_the_initial_arrays_may_be_a_state_dict(library):
    arrays = model_of(initial())
    if library == "torch":
        import torch

        arrays = {name: torch.nn.Parameter(torch.from_numpy(array.copy())) for name, array in arrays.items()}
        arrays["half"] = torch.ones(3, dtype=torch.bfloat16)
        expected = {**model_of(initial()), "half": np.ones(3)}
    else:
        expected = arrays
    result = strategy(fedbuff(buffer_size=2)).start(grid_of(1.0, 2.0), arrays, num_rounds=0)
    for name, array in model_of(result.arrays).items():
        assert np.array_equal(np.asarray(array, np.float64), np.asarray(expected[name], np.float64))
    assert list(result.arrays) == list(expected)
    check_error("initial_arrays is .* an ArrayRecord", strategy(fedbuff(buffer_size=2)).start, grid_of(1.0), [1.0])


def test_the_configuration_may_depend_on_the_step_and_the_node():
    grid = grid_of(1.0, 2.0, 3.0)
    own = strategy(
        fedbuff(buffer_size=2), concurrency=2, node_config=lambda node, step: {"epochs": node % 7, "late": step > 2}
    )
    own.start(grid, initial(), num_rounds=4, train_config=lambda step: ConfigRecord({"lr": 0.1 / step, "epochs": 0}))
    for node, config in train_configs(grid):
        step = config["server-round"]
        assert config == {"lr": 0.1 / step, "epochs": node % 7, "late": step > 2, "server-round": step}
    assert {config["server-round"] for _, config in train_configs(grid)} == {1, 2, 3, 4}


@pytest.mark.parametrize("wrong", ["train_config", "node_config"])
def test_a_function_that_makes_no_configuration_is_refused(wrong):
    functions = {"train_config": None, "node_config": None, wrong: lambda *arguments: None}
    own = strategy(fedbuff(buffer_size=1), node_config=functions["node_config"])
    with pytest.raises(AffluxError, match=rf"the result of {wrong} for .*step 1 is None, must be a ConfigRecord"):
        own.start(grid_of(1.0), initial(), train_config=functions["train_config"])
    assert own.server.tasks == ()
    check_error(r"\[AsyncStrategy\] choose is 3, must be a function", strategy, fedbuff(), choose=3)


@pytest.mark.parametrize("rule", [fedbuff(buffer_size=2), ca2fl(buffer_size=2)], ids=lambda rule: rule.name)
def test_the_user_chooses_the_nodes(rule):
    asked = []

    def choose(nodes, count, step):
        asked.append((count, step))
        return sorted(nodes)[:count]

    grid = FakeGrid({node: adds(1.0) for node in range(1, 6)})
    grid.pull_messages = lambda keys: all_of(grid, keys)
    own = strategy(rule, concurrency=2, choose=choose)
    own.start(grid, initial(), num_rounds=3)
    assert [node for node, _ in train_configs(grid)] == [1, 2] * 3
    assert asked == [(2, 1), (2, 2), (2, 3)]


def test_a_choice_of_other_nodes_is_refused_and_an_empty_one_is_said(logged):
    for choice in ([99], [5, 5], [5, 11, 5], None):
        own = strategy(fedbuff(buffer_size=1), concurrency=2, choose=lambda nodes, count, step, c=choice: c)
        check_error("the choice is .*, must be at most 2 of", own.start, grid_of(1.0, 2.0, 3.0, 4.0), initial())
    calls = []

    def choose(nodes, count, step):
        calls.append(step)
        return nodes[:1] if len(calls) > 3 else []

    strategy(fedbuff(buffer_size=1), choose=choose).start(grid_of(1.0, 2.0), initial(), num_rounds=1)
    assert logged.count("None of 2 idle clients is chosen, and none trains: the run waits") == 1


def reports(records):
    """A node with further records beside the arrays."""
    node = adds(1.0)

    def replies(message):
        reply = node(message)
        if message.metadata.message_type == "evaluate":
            return reply
        return RecordDict({"arrays": reply["arrays"], **records(message.metadata.dst_node_id)})

    return replies


def test_the_aggregation_of_metrics_gets_the_records_of_the_reply(tmp_path):
    """FedAvg passes them under their names; those of replies that wait for a step are stored."""

    def records(node):
        metrics = MetricRecord({"num-examples": node, "train_loss": 0.5, "lists": [1.0, 2.0]})
        config = ConfigRecord({"site": f"site {node}", "raw": b"\xff\0", "many": [b"a", b"b"], "yes": True})
        return {"train_metrics": metrics, "who": config, "large": ConfigRecord({"x": b"1" * 20_000})}

    seen = []

    def aggregate(contents, key):
        seen.extend(contents)
        return MetricRecord({"nodes": sum(content["train_metrics"][key] for content in contents)})

    def run(steps, grid, **options):
        own = strategy(fedbuff(buffer_size=2), train_metrics_aggr_fn=aggregate, store=tmp_path / "store", **options)
        return own.start(grid, initial(), num_rounds=steps)

    class Interrupted(FakeGrid):
        def pull_messages(self, keys):
            if len(self.sent) == 2:
                raise KeyboardInterrupt
            return super().pull_messages(keys)

    nodes = {1: reports(records), 2: reports(records)}
    check_raises(KeyboardInterrupt, run, 1, Interrupted(nodes), concurrency=1)
    result = run(1, FakeGrid({2: nodes[2]}))
    assert result.train_metrics_clientapp[1] == {"nodes": sum(c["train_metrics"]["num-examples"] for c in seen)}
    assert len(seen) == 2
    for content in seen:
        node = content["train_metrics"]["num-examples"]
        expected = {name: record for name, record in records(node).items() if name != "large"}
        assert dict(content.items()) == expected
        assert isinstance(content["train_metrics"], MetricRecord)
        assert isinstance(content["who"], ConfigRecord)


@pytest.mark.parametrize("hook", ["train", "evaluate", "overridden"])
def test_an_error_of_the_users_aggregation_is_raised(hook):
    calls = []

    def stop(contents, key):
        calls.append(len(contents))
        raise StopIteration("accurate enough")

    class Own(AsyncStrategy):
        def aggregate_evaluate(self, server_round, replies):
            return stop(replies, "")

    kind = Own if hook == "overridden" else AsyncStrategy
    functions = {} if hook == "overridden" else {f"{hook}_metrics_aggr_fn": stop}
    options = {"min_available_nodes": 1, "poll_interval": 0.0, "fraction_evaluate": 1.0, **functions}
    own = kind(fedbuff(buffer_size=3), **options)
    grid = FakeGrid({1: adds(1.0), 2: adds(1.0), 3: adds(1.0, other=2.0)})
    grid.pull_messages = lambda keys: all_of(grid, keys)
    check_error("accurate enough", own.start, grid, initial(), num_rounds=9, error=StopIteration)
    assert calls == [2 if hook == "train" else 3]
    assert own.server.version >= 1
    assert flat(own.result.arrays).tobytes() == own.server.params.tobytes()


@pytest.mark.parametrize("hook", ["train", "evaluate"])
def test_an_aggregation_that_is_no_record_is_refused(hook):
    own = strategy(fedbuff(buffer_size=2), fraction_evaluate=1.0, **{f"{hook}_metrics_aggr_fn": lambda *some: 0.5})
    check_error(r"step \d is aggregated to 0\.5, .*MetricRecord", own.start, grid_of(1.0, 2.0), initial(), num_rounds=2)


def test_an_aggregation_without_weights_is_the_users():
    """Flower's own needs the weight, and no node has a positive one here."""
    count = lambda contents, key: MetricRecord({"nodes": len(contents)})  # noqa: E731
    nodes = {i: reports(lambda node: {"m": MetricRecord({"train_loss": 1.0})}) for i in (1, 2)}
    own = strategy(fedbuff(buffer_size=2), train_metrics_aggr_fn=count)
    assert own.start(FakeGrid(nodes), initial(), num_rounds=1).train_metrics_clientapp == {1: {"nodes": 2}}

    def empty(message):
        reply = adds(1.0)(message)
        if message.metadata.message_type == "evaluate":
            reply["metrics"]["num-examples"] = 0
        return reply

    own = strategy(fedbuff(buffer_size=1), fraction_evaluate=1.0)
    assert not own.start(FakeGrid({1: empty, 2: empty}), initial(), num_rounds=2).evaluate_metrics_clientapp
    assert own.server.version == 2


def test_the_best_model_is_that_of_its_evaluation(monkeypatch):
    """Evaluations of several steps are open at the same time, and end in another order."""
    saved, sent = {}, {}

    class Best(AsyncStrategy):
        def configure_evaluate(self, server_round, arrays, config, grid):
            sent[server_round] = arrays
            messages = super().configure_evaluate(server_round, arrays, config, grid)
            return [message for message in messages if message.metadata.dst_node_id == server_round]

        def aggregate_evaluate(self, server_round, replies):
            saved[server_round] = self.evaluated_arrays
            return super().aggregate_evaluate(server_round, replies)

    class Slow(FakeGrid):
        """The first evaluation comes last."""

        def pull_messages(self, keys):
            held = {key for key in keys if self.sent[self.place[key]].metadata.message_type == "evaluate"}
            first = min(held, key=self.place.__getitem__, default=None)
            if self.training:
                keys = [key for key in keys if key != first]
            return super().pull_messages(keys)

        training = True

    options = {"min_available_nodes": 1, "poll_interval": 0.0, "min_evaluate_nodes": 1}
    own = Best(fedbuff(buffer_size=2), **options)
    grid = Slow({node: adds(1.0) for node in range(1, 7)})
    finish = _flower_run.FlowerTransport.finish

    def finished(transport):
        grid.training = False
        finish(transport)

    monkeypatch.setattr(_flower_run.FlowerTransport, "finish", finished)
    result = own.start(grid, initial(), num_rounds=5)
    assert sorted(saved) == [1, 2, 3, 4, 5]
    assert list(saved) != sorted(saved)
    assert saved == sent
    assert list(result.evaluate_metrics_clientapp) == sorted(saved)
    assert own.evaluated_arrays is None


def test_arrays_of_evaluations_are_held_only_for_functions_of_the_user(monkeypatch):
    held, end = [], _flower_run.FlowerTransport._end_evaluation

    def noted(self, step):
        held.append(step in self.evaluated_arrays)
        end(self, step)

    monkeypatch.setattr(_flower_run.FlowerTransport, "_end_evaluation", noted)
    for functions in ({}, {"evaluate_metrics_aggr_fn": lambda contents, key: MetricRecord({"n": 1})}):
        own = strategy(fedbuff(buffer_size=2), fraction_evaluate=1.0, **functions)
        own.start(grid_of(1.0, 2.0), initial(), num_rounds=1)
    assert held == [False, True]
