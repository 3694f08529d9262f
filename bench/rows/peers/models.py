"""From checkout to the published version: M clients' models in twenty tensors each become the next params."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

from afflux.rules import fedavg
from afflux.server.server import Server
from bench.rows.peers.means import (
    APPFL_MODULES,
    FLOWER_MODULES,
    PFL_MODULES,
    appfl_aggregator,
    pfl_functions,
    without_collections,
)
from bench.spec.columns import BY_D, ERROR, ROLE, SPEED, TIMES_OURS, ULP, UPDATE
from bench.spec.contender import Arrays, Round, ours, peer, plain
from bench.spec.inputs import Case, Inputs
from bench.spec.libraries import find
from bench.spec.optional_torch import torch
from bench.spec.row import Asked, Exact, Row
from bench.spec.streams import Streams

D, QUICK_D, SMALL = 2_500_000, 20_000, 650
LAPS = 20  #: rounds in a sample of a small model; a single round would measure how the caches fill with its code
ARRAYS = 20  #: arrays of a model
Model = dict[str, Any]


def cases(asked: Asked) -> list[Case]:
    lengths = [asked.d] if asked.d else [SMALL, QUICK_D if asked.quick else D]
    return [Case(d, asked.m or 10, asked.threads, sets=asked.sets, laps=LAPS if d <= SMALL else 1) for d in lengths]


def reference(before: Arrays) -> Exact:
    """Compute params + mean of (model - params) in float64, with the terms of the sum that afflux forms."""
    models, params = before["updates"].astype("f8"), before["params"].astype("f8")
    return {"params": (models.mean(0), 2 * abs(params) + abs(models).mean(0))}


def model_of(vector: Any) -> Model:
    """Return the arrays of a model as views of a flat tensor."""
    size = vector.numel()
    ends = [size * i // ARRAYS for i in range(ARRAYS + 1)]
    return {f"layers.{i}.weight": vector[begin:end] for i, (begin, end) in enumerate(pairwise(ends))}


def first_model(inputs: Inputs) -> Model:
    return model_of(torch.from_numpy(inputs.params[0].copy()))


def models_of(inputs: Inputs) -> list[list[Model]]:
    """Return the M models of each input set."""
    return [[model_of(torch.from_numpy(vector)) for vector in block] for block in inputs.updates]


def flat(model: Model) -> Any:
    return torch.cat([tensor.detach().reshape(-1) for tensor in model.values()]).numpy()


def from_models(
    inputs: Inputs,
    run: Callable[[int], Any],
    params: Callable[[], Any],
    flatten: Callable[[Any], Any] = flat,
    prepare: Callable[[int], object] = lambda k: None,
) -> Round:
    """Return a round on the models of set k; `params()` are those before it, `flatten` makes a vector of its result."""

    def before(k: int) -> Arrays:
        return {"updates": inputs.updates[k], "params": params()}

    return Round(run, before, lambda model: {"params": flatten(model)}, prepare)


def a_server(inputs: Inputs) -> Round:
    threads = inputs.num_threads
    server = Server(fedavg(buffer_size=inputs.m), first_model(inputs), num_threads=threads, push_threads=threads)
    models = models_of(inputs)

    def run(k: int) -> object:
        tasks = [server.checkout(client) for client in range(inputs.m)]
        for task, model in zip(tasks, models[k], strict=True):
            server.push(task=task, model=model)
        return server.params

    return from_models(inputs, run, lambda: server.params, lambda params: params)


def of(
    step: Callable[[Inputs, Model], tuple[Callable[[list[Model]], list[Any]], Callable[[list[Any]], Model]]],
    flatten: Callable[[Any], Any] = flat,
) -> Any:
    """Return a contender of a step.

    The containers are made before; `flatten` makes a vector of the next model.
    """

    def make(inputs: Inputs) -> Round:
        contain, mean = step(inputs, first_model(inputs))
        ready = list(map(contain, models_of(inputs)))
        return from_models(inputs, lambda k: mean(ready[k]), lambda: inputs.params[0], flatten)

    return make


def stack_mean(inputs: Inputs, params: Model) -> Any:
    def mean(models: list[Model]) -> Model:
        return {name: x + torch.stack([model[name] - x for model in models]).mean(0) for name, x in params.items()}

    return list, mean


def pfl(inputs: Inputs, params: Model) -> Any:
    """Return the functions of pfl: one subtraction for each array makes a client's statistics from its model."""
    statistics_of, mean_of = pfl_functions()

    def mean(models: list[Model]) -> Model:
        total = mean_of(statistics_of({name: y[name] - x for name, x in params.items()}, 1.0) for y in models)
        return {name: x + total[name] for name, x in params.items()}

    return list, mean


def flower_records(inputs: Inputs, params: Model) -> Any:
    """Return the functions of Flower; the result is the next record.

    Records are as they arrive from the network, with the bytes of an .npy file for each array.
    """
    app = find("flwr.app")
    aggregate = find("flwr.serverapp.strategy.strategy_utils").aggregate_arrayrecords
    metrics = app.MetricRecord({"num-examples": 1})

    def contain(models: list[Model]) -> list[Any]:
        return [app.RecordDict({"arrays": app.ArrayRecord(model), "metrics": metrics}) for model in models]

    return contain, lambda records: aggregate(records, "num-examples")


def flower(inputs: Inputs, params: Model) -> Any:
    """Return the same functions; the result is the next model."""
    contain, mean = flower_records(inputs, params)
    return contain, lambda records: mean(records).to_torch_state_dict()


def renamed(model: Model) -> Model:
    """Return the arrays under names that torch allows in a module: without dots."""
    return {name.replace(".", "-"): tensor for name, tensor in model.items()}


def appfl_model(arrays: Model) -> Any:
    """Return APPFL's model: a module with copies of these arrays."""
    model = torch.nn.Module()
    for name, tensor in renamed(arrays).items():
        model.register_parameter(name, torch.nn.Parameter(tensor.clone(), requires_grad=False))
    return model


def appfl(inputs: Inputs, params: Model) -> Any:
    """Return the functions of APPFL's FedBuff, whose base is its current model.

    The collections of garbage, which take seconds, are left out.
    """
    aggregator = appfl_aggregator(appfl_model(params), inputs.m)
    for client in range(inputs.m):
        aggregator.set_client_sample_size(client, 1)

    def mean(models: list[Any]) -> Model:
        with without_collections():
            for client, model in enumerate(models):
                made: Model = aggregator.aggregate(client, model)
        return made

    return lambda models: list(map(renamed, models)), mean


MEAN = "checks nothing; float32 sums"
CONTENDERS = [
    ours("afflux", "M x Server.checkout, M x push(task=, model=), the last with the round", a_server, lambda m: m + 4),
    plain(
        "torch stack().mean",
        "x + torch.stack([y - x for each]).mean(0) for each array",
        of(stack_mean),
        temporary=lambda m: 2 * m + 2,
        caveat=MEAN,
    ),
    peer(
        "flower, records",
        "aggregate_arrayrecords(...).to_torch_state_dict()",
        of(flower),
        temporary=lambda m: 2 * m + 4,
        caveat=f"of models: subtracts and adds nothing; {MEAN}",
        modules=FLOWER_MODULES,
    ),
    peer(
        "pfl",
        "y - x, SumAggregator.accumulate each, average(), x + mean",
        of(pfl),
        temporary=4,
        caveat=MEAN,
        modules=PFL_MODULES,
    ),
    peer(
        "appfl, no gc",
        "FedBuffAggregator.aggregate each, gc.collect doing nothing",
        of(appfl),
        kept=4,
        temporary=3,
        caveat=MEAN,
        modules=APPFL_MODULES,
    ),
]

MODELS = Row(
    name="from-models",
    formula="params + 1/M sum_i (y_i - params); from M models of 20 torch tensors, checkout to published version",
    counted="4 d (M + 2): M models and params read, params written",
    traffic=lambda m: (Streams(reads=(4,) * (m + 1), writes=(4,)),),
    reference=reference,
    cases=cases,
    contenders=CONTENDERS,
    columns=(BY_D, ROLE, *UPDATE, *SPEED, TIMES_OURS, ERROR, ULP),
)
