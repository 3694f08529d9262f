"""APPFL's aggregator: from the models of M clients to the version that the last client gets."""

from itertools import count

from bench.rows.adapters.row import adapter_row
from bench.rows.peers.means import APPFL_MODULES
from bench.rows.peers.models import Model, appfl, appfl_model, first_model, from_models, models_of, of, renamed
from bench.spec.contender import Round, ours, peer
from bench.spec.inputs import Inputs
from bench.spec.libraries import find


def by_adapter(inputs: Inputs) -> Round:
    """Call `AffluxAggregator.aggregate` with each model, in APPFL's dialect of FedBuff.

    Each call returns a client's next model.
    """
    options = {"dialect": "appfl", "K": inputs.m, "alpha": 1.0, "staleness_fn": "constant", "num_clients": inputs.m}
    configs = find("omegaconf").OmegaConf.create({**options, "num_threads": inputs.num_threads})
    aggregator = find("afflux.integrations.appfl").AffluxAggregator(appfl_model(first_model(inputs)), configs)
    for client in range(inputs.m):
        aggregator.get_parameters(client_id=client)
    models = [list(map(renamed, clients)) for clients in models_of(inputs)]
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
    ),
    peer(
        "appfl, no gc",
        "M x FedBuffAggregator.aggregate, gc.collect doing nothing",
        of(appfl),
        kept=4,
        temporary=3,
        caveat="checks nothing; float32 sums",
    ),
]

APPFL_ADAPTER = adapter_row(
    "appfl", "from M models of 20 tensors to the next model for each client", CONTENDERS, APPFL_MODULES
)
