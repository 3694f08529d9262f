"""APPFL's aggregator: from the models of M clients to the version that the last client gets."""

from itertools import count

from bench.rows.adapters.row import adapter_row
from bench.rows.peers.means import APPFL_MODULES
from bench.rows.peers.models import Model, appfl, from_models, model_of, models_of, of
from bench.spec.contender import Round, ours, peer
from bench.spec.inputs import Inputs
from bench.spec.libraries import find
from bench.spec.optional_torch import torch


def by_adapter(inputs: Inputs) -> Round:
    """Call `AffluxAggregator.aggregate` with each model, in APPFL's dialect of FedBuff.

    Each call returns a client's next model.
    """
    start = torch.nn.Module()
    for name, tensor in model_of(torch.from_numpy(inputs.params[0])).items():
        start.register_parameter(name.replace(".", "-"), torch.nn.Parameter(tensor.clone(), requires_grad=False))
    options = {"dialect": "appfl", "K": inputs.m, "alpha": 1.0, "staleness_fn": "constant", "num_clients": inputs.m}
    configs = find("omegaconf").OmegaConf.create({**options, "num_threads": inputs.num_threads})
    aggregator = find("afflux.integrations.appfl").AffluxAggregator(start, configs)
    for client in range(inputs.m):
        aggregator.get_parameters(client_id=client)
    models = [
        [{name.replace(".", "-"): tensor for name, tensor in model.items()} for model in models_of(inputs, k)]
        for k in range(len(inputs.updates))
    ]
    trainings = count(1)

    def run(k: int) -> Model:
        number = next(trainings)
        for client, model in enumerate(models[k]):
            made: Model = aggregator.aggregate(client, model, round=number)
        return made

    return from_models(inputs, run, lambda: aggregator.server.params)


CONTENDERS = [
    ours(
        "afflux",
        "M x AffluxAggregator.aggregate, the last with the round",
        by_adapter,
        lambda m: m + 4,
        temporary=2,
        modules=APPFL_MODULES,
    ),
    peer(
        "appfl, no gc",
        "M x FedBuffAggregator.aggregate, gc.collect doing nothing",
        of(appfl),
        kept=4,
        temporary=3,
        caveat="checks nothing; float32 sums",
        modules=APPFL_MODULES,
    ),
]

APPFL_ADAPTER = adapter_row("appfl", "from M models of 20 tensors to the next model for each client", CONTENDERS)
