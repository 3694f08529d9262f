"""The plain weighted mean: from each peer's own containers, and from flat vectors that arrive one by one."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from bench.rows import fedbuff
from bench.rows.passes import applied
from bench.rows.peers.means import COLLECTING, PEERS, Mean, Peer
from bench.rows.server import streaming
from bench.spec.arrays import HOST
from bench.spec.contender import Arrays, Contender, Round, best, count, ours, peer, plain
from bench.spec.inputs import LR, Float32, Float64, Inputs
from bench.spec.optional_torch import torch
from bench.spec.row import Exact


def examples(m: int) -> list[int]:
    """Return the clients' weights: 10 to 50 in turn."""
    return [10 * (1 + client % 5) for client in range(m)]


def weights(m: int) -> Float64:
    total = sum(examples(m))
    return np.array([count / total for count in examples(m)])


def reference(before: Arrays) -> Exact:
    """Compute FedBuff's round with a step of 1: the mean plus params for afflux, the mean alone for the others."""
    nothing = {"params": np.zeros(before["updates"].shape[1])}
    return fedbuff.reference(nothing | before | {"weights": before["weights"] / LR})


# Native containers, prebuilt

MEAN_ALONE = "float32 sums; adds nothing to params"


def containers(peer: Mean, updates: Iterable[Float32], m: int) -> list[Any]:
    return [peer.contain(client, u, n) for client, (u, n) in enumerate(zip(updates, examples(m), strict=True))]


def mean_alone(
    inputs: Inputs, run: Callable[[int], object], shares: Float64, array: Callable[[Any], Any] = np.asarray
) -> Round:
    """Return a round whose result is the mean with these weights; `array` makes an array of the result."""

    def before(k: int) -> Arrays:
        return {"updates": inputs.updates[k], "weights": shares}

    return Round(run, before, lambda result: {"params": np.asarray(array(result))})


def native(framework: Peer) -> Contender:
    def make(inputs: Inputs) -> Round:
        ready = framework.make(inputs.d, inputs.m)
        prebuilt = [containers(ready, updates, inputs.m) for updates in inputs.updates]
        return mean_alone(inputs, lambda k: ready.mean(prebuilt[k]), weights(inputs.m), ready.array)

    return peer(
        framework.name,
        framework.what,
        make,
        kept=lambda m: count(framework.kept, m) + count(framework.contained, m),
        temporary=framework.temporary,
        caveat=MEAN_ALONE,
        modules=framework.modules,
    )


def afflux_mean(inputs: Inputs) -> Round:
    return applied(inputs, weights(inputs.m))


def torch_mean(inputs: Inputs) -> Round:
    """Return the unweighted mean, computed by torch."""
    updates = [list(torch.from_numpy(block)) for block in inputs.updates]
    return mean_alone(inputs, lambda k: torch.stack(updates[k]).mean(0), inputs.equal_weights)


def torch_product(inputs: Inputs) -> Round:
    updates, out = [torch.from_numpy(block).T for block in inputs.updates], torch.empty(inputs.d)
    shares = torch.from_numpy(weights(inputs.m)).float()
    return mean_alone(inputs, lambda k: torch.mv(updates[k], shares, out=out), weights(inputs.m))


NATIVE = [
    ours("afflux", "ops.apply of M vectors, weighted; adds it to params", afflux_mean),
    plain("torch stack().mean", "torch.stack(vectors).mean(0), unweighted", torch_mean, temporary=lambda m: m + 1),
    best(
        "torch mv",
        "torch.mv(U.T, w, out=mean), contiguous U",
        torch_product,
        1,
        caveat=f"needs one contiguous matrix; {MEAN_ALONE}",
    ),
    *map(native, PEERS),
]


# End to end from flat vectors: params + LR * mean, equal weights

CHECKS_NOTHING = "checks nothing; float32 sums; overwrites params"


def flat(step: Callable[[Inputs, Any], Callable[[list[Float32]], object]]) -> Callable[[Inputs], Round]:
    """Return a contender that adds LR * mean to its params.

    `step(inputs, params)` returns a function that takes the M vectors.
    """

    def make(inputs: Inputs) -> Round:
        own = HOST.copied(inputs.params[0])
        take = step(inputs, torch.from_numpy(own))

        return Round(
            lambda k: take(inputs.vectors[k]),
            lambda k: inputs.read(k, inputs.equal_weights) | {"params": own},
            lambda _: {"params": own},
        )

    return make


def of_peer(framework: Peer) -> Contender:
    """Return a contender of containers, the peer's mean, and one torch operation that adds the mean to params."""

    def step(inputs: Inputs, params: Any) -> Callable[[list[Float32]], object]:
        ready = framework.make(inputs.d, inputs.m)

        def take(arriving: list[Float32]) -> object:
            clients = [ready.contain(client, vector, 1) for client, vector in enumerate(arriving)]
            return params.add_(torch.as_tensor(ready.array(ready.mean(clients))), alpha=LR)

        return take

    return peer(
        framework.name,
        framework.what,
        flat(step),
        kept=lambda m: count(framework.kept, m) + 1,
        temporary=lambda m: count(framework.temporary, m) + count(framework.contained, m) / 2,
        caveat=CHECKS_NOTHING,
        modules=framework.modules,
    )


def stack_mean(inputs: Inputs, params: Any) -> Callable[[list[Float32]], object]:
    return lambda arriving: params.add_(torch.stack([torch.from_numpy(u) for u in arriving]).mean(0), alpha=LR)


def into_buffer(inputs: Inputs, params: Any) -> Callable[[list[Float32]], object]:
    buffer, shares = torch.zeros(inputs.m, inputs.d), torch.full((inputs.m,), LR / inputs.m)

    def take(arriving: list[Float32]) -> object:
        for row, vector in zip(buffer, arriving, strict=True):
            row.copy_(torch.from_numpy(vector))
        return params.addmv_(buffer.T, shares)

    return take


FLAT = [
    ours("afflux", "Server.push each, the last with the round", streaming.a_round(), lambda m: m + 4),
    ours(
        "afflux, step", "Server.step of all, whose round reads each where it lies", streaming.a_round(at_once=True), 2
    ),
    ours("afflux, streaming", "the same of Server(accumulate=True)", streaming.a_round(accumulate=True), 6),
    ours(
        "afflux, bfloat16 slots",
        'the same of Server(slot_dtype="bfloat16"), which rounds each vector',
        streaming.a_round(slot_dtype="bfloat16"),
        lambda m: m / 2 + 4,
    ),
    plain(
        "torch stack().mean",
        "params.add_(torch.stack(vectors).mean(0), alpha=lr)",
        flat(stack_mean),
        1,
        lambda m: m + 1,
    ),
    best(
        "torch copy_, addmv_",
        "each into its row of a buffer, params.addmv_(buffer.T, lr / M)",
        flat(into_buffer),
        lambda m: m + 2,
        caveat=CHECKS_NOTHING,
    ),
    *(of_peer(framework) for framework in PEERS if framework is not COLLECTING),
]
