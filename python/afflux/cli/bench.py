"""`afflux bench`: one table of the engine's operations, beside NumPy and torch.

`bench/` of the checkout measures more.
"""

import argparse
import json
import statistics
import time
from argparse import Namespace
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from importlib.util import find_spec
from typing import Any

import numpy as np

from afflux import __version__, ops
from afflux.cli.common import Parser, add_command, positive_integer
from afflux.ops import codecs

HELP = """Time the engine's operations, NumPy's and torch's, in one table, in some seconds.

The bytes are those of the definition: each input is read once, each output is
written once. The share is relative to the speed at which this machine copies
memory, measured in the same run. An operation that reads more than it writes may
be faster than a copy. A checkout has the full benchmark: python -m bench.

Examples:
  afflux bench
  afflux bench -d 1_000_000 -M 32 --threads 1
  afflux bench --json
"""

LR, BETA1, BETA2, EPSILON = 0.7, 0.9, 0.99, 1e-8
#: The factor of the memory in `inner`.
SHIFT = 0.5
CODEC = codecs.affine(4)

#: Does the operation once; returns its main output.
Timed = Callable[[], Any]


@dataclass
class Operation:
    """An operation, and its contenders: afflux, NumPy and torch."""

    name: str
    formula: str
    bytes: int
    contenders: dict[str, Timed]
    seconds: dict[str, list[float]] = field(default_factory=dict)

    def measure(self, repeats: int) -> None:
        """Time all contenders, in turn; the first call of each is not timed."""
        for call in self.contenders.values():
            call()
        for _ in range(repeats):
            for name, call in self.contenders.items():
                start = time.perf_counter()
                call()
                self.seconds.setdefault(name, []).append(time.perf_counter() - start)

    def figures(self, copy_speed: float) -> dict[str, Any]:
        """Return the figures of the operation; times are medians."""
        medians = {name: statistics.median(seconds) for name, seconds in self.seconds.items()}
        speed = self.bytes / medians["afflux"]
        return {
            "operation": self.name,
            "formula": self.formula,
            "bytes": self.bytes,
            "gbps": speed / 1e9,
            "percent_of_copy": 100 * speed / copy_speed,
            "seconds": medians,
        }


class Inputs:
    """The vectors of all operations, with pages that were written."""

    def __init__(self, d: int, m: int, num_threads: int) -> None:
        rng = np.random.default_rng(0)
        self.d, self.m, self.num_threads = d, m, num_threads
        self.params = rng.standard_normal(d, np.float32)
        self.updates = rng.standard_normal((m, d), np.float32)
        self.updates *= np.float32(0.01)
        self.weights = np.full(m, 1 / m)
        self.out = np.zeros(d, np.float32)

    def vector(self, value: float = 0.0, dtype: type = np.float32) -> Any:
        """Return a new vector with this value."""
        return np.full(self.d, value, dtype)

    def copy_speed(self, repeats: int) -> float:
        """Return the bytes a second, read and written, of the fastest copy of the updates by all threads."""
        target = self.updates.copy().reshape(-1)
        source = self.updates.reshape(-1)
        parts = [
            slice(i * source.size // self.num_threads, (i + 1) * source.size // self.num_threads)
            for i in range(self.num_threads)
        ]
        seconds = []
        with ThreadPoolExecutor(self.num_threads) as pool:
            for _ in range(repeats + 1):
                start = time.perf_counter()
                list(pool.map(lambda part: np.copyto(target[part], source[part]), parts))
                seconds.append(time.perf_counter() - start)
        return 2 * source.nbytes / min(seconds[1:])


def in_numpy_and_torch(make: Callable[[Any, Callable[[Any], Any]], Timed]) -> dict[str, Timed]:
    """Return NumPy's contender and, if torch is installed, torch's: the same formula.

    `make` gets the library, and a function that returns an array of this library over the memory of NumPy's.
    """
    calls = {"NumPy": make(np, np.asarray)}
    if find_spec("torch"):
        import torch

        calls["torch"] = make(torch, torch.from_numpy)
    return calls


def ingest(inputs: Inputs) -> Operation:
    """Return the copy of an update, the check that it is finite, and its norm."""
    update, slot = inputs.updates[0], inputs.vector()

    def make(library: Any, of: Callable[[Any], Any]) -> Timed:
        source, target = of(update), of(inputs.vector())

        def call() -> float:
            target[...] = source
            if not library.isfinite(target).all():
                raise ValueError("not finite")
            return float(library.linalg.norm(target))

        return call

    def ours() -> float:
        return ops.ingest(update, slot, num_threads=inputs.num_threads).norm

    calls = {"afflux": ours, **in_numpy_and_torch(make)}
    return Operation("ingest", "slot = u; all of u finite? |u|", 8 * inputs.d, calls)


def gram(inputs: Inputs) -> Operation:
    """Return all inner products of the updates."""

    def make(library: Any, of: Callable[[Any], Any]) -> Timed:
        matrix = of(inputs.updates)
        return lambda: matrix @ matrix.T

    vectors = list(inputs.updates)
    calls = {"afflux": lambda: ops.gram(vectors, num_threads=inputs.num_threads), **in_numpy_and_torch(make)}
    return Operation("gram", "G_ij = <u_i, u_j>", 4 * inputs.d * inputs.m, calls)


def inner(inputs: Inputs) -> Operation:
    """Return the products of the updates with their weighted sum."""
    memory, vectors = inputs.vector(0.01), list(inputs.updates)

    def ours() -> Any:
        return ops.inner(vectors, inputs.weights, memory=memory, shift=SHIFT, num_threads=inputs.num_threads).products

    def make(library: Any, of: Callable[[Any], Any]) -> Timed:
        matrix, shift, weights = of(inputs.updates), of(memory), of(inputs.weights.astype(np.float32))

        def call() -> Any:
            shifted = matrix + SHIFT * shift
            library.square(shifted).sum(1)
            return shifted @ (weights @ shifted)

        return call

    formula = "x_i = u_i + shift * memory, e = sum_i w_i x_i; |x_i|^2, <x_i, e>"
    return Operation("inner", formula, 4 * inputs.d * (inputs.m + 1), {"afflux": ours, **in_numpy_and_torch(make)})


def applied(inputs: Inputs, **stages: Any) -> Timed:
    """Return afflux's contender: one pass over the updates."""
    combine = ops.Combine(list(inputs.updates), inputs.weights)
    round = ops.Pass(inputs.params, inputs.out, combine, **stages)

    def call() -> Any:
        ops.apply(round, num_threads=inputs.num_threads)
        return inputs.out

    return call


def fedbuff(inputs: Inputs) -> Operation:
    """Return FedBuff's round."""

    def make(library: Any, of: Callable[[Any], Any]) -> Timed:
        params, updates, weights = of(inputs.params), of(inputs.updates), of(inputs.weights.astype(np.float32))
        return lambda: params + LR * (weights @ updates)

    calls = {"afflux": applied(inputs, step=ops.Step("sgd", LR)), **in_numpy_and_torch(make)}
    return Operation("fedbuff", "out = params + lr sum_i w_i u_i", 4 * inputs.d * (inputs.m + 2), calls)


def fadas(inputs: Inputs) -> Operation:
    """Return FADAS's round."""

    def moments() -> list[Any]:
        return [inputs.vector(0.01), inputs.vector(1e-4), inputs.vector(1e-4)]

    def make(library: Any, of: Callable[[Any], Any]) -> Timed:
        params, updates, weights = of(inputs.params), of(inputs.updates), of(inputs.weights.astype(np.float32))
        m, v, v_hat = map(of, moments())

        def call() -> Any:
            direction = weights @ updates
            m[...] = BETA1 * m + (1 - BETA1) * direction
            v[...] = BETA2 * v + (1 - BETA2) * direction**2
            v_hat[...] = library.maximum(v_hat, v)
            return params + LR * m / (library.sqrt(v_hat) + EPSILON)

        return call

    step = ops.Step("amsgrad", LR, BETA1, BETA2, EPSILON)
    calls = {"afflux": applied(inputs, step=step, states=moments()), **in_numpy_and_torch(make)}
    formula = "D = sum_i w_i u_i, AMSGrad's m, v, v_hat of D, out = params + lr m / (sqrt(v_hat) + eps)"
    return Operation("fadas", formula, 4 * inputs.d * (inputs.m + 8), calls)


def ca2fl(inputs: Inputs) -> Operation:
    """Return CA2FL's round, with float32 rows."""
    clients, first = 10 * inputs.m, 0.01

    def make(library: Any, of: Callable[[Any], Any]) -> Timed:
        params, updates = of(inputs.params), of(inputs.updates)
        rows, h = of(np.full_like(inputs.updates, first)), of(inputs.vector(first * inputs.m / clients))

        def call() -> Any:
            total = (updates - rows).sum(0)
            out = params + LR * (h + total / inputs.m)
            h[...] += total / clients
            rows[...] = updates
            return out

        return call

    rows = list(np.full_like(inputs.updates, first))
    total = inputs.vector(inputs.m * first, np.float64)
    calibrate = ops.CachedDifference(total, clients, rows, rows)
    calls = {"afflux": applied(inputs, calibrate=calibrate, step=ops.Step("sgd", LR)), **in_numpy_and_torch(make)}
    formula = "v = h + 1/M sum_i (u_i - h_i), out = params + lr v, h_i = u_i"
    return Operation("ca2fl", formula, 4 * inputs.d * (3 * inputs.m + 2) + 16 * inputs.d, calls)


def coded(inputs: Inputs) -> list[Operation]:
    """Return the codec's operations, which neither NumPy nor torch has."""
    update, vector = inputs.updates[0], inputs.vector()
    row = np.zeros(CODEC.row_size(inputs.d), CODEC.row_dtype)
    facts = ops.RowFacts(1)

    def encode() -> Any:
        ops.encode(update, row, codec=CODEC, facts=facts, num_threads=inputs.num_threads)
        return row

    def decode() -> Any:
        ops.decode(row, vector, codec=CODEC, num_threads=inputs.num_threads)
        return vector

    amount = 4 * inputs.d + CODEC.row_bytes(inputs.d)
    return [
        Operation("encode", f"row = Q(u), {CODEC.name}", amount, {"afflux": encode}),
        Operation("decode", "vector = the values of a row", amount, {"afflux": decode}),
    ]


def operations(inputs: Inputs) -> Iterator[Operation]:
    """Make the operations, one at a time, because each has its own state."""
    for make in (ingest, gram, inner, fedbuff, fadas, ca2fl):
        yield make(inputs)
    yield from coded(inputs)


def lines(results: Sequence[dict[str, Any]]) -> list[str]:
    """Return the table. `x` is a library's time divided by afflux's."""
    others = [name for name in ("NumPy", "torch") if any(name in result["seconds"] for result in results)]
    heads = ["MB", "ms", "GB/s", "of copy", *(head for name in others for head in (f"{name} ms", "x"))]
    widths = [max(8, len(head) + 2) for head in heads]
    table = [f"{'':<9}" + "".join(f"{head:>{width}}" for head, width in zip(heads, widths, strict=True))]
    for result in results:
        seconds = result["seconds"]
        cells = [f"{result['bytes'] / 1e6:.4g}", f"{1e3 * seconds['afflux']:.3g}", f"{result['gbps']:.1f}"]
        cells.append(f"{result['percent_of_copy']:.0f} %")
        for name in others:
            known = name in seconds
            cells += [f"{1e3 * seconds[name]:.3g}", f"{seconds[name] / seconds['afflux']:.2f}"] if known else ["", ""]
        row = "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))
        table.append(f"{result['operation']:<9}{row}   {result['formula']}")
    return table


def add_to(commands: "argparse._SubParsersAction[Parser]") -> None:
    """Add the command."""
    parser = add_command(commands, bench, HELP)
    parser.option("-d", type=positive_integer, default=5_000_000, help="Length of the vectors.")
    parser.option("-M", dest="m", type=positive_integer, default=10, help="Updates a round.")
    parser.option("--threads", type=positive_integer, help="Default: all usable cores.")
    parser.option("--repeats", type=positive_integer, default=9, help="Samples of each contender.")
    parser.flag("--json", help="Print JSON.")


def bench(arguments: Namespace) -> None:
    """Print the table (see HELP)."""
    num_threads = arguments.threads or ops.default_threads()
    if find_spec("torch"):
        import torch

        torch.set_num_threads(num_threads)
    inputs = Inputs(arguments.d, arguments.m, num_threads)
    copy_speed = inputs.copy_speed(arguments.repeats)
    results = []
    for operation in operations(inputs):
        operation.measure(arguments.repeats)
        results.append(operation.figures(copy_speed))
    isa = next(backend.name for backend in ops.backends() if backend.chosen)
    settings = {"d": arguments.d, "m": arguments.m, "threads": num_threads, "repeats": arguments.repeats}
    if arguments.json:
        box = {"afflux": __version__, "instruction_set": isa, "copy_gbps": copy_speed / 1e9}
        print(json.dumps(box | settings | {"operations": results}, indent=1))
        return
    about = f"afflux {__version__}, {isa}, {num_threads} threads"
    sizes = f"d = {arguments.d:_}, M = {arguments.m}; medians of {arguments.repeats}"
    print(f"{about}; {sizes}; a copy: {copy_speed / 1e9:.1f} GB/s\n")
    print("\n".join(lines(results)))
