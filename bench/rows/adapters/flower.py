"""Flower's adapter: from the replies of M clients, as Flower delivers them, to the record that it sends next."""

from typing import Any

from afflux.rules import fedavg
from bench.rows.adapters.row import adapter_row
from bench.rows.peers.means import FLOWER_MODULES
from bench.rows.peers.models import Model, first_model, flat, flower_records, from_models, models_of, of
from bench.spec.arrays import Vector
from bench.spec.contender import Round, ours, peer
from bench.spec.inputs import Inputs
from bench.spec.libraries import find


def flat_of(record: Any) -> Vector:
    """Return the arrays of a record as one flat vector."""
    return flat(record.to_torch_state_dict())


class _Grid:
    """The part of a Grid that a run needs to receive replies that have already arrived."""

    def __init__(self, nodes: int) -> None:
        self.nodes = list(range(nodes))
        self.replies: list[Any] = []

    def get_node_ids(self) -> list[int]:
        return self.nodes

    def pull_messages(self, keys: list[str]) -> list[Any]:
        found, self.replies = self.replies, []
        return found


def messages(inputs: Inputs, params: Model) -> Any:
    """Return functions that put models into Flower's messages, and that run Flower's FedAvg on these.

    The key of a node's reply is its number. FedAvg also checks that the messages fit together, and aggregates metrics.
    """
    quiet()
    make, (contain, _) = find("flwr.app").Message, flower_records(inputs, params)
    strategy = find("flwr.serverapp.strategy").FedAvg()

    def reply(node: int, content: Any) -> Any:
        message = make(content, node, "train", group_id="1")
        message.metadata.__dict__["_message_id"] = str(node)
        return make(content, reply_to=message)

    return (
        lambda models: [reply(node, content) for node, content in enumerate(contain(models))],
        lambda replies: strategy.aggregate_train(1, replies)[0],
    )


def quiet() -> None:
    """Silence Flower's log lines about each step, which would be timed."""
    find("flwr.common.logger").FLOWER_LOGGER.setLevel("ERROR")
    # Flower's own drivers set the task's identity before a ServerApp runs.
    identity = find("flwr.supercore.task_identity").TaskIdentity
    identity.run_id, identity.node_id, identity.task_id = 1, 1, 1


def by_adapter(inputs: Inputs) -> Round:
    """Return a contender that runs `AsyncStrategy` on replies.

    It pulls messages, reads their bytes in place, pushes them, records the step and its metrics, and makes the next
    record.
    """
    quiet()
    core, loops = find("afflux.integrations._core"), find("afflux.integrations._loop")
    adapter, flower_run = find("afflux.integrations.flower"), find("afflux.integrations._flower_run")
    contain, _ = flower_records(inputs, {})
    initial = contain([first_model(inputs)])[0]["arrays"]
    strategy = adapter.AsyncStrategy(fedavg(buffer_size=inputs.m), num_threads=inputs.num_threads, evaluate_every=10**9)
    start, grid = adapter.model_of(initial), _Grid(inputs.m)
    training = core.TrainingRun(strategy.rule, start, strategy.settings, num_clients=inputs.m)
    transport = flower_run.FlowerTransport(strategy, grid, training, {}, {}, None, last=10**9)
    loop, server = loops.Loop(training, transport), training.server
    replies = list(map(messages(inputs, {})[0], models_of(inputs)))

    def run(k: int) -> Any:
        for node in grid.nodes:
            training.sent(str(node), training.assign(node), node)
        grid.replies = replies[k]
        loop.take_replies(10**9)
        return transport.arrays(server.pull())

    return from_models(inputs, run, lambda: server.params, flat_of)


CONTENDERS = [
    ours(
        "afflux",
        "AsyncStrategy: M replies taken in, a step with its metrics, the next ArrayRecord",
        by_adapter,
        lambda m: m + 4,
        temporary=2,
    ),
    peer(
        "flower",
        "aggregate_arrayrecords(replies)",
        of(flower_records, flat_of),
        temporary=lambda m: 2 * m + 4,
        caveat="of models: subtracts and adds nothing; checks nothing; float32 sums; no metrics",
    ),
    peer(
        "flower, FedAvg",
        "FedAvg.aggregate_train(step, replies)",
        of(messages, flat_of),
        temporary=lambda m: 2 * m + 4,
        caveat="of models: subtracts and adds nothing; compares keys; float32 sums",
    ),
]

FLOWER_ADAPTER = adapter_row(
    "flower", "from the bytes of M replies of 20 arrays to the next ArrayRecord", CONTENDERS, FLOWER_MODULES
)
