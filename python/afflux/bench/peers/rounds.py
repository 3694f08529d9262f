"""The plain weighted mean: from each peer's own containers, and from flat vectors that arrive one by one."""

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from afflux import Server, ops
from afflux.bench.baselines import torch, vectors
from afflux.bench.contender import Arrays, Contender, Round
from afflux.bench.inputs import LR, Float32, Float64, Inputs
from afflux.bench.peers.find import absent
from afflux.bench.peers.means import COLLECTING, PEERS, Mean, Peer
from afflux.bench.row import Exact
from afflux.rules.fedbuff import fedbuff


def examples(m: int) -> list[int]:
    """The clients' weights: 10 to 50 in turn."""
    return [10 * (1 + client % 5) for client in range(m)]


def weights(m: int) -> Float64:
    total = sum(examples(m))
    return np.array([count / total for count in examples(m)])


def reference(before: Arrays) -> Exact:
    """params, if there are any, plus the weighted sum; one update at a time, so that the temporaries stay small."""
    out = before.get("params", np.zeros(before["updates"].shape[1])).astype(np.float64)
    size = np.abs(out)
    for weight, update in zip(before["weights"], before["updates"], strict=True):
        term = weight * update.astype(np.float64)
        out += term
        size += np.abs(term)
    return {"params": (out, size)}


# Native containers, prebuilt


def containers(peer: Mean, updates: Iterable[Float32], m: int) -> list[Any]:
    return [peer.contain(client, u, n) for client, (u, n) in enumerate(zip(updates, examples(m), strict=True))]


def native(peer: Peer) -> Contender:
    def make(inputs: Inputs) -> Round:
        ready = peer.make(inputs.d, inputs.m)
        prebuilt = [containers(ready, updates, inputs.m) for updates in inputs.updates]

        def before(k: int) -> Arrays:
            return {"updates": inputs.updates[k], "weights": weights(inputs.m)}

        return Round(
            lambda k: ready.mean(prebuilt[k]), before, lambda result: {"params": np.asarray(ready.array(result))}
        )

    return Contender(
        peer.name,
        peer.what,
        make,
        kept=lambda d, m: peer.kept(d, m) + peer.contained(d, m),
        temporary=peer.temporary,
        absent=lambda: absent(*peer.modules),
    )


def afflux_mean(inputs: Inputs) -> Round:
    updates = [list(block) for block in inputs.updates]
    passes = [
        ops.Pass(params, inputs.out, ops.Combine(vectors, weights(inputs.m)))
        for params, vectors in zip(inputs.params, updates, strict=True)
    ]

    def run(k: int) -> object:
        ops.apply(passes[k], num_threads=inputs.num_threads)
        return inputs.out

    def before(k: int) -> Arrays:
        return {"params": inputs.params[k], "updates": inputs.updates[k], "weights": weights(inputs.m)}

    return Round(run, before, lambda _: {"params": inputs.out})


def torch_mean(inputs: Inputs) -> Round:
    """Unweighted, as it is written."""
    updates = [list(torch.from_numpy(block)) for block in inputs.updates]

    def before(k: int) -> Arrays:
        return {"updates": inputs.updates[k], "weights": inputs.equal_weights}

    return Round(lambda k: torch.stack(updates[k]).mean(0), before, lambda result: {"params": np.asarray(result)})


NATIVE = [Contender("afflux", "ops.apply of M vectors, weighted; adds it to params", afflux_mean)]
if torch is not None:
    NATIVE.append(
        Contender(
            "torch stack().mean",
            "torch.stack(vectors).mean(0), unweighted",
            torch_mean,
            temporary=vectors(lambda m: m + 1),
            plain=True,
        )
    )
NATIVE += [native(peer) for peer in PEERS]


# End to end from flat vectors: params + LR * mean, equal weights


def server(inputs: Inputs) -> Round:
    own = Server(
        fedbuff(buffer_size=inputs.m, server_lr=LR),
        inputs.params[0],
        num_threads=inputs.num_threads,
        push_threads=inputs.num_threads,
    )

    def run(k: int) -> object:
        push, version = own.push, own.version
        for client, vector in enumerate(inputs.vectors[k]):
            push(client, vector, version=version)
        return None

    def before(k: int) -> Arrays:
        return {"params": own.params, "updates": inputs.updates[k], "weights": LR * inputs.equal_weights}

    return Round(run, before, lambda _: {"params": own.params})


def flat(step: Callable[[Inputs, Any], Callable[[list[Float32]], object]]) -> Callable[[Inputs], Round]:
    """A contender that adds LR * mean to its own params: `step(inputs, params)` gives what takes the M vectors."""

    def make(inputs: Inputs) -> Round:
        own = inputs.params[0].copy()
        take = step(inputs, torch.from_numpy(own))

        def before(k: int) -> Arrays:
            return {"params": own, "updates": inputs.updates[k], "weights": LR * inputs.equal_weights}

        return Round(lambda k: take(inputs.vectors[k]), before, lambda _: {"params": own})

    return make


def of_peer(peer: Peer) -> Contender:
    """Containers, the peer's mean, and one torch operation that adds it to params: the same for all peers."""

    def step(inputs: Inputs, params: Any) -> Callable[[list[Float32]], object]:
        ready = peer.make(inputs.d, inputs.m)

        def take(arriving: list[Float32]) -> object:
            clients = [ready.contain(client, vector, 1) for client, vector in enumerate(arriving)]
            return params.add_(torch.as_tensor(ready.array(ready.mean(clients))), alpha=LR)

        return take

    return Contender(
        peer.name,
        peer.what,
        flat(step),
        kept=lambda d, m: peer.kept(d, m) + 4 * d,
        temporary=lambda d, m: peer.temporary(d, m) + peer.contained(d, m) // 2,
        absent=lambda: absent(*peer.modules),
    )


def stack_mean(inputs: Inputs, params: Any) -> Callable[[list[Float32]], object]:
    def take(arriving: list[Float32]) -> object:
        return params.add_(torch.stack([torch.from_numpy(vector) for vector in arriving]).mean(0), alpha=LR)

    return take


def into_buffer(inputs: Inputs, params: Any) -> Callable[[list[Float32]], object]:
    buffer, shares = torch.zeros(inputs.m, inputs.d), torch.full((inputs.m,), LR / inputs.m)

    def take(arriving: list[Float32]) -> object:
        for row, vector in zip(buffer, arriving, strict=True):
            row.copy_(torch.from_numpy(vector))
        return params.addmv_(buffer.T, shares)

    return take


FLAT = [Contender("afflux", "Server.push each, the last with the round", server, vectors(lambda m: m + 4))]
if torch is not None:
    FLAT += [
        Contender(
            "torch stack().mean",
            "params.add_(torch.stack(vectors).mean(0), alpha=lr)",
            flat(stack_mean),
            vectors(lambda m: 1),
            vectors(lambda m: m + 1),
            plain=True,
        ),
        Contender(
            "torch copy_, addmv_",
            "best: each into its row of a buffer, params.addmv_(buffer.T, lr / M)",
            flat(into_buffer),
            vectors(lambda m: m + 1),
        ),
    ]
FLAT += [of_peer(peer) for peer in PEERS if peer is not COLLECTING]
