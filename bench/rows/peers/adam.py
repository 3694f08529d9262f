"""The weighted mean, and a server's Adam on it: m and v of D, params + lr m / (sqrt(v) + epsilon).

D is the mean itself or, for peers whose clients send models, the mean minus params. All contenders are far from their
first step, where bias corrections are 1, so all compute the same function. The peers' containers are made before.
"""

import logging
import warnings
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np

from afflux import ops
from afflux.rules.presets.fedopt import BETA1, BETA2, EPSILON
from bench.rows.peers import means
from bench.rows.peers.means import APPFL_MODULES, NVFLARE_MODULES, PFL_MODULES, module
from bench.rows.peers.rounds import containers, examples, weights
from bench.rows.references import adaptive_step, weighted_sum
from bench.spec.arrays import HOST
from bench.spec.contender import Arrays, Round, best, ours, peer, plain
from bench.spec.inputs import LR, Float32, Inputs
from bench.spec.libraries import find
from bench.spec.optional_torch import torch
from bench.spec.row import Exact

FAR = 10**6  #: steps after which no bias correction is left
NAMES = ("params", "m", "v")


def moments(inputs: Inputs) -> list[Float32]:
    """Return m and v of the size of the updates and params, so that no result depends on a division by almost 0."""
    return [HOST.filled(inputs.d, value) for value in (0.01, 0.01)]


def reference(before: Arrays) -> Exact:
    """Compute the step in float64: the direction is the mean of the updates, or the mean of the models minus params."""
    direction, size = weighted_sum(before["weights"], before["updates"])
    if before["models"]:
        direction -= before["params"]
        size += np.abs(before["params"])
    return adaptive_step([before[name] for name in NAMES], direction, size, (BETA1, BETA2), EPSILON)


#: A function that makes a round, and a function that returns the peer's states in the order of NAMES.
Ready = tuple[Callable[[int], object], Callable[[], tuple[Any, ...]]]


def stepping(make: Callable[[Inputs], Ready], *, models: bool = False, weighted: bool = True) -> Any:
    """Return a contender that keeps its own states; with `models`, its clients send models, not updates."""

    def ready(inputs: Inputs) -> Round:
        run, states = make(inputs)

        def now(_: object = None) -> Arrays:
            return dict(zip(NAMES, map(np.asarray, states()), strict=True))

        def before(k: int) -> Arrays:
            shares = weights(inputs.m) if weighted else inputs.equal_weights
            return inputs.read(k, shares, models=np.array(models)) | now()

        return Round(run, before, now)

    return ready


def afflux_step(inputs: Inputs) -> Ready:
    params, states = HOST.copied(inputs.params[0]), moments(inputs)
    step = ops.Step("adam", LR, BETA1, BETA2, EPSILON)
    passes = [
        ops.Pass(params, params, ops.Combine(list(block), weights(inputs.m)), step=step, states=states)
        for block in inputs.updates
    ]
    return lambda k: ops.apply(passes[k], num_threads=inputs.num_threads), lambda: (params, *states)


def eager(inputs: Inputs) -> Ready:
    own = [torch.from_numpy(array) for array in (HOST.copied(inputs.params[0]), *moments(inputs))]
    updates = [list(torch.from_numpy(block)) for block in inputs.updates]

    def run(k: int) -> object:
        params, m, v = own
        direction = torch.stack(updates[k]).mean(0)
        m = BETA1 * m + (1 - BETA1) * direction
        v = BETA2 * v + (1 - BETA2) * direction**2
        own[:] = params + LR * m / (torch.sqrt(v) + EPSILON), m, v
        return None

    return run, lambda: tuple(own)


def optimizer(model: Any, states: list[Float32], **options: Any) -> Any:
    """Make torch's Adam on the module's w, far from its first step. It subtracts, so it gets -D and keeps -m."""
    made = torch.optim.Adam([model.w], LR, (BETA1, BETA2), EPSILON, **options)
    m, v = (torch.from_numpy(state) for state in states)
    made.state[model.w] = {"step": torch.tensor(float(FAR)), "exp_avg": m.neg_(), "exp_avg_sq": v}
    return made


def own_module(inputs: Inputs) -> Any:
    return module(torch.from_numpy(HOST.copied(inputs.params[0])), trained=True)


def fused(inputs: Inputs) -> Ready:
    model, (m, v) = own_module(inputs), moments(inputs)
    step = optimizer(model, [m, v], fused=True).step
    model.w.grad = direction = torch.zeros(inputs.d)
    updates = [torch.from_numpy(block).T for block in inputs.updates]
    shares = torch.from_numpy(-weights(inputs.m)).float()

    def run(k: int) -> object:
        torch.mv(updates[k], shares, out=direction)
        return step()

    return run, lambda: (model.w.detach(), -m, v)


def nvflare(inputs: Inputs) -> Ready:
    """Return the step of NVFlare's FedOpt, without the workflow around it."""
    peer = means.nvflare(inputs.d, inputs.m, tensors=True)
    prebuilt = [containers(peer, block, inputs.m) for block in inputs.updates]
    generator = find("nvflare.app_opt.pt.fedopt").PTFedOptModelShareableGenerator({"path": "torch.optim.Adam"})
    (m, v), generator.model, generator.device = moments(inputs), own_module(inputs), torch.device("cpu")
    generator.optimizer = optimizer(generator.model, [m, v])
    warnings.filterwarnings("ignore", "To copy construct from a tensor")  # NVFlare constructs a tensor in this way

    def run(k: int) -> object:
        return generator.server_update(peer.mean(prebuilt[k]))

    return run, lambda: (generator.model.w.detach(), -m, v)


def pfl(inputs: Inputs) -> Ready:
    peer = means.pfl(inputs.d, inputs.m)
    prebuilt = [containers(peer, block, inputs.m) for block in inputs.updates]
    model, (m, v) = own_module(inputs), moments(inputs)
    model.loss = model.metrics = None  # required attributes, for training and evaluation
    central = find("pfl.model.pytorch").PyTorchModel(model, None, optimizer(model, [m, v]))
    return lambda k: central.apply_model_update(peer.mean(prebuilt[k])), lambda: (model.w.detach(), -m, v)


def reply(content: Any) -> Any:
    """Return the part of Flower's message that the aggregation reads; a real message needs a running task."""
    return SimpleNamespace(content=content, has_error=lambda: False)


def flower(inputs: Inputs) -> Ready:
    """Return the step of Flower's strategy, without the network.

    The result, a record, is unpacked as in the next round.
    """
    peer = means.flower_records(inputs.d, inputs.m)
    prebuilt = [list(map(reply, containers(peer, block, inputs.m))) for block in inputs.updates]
    logging.getLogger("flwr").setLevel(logging.WARNING)  # otherwise it logs each round
    options = {"eta": LR, "beta_1": BETA1, "beta_2": BETA2, "tau": EPSILON}
    strategy = find("flwr.serverapp.strategy").FedAdam(**options)
    (m, v), params = moments(inputs), HOST.copied(inputs.params[0])
    strategy.m_t, strategy.v_t, strategy.current_arrays = {"w": m}, {"w": v}, {"w": params}

    def run(k: int) -> object:
        arrays, _ = strategy.aggregate_train(FAR, prebuilt[k])
        strategy.current_arrays = {"w": peer.array(arrays)}
        return None

    return run, lambda: (strategy.current_arrays["w"], strategy.m_t["w"], strategy.v_t["w"])


def appfl(inputs: Inputs) -> Ready:
    options = {"client_weights_mode": "sample_size", "optimize_memory": False}
    names = ("server_learning_rate", "server_momentum_param_1", "server_momentum_param_2", "server_adapt_param")
    config = find("omegaconf").OmegaConf.create(options | dict(zip(names, (LR, BETA1, BETA2, EPSILON), strict=True)))
    model, (m, v) = own_module(inputs), moments(inputs)
    aggregator = find("appfl.algorithm.aggregator").FedAdamAggregator(model, config)
    aggregator.m_vector, aggregator.v_vector = {"w": torch.from_numpy(m)}, {"w": torch.from_numpy(v)}
    for client, count in enumerate(examples(inputs.m)):
        aggregator.set_client_sample_size(client, count)
    prebuilt = [dict(enumerate({"w": torch.from_numpy(u)} for u in block)) for block in inputs.updates]
    return (
        lambda k: aggregator.aggregate(prebuilt[k]),
        lambda: (model.w.detach(), aggregator.m_vector["w"], aggregator.v_vector["w"]),
    )


from_models = partial(stepping, models=True)
SUMS = "float32 sums"
FEDOPT = (*NVFLARE_MODULES, "nvflare.app_opt.pt.fedopt")
FLWR = ("torch", "flwr.app", "flwr.serverapp.strategy")
ADAM = "PyTorchModel.apply_model_update with torch.optim.Adam"


def with_containers(m: int) -> int:
    """Return four vectors, and containers that are copies of both input sets."""
    return 4 + 2 * m


CONTENDERS = [
    ours("afflux", "ops.apply, all in place", stepping(afflux_step), 3),
    plain(
        "torch stack().mean",
        "m, v = ..., params + lr * m / (sqrt(v) + eps), eager, unweighted",
        stepping(eager, weighted=False),
        3,
        lambda m: m + 6,
    ),
    best(
        "torch fused Adam",
        "mv, then torch.optim.Adam(fused=True)",
        stepping(fused),
        4,
        caveat="needs one contiguous matrix; float32 throughout",
    ),
    peer(
        "nvflare",
        "WeightedAggregationHelper, PTFedOptModelShareableGenerator.server_update",
        stepping(nvflare),
        4,
        5,
        SUMS,
        modules=FEDOPT,
    ),
    peer("pfl", f"SumAggregator, {ADAM}", stepping(pfl), with_containers, 5, SUMS, modules=PFL_MODULES),
    peer("flower, records", "FedAdam.aggregate_train", from_models(flower), with_containers, 12, SUMS, modules=FLWR),
    peer("appfl", "FedAdamAggregator.aggregate", from_models(appfl), 4, 6, SUMS, modules=APPFL_MODULES),
]
