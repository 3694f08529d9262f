"""The trimmed mean of each element, as fedtrimmedavg takes it, beside the mean of the same updates."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from afflux import ops
from bench.rows.fedbuff import functional, traffic
from bench.rows.passes import applied
from bench.rows.references import oracle
from bench.spec.columns import BY_D, BY_M, ROLE, TIME, TIMES_OURS, ULP, Line, number
from bench.spec.contender import Arrays, Round, ours, plain
from bench.spec.inputs import LR, Case, Inputs
from bench.spec.optional_torch import Tensor, torch
from bench.spec.row import QUICK_D, Asked, D, Exact, Row

SHARE = 0.2


def cut(m: int) -> int:
    """Return how many of M values are cut at each end: whole ones, as libraries do."""
    return int(SHARE * m)


def reference(before: Arrays) -> Exact:
    params, updates, weights = before["params"].astype(np.float64), before["updates"], before["weights"]
    step = LR * oracle.trimmed(updates, weights, cut(len(weights)) / len(weights))
    return {"params": (params + step, np.abs(params) + LR * weights.sum() * np.abs(updates).max(axis=0))}


def afflux_round(*, weighted: bool = False, trims: bool = True) -> Callable[[Inputs], Round]:
    """Return a contender; that of the mean has no output, as the row's reference is trimmed."""

    def make(inputs: Inputs) -> Round:
        weights, trim = inputs.weights if weighted else inputs.equal_weights, cut(inputs.m) / inputs.m
        step = applied(inputs, weights, trim=trim if trims else 0.0, step=ops.Step("sgd", LR))
        return step if trims else replace(step, after=lambda result: {})

    return make


def sorted_mean(params: Tensor, updates: list[Tensor], weights: Tensor) -> Tensor:
    ends = cut(len(updates))
    return params + LR * torch.sort(torch.stack(updates), dim=0).values[ends : len(updates) - ends].mean(0)


def sizes(asked: Asked) -> list[Case]:
    """Return one case for each M, each with at most as many bytes as twenty updates of the benchmark's size."""
    longest = QUICK_D if asked.quick else D
    return [
        Case(asked.d or min(longest, 20 * longest // m), m, asked.threads, sets=asked.sets)
        for m in ([asked.m] if asked.m else [1, 10, 32, 64])
    ]


def beside_the_mean(lines: list[Line]) -> None:
    """Add the time of the mean with this M divided by that of each contender."""
    means = {line["m"]: line["median"] for line in lines if line["name"] == MEAN.name}
    for line in lines:
        line["of_mean"] = means[line["m"]] / line["median"] if line["m"] in means else None


MEAN = ours("afflux, the mean", "ops.apply without trim", afflux_round(trims=False))
TRIMMED = Row(
    name="trimmed",
    formula="out = params + lr times the mean of u without its M / 5 largest and smallest values, element by element",
    counted="4 d (M + 2), as fedbuff",
    traffic=traffic,
    reference=reference,
    cases=sizes,
    contenders=[
        ours("afflux", "ops.apply with trim, equal weights", afflux_round()),
        ours("afflux, weighted", "the same, weights that differ", afflux_round(weighted=True)),
        MEAN,
        plain(
            "torch sort",
            "torch.sort(torch.stack(updates), dim=0).values[k:M - k].mean(0)",
            functional(sorted_mean, weighted=False),
            temporary=lambda m: 4 * m + 2,
        ),
    ],
    columns=(BY_M, BY_D, ROLE, *TIME, number("of the mean's speed, %", "of_mean", ".0f", 100), TIMES_OURS, ULP),
    compare=beside_the_mean,
)
