"""Through the adapters: from the replies of M clients, as their framework hands them over, to what it sends next."""

from typing import Any

from afflux.bench.rows.peers.find import absent, find
from afflux.bench.rows.peers.models import MODELS, Model, flat, flower, model_of, models_of, of
from afflux.bench.spec.arrays import Vector
from afflux.bench.spec.columns import BY_D, ERROR, ROLE, TIMES_OURS, ULP, UPDATE
from afflux.bench.spec.contender import Arrays, Contender, Round, vector_bytes
from afflux.bench.spec.inputs import Inputs
from afflux.bench.spec.optional_torch import torch
from afflux.bench.spec.row import Row
from afflux.rules import fedavg

FLOWER_MODULES = ("torch", "flwr.app", "flwr.serverapp.strategy.strategy_utils")


def flat_of(record: Any) -> Vector:
    """The arrays of a record, one after the other."""
    return flat(record.to_torch_state_dict())


def by_adapter(inputs: Inputs) -> Round:
    """What `AsyncStrategy` does with replies: bytes are read in place, converted, pushed; the next record is made."""
    core, adapter = find("afflux.integrations._core"), find("afflux.integrations._flower_run")
    settings = find("afflux.integrations._settings").RunSettings(num_threads=inputs.num_threads)
    contain, _ = flower(inputs, {})
    start = {name: array.numpy() for name, array in model_of(torch.from_numpy(inputs.params[0])).items()}
    training = core.TrainingRun(fedavg(buffer_size=inputs.m), start, settings, num_clients=inputs.m)
    server = training.server
    replies = [contain(models_of(inputs, k)) for k in range(len(inputs.updates))]

    def run(k: int) -> Any:
        for client in range(inputs.m):
            training.sent(str(client), training.assign(client))
        for client, reply in enumerate(replies[k]):
            training.receive(str(client), lambda reply=reply: core.Trained(adapter.model_of(reply["arrays"]), 1))
        return adapter.record_of(training.versions.of(server.pull()))

    def before(k: int) -> Arrays:
        return {"updates": inputs.updates[k], "params": server.params}

    return Round(run, before, lambda record: {"params": flat_of(record)})


def flowers_own(inputs: Inputs, params: Model) -> Any:
    """`aggregate_arrayrecords`, whose result is the next record."""
    contain, _ = flower(inputs, params)
    aggregate = find("flwr.serverapp.strategy.strategy_utils").aggregate_arrayrecords

    def mean(records: list[Any]) -> Any:
        return aggregate(records, "num-examples")

    return contain, mean


CONTENDERS: list[Contender] = []
if torch is not None:

    def flower_record(inputs: Inputs) -> Round:
        made: Round = of(flowers_own)(inputs)
        return Round(made.run, made.before, lambda record: {"params": flat_of(record)})

    CONTENDERS = [
        Contender(
            "afflux",
            "AsyncStrategy: M clients assigned, their replies taken in, the next ArrayRecord made",
            by_adapter,
            vector_bytes(lambda m: m + 4),
            temporary=vector_bytes(lambda m: 2),
            role="ours",
            absent=lambda: absent(*FLOWER_MODULES),
        ),
        Contender(
            "flower",
            "aggregate_arrayrecords(replies)",
            flower_record,
            temporary=vector_bytes(lambda m: 2 * m + 4),
            role="peer",
            caveat="of models: subtracts and adds nothing; checks nothing; float32 sums",
            absent=lambda: absent(*FLOWER_MODULES),
        ),
    ]

FLOWER_ADAPTER = Row(
    name="flower-adapter",
    formula="params + 1/M sum_i (y_i - params); from the bytes of M replies of 20 arrays to the next ArrayRecord",
    counted=MODELS.counted,
    traffic=MODELS.traffic,
    reference=MODELS.reference,
    cases=MODELS.cases,
    contenders=CONTENDERS,
    columns=(BY_D, ROLE, *UPDATE, TIMES_OURS, ERROR, ULP),
    compare=MODELS.compare,
)
