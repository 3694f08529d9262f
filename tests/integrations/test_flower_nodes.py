"""Nodes that connect one after the other, are not known, or are restarted, for rules with a row for each client."""

from itertools import count

import pytest
from flwr.app import Error, Message

from afflux.integrations import flower
from afflux.integrations._core import TrainingRun
from afflux.rules import ca2fl, fedbuff
from conftest import check_error
from flower_grid import FakeGrid, adds, initial, logged, said, strategy

__all__ = ["logged"]


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    """Of a run: each look at the time is a second later, so that it often looks for nodes."""
    seconds = count()
    monkeypatch.setattr(TrainingRun, "clock", lambda run: float(next(seconds)))
    monkeypatch.setattr(flower, "sleep", lambda seconds: None)


class Growing(FakeGrid):
    """One more node at each look of the start; its last nodes later."""

    def __init__(self, nodes, late=0):
        super().__init__(nodes)
        self.looks, self.late = 0, late

    def get_node_ids(self):
        self.looks += 1
        there = min(self.looks, len(self.nodes) - self.late) if not self.sent else len(self.nodes)
        return sorted(self.nodes)[:there]


@pytest.mark.parametrize(
    ("rule", "options", "expected"),
    [
        (ca2fl(buffer_size=3), {}, 3),
        (ca2fl(buffer_size=2), {"concurrency": 4}, 4),
        (ca2fl(buffer_size=2), {"min_available_nodes": 5}, 5),
        (ca2fl(buffer_size=3), {"server_options": {"num_clients": 6}}, 1),
        (fedbuff(buffer_size=3), {"concurrency": 4}, 1),
    ],
)
def test_a_rule_with_rows_waits_for_its_nodes(rule, options, expected, logged):
    grid = Growing({node: adds(1.0) for node in range(1, 7)})
    own = strategy(rule, max_failures=100, **options)
    own.start(grid, initial(), num_rounds=2)
    waits = [line for line in logged if line.startswith("Waiting for nodes")]
    least = max(expected, options.get("min_available_nodes", 1))
    assert waits == [
        f"Waiting for nodes to connect: {there} connected (minimum required: {least})." for there in range(1, least)
    ]
    if rule.name == "ca2fl":
        assert own.server.options.num_clients == options.get("server_options", {"num_clients": expected})["num_clients"]


def test_nodes_that_come_too_late_for_a_row_are_named_once(logged):
    grid = Growing({node: adds(1.0) for node in range(1, 7)}, late=2)
    own = strategy(ca2fl(buffer_size=2), concurrency=4)
    own.start(grid, initial(), num_rounds=20)
    assert {message.metadata.dst_node_id for message in grid.sent} == {1, 2, 3, 4}
    (line,) = [line for line in logged if line.startswith("No task goes to")]
    assert all(text in line for text in ("client 5, 6", "num_clients=4", "client_key="))
    assert own.server.counts["faulty"] == 0


def restart(grid, old, new):
    """Give a node another id; its open message ends with Flower's error."""
    grid.nodes[new] = grid.nodes.pop(old)
    for key in grid.under_way:
        message = grid.sent[grid.place[key]]
        if message.metadata.dst_node_id == old:
            grid.under_way[key] = Message(Error(3, "the node is not available"), reply_to=message)


def test_a_run_whose_nodes_have_other_ids_ends_with_an_error():
    grid = FakeGrid({node: adds(1.0) for node in range(1, 5)})
    own = strategy(ca2fl(buffer_size=2))

    def central(step, arrays):
        if step == 5:
            for node in range(1, 5):
                restart(grid, node, node + 100)

    message = r"none of the 4 clients .* may train, for example 10\d: ca2fl .*num_clients=4\. .* client_key="
    check_error(message, own.start, grid, initial(), num_rounds=30, evaluate_fn=central, error=RuntimeError)


def test_an_unknown_node_is_left_out(logged):
    """The client_key of the page; two of three nodes are in it, and M = 2."""
    grid = FakeGrid({123: adds(1.0), 456: adds(2.0), 789: adds(3.0)})
    own = strategy(ca2fl(buffer_size=2), client_key={123: "hospital-a", 456: "hospital-b"}.get)
    own.start(grid, initial(), num_rounds=5)
    assert sorted(own.server.rows.client_ids) == ["hospital-a", "hospital-b"]
    assert own.server.options.num_clients == 2
    assert {message.metadata.dst_node_id for message in grid.sent} == {123, 456}
    assert [line.split(": ")[0] for line in logged if "789" in line] == ["No task goes to client 789"]


def test_a_node_that_was_restarted_goes_on_before_its_old_id_is_gone(logged):
    """Node 1 is killed while it trains and comes back as 11; Flower lists 1 for another minute."""
    client = {1: said("ann"), 2: said("bob"), 3: said("eve")}
    killed = []

    def dies(message):
        return None if killed else client[1](message)

    grid = FakeGrid({**client, 1: dies})
    own = strategy(ca2fl(buffer_size=2), client_key="partition", concurrency=3, timeout=200.0)

    def central(step, arrays):
        if step == 5:
            killed.append(step)
            grid.nodes[11] = client[1]

    own.start(grid, initial(), num_rounds=60, evaluate_fn=central)
    assert sorted(own.server.rows.client_ids) == ["ann", "bob", "eve"]
    assert own.server.counts["faulty"] == 0
    assert "No task goes to client 1: 'ann' has connected again, as 11" in logged
    assert sum(message.metadata.dst_node_id == 11 for message in grid.sent) > 5
