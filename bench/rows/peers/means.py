"""The weighted mean of each peer: its container for a client's vector, and its function of M containers.

A model is one array, named "w": every peer loops over its arrays in Python, so one array means the fewest calls
and the longest sweeps. Containers are views of the client's vector wherever the peer allows it.
"""

import gc
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol
from unittest import mock

from bench.rows.peers.find import find
from bench.spec.arrays import HOST
from bench.spec.contender import nothing, vector_bytes
from bench.spec.inputs import Float32
from bench.spec.optional_torch import torch

Containers = list[Any]
Bytes = Callable[[int, int], int]


class Mean(Protocol):
    """A peer, prepared for M vectors (d,)."""

    def contain(self, client: int, vector: Float32, examples: int) -> Any:
        """Return the peer's container of one client's vector and weight."""

    def mean(self, clients: Containers) -> Any:
        """Call the peer's function, which computes sum_i examples_i u_i / sum_i examples_i."""

    def array(self, result: Any) -> Any:
        """Return the mean as an array or tensor, from the result of `mean`."""


def shares(clients: Containers) -> list[float]:
    """Return the clients' numbers of examples, the last entries of their containers, divided by their sum."""
    total = sum(examples for *_, examples in clients)
    return [examples / total for *_, examples in clients]


class NVFlare:
    """NVFlare's mean. It adds tensors in place, other arrays out of place, and computes the weights itself."""

    def __init__(self, d: int, m: int, tensors: bool) -> None:
        aggregators = find("nvflare.app_common.aggregators.weighted_aggregation_helper")
        self.helper = aggregators.WeightedAggregationHelper()
        self.tensors = tensors

    def contain(self, client: int, vector: Float32, examples: int) -> Any:
        return f"client {client}", {"w": torch.from_numpy(vector) if self.tensors else vector}, examples

    def mean(self, clients: Containers) -> Any:
        for name, data, examples in clients:
            self.helper.add(data, examples, name, 0)
        return self.helper.get_result()

    def array(self, result: Any) -> Any:
        return result["w"]


class Pfl:
    """The mean of pfl. Clients multiply their statistics by the weights where they train, which is not timed."""

    def __init__(self, d: int, m: int) -> None:
        find("pfl.model.pytorch")  # this import selects torch as the framework
        self.statistics = find("pfl.stats").MappedVectorStatistics
        self.aggregator = find("pfl.aggregate.base").SumAggregator()

    def contain(self, client: int, vector: Float32, examples: int) -> Any:
        if examples == 1:
            return self.statistics({"w": torch.from_numpy(vector)}, 1.0)
        weighted = self.statistics({"w": torch.from_numpy(HOST.copied(vector))}, 1.0)
        weighted.reweight(float(examples))
        return weighted

    def mean(self, clients: Containers) -> Any:
        accumulated: Any = None
        for statistics in clients:
            accumulated = self.aggregator.accumulate(accumulated=accumulated, user_stats=statistics)
        accumulated.average()
        return accumulated

    def array(self, result: Any) -> Any:
        return result["w"]


class Flower:
    """The aggregation of Flower's strategies on lists of arrays."""

    def __init__(self, d: int, m: int) -> None:
        self.aggregate = find("flwr.server.strategy.aggregate").aggregate

    def contain(self, client: int, vector: Float32, examples: int) -> Any:
        return [vector], examples

    def mean(self, clients: Containers) -> Any:
        return self.aggregate(clients)

    def array(self, result: Any) -> Any:
        return result[0]


class FlowerRecords:
    """The aggregation of Flower's message-based strategies; a record holds the bytes of an .npy file."""

    KEY = "num-examples"

    def __init__(self, d: int, m: int) -> None:
        self.app = find("flwr.app")
        self.aggregate = find("flwr.serverapp.strategy.strategy_utils").aggregate_arrayrecords

    def contain(self, client: int, vector: Float32, examples: int) -> Any:
        arrays = self.app.ArrayRecord({"w": self.app.Array(vector)})
        return self.app.RecordDict({"arrays": arrays, "metrics": self.app.MetricRecord({self.KEY: examples})})

    def mean(self, clients: Containers) -> Any:
        return self.aggregate(clients, self.KEY)

    def array(self, result: Any) -> Any:
        return result["w"].numpy()


class FLGo:
    def __init__(self, d: int, m: int) -> None:
        self.average = find("flgo.utils.fmodule")._modeldict_weighted_average

    def contain(self, client: int, vector: Float32, examples: int) -> Any:
        return {"w": torch.from_numpy(vector)}, examples

    def mean(self, clients: Containers) -> Any:
        return self.average([model for model, _ in clients], shares(clients))

    def array(self, result: Any) -> Any:
        return result["w"]


class FedLab:
    def __init__(self, d: int, m: int) -> None:
        self.average = find("fedlab.utils.aggregator").Aggregators.fedavg_aggregate

    def contain(self, client: int, vector: Float32, examples: int) -> Any:
        return torch.from_numpy(vector), examples

    def mean(self, clients: Containers) -> Any:
        return self.average([vector for vector, _ in clients], [examples for _, examples in clients])

    def array(self, result: Any) -> Any:
        return result


def module(values: Any, *, trained: bool = False) -> Any:
    """Return a torch module whose only parameter, w, is this tensor."""
    made = torch.nn.Module()
    made.w = torch.nn.Parameter(values, requires_grad=trained)
    return made


class Fluke:
    """The mean of fluke, which moves a target towards the mean; here the target becomes the mean."""

    def __init__(self, d: int, m: int) -> None:
        self.aggregate = find("fluke.utils.model").aggregate_models
        self.target = module(torch.zeros(d))

    def contain(self, client: int, vector: Float32, examples: int) -> Any:
        return module(torch.from_numpy(vector)), examples

    def mean(self, clients: Containers) -> Any:
        return self.aggregate(self.target, [model for model, _ in clients], shares(clients), eta=1.0)

    def array(self, result: Any) -> Any:
        return result.w.data


class APPFL:
    """The mean of APPFL, which computes x + sum_i w_i (y_i - x) with its own x.

    If the sum of the weights is 1, the result is the mean of the y, and the y are our vectors.

    Each call returns a copy of x. With optimize_memory, its default, each call also collects the garbage of the whole
    process, which here includes the imports of all peers. `collecting=False` makes this collection do nothing.
    """

    def __init__(self, d: int, m: int, optimize_memory: bool = False, collecting: bool = True) -> None:
        options = {"K": m, "alpha": 1.0, "client_weights_mode": "sample_size", "optimize_memory": optimize_memory}
        config = find("omegaconf").OmegaConf.create(options)
        aggregators = find("appfl.algorithm.aggregator")
        self.aggregator = aggregators.FedBuffAggregator(module(torch.full((d,), 0.01)), config)
        self.collecting = collecting

    def contain(self, client: int, vector: Float32, examples: int) -> Any:
        self.aggregator.set_client_sample_size(client, examples)
        return client, {"w": torch.from_numpy(vector)}

    def mean(self, clients: Containers) -> Any:
        if not self.collecting:
            with mock.patch.object(gc, "collect", return_value=0):
                return self.one_by_one(clients)
        return self.one_by_one(clients)

    def one_by_one(self, clients: Containers) -> Any:
        for client, model in clients:
            x = self.aggregator.aggregate(client, model)
        return x

    def array(self, result: Any) -> Any:
        return result["w"]


@dataclass(frozen=True)
class Peer:
    """A description of a peer's mean; the peer's modules are imported later."""

    name: str
    what: str
    modules: tuple[str, ...]  #: the modules that the peer needs
    make: Callable[[int, int], Mean]  #: makes the mean for (d, M)
    contained: Bytes = nothing  #: bytes of containers that are not views, for two input sets
    kept: Bytes = nothing  #: bytes of the peer's own state
    temporary: Bytes = nothing  #: bytes that a round allocates and frees


APPFL_MODULES = ("torch", "omegaconf", "appfl.algorithm.aggregator")
APPFL_KEPT, APPFL_TEMPORARY = vector_bytes(lambda m: 4), vector_bytes(lambda m: 3)

#: This peer takes as long as twelve walks over the whole heap, for any d, so it is timed in one row only, `peers`.
COLLECTING = Peer(
    "appfl, gc",
    "with optimize_memory, collecting garbage",
    APPFL_MODULES,
    lambda d, m: APPFL(d, m, optimize_memory=True),
    kept=APPFL_KEPT,
    temporary=APPFL_TEMPORARY,
)

PEERS = [
    Peer(
        "nvflare, tensors",
        "WeightedAggregationHelper.add each, get_result",
        ("torch", "nvflare.app_common.aggregators.weighted_aggregation_helper"),
        lambda d, m: NVFlare(d, m, tensors=True),
        temporary=vector_bytes(lambda m: 1),
    ),
    Peer(
        "nvflare, ndarrays",
        "the same on NumPy arrays",
        ("torch", "nvflare.app_common.aggregators.weighted_aggregation_helper"),
        lambda d, m: NVFlare(d, m, tensors=False),
        temporary=vector_bytes(lambda m: 3),
    ),
    Peer(
        "pfl",
        "SumAggregator.accumulate each, average()",
        ("torch", "pfl.model.pytorch", "pfl.stats", "pfl.aggregate.base"),
        Pfl,
        contained=vector_bytes(lambda m: 2 * m),
        temporary=vector_bytes(lambda m: 2),
    ),
    Peer(
        "flower",
        "flwr.server.strategy.aggregate.aggregate",
        ("torch", "flwr.server.strategy.aggregate"),
        Flower,
        temporary=vector_bytes(lambda m: m + 3),
    ),
    Peer(
        "flower, records",
        "aggregate_arrayrecords",
        ("torch", "flwr.app", "flwr.serverapp.strategy.strategy_utils"),
        FlowerRecords,
        contained=vector_bytes(lambda m: 2 * m),
        temporary=vector_bytes(lambda m: 4),
    ),
    Peer(
        "flgo",
        "fmodule._modeldict_weighted_average",
        ("torch", "flgo.utils.fmodule"),
        FLGo,
        temporary=vector_bytes(lambda m: 3),
    ),
    Peer(
        "fedlab",
        "Aggregators.fedavg_aggregate",
        ("torch", "fedlab.utils.aggregator"),
        FedLab,
        temporary=vector_bytes(lambda m: 2 * m + 1),
    ),
    Peer(
        "fluke",
        "aggregate_models, in place",
        ("torch", "fluke.utils.model"),
        Fluke,
        kept=vector_bytes(lambda m: 1),
        temporary=vector_bytes(lambda m: 1),
    ),
    Peer("appfl", "FedBuffAggregator.aggregate each", APPFL_MODULES, APPFL, kept=APPFL_KEPT, temporary=APPFL_TEMPORARY),
    Peer(
        "appfl, no gc",
        "with optimize_memory, gc.collect doing nothing",
        APPFL_MODULES,
        lambda d, m: APPFL(d, m, optimize_memory=True, collecting=False),
        kept=APPFL_KEPT,
        temporary=APPFL_TEMPORARY,
    ),
    COLLECTING,
]
