"""A Grid for tests: nodes are functions, and replies come in an order that a seed decides."""

import random
from collections.abc import Callable, Iterable
from uuid import uuid4

import numpy as np
import pytest

pytest.importorskip("flwr", reason="needs flwr: make test-integrations")

from flwr.app import Array, ArrayRecord, Error, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

# Flower's own drivers set it before a ServerApp runs.
TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = 1, 1, 1

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
