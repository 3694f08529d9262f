"""The weighted mean of each peer: its container for a client's vector, and its function of M containers.

A model is one array, named "w": every peer loops over its arrays in Python, so one array means the fewest calls
and the longest sweeps. Containers are views of the client's vector wherever the peer allows it.
"""

import gc
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any
from unittest import mock

from bench.spec.arrays import HOST
from bench.spec.contender import TORCH, Vectors
from bench.spec.inputs import Float32
from bench.spec.libraries import find
from bench.spec.optional_torch import torch

Containers = list[Any]


def only_array(result: Any) -> Any:
    return result["w"]


@dataclass(frozen=True)
class Mean:
    """The functions of a peer, prepared for M vectors (d,)."""

    #: (client, vector, number of examples): returns the peer's container of them
    contain: Callable[[int, Float32, int], Any]
    #: calls the peer's function of M containers, which computes sum_i examples_i u_i / sum_i examples_i
    mean: Callable[[Containers], Any]
    array: Callable[[Any], Any] = only_array  #: returns the mean as an array or tensor, from the result of `mean`


def shares(clients: Containers) -> list[float]:
    """Return the clients' numbers of examples, the last entries of their containers, divided by their sum."""
    total = sum(examples for *_, examples in clients)
    return [examples / total for *_, examples in clients]


def nvflare(d: int, m: int, tensors: bool) -> Mean:
    """Return NVFlare's mean. It adds tensors in place, other arrays out of place, and computes the weights itself."""
    helper = find("nvflare.app_common.aggregators.weighted_aggregation_helper").WeightedAggregationHelper()

    def contain(client: int, vector: Float32, examples: int) -> Any:
        return f"client {client}", {"w": torch.from_numpy(vector) if tensors else vector}, examples

    def mean(clients: Containers) -> Any:
        for name, data, examples in clients:
            helper.add(data, examples, name, 0)
        return helper.get_result()

    return Mean(contain, mean)


def pfl_functions() -> tuple[Any, Callable[[Iterable[Any]], Any]]:
    """Return the class of pfl's statistics, and a function that computes the mean of clients' statistics."""
    find("pfl.model.pytorch")  # this import selects torch as the framework
    aggregator = find("pfl.aggregate.base").SumAggregator()

    def mean(clients: Iterable[Any]) -> Any:
        accumulated: Any = None
        for statistics in clients:
            accumulated = aggregator.accumulate(accumulated=accumulated, user_stats=statistics)
        accumulated.average()
        return accumulated

    return find("pfl.stats").MappedVectorStatistics, mean


def pfl(d: int, m: int) -> Mean:
    """Return the mean of pfl. Clients multiply their statistics by the weights where they train, which is not timed."""
    statistics_of, mean = pfl_functions()

    def contain(client: int, vector: Float32, examples: int) -> Any:
        if examples == 1:
            return statistics_of({"w": torch.from_numpy(vector)}, 1.0)
        weighted = statistics_of({"w": torch.from_numpy(HOST.copied(vector))}, 1.0)
        weighted.reweight(float(examples))
        return weighted

    return Mean(contain, mean)


def flower(d: int, m: int) -> Mean:
    """Return the aggregation of Flower's strategies on lists of arrays."""
    aggregate = find("flwr.server.strategy.aggregate").aggregate
    return Mean(lambda client, vector, examples: ([vector], examples), aggregate, lambda result: result[0])


def flower_records(d: int, m: int) -> Mean:
    """Return the aggregation of Flower's message-based strategies; a record holds the bytes of an .npy file."""
    app, key = find("flwr.app"), "num-examples"
    aggregate = find("flwr.serverapp.strategy.strategy_utils").aggregate_arrayrecords

    def contain(client: int, vector: Float32, examples: int) -> Any:
        arrays = app.ArrayRecord({"w": app.Array(vector)})
        return app.RecordDict({"arrays": arrays, "metrics": app.MetricRecord({key: examples})})

    return Mean(contain, lambda clients: aggregate(clients, key), lambda result: result["w"].numpy())


def flgo(d: int, m: int) -> Mean:
    average = find("flgo.utils.fmodule")._modeldict_weighted_average
    return Mean(
        lambda client, vector, examples: ({"w": torch.from_numpy(vector)}, examples),
        lambda clients: average([model for model, _ in clients], shares(clients)),
    )


def fedlab(d: int, m: int) -> Mean:
    average = find("fedlab.utils.aggregator").Aggregators.fedavg_aggregate
    return Mean(
        lambda client, vector, examples: (torch.from_numpy(vector), examples),
        lambda clients: average(*map(list, zip(*clients, strict=True))),
        lambda result: result,
    )


def module(values: Any, *, trained: bool = False) -> Any:
    """Return a torch module whose only parameter, w, is this tensor."""
    holder = torch.nn.Module()
    holder.w = torch.nn.Parameter(values, requires_grad=trained)
    return holder


def fluke(d: int, m: int) -> Mean:
    """Return the mean of fluke, which moves a target towards the mean; here the target becomes the mean."""
    aggregate, target = find("fluke.utils.model").aggregate_models, module(torch.zeros(d))
    return Mean(
        lambda client, vector, examples: (module(torch.from_numpy(vector)), examples),
        lambda clients: aggregate(target, [model for model, _ in clients], shares(clients), eta=1.0),
        lambda result: result.w.data,
    )


def appfl_aggregator(model: Any, m: int, optimize_memory: bool = False) -> Any:
    options = {"K": m, "alpha": 1.0, "client_weights_mode": "sample_size", "optimize_memory": optimize_memory}
    config = find("omegaconf").OmegaConf.create(options)
    return find("appfl.algorithm.aggregator").FedBuffAggregator(model, config)


def without_collections() -> Any:
    """Return a context in which gc.collect does nothing."""
    return mock.patch.object(gc, "collect", return_value=0)


def appfl(d: int, m: int, optimize_memory: bool = False, collecting: bool = True) -> Mean:
    """Return the mean of APPFL, which computes x + sum_i w_i (y_i - x) with its own x.

    If the sum of the weights is 1, the result is the mean of the y, and the y are our vectors.

    Each call returns a copy of x. With optimize_memory, its default, each call also collects the garbage of the whole
    process, which here includes the imports of all peers. `collecting=False` makes this collection do nothing.
    """
    aggregator = appfl_aggregator(module(torch.full((d,), 0.01)), m, optimize_memory)

    def contain(client: int, vector: Float32, examples: int) -> Any:
        aggregator.set_client_sample_size(client, examples)
        return client, {"w": torch.from_numpy(vector)}

    def mean(clients: Containers) -> Any:
        with nullcontext() if collecting else without_collections():
            for client, model in clients:
                x = aggregator.aggregate(client, model)
        return x

    return Mean(contain, mean)


@dataclass(frozen=True)
class Peer:
    """A description of a peer's mean; the peer's modules are imported later."""

    name: str
    what: str
    modules: tuple[str, ...]  #: the modules that the peer needs
    make: Callable[[int, int], Mean]  #: makes the mean for (d, M)
    contained: Vectors = 0  #: containers that are not views, for two input sets
    kept: Vectors = 0  #: the peer's own state
    temporary: Vectors = 0  #: what a round allocates and frees


APPFL_MODULES = ("torch", "omegaconf", "appfl.algorithm.aggregator")
FLOWER_MODULES = ("torch", "flwr.app", "flwr.serverapp.strategy.strategy_utils")
NVFLARE_MODULES = ("torch", "nvflare.app_common.aggregators.weighted_aggregation_helper")
PFL_MODULES = ("torch", "pfl.model.pytorch", "pfl.stats", "pfl.aggregate.base")


def of_appfl(name: str, what: str, **options: bool) -> Peer:
    return Peer(name, what, APPFL_MODULES, partial(appfl, **options), kept=4, temporary=3)


def of_nvflare(name: str, what: str, temporary: int, tensors: bool) -> Peer:
    return Peer(name, what, NVFLARE_MODULES, partial(nvflare, tensors=tensors), temporary=temporary)


#: This peer takes as long as twelve walks over the whole heap, for any d, so it is timed in one row only, `peers`.
COLLECTING = of_appfl("appfl, gc", "with optimize_memory, collecting garbage", optimize_memory=True)

AGGREGATE = "flwr.server.strategy.aggregate"
PEERS = [
    of_nvflare("nvflare, tensors", "WeightedAggregationHelper.add each, get_result", 1, tensors=True),
    of_nvflare("nvflare, ndarrays", "the same on NumPy arrays", 3, tensors=False),
    Peer("pfl", "SumAggregator.accumulate each, average()", PFL_MODULES, pfl, lambda m: 2 * m, temporary=2),
    Peer("flower", f"{AGGREGATE}.aggregate", ("torch", AGGREGATE), flower, temporary=lambda m: m + 3),
    Peer("flower, records", "aggregate_arrayrecords", FLOWER_MODULES, flower_records, lambda m: 2 * m, temporary=4),
    Peer("flgo", "fmodule._modeldict_weighted_average", (*TORCH, "flgo.utils.fmodule"), flgo, temporary=3),
    Peer(
        "fedlab",
        "Aggregators.fedavg_aggregate",
        (*TORCH, "fedlab.utils.aggregator"),
        fedlab,
        temporary=lambda m: 2 * m + 1,
    ),
    Peer("fluke", "aggregate_models, in place", (*TORCH, "fluke.utils.model"), fluke, kept=1, temporary=1),
    of_appfl("appfl", "FedBuffAggregator.aggregate each"),
    of_appfl("appfl, no gc", "with optimize_memory, gc.collect doing nothing", optimize_memory=True, collecting=False),
    COLLECTING,
]
