"""FLGo's asynchronous server: from the packages of M clients to the model that the next clients get."""

from collections import defaultdict
from types import SimpleNamespace
from typing import Any

from afflux.rules import fedavg
from bench.rows.adapters.row import adapter_row
from bench.rows.peers.models import Model, first_model, flat, from_models, model_of, models_of, of
from bench.spec.contender import Round, ours, peer
from bench.spec.inputs import Inputs
from bench.spec.libraries import find
from bench.spec.optional_torch import torch

FLGO_MODULES = ("torch", "flgo.algorithm.asyncbase", "flgo.algorithm.fedbuff")
#: The options of `flgo.init` that a server without a task reads.
OPTION = {"num_parallels": 1, "algo_para": [], "rule": None}


def modules_of(shapes: Model) -> type[Any]:
    """Return the class of FLGo's models with arrays of these sizes; FLGo makes new models without arguments."""
    sizes = [tensor.numel() for tensor in shapes.values()]

    class Model(find("flgo.utils.fmodule").FModule):  # type: ignore[misc]
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ParameterList([torch.empty(size) for size in sizes])

    return Model


def module(make: type[Any], tensors: Model) -> Any:
    """Return a model of these tensors, without a copy, as a client that got the first version sends it."""
    made = make()
    for parameter, tensor in zip(made.parameters(), tensors.values(), strict=True):
        parameter.data = tensor
    made._round = 1
    return made


def a_server(kind: Any, model: Any, clients: int, **facts: Any) -> Any:
    """Return a server of FLGo with the attributes that `flgo.init` sets.

    The constructor of the server needs a whole task.
    """
    server = kind.__new__(kind)
    logger = SimpleNamespace(output=defaultdict(list), warning=print)
    shared = {"logger": logger, "clock": SimpleNamespace(current_time=0)}
    own = {"model": model, "num_clients": clients, "clients_per_round": clients, "sample_option": "uniform"}
    known = {"option": OPTION, "tolerance_for_latency": 999999, "current_round": 1, "gv": SimpleNamespace(**shared)}
    server.__dict__.update(own | known | facts)
    return server


def flat_of(model: Any) -> Any:
    return flat(model.state_dict())


def by_adapter(inputs: Inputs) -> Round:
    """Call `package_handler` with one package after the other, with the tasks that they answer."""
    adapter = find("afflux.integrations.flgo")
    first = first_model(inputs)
    make = modules_of(first)
    made = adapter.algorithm(fedavg(buffer_size=inputs.m), num_threads=inputs.num_threads)
    server = a_server(made.Server, module(make, first), inputs.m)
    server.initialize()
    facts = {"num_examples": [1], "client_lr": [0.1], "local_steps": [5]}
    models = [[module(make, model) for model in clients] for clients in models_of(inputs)]

    def run(k: int) -> Any:
        keys = [server.open_task(client) for client in range(inputs.m)]
        for client, (key, model) in enumerate(zip(keys, models[k], strict=True)):
            made_step = server.package_handler({"model": [model], "__cid": [client], **facts, adapter.TASK: [key]})
        assert made_step
        return server.model

    return from_models(inputs, run, lambda: server.server.params, flat_of)


def by_fedbuff(inputs: Inputs) -> Round:
    """Call `package_handler` of FLGo's FedBuff with the updates that its clients make."""
    first, kind = first_model(inputs), find("flgo.algorithm.fedbuff").Server
    make = modules_of(first)
    start = module(make, first)
    server = a_server(kind, start, inputs.m, buffer=[], buffer_ratio=1.0, eta=1.0)
    updates = [
        [module(make, model_of(torch.from_numpy(vector - inputs.params[0]))) for vector in block]
        for block in inputs.updates
    ]

    def prepare(k: int) -> None:
        server.model = start

    def run(k: int) -> Any:
        for client, update in enumerate(updates[k]):
            made_step = server.package_handler({"model": [update], "__cid": [client]})
        assert made_step
        return server.model

    return from_models(inputs, run, lambda: inputs.params[0], flat_of, prepare)


def average(inputs: Inputs, params: Model) -> Any:
    """Return functions that do only the arithmetic of FLGo's servers, on tensors by name."""
    mean, weights = find("flgo.utils.fmodule")._modeldict_weighted_average, [1 / inputs.m] * inputs.m
    return list, lambda models: mean(models, weights)


CONTENDERS = [
    ours(
        "afflux",
        "M x AffluxServer.open_task, M x package_handler, the last with the round",
        by_adapter,
        lambda m: m + 4,
    ),
    peer(
        "flgo, FedBuff",
        "M x fedbuff.Server.package_handler, the last with the round",
        by_fedbuff,
        temporary=6,
        caveat="of updates: the clients have subtracted; checks nothing; float32 sums",
    ),
    peer(
        "flgo, average",
        "_modeldict_weighted_average(models, weights)",
        of(average),
        temporary=2,
        caveat="of models: subtracts and adds nothing; checks nothing; float32 sums",
    ),
]

FLGO_ADAPTER = adapter_row("flgo", "from M models of 20 tensors to FLGo's next model", CONTENDERS, FLGO_MODULES)
