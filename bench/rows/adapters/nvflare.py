"""NVFlare's Collab API: from the results of M clients to the next model that can be sent."""

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from bench.rows.adapters.row import adapter_row
from bench.rows.peers.models import LAPS, Model, first_model, model_of, of
from bench.spec.contender import Arrays, Round, ours, peer
from bench.spec.inputs import Inputs
from bench.spec.libraries import find
from bench.spec.optional_torch import torch

MODULES = ("torch", "nvflare.collab")


def arrays_of(model: Model) -> Model:
    """Return NumPy arrays over the memory of a model; a client may return these as well."""
    return {name: tensor.numpy() for name, tensor in model.items()}


def as_they_are(model: Model) -> Model:
    return model


def flat_of(model: Any) -> Any:
    return np.concatenate([np.ravel(array) for array in model.values()])


def deltas_of(inputs: Inputs, k: int) -> Any:
    """Return the updates, (M, d), of clients that trained from the first params, as params_type="DIFF" sends them."""
    return inputs.updates[k] - inputs.params[0]


def by_adapter(kind: Callable[[Model], Model], *, deltas: bool = False) -> Callable[[Inputs], Round]:
    """Return a contender that runs `AsyncServer` on results that NVFlare has received.

    After the round, the version can be sent.
    """

    def make(inputs: Inputs) -> Round:
        core, calls = find("afflux.integrations._core"), find("afflux.integrations._nvflare_calls")
        adapter = find("afflux.integrations.nvflare")
        start = kind(first_model(inputs))

        class App(adapter.AsyncServer):  # type: ignore[misc,name-defined]
            def initial_model(self) -> Model:
                return start

        settings = {"num_threads": inputs.num_threads}
        kinds = "DIFF" if deltas else "FULL"
        app = App("fedavg", {"buffer_size": inputs.m}, settings=settings, params_type=kinds)
        rule, checked = app.configured()
        training = core.TrainingRun(rule, start, checked, num_clients=inputs.m)
        transport, server = calls.CollabTransport(app, {}, training), training.server
        sent = [deltas_of(inputs, k) if deltas else inputs.updates[k] for k in range(len(inputs.updates))]
        replies = [
            [(kind(model_of(torch.from_numpy(vector))), {"num_steps": 1}) for vector in vectors] for vectors in sent
        ]
        names = [f"site-{client + 1}" for client in range(inputs.m)]

        def run(k: int) -> Any:
            for name in names:
                task = training.assign(name)
                training.sent(name, task, name)
            for name, reply in zip(names, replies[k], strict=True):
                training.receive(name, partial(transport._read, reply))
            return calls._for_calls(training.versions.copied(server.pull()))

        def before(k: int) -> Arrays:
            now = server.params
            return {"updates": now + sent[k].astype("f8") if deltas else sent[k], "params": now}

        return Round(run, before, lambda model: {"params": flat_of(model)})

    return make


def example(inputs: Inputs, params: Model) -> Any:
    """Return functions with the arithmetic of NVFlare's FedBuff example in Collab.

    They also copy the model for the clients.
    """

    def mean(models: list[Model]) -> Model:
        deltas = [{name: y.detach().cpu() - params[name] for name, y in model.items()} for model in models]
        total: Model = {}
        for delta in deltas:
            for name, value in delta.items():
                if name in total:
                    total[name].add_(value, alpha=1.0)
                else:
                    total[name] = value.clone().mul_(1.0)
        update = {name: value / len(models) for name, value in total.items()}
        made = {name: x.detach().clone() + 1.0 * update[name] for name, x in params.items()}
        return {name: x.detach().clone() for name, x in made.items()}

    return list, mean


def helper(kind: Callable[[Model], Model]) -> Any:
    """Return functions that compute the mean as NVFlare's FedAvg does: it adds up models as they arrive.

    The mean of the models is the next model.
    """

    def step(inputs: Inputs, params: Model) -> Any:
        aggregation = find("nvflare.app_common.aggregators.weighted_aggregation_helper").WeightedAggregationHelper()

        def mean(models: list[Model]) -> Model:
            for client, model in enumerate(models):
                aggregation.add(model, 1.0, f"site-{client + 1}", 0)
            made: Model = aggregation.get_result()
            return made

        return lambda models: [kind(model) for model in models], mean

    return step


def edge(inputs: Inputs) -> Round:
    """Return a contender that runs NVFlare's manager of models for devices.

    Its models consist of lists, as in JSON.
    """
    dxo, mud = find("nvflare.apis.dxo"), find("nvflare.edge.mud")
    context = find("nvflare.apis.fl_context").FLContext()
    manager = find("nvflare.edge.assessors.buff_model_manager").BuffModelManager(num_updates_for_model=inputs.m)
    manager.fire_event = lambda event, fl_ctx: None  # there is no engine of NVFlare here
    start = arrays_of(first_model(inputs))
    manager.initialize_model(dxo.DXO(dxo.DataKind.WEIGHTS, data=start), context)
    manager.generate_new_model(context)
    deltas = [deltas_of(inputs, k) for k in range(len(inputs.updates))]
    ready = [[arrays_of(model_of(torch.from_numpy(delta))) for delta in each] for each in deltas]
    replies: list[list[Any]] = []  # for each set, the replies of later rounds

    def replies_of(k: int) -> list[Any]:
        diffs = [dxo.DXO(dxo.DataKind.WEIGHT_DIFF, data={"dict": dict(own), "count": 1}) for own in ready[k]]
        return [mud.ModelUpdate(1, diff.to_shareable(), {str(i): 0.0}) for i, diff in enumerate(diffs)]

    def contain(k: int) -> None:
        """Make replies for each round, because the manager keeps the replies that it gets."""
        replies[:] = [[replies_of(each) for _ in range(LAPS)] for each in range(len(ready))]

    contain(0)  # for the check of errors

    def run(k: int) -> Any:
        version = manager.current_model_version
        for reply in replies[k].pop():
            manager.process_updates({version: reply}, context)
        manager.prune_model_versions({manager.current_model_version}, context)
        return manager.current_model.data

    def before(k: int) -> Arrays:
        now = flat_of(manager.current_model.data)
        return {"updates": now + deltas[k].astype("f8"), "params": now}

    return Round(run, before, lambda model: {"params": flat_of(model)}, contain)


MEAN = "checks nothing; float32 sums"
HELPER_MODULES = ("torch", "nvflare.app_common.aggregators.weighted_aggregation_helper")
EDGE_MODULES = ("torch", "nvflare.edge.assessors.buff_model_manager", "nvflare.edge.mud", "nvflare.apis.dxo")
part_of_a_round = partial(
    peer,
    caveat=f"a part of a round: of models, subtracts nothing, knows no base and no staleness; {MEAN}",
    modules=HELPER_MODULES,
)
CONTENDERS = [
    ours(
        "afflux",
        "AsyncServer: M clients assigned, their results of tensors taken in, the next state_dict made",
        by_adapter(as_they_are),
        lambda m: m + 4,
    ),
    ours("afflux, ndarrays", "the same of NumPy's arrays", by_adapter(arrays_of), lambda m: m + 4),
    ours(
        "afflux, deltas",
        "the same of NumPy's arrays, which hold what clients added",
        by_adapter(arrays_of, deltas=True),
        lambda m: m + 4,
        temporary=lambda m: 2 * m,
    ),
    peer(
        "nvflare, example",
        "y - x for each, their weighted sum, its mean added to x, a copy for the clients: its example of FedBuff",
        of(example),
        temporary=lambda m: m + 5,
        caveat=f"written after its example, without its logs and its collection of garbage; {MEAN}",
    ),
    peer(
        "nvflare, edge",
        "BuffModelManager.process_updates of M deltas; the next model in lists",
        edge,
        temporary=20,
        caveat=f"of deltas, beside afflux's of deltas; makes lists of Python's floats; {MEAN}",
        modules=EDGE_MODULES,
    ),
    part_of_a_round(
        "nvflare, helper, tensors",
        "WeightedAggregationHelper.add each, get_result()",
        of(helper(as_they_are)),
        temporary=1,
    ),
    part_of_a_round(
        "nvflare, helper, ndarrays", "the same of NumPy's arrays", of(helper(arrays_of), flat_of), temporary=3
    ),
]

NVFLARE_ADAPTER = adapter_row(
    "nvflare", "from M results of 20 arrays to the next model that can be sent", CONTENDERS, MODULES
)
