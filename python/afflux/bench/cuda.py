"""The rows on a GPU: CUDA events, the best device-to-device probe of the same run, torch and CuPy beside ours.

python -m afflux.bench.cuda [d ...]      without typer and rich, which a bare machine may lack
"""

import random
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from afflux import codecs, ops
from afflux._arrays import on_host
from afflux.bench.baselines import torch
from afflux.rules.fadas import BETA1, BETA2, EPSILON

LR, M = 0.7, 10
D, SMALL = 100_000_000, 10_000
REPEATS = 20

Run = Callable[[], object]
#: Copies a NumPy array to where the row shall run.
Put = Callable[[np.ndarray], Any]


@dataclass(frozen=True)
class Made:
    """One row's arrays by name, the bytes that it moves, and our way to do it."""

    arrays: dict[str, Any]
    bytes: int
    run: Run


@dataclass
class Timed:
    row: str
    name: str
    bytes: int
    run: Run
    seconds: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)


def inputs(d: int, put: Put, states: int = 0) -> dict[str, Any]:
    """Normal vectors; long ones repeat themselves."""
    rng = np.random.default_rng(d)
    block = rng.standard_normal(min(d, 2**21), np.float32)
    arrays: dict[str, Any] = {"params": put(np.resize(block, d)), "out": put(np.zeros(d, np.float32))}
    arrays["updates"] = [put(np.resize(np.roll(block, 97 * i + 1), d) * np.float32(0.01)) for i in range(M)]
    arrays["states"] = [put(np.full(d, 1e-5, np.float32)) for _ in range(states)]
    return arrays


def weights() -> np.ndarray:
    return np.full(M, 1 / M)


def fedbuff(d: int, put: Put) -> Made:
    a = inputs(d, put)
    sweep = ops.Pass(a["params"], a["out"], ops.Combine(a["updates"], weights()), step=ops.Sgd(LR))
    return Made(a, 4 * d * (M + 2), lambda: ops.apply(sweep))


def fadas(d: int, put: Put) -> Made:
    a = inputs(d, put, states=3)
    step = ops.Adaptive("amsgrad", LR, BETA1, BETA2, EPSILON)
    sweep = ops.Pass(a["params"], a["out"], ops.Combine(a["updates"], weights()), None, step, a["states"])
    return Made(a, 4 * d * (M + 8), lambda: ops.apply(sweep))


def cached(codec: codecs.Codec) -> Callable[[int, Put], Made]:
    """CA2FL with rows of this codec."""

    def make(d: int, put: Put) -> Made:
        a = inputs(d, put)
        rows = [np.empty(codec.row_size(d), codec.row_dtype) for _ in range(M)]
        source = np.resize(np.random.default_rng(1).standard_normal(2**21, np.float32), d)
        facts = [ops.RowFacts(i, -6.0, 6.0) for i in range(M)]
        for row, fact in zip(rows, facts, strict=True):
            ops.encode(source, row, codec=codec, facts=fact)
        a["rows"], a["sum"] = [put(row) for row in rows], put(np.zeros(d))
        stage = ops.CachedDifference(a["sum"], 10 * M, a["rows"], a["rows"], codec, facts)
        sweep = ops.Pass(a["params"], a["out"], ops.Combine(a["updates"], weights()), stage, ops.Sgd(LR))
        moved = 4 * d * (M + 2) + 16 * d + 2 * M * codec.row_bytes(d)
        return Made(a, moved, lambda: ops.apply(sweep))

    return make


def wkafl(d: int, put: Put) -> Made:
    """The two sweeps: inner products of the estimate and the updates, then both linear combinations of them."""
    a = inputs(d, put, states=1)
    following = np.full((1, M + 1), 0.1)
    memory = ops.Memory(a["states"], np.array([0.1]), following)
    mix = ops.Combine(a["updates"], weights())
    sweep = ops.Pass(a["params"], a["out"], mix, step=ops.Sgd(-LR), memory=memory)

    def run() -> None:
        ops.gram([*a["states"], *a["updates"]])
        ops.apply(sweep)

    return Made(a, 4 * d * (2 * M + 5), run)


ROWS: dict[str, Callable[[int, Put], Made]] = {
    "fedbuff": fedbuff,
    "fadas": fadas,
    "ca2fl": cached(codecs.float32),
    "mf-ca2fl, 4 bits": cached(codecs.affine(4)),
    "wkafl": wkafl,
}


def plain(row: str, a: dict[str, Any]) -> Callable[..., Any] | None:
    """What torch is asked to do, in float32; None where there is nothing like it."""
    p, out, updates = a["params"], a["out"], a["updates"]

    def mean() -> Any:
        total = updates[0] / M
        for update in updates[1:]:
            total = total + update / M
        return total

    def adaptive() -> Any:
        m, v, v_hat = a["states"]
        v_d = mean()
        m.copy_(BETA1 * m + (1 - BETA1) * v_d)
        v.copy_(BETA2 * v + (1 - BETA2) * v_d * v_d)
        v_hat.copy_(torch.maximum(v_hat, v))
        return out.copy_(p + LR * m / (v_hat.sqrt() + EPSILON))

    def difference() -> Any:
        rows, total = a["rows"], a["sum"]
        h, change = total / (10 * M), updates[0] - rows[0]
        for update, kept in zip(updates[1:], rows[1:], strict=True):
            change = change + (update - kept)
        out.copy_(p + LR * (h + change / M))
        total.add_(change)
        for update, kept in zip(updates, rows, strict=True):
            kept.copy_(update)
        return out

    return {"fedbuff": lambda: out.copy_(p + LR * mean()), "fadas": adaptive, "ca2fl": difference}.get(row)


def others(row: str, a: dict[str, Any]) -> Iterator[tuple[str, Run]]:
    """torch and CuPy on the same arrays."""
    doing = plain(row, a)
    if doing is None:
        return
    yield "torch eager", doing
    yield "torch.compile", torch.compile(doing)
    if row == "fedbuff":
        if "cupy" in sys.modules:
            cupy = sys.modules["cupy"]
            p, out, *updates = (cupy.from_dlpack(x) for x in (a["params"], a["out"], *a["updates"]))

            def in_cupy() -> None:
                out[...] = p
                for update in updates:
                    out[...] += np.float32(LR / M) * update

            yield "CuPy", in_cupy
        graph = torch.cuda.CUDAGraph()
        doing()
        with torch.cuda.graph(graph):
            doing()
        yield "torch eager in a CUDA graph", graph.replay
        one = a["out"][:1]
        yield "one empty launch", one.zero_


def probes(a: dict[str, Any]) -> Iterator[tuple[str, int, Run]]:
    """Device to device: copies, sums and products in place of long vectors."""
    size, (x, y) = a["out"].numel(), a["updates"][:2]
    yield "copy_", 8 * size, lambda: a["out"].copy_(x)
    yield "mul_", 8 * size, lambda: a["out"].mul_(1.0)
    yield "add, out=", 12 * size, lambda: torch.add(x, y, out=a["out"])
    yield "sum", 4 * size, x.sum


def measured(everyone: list[Timed], repeats: int) -> None:
    """Everyone has a turn in every repeat, in a new order, between two events."""
    shuffle = random.Random(0).shuffle
    for timed in everyone:
        timed.run()
    for _ in range(repeats):
        shuffle(everyone)
        for timed in everyone:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            timed.run()
            end.record()
            end.synchronize()
            timed.seconds.append(begin.elapsed_time(end) / 1e3)


def agrees(row: str, put: Put, d: int = 70_001) -> bool:
    """Whether what the row writes there has the CPU's bits."""
    made = [ROWS[row](d, where) for where in (np.array, put)]
    for one in made:
        one.run()
    flat = [[*m.arrays["states"], *m.arrays.get("rows", []), m.arrays["out"], m.arrays.get("sum")] for m in made]
    pairs = [(mine, on_host(theirs)) for mine, theirs in zip(*flat, strict=True) if mine is not None]
    return all(mine.tobytes() == theirs.tobytes() for mine, theirs in pairs)


def table(d: int, put: Put, repeats: int = REPEATS, rows: list[str] | None = None) -> list[tuple[str, ...]]:
    """One line for each contender: row, name, ms, GB/s, % of the best probe, times our time, whether the bits agree."""
    lines: list[tuple[str, ...]] = []
    for row in rows or list(ROWS):
        made = ROWS[row](d, put)
        everyone = [Timed(row, "afflux", made.bytes, made.run, [])]
        everyone += [Timed(row, name, made.bytes, run, []) for name, run in others(row, made.arrays)]
        tried = [Timed("", name, size, run, []) for name, size, run in probes(made.arrays)]
        ours, names = everyone[0], [timed.name for timed in everyone]
        measured([*everyone, *tried], repeats)
        limit = max(timed.bytes / timed.median for timed in [*everyone[:1], *tried])
        for timed in sorted(everyone, key=lambda timed: names.index(timed.name)):
            speed, bits = timed.bytes / timed.median, "" if timed is not ours else str(agrees(row, put))
            figures = (f"{1e3 * timed.median:.3f}", f"{speed / 1e9:.0f}", f"{100 * speed / limit:.0f}")
            lines.append((row, timed.name, *figures, f"{timed.median / ours.median:.2f}", bits))
    return lines


HEADER = ("row", "who", "ms", "GB/s", "% of limit", "x ours", "CPU's bits")


def why_not() -> str:
    """Why there is nothing to measure; empty if there is."""
    if torch is None:
        return "torch is not installed"
    (reason,) = [backend.why_not for backend in ops.backends() if backend.name == "cuda"]
    return reason or ("" if torch.cuda.is_available() else "torch finds no GPU")


def run(sizes: list[int], repeats: int = REPEATS) -> None:
    """Prints a table for each d."""
    for d in sizes:
        print(f"{torch.cuda.get_device_name()}, d = {d:_}, M = {M}, float32, medians of {repeats}")
        lines = [HEADER, *table(d, lambda array: torch.tensor(array, device="cuda"), repeats)]
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        for line in lines:
            print("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip())


if __name__ == "__main__":
    if reason := why_not():
        sys.exit(f"no GPU bench: {reason}")
    run([int(size) for size in sys.argv[1:]] or [D, SMALL])
