"""A Grid for tests: nodes are functions, and replies come in an order that a seed decides. Beside it the models, nodes
and strategies that several files of tests use.
"""

import random
from collections.abc import Callable, Iterable
from uuid import uuid4

import numpy as np
import pytest

pytest.importorskip("flwr", reason="needs flwr: make test-integrations")

from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.common.logger import FLOWER_LOGGER
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from afflux.integrations.flower import AsyncStrategy, model_of, record_of

# Flower's own drivers set it before a ServerApp runs.
TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1

NODES = [2**63 + 7, 5, 2**64 - 1, 11]

#: Of a node: what it replies to a message; None: nothing, ever.
Node = Callable[[Message], "RecordDict | Error | None"]


class FakeGrid(Grid):
    """Each look hands over some of the replies that are under way, at least one if there is one."""

    def __init__(self, nodes: dict[int, Node], seed: int = 0, most: int = 2) -> None:
        self.nodes = nodes
        self.random = random.Random(seed)
        self.most = most
        self.under_way: dict[str, Message] = {}
        self.sent: list[Message] = []
        self.place: dict[str, int] = {}

    def set_run(self, run):
        raise NotImplementedError

    @property
    def run(self):
        raise NotImplementedError

    def create_message(self, *args, **kwargs):
        raise NotImplementedError

    def send_and_receive(self, messages, *, timeout=None):
        keys = self.push_messages(messages)
        replies = []
        while any(key in self.under_way for key in keys):
            replies += self.pull_messages(keys)
        return replies

    def get_node_ids(self) -> Iterable[int]:
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        keys = []
        for message in messages:
            if message.metadata.dst_node_id not in self.nodes:
                keys.append("")
                continue
            key = str(uuid4())
            message.metadata.__dict__["_message_id"] = key
            self.place[key] = len(self.sent)
            self.sent.append(message)
            answer = self.nodes[message.metadata.dst_node_id](message)
            if answer is not None:
                reply = Message(answer, reply_to=message)
                self.under_way[key] = reply
            keys.append(key)
        return keys

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        ready = sorted(set(message_ids) & self.under_way.keys(), key=self.place.__getitem__)
        some = self.random.sample(ready, min(len(ready), self.random.randint(1, self.most)))
        return [self.under_way.pop(key) for key in some]


def adds(value: float, examples: int = 10, **metrics: float) -> Node:
    """A node that adds a number to each element of the model, and evaluates to its mean."""

    def node(message: Message) -> RecordDict:
        arrays = message.content["arrays"]
        own = {"num-examples": examples, "train_loss": 1.0, **metrics}
        if message.metadata.message_type == "evaluate":
            mean = float(np.mean([array.numpy().mean() for array in arrays.values()]))
            return RecordDict({"metrics": MetricRecord({"num-examples": examples, "mean": mean})})
        model = {name: Array((array.numpy() + value).astype(array.dtype)) for name, array in arrays.items()}
        return RecordDict({"arrays": ArrayRecord(model), "metrics": MetricRecord(own)})

    return node


def initial(seed=0):
    rng = np.random.default_rng(seed)
    return record_of({"w": rng.standard_normal((3, 4), np.float32), "b": rng.standard_normal(5, np.float32)})


def grid_of(*values, **options):
    """Nodes that add these values."""
    return FakeGrid(
        {node: adds(value, 10 * (i + 1)) for i, (node, value) in enumerate(zip(NODES, values, strict=False))}, **options
    )


def strategy(rule, **options):
    options = {"min_available_nodes": 1, "poll_interval": 0.0, "fraction_evaluate": 0.0, **options}
    return AsyncStrategy(rule, **options)


def flat(record):
    return np.concatenate([array.ravel() for array in model_of(record).values()])


def bad(kind):
    """A node whose replies are of no use."""
    good = adds(1.0)

    def node(message):
        if kind == "lost":
            return None
        if kind == "error":
            return Error(0, "out of memory")
        reply = good(message)
        if message.metadata.message_type == "evaluate":
            return reply
        arrays = dict(reply["arrays"].items())
        if kind == "nan":
            arrays["b"] = Array(np.full(5, np.nan, np.float32))
        elif kind == "bytes":
            arrays["b"] = Array("float32", (5,), "numpy.ndarray", arrays["b"].data[:-4])
        elif kind == "no bytes":
            arrays["b"] = Array("float32", (5,), "numpy.ndarray", b"")
        elif kind == "objects":
            arrays["b"] = Array(np.array(["a"] * 5))
        elif kind == "header":
            arrays["b"] = Array("float32", (5,), "numpy.ndarray", b"\x93NUMPY\x01\x00" + b"\x28\x23" + b"-" * 9000)
        elif kind == "many":
            return RecordDict({"arrays": reply["arrays"], "more": reply["arrays"], "metrics": reply["metrics"]})
        elif kind == "many metrics":
            return RecordDict({"arrays": reply["arrays"], "more": reply["metrics"], "metrics": reply["metrics"]})
        content = {"arrays": ArrayRecord(arrays), "metrics": reply["metrics"]}
        if kind == "list":
            content["metrics"] = MetricRecord({"num-examples": [1, 2]})
        elif kind == "no arrays":
            del content["arrays"]
        return RecordDict(content)

    return node


def said(partition):
    """A node whose replies say which client it is."""
    node = adds(1.0, 10)

    def replies(message):
        return RecordDict({**node(message), "who": ConfigRecord({"partition": partition})})

    return replies


def all_of(grid, keys):
    """Hands over all replies that are under way."""
    return [grid.under_way.pop(key) for key in dict.fromkeys(keys) if key in grid.under_way]


@pytest.fixture
def logged(monkeypatch):
    """What Flower's logger is given, as lines."""
    lines = []
    monkeypatch.setattr(FLOWER_LOGGER, "handle", lambda record: lines.append(record.getMessage()))
    return lines
