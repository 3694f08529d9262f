"""FedBuff with normal noise in the direction, as the rules for differential privacy need it, and without."""

from dataclasses import replace
from typing import Any

import numpy as np

from afflux import ops
from bench.rows import fedbuff
from bench.rows.passes import applied
from bench.rows.trimmed import sizes
from bench.spec.columns import BY_D, BY_M, ROLE, TIME, ULP, Line, number
from bench.spec.contender import Arrays, Round, ours
from bench.spec.inputs import LR, Inputs
from bench.spec.row import Exact

NOISE = ops.Noise(1e-3, bytes(range(32)), bytes(12))


def z(size: int) -> np.ndarray:
    """Return the noise of each element, in float64."""
    out = np.empty(size)
    ops.apply(ops.Pass(np.zeros(size), out, ops.Combine([], np.zeros(0), noise=NOISE)))
    return out


def reference(before: Arrays) -> Exact:
    exact, terms = fedbuff.reference(before)["params"]
    noise = LR * before["noise"] if "noise" in before else np.zeros(1)
    return {"params": (exact + noise, terms + np.abs(noise))}


def afflux_round(inputs: Inputs) -> Round:
    def before(k: int) -> Arrays:
        return inputs.read(k, inputs.weights, noise=z(inputs.d))

    return applied(inputs, inputs.weights, before=before, noise=NOISE, step=ops.Step("sgd", LR))


def beside_none(lines: list[Line]) -> None:
    """Add how many times as long a round takes as one without noise."""
    without: dict[Any, float] = {(line["d"], line["m"]): line["median"] for line in lines if line["name"] != "afflux"}
    for line in lines:
        line["times_without"] = line["median"] / without[line["d"], line["m"]]


NOISE_ROW = replace(
    fedbuff.FEDBUFF,
    name="noise",
    formula="out = params + lr (sum_i w_i u_i + sigma z), z normal from ChaCha20",
    counted="4 d (M + 2), as fedbuff",
    reference=reference,
    cases=sizes,
    contenders=[
        ours("afflux", "ops.apply with Combine.noise", afflux_round),
        ours("afflux, no noise", "the same without noise", fedbuff.afflux_round()),
    ],
    columns=(BY_M, BY_D, ROLE, *TIME, number("x no noise", "times_without", ".2f"), ULP),
    compare=beside_none,
)
