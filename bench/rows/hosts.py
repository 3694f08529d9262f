"""Hosts that own their loop: their lines that aggregate, and the calls of docs/guides/host.md that replace them.

A model is COUNT arrays of torch. Both sides run on one thread and write the host's own model, but for the row of a step
beside its sweep. `CPU` is the time of the process; a ratio above 1 means that afflux is faster.
"""

import ctypes
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import median
from time import process_time
from typing import Any, ClassVar

import numpy as np

from afflux import Server, aggregate, ops
from afflux.ops import Parts
from afflux.rules import fadas, fedasync, fedavg
from afflux.rules.optimizers import Momentum, Sgd
from afflux.rules.rule import Calibrate, Needs, Rule, Weights
from bench.measure import native_probes
from bench.rows import fadas as amsgrad
from bench.rows.references import weighted_sum
from bench.spec.arrays import HOST
from bench.spec.columns import BY_D, BY_M, ERROR, ROLE, SPAN, TIMES_OURS, ULP, Line, number
from bench.spec.contender import TORCH, Arrays, Contender, Round
from bench.spec.inputs import LR, Case, Float32, Inputs
from bench.spec.libraries import find
from bench.spec.optional_torch import torch
from bench.spec.row import Asked, Exact, Row
from bench.spec.streams import Streams

COUNT, MIX, BETA = 20, 0.3, 0.9  #: arrays of a model, the share of FedAsync's reply, Nesterov's momentum
SIZES, QUICK_SIZES, SHORT = [100_000, 2_500_000], [2_000], 1_000_000

#: The CPU seconds of each run, by row, contender, d and M.
_cpu: dict[tuple[str, str, int, int], list[float]] = defaultdict(list)


def cut(vector: Float32) -> dict[str, Any]:
    """Return the arrays of a model over the memory of a vector."""
    return {f"layer.{i}": torch.from_numpy(part) for i, part in enumerate(np.array_split(vector, COUNT))}


class Host:
    """A host's model and the trees of each input set."""

    def __init__(self, inputs: Inputs) -> None:
        self.inputs = inputs
        self.flat = HOST.copied(inputs.params[0])
        self.model = cut(self.flat)
        self.trees = [[cut(vector) for vector in vectors] for vectors in inputs.vectors]
        self.lists = [[list(tree.values()) for tree in trees] for trees in self.trees]
        self.arrays = list(self.model.values())
        self.states: dict[str, Any] = {}
        #: The outputs, copied by `outputs`, which is not timed.
        self.params: Callable[[], Any] = lambda: self.flat
        self.vectors: Callable[[], Any] = lambda: self.states

    def state(self, name: str, value: float) -> list[Any]:
        """Return the arrays of a state, which the outputs contain."""
        self.states[name] = HOST.filled(self.inputs.d, value)
        return list(cut(self.states[name]).values())

    def outputs(self, _: object = None) -> Arrays:
        return {"params": self.params(), **self.vectors()}


def round_of(row: str, name: str, host: Host, run: Callable[[int], object]) -> Round:
    """Return the round of a contender, whose CPU seconds are kept."""
    inputs = host.inputs
    seconds = _cpu[row, name, inputs.d, inputs.m]

    def timed(k: int) -> object:
        start = process_time()
        result = run(k)
        seconds.append(process_time() - start)
        return result

    return Round(timed, lambda k: inputs.read(k, inputs.equal_weights) | host.outputs(), host.outputs)


def fedasync_step(host: Host) -> Callable[[int], object]:
    server = Server(fedasync(alpha=MIX), host.model, num_threads=1)
    return lambda k: server.step([("ann", server.version, host.trees[k][0])], out=host.model)


def fedasync_push(host: Host) -> Callable[[int], object]:
    server = Server(fedasync(alpha=MIX), host.model, num_threads=1)

    def run(k: int) -> object:
        server.push(client="ann", version=server.version, model=host.trees[k][0])
        return server.pull(out=host.model)

    return run


def mixed_aggregate(host: Host) -> Callable[[int], object]:
    model = host.model
    return lambda k: aggregate([model, host.trees[k][0]], [1 - MIX, MIX], out=model, num_threads=1)


def mixed_by_sum(host: Host) -> Callable[[int], object]:
    """a * g + b * l, written to the host's model, as `load_state_dict` does."""

    def run(k: int) -> None:
        for mine, other in zip(host.arrays, host.lists[k][0], strict=True):
            mine.copy_((1 - MIX) * mine + MIX * other)

    return run


def mixed_by_lerp(host: Host) -> Callable[[int], object]:
    def run(k: int) -> None:
        for mine, other in zip(host.arrays, host.lists[k][0], strict=True):
            mine.lerp_(other, MIX)

    return run


def mixed(before: Arrays) -> Exact:
    params, reply = (array.astype(np.float64) for array in (before["params"], before["updates"][0]))
    return {"params": ((1 - MIX) * params + MIX * reply, (1 - MIX) * np.abs(params) + MIX * np.abs(reply))}


@dataclass(frozen=True)
class NesterovMean:
    """The direction of Nesterov's momentum from one gradient."""

    needs: ClassVar[Needs] = Needs(rule_vectors=("velocity",))

    def __call__(self, arrivals: Any) -> Weights:
        return Weights(np.array([1 + BETA]), rule_vectors=(BETA**2,), next=np.array([[BETA, 1.0]]))


def nesterov_step(host: Host) -> Callable[[int], object]:
    rule = Rule("nesterov", "gradient", 1, NesterovMean(), Calibrate(cached=False), Sgd(LR))
    server = Server(rule, host.model, num_threads=1)
    host.vectors = lambda: server.rule_vectors
    return lambda k: server.step([("ann", server.version, host.trees[k][0])], out=host.model)


def optimizer_step(host: Host, make: Callable[[Any], Any], velocity: str) -> Callable[[int], object]:
    params = [array.requires_grad_() for array in host.arrays]
    optimizer = make(params)
    for param, state in zip(params, host.state("velocity", 0), strict=True):
        optimizer.state[param][velocity] = state

    def run(k: int) -> object:
        for param, gradient in zip(params, host.lists[k][0], strict=True):
            param.grad = gradient
        return optimizer.step()

    return run


def outer_optimizer(host: Host) -> Callable[[int], object]:
    optimizer = find("afflux.integrations.torch").OuterOptimizer
    return optimizer_step(host, lambda params: optimizer(params, Momentum(LR, BETA), nesterov=True), "velocity")


def torch_nesterov(host: Host) -> Callable[[int], object]:
    return optimizer_step(
        host, lambda params: torch.optim.SGD(params, LR, momentum=BETA, nesterov=True), "momentum_buffer"
    )


def mean_aggregate(host: Host) -> Callable[[int], object]:
    ones = [1] * host.inputs.m
    return lambda k: aggregate(host.trees[k], ones, out=host.model, num_threads=1)


def mean_step(host: Host) -> Callable[[int], object]:
    server = Server(fedavg(), host.model, num_threads=1)
    host.params = lambda: server.params

    def run(k: int) -> object:
        version = server.version
        return server.step([(i, version, tree) for i, tree in enumerate(host.trees[k])])

    return run


def mean_pushes(host: Host) -> Callable[[int], object]:
    server = Server(fedavg(buffer_size=host.inputs.m), host.model, num_threads=1)
    host.params = lambda: server.params

    def run(k: int) -> object:
        version = server.version
        for client, tree in enumerate(host.trees[k]):
            server.push(client=client, version=version, update=tree)
        return None

    return run


def mean_sweep(host: Host) -> Callable[[int], object]:
    """Make the sweep of `mean_step` alone, as a server from one memory to another."""
    borders = np.cumsum([0, *(len(array) for array in host.arrays)])
    versions = [host.flat, HOST.copied(host.flat)]
    host.params = lambda: versions[0]
    sums = [
        ops.Combine([Parts(arrays, borders) for arrays in lists], host.inputs.equal_weights) for lists in host.lists
    ]

    def run(k: int) -> None:
        ops.apply(ops.Pass(versions[0], versions[1], sums[k]), num_threads=1)
        versions.reverse()

    return run


def stepped(host: Host) -> Callable[[int], object]:
    def run(k: int) -> None:
        for i, mine in enumerate(host.arrays):
            for arrays in host.lists[k]:
                mine.add_(arrays[i], alpha=1 / host.inputs.m)

    return run


def added(host: Host) -> Callable[[int], object]:
    """Sum all updates in float32, then divide."""

    def run(k: int) -> None:
        for i, mine in enumerate(host.arrays):
            mine.zero_()
            for arrays in host.lists[k]:
                mine.add_(arrays[i], alpha=1 / host.inputs.m)

    return run


def accumulated(host: Host) -> Callable[[int], object]:
    """Call the loops of a C++ kernel: the sum of weighted vectors in float32, one after the other."""
    inputs, call = host.inputs, native_probes.library().afflux_accumulate
    weights = np.full(inputs.m, 1 / inputs.m, np.float32)
    vectors = [(ctypes.c_void_p * inputs.m)(*(v.ctypes.data for v in each)) for each in inputs.vectors]
    out = host.flat.ctypes.data
    return lambda k: call(out, vectors[k], weights.ctypes.data, inputs.m, inputs.d)


def flat_aggregate(host: Host) -> Callable[[int], object]:
    ones, out = [1] * host.inputs.m, host.flat
    return lambda k: aggregate(host.inputs.vectors[k], ones, out=out, num_threads=1)


def flat_apply(host: Host) -> Callable[[int], object]:
    """What a host in C++ calls."""
    inputs, step = host.inputs, ops.Step("assign")
    sums = [ops.Combine(list(vectors), inputs.equal_weights) for vectors in inputs.vectors]
    passes = [ops.Pass(host.flat, host.flat, each, step=step) for each in sums]
    return lambda k: ops.apply(passes[k], num_threads=1)


def mean(before: Arrays) -> Exact:
    return {"params": weighted_sum(before["weights"], before["updates"])}


def step(before: Arrays) -> Exact:
    change, size = weighted_sum(before["weights"], before["updates"])
    params = before["params"].astype(np.float64)
    return {"params": (params + change, np.abs(params) + size)}


def nesterov(before: Arrays) -> Exact:
    params, velocity, gradient = (
        array.astype(np.float64) for array in (before["params"], before["velocity"], before["updates"][0])
    )
    new, size = BETA * velocity + gradient, BETA * np.abs(velocity) + np.abs(gradient)
    step, step_size = gradient + BETA * new, np.abs(gradient) + BETA * size
    return {"params": (params - LR * step, np.abs(params) + LR * step_size), "velocity": (new, size)}


def fadas_step(host: Host) -> Callable[[int], object]:
    inputs = host.inputs
    rule = fadas(buffer_size=inputs.m, server_lr=LR, initial_v=0.01**2 / inputs.m)
    server = Server(rule, host.model, num_threads=1)
    host.vectors = lambda: server.rule_vectors

    def run(k: int) -> object:
        version = server.version
        return server.step([(i, version, tree) for i, tree in enumerate(host.trees[k])], out=host.model)

    return run


def amsgrad_in_place(host: Host) -> Callable[[int], object]:
    """The lines of FADAS's script: the mean by `add_`, then the moments."""
    m = host.inputs.m
    first = 0.01**2 / m
    states = [host.state(name, value) for name, value in (("m", 0.0), ("v", first), ("v_hat", first))]
    directions = [torch.empty_like(array) for array in host.arrays]
    steps = [amsgrad.eager_step(*each) for each in zip(host.arrays, directions, *states, strict=True)]

    def run(k: int) -> None:
        for i, (direction, step) in enumerate(zip(directions, steps, strict=True)):
            direction.zero_()
            for arrays in host.lists[k]:
                direction.add_(arrays[i], alpha=1 / m)
            step()

    return run


def cases(asked: Asked, counts: tuple[int, ...]) -> list[Case]:
    lengths = [asked.d] if asked.d else QUICK_SIZES if asked.quick else SIZES
    return [
        Case(d, asked.m or m, 1, separate=True, sets=asked.sets, laps=10 if d < SHORT else 1)
        for d in lengths
        for m in counts
    ]


def by_cpu(lines: list[Line]) -> None:
    """Add CPU times, and what a step costs beside its sweep."""
    first: Line = {}
    for line in lines:
        line["cpu"] = median(_cpu[line["operation"], line["name"], line["d"], line["m"]])
        first = line if line["first"] else first
        line["times_cpu"] = line["cpu"] / first["cpu"]
        if line["name"] == "sweep":
            first["us_beside"] = 1e6 * (first["median"] - line["median"])


Form = tuple[str, str, Callable[[Host], Callable[[int], object]]]


def contender(row: str, role: Any, form: Form) -> Contender:
    name, what, make = form

    def ready(inputs: Inputs) -> Round:
        host = Host(inputs)
        return round_of(row, name, host, make(host))

    missing = native_probes.why_missing if make is accumulated else str
    return Contender(
        name, what, ready, lambda m: m + 8, 1, "float32", role, TORCH, requirement=lambda: missing() or None
    )


def hosts_row(
    name: str,
    formula: str,
    reference: Callable[[Arrays], Exact],
    counts: tuple[int, ...],
    traffic: tuple[str, Callable[[int], Streams]],
    forms: tuple[list[Form], list[Form]],
) -> Row:
    """Return a row with the calls of afflux, the most usual one first, and the host's forms."""
    name = f"hosts-{name}"
    counted, streams = traffic
    return Row(
        name=name,
        formula=formula,
        counted=counted,
        traffic=lambda m: (streams(m),),
        reference=reference,
        cases=partial(cases, counts=counts),
        contenders=[
            contender(name, role, form) for role, each in zip(("ours", "best"), forms, strict=True) for form in each
        ],
        columns=(
            BY_D,
            BY_M,
            ROLE,
            *SPAN,
            TIMES_OURS,
            number("CPU ms", "cpu", ".3f", 1e3),
            number("x afflux's CPU", "times_cpu", ".2f"),
            number("us beside the sweep", "us_beside", ".0f"),
            ERROR,
            ULP,
        ),
        compare=by_cpu,
    )


SUM = "4 d (M + 1): M vectors read, out written", lambda m: Streams(reads=(4,) * m, writes=(4,))
IN_PLACE = "4 d (M + 2): M updates read, params read and written", lambda m: Streams(reads=(4,) * m, in_place=(4,))

HOSTS = [
    hosts_row(
        "fedasync",
        "g = (1 - a) g + a l",
        mixed,
        (1,),
        IN_PLACE,
        (
            [
                ("step", "Server.step(out=model)", fedasync_step),
                ("push", "Server.push, pull(out=model)", fedasync_push),
                ("aggregate", "aggregate([model, reply], [1 - a, a], out=model)", mixed_aggregate),
            ],
            [("a*g + b*l", "copy_ of a new tensor", mixed_by_sum), ("lerp_", "g.lerp_(l, a)", mixed_by_lerp)],
        ),
    ),
    hosts_row(
        "nesterov",
        "v = b v + G, params -= lr (G + b v)",
        nesterov,
        (1,),
        ("20 d: G read, params and v read and written", lambda m: Streams(reads=(4,), in_place=(4, 4))),
        (
            [
                ("OuterOptimizer", "OuterOptimizer(Momentum, nesterov=True).step()", outer_optimizer),
                ("step", "Server.step(out=model) of a rule with one rule vector", nesterov_step),
            ],
            [("torch SGD", "torch.optim.SGD(momentum=b, nesterov=True).step()", torch_nesterov)],
        ),
    ),
    hosts_row(
        "mean",
        "out = 1/M sum_i u_i",
        mean,
        (10,),
        SUM,
        (
            [("aggregate", "aggregate(trees, ones, out=model)", mean_aggregate)],
            [("add_", "zero_, then add_(u, alpha=1/M)", added)],
        ),
    ),
    hosts_row(
        "step",
        "params += 1/M sum_i u_i",
        step,
        (10, 20),
        IN_PLACE,
        (
            [
                ("step", "Server.step", mean_step),
                ("push", "M times Server.push", mean_pushes),
                ("sweep", "ops.apply of the same arrays", mean_sweep),
            ],
            [("add_", "add_(u, alpha=1/M)", stepped)],
        ),
    ),
    hosts_row(
        "amsgrad",
        "m = b1 m + (1-b1) D, v = b2 v + (1-b2) D^2, v_hat = max(v_hat, v), params += lr m / (sqrt(v_hat) + eps)",
        amsgrad.reference,
        (1, 10),
        (
            "4 d (M + 8): M updates read; params, m, v and v_hat read and written",
            lambda m: Streams(reads=(4,) * m, in_place=(4,) * 4),
        ),
        (
            [("step", "Server.step(out=model) of fadas", fadas_step)],
            [("addcdiv_", "add_; lerp_, addcmul_, maximum, sqrt, addcdiv_", amsgrad_in_place)],
        ),
    ),
    hosts_row(
        "accumulator",
        "out = 1/M sum_i u_i",
        mean,
        (10,),
        SUM,
        (
            [
                ("apply", "ops.apply, as a host in C++ calls it", flat_apply),
                ("aggregate", "aggregate(vectors, ones, out=out)", flat_aggregate),
            ],
            [("C++", "out[j] += w[i] * u[i][j], vector by vector, -O3", accumulated)],
        ),
    ),
]
