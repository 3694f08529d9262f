"""WKAFL: weights from an estimate of the unbiased gradient, and from each arrival's cosine with it.

Zhou, Li, Ren and Yang, Towards Efficient and Stable K-Asynchronous FL ..., IEEE TPDS 2022. Everything is computed from
the Gram matrix G of [estimate of the last round, g_1 .. g_M], so that the buffer is read once for G and once by the
step that writes both params and the new estimate.
"""

from dataclasses import dataclass
from math import sqrt
from typing import Any, ClassVar, Literal

import numpy as np

from afflux.ops import exact
from afflux.ops.exact import ordered_sum, quadratic, times
from afflux.ops.validation import (
    check_fields,
    finite,
    flag,
    integer,
    not_negative,
    one_of,
    optional,
    positive,
    positive_or_inf,
)
from afflux.rules.calibration import NONE
from afflux.rules.optimizers import Sgd
from afflux.rules.registry import register
from afflux.rules.rule import Arrivals, Float64, Needs, Rule, Weights
from afflux.rules.schedules import MinimumStaleness, Rate
from afflux.rules.staleness import Exponential, StalenessLaw, a_law
from afflux.rules.weights import with_sum


@register("cosine_selection", "weigh")
@dataclass(frozen=True, slots=True)
class CosineSelection:
    """WKAFL's weights (Zhou, Li, Ren and Yang 2022, Algorithms 2 and 3).

    With g'_i = clip(g_i + alpha * last estimate, clip):

        estimate = sum_i a_i g'_i / sum_i a_i,  a_i = law(staleness_i)      eq. 5
        p_i ~ exp(beta cos(g'_i, estimate)), 0 where the cosine < sim_min   eq. 6 to 8
        v = sum_i p_i g'_i, each first clipped to stage_two_clip * |estimate| in stage two   eq. 9

    A zero vector has cosine 0. If all are rejected, v is the estimate; cached rows stay even so. Stage two begins
    when the mean loss of the buffer is at most `stage_two_loss`, or at the version `stage_two_version`, and never ends;
    losses that clients did not report begin no stage.

    Args:
        law: None weighs all arrivals alike in the estimate.
        clip: CB, on norms; None or inf: none.
        select: False takes the estimate itself as the direction.
        memory: what the next round adds: the "estimate" (the paper) or v, the "aggregate" (its authors' code).

    Cost: O((R + M)^2) beside the gram. Precision is lost only where |estimate| is below 1e-7 of the largest |g_i|.
    """

    alpha: float = 0.1
    sim_min: float = 0.3
    beta: float = 10.0
    clip: float | None = 100.0
    stage_two_clip: float = 10.0
    law: StalenessLaw | None = Exponential()  # noqa: RUF009 - frozen
    select: bool = True
    memory: Literal["estimate", "aggregate"] = "estimate"
    stage_two_loss: float | None = None
    stage_two_version: int | None = None
    needs: ClassVar[Needs] = Needs(gram=True, rule_vectors=("estimate",), scalars={"stage": 1.0})

    def __post_init__(self) -> None:
        check_fields(self, finite, "alpha", "sim_min", "beta")
        check_fields(self, optional(positive_or_inf), "clip")
        check_fields(self, positive, "stage_two_clip")
        check_fields(self, optional(a_law), "law")
        check_fields(self, flag, "select")
        check_fields(self, one_of("estimate", "aggregate"), "memory")
        check_fields(self, optional(finite), "stage_two_loss")
        check_fields(self, optional(integer(0)), "stage_two_version")

    def __call__(self, arrivals: Arrivals, /) -> Weights:
        """See the class."""
        gram, alpha = arrivals.gram, self.alpha
        assert gram is not None  # the rule needs it
        stage = self._stage(arrivals)
        squares = [gram[i, i] + 2.0 * alpha * gram[i, 0] + alpha * alpha * gram[0, 0] for i in range(1, len(gram))]
        norms = [sqrt(max(square, 0.0)) for square in squares]
        clips = [1.0 if self.clip is None else _shrink(norm, self.clip) for norm in norms]
        estimate = self._combination(self._trust(arrivals), clips)
        size = sqrt(quadratic(gram, estimate))
        onto = times(gram, estimate)
        cosines = [
            0.0 if norm == 0 or size == 0 else _clamped((onto[i] + alpha * onto[0]) / (norm * size))
            for i, norm in enumerate(norms, 1)
        ]
        rejected = {
            i: f"cosine {cosine:.3g} below {self.sim_min:g}"
            for i, cosine in enumerate(cosines)
            if self.select and cosine < self.sim_min
        }
        step = estimate
        if self.select and len(rejected) < len(arrivals):
            if stage == 2:
                limits = [
                    _shrink(clip * norm, self.stage_two_clip * size) for clip, norm in zip(clips, norms, strict=True)
                ]
                clips = [clip * limit for clip, limit in zip(clips, limits, strict=True)]
            step = self._combination(self._shares(cosines, rejected), clips)
        elif rejected:
            rejected = {i: f"{why}, as all: the step is the estimate" for i, why in rejected.items()}
        kept = estimate if self.memory == "estimate" else step
        return Weights(step[1:], (float(step[0]),), kept[None, :], {"stage": float(stage)}, rejected, np.array(cosines))

    def _stage(self, arrivals: Arrivals) -> int:
        mean_loss = ordered_sum(arrivals.losses) / len(arrivals)
        by_loss = self.stage_two_loss is not None and mean_loss <= self.stage_two_loss
        by_version = self.stage_two_version is not None and arrivals.version >= self.stage_two_version
        return 2 if arrivals.scalars["stage"] == 2.0 or by_loss or by_version else 1

    def _trust(self, arrivals: Arrivals) -> list[float]:
        """Each arrival's share in the estimate."""
        if self.law is None:
            return [1.0 / len(arrivals)] * len(arrivals)
        staleness = arrivals.staleness.tolist()
        values, total = with_sum("CosineSelection", self.law, staleness, [1.0] * len(staleness))
        return [value / total for value in values]

    def _shares(self, cosines: list[float], rejected: dict[int, str]) -> list[float]:
        """p_i; the largest cosine is taken off in the exponent, so that exp cannot overflow."""
        top = max(cosines)
        values = [0.0 if i in rejected else exact.exp(self.beta * (cosine - top)) for i, cosine in enumerate(cosines)]
        total = ordered_sum(values)
        return [value / total for value in values]

    def _combination(self, shares: list[float], clips: list[float]) -> Float64:
        """sum_i shares_i clips_i (g_i + alpha * last estimate), as coefficients of [last estimate, g_1 .. g_M]."""
        weights = [share * clip for share, clip in zip(shares, clips, strict=True)]
        return np.array([self.alpha * ordered_sum(weights), *weights])


def _shrink(norm: float, bound: float) -> float:
    """What clips a vector of this norm to a bound."""
    return bound / norm if norm > bound else 1.0


def _clamped(cosine: float) -> float:
    """Within [-1, 1], which rounding may leave: sim_min = -1 rejects nothing."""
    return max(-1.0, min(1.0, cosine))


#: The paper's settings: `wkafl(**CIFAR10)`. alpha and sim_min are the same in both.
EMNIST_MNIST: dict[str, Any] = {"beta": 10.0, "gamma": 0.1, "clip": 100.0, "stage_two_clip": 10.0, "server_lr": 0.005}


CIFAR10: dict[str, Any] = {"beta": 50.0, "gamma": 0.01, "clip": 70.0, "stage_two_clip": 5.0, "server_lr": 0.0005}


def wkafl(
    *,
    buffer_size: int = 10,
    server_lr: Rate = 0.005,
    alpha: float = 0.1,
    sim_min: float = 0.3,
    beta: float = 10.0,
    gamma: float = 0.1,
    clip: float | None = 100.0,
    stage_two_clip: float = 10.0,
    stage_two_loss: float | None = None,
    stage_two_version: int | None = None,
    selection: bool = True,
    staleness: bool = True,
    momentum: bool = True,
    memory: Literal["estimate", "aggregate"] = "estimate",
) -> Rule:
    """x -= server_lr / (1 + gamma tau_min) * sum_i p_i g'_i over the gradients that agree with their estimate.

    Algorithms 2 and 3 and eq. 4 to 10: see CosineSelection for g', p and the two stages. The ablations are the paper's:
    `selection=False` steps with the estimate; `staleness=False` weighs all alike in it, with gamma = 0 (section 4.3.4);
    `momentum=False` has alpha = 0; the latter two are without the bound `clip`. The paper gives no value for
    `stage_two_loss`. State on the server: the last estimate, 4 d bytes. Sweeps: two, the inner products and the step.
    """
    # Checked here, because an ablation leaves them out.
    alpha, gamma = finite("wkafl", "alpha", alpha), not_negative("wkafl", "gamma", gamma)
    clip = optional(positive_or_inf)("wkafl", "clip", clip)
    staleness, momentum = flag("wkafl", "staleness", staleness), flag("wkafl", "momentum", momentum)
    weigh = CosineSelection(
        alpha if momentum else 0.0,
        sim_min,
        beta,
        clip if staleness and momentum else None,
        stage_two_clip,
        Exponential() if staleness else None,
        selection,
        memory,
        stage_two_loss,
        stage_two_version,
    )
    lr = MinimumStaleness(server_lr, gamma if staleness else 0.0)
    return Rule("wkafl", "gradient", buffer_size, weigh, NONE, Sgd(lr))
