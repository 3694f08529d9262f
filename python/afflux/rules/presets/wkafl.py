"""WKAFL: weights by the cosine with an estimate of the unbiased gradient; its second stage needs `stage_two_version`.

The buffer is read once for norms and cosines, twice if norms are clipped, and once by the step, which writes both
params and the new estimate.

@article{zhou2022wkafl,
  title = {Towards Efficient and Stable {K}-Asynchronous Federated Learning with Unbounded Stale Gradients on
    Non-{IID} Data},
  author = {Zhou, Zihao and Li, Yanan and Ren, Xuebin and Yang, Shusen},
  journal = {IEEE Transactions on Parallel and Distributed Systems},
  year = {2022}
}
"""

from dataclasses import dataclass
from math import inf, sqrt
from typing import Any, ClassVar, Literal

import numpy as np

from afflux import ops
from afflux.ops import exact
from afflux.ops.exact import ordered_sum
from afflux.ops.validation import (
    check_fields,
    finite,
    flag,
    integer,
    not_negative,
    one_of,
    one_or_less,
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

    A zero vector has cosine 0. If all are rejected, v is the estimate, and cached rows do not change. Stage two begins
    when the mean loss of the buffer is at most `stage_two_loss`, or at the version `stage_two_version`, and never ends.
    If a loss is not reported, the losses of that buffer do not begin stage two.

    Args:
        law: the staleness function a; None: all arrivals have equal weights in the estimate.
        clip: the bound CB on norms; None or inf: no bound.
        select: False uses the estimate itself as the direction.
        memory: the vector that the next round adds: the "estimate" (the paper) or v, the "aggregate" (its authors'
            code).

    Cost: one sweep over buffer and estimate, in which g_i + alpha * estimate is formed element by element, so that no
    precision is lost if the two nearly cancel. The sweep assumes that no norm exceeds `clip`; if one does, it is
    repeated with the clips. Without selection there is only a sweep for the norms, and no cosines are reported.
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
    needs: ClassVar[Needs] = Needs(inner=True, rule_vectors=("estimate",), scalars={"stage": 1.0})

    def __post_init__(self) -> None:
        check_fields(self, one_or_less, "alpha")
        check_fields(self, finite, "sim_min", "beta")
        check_fields(self, optional(positive_or_inf), "clip")
        check_fields(self, positive, "stage_two_clip")
        check_fields(self, optional(a_law), "law")
        check_fields(self, flag, "select")
        check_fields(self, one_of("estimate", "aggregate"), "memory")
        check_fields(self, optional(finite), "stage_two_loss")
        check_fields(self, optional(integer(0)), "stage_two_version")

    def __call__(self, arrivals: Arrivals, /) -> Weights:
        """See the class."""
        stage, trust = self._stage(arrivals), self._trust(arrivals)
        if not self.select:
            is_bounded = self.clip is not None and self.clip != inf
            clips = self._clips(self._asked(arrivals, None)) if is_bounded else [1.0] * len(arrivals)
            estimate = _scaled(trust, clips)
            return self._weights(stage, estimate, estimate)
        inner_products, clips = self._products(arrivals, trust)
        assert inner_products.products is not None  # because weights were given
        estimate, norms, size = _scaled(trust, clips), _roots(inner_products.squares), sqrt(inner_products.square)
        cosines = [
            0.0 if norm == 0 or size == 0 else _clamped(product / (norm * size))
            for norm, product in zip(norms, inner_products.products.tolist(), strict=True)
        ]
        rejected = {
            i: f"cosine {cosine:.3g} below {self.sim_min:g}"
            for i, cosine in enumerate(cosines)
            if cosine < self.sim_min
        }
        step = estimate
        if len(rejected) < len(arrivals):
            if stage == 2:
                bound = self.stage_two_clip * size
                clips = [clip * _shrink(clip * norm, bound) for clip, norm in zip(clips, norms, strict=True)]
            step = _scaled(self._shares(cosines, rejected), clips)
        else:
            rejected = {i: f"{why}, as all: the step is the estimate" for i, why in rejected.items()}
        memory_weights = estimate if self.memory == "estimate" else step
        return self._weights(stage, step, memory_weights, rejected, np.array(cosines))

    def _products(self, arrivals: Arrivals, trust: list[float]) -> tuple[ops.InnerProducts, list[float]]:
        """Return squares of the shifted gradients and their products with the estimate, and the factors that clip the
        gradients to `clip`.
        """
        inner_products = self._asked(arrivals, trust)
        clips = self._clips(inner_products)
        if any(clip < 1.0 for clip in clips):
            inner_products = self._asked(arrivals, _scaled(trust, clips))
        return inner_products, clips

    def _asked(self, arrivals: Arrivals, shares: list[float] | None) -> ops.InnerProducts:
        """Return the inner products of one sweep. With alpha = 0 the last estimate is not read."""
        last = "estimate" if self.alpha != 0 else None
        return arrivals.inner(None if shares is None else np.array(shares), rule_vector=last, shift=self.alpha)

    def _clips(self, inner_products: ops.InnerProducts) -> list[float]:
        return [1.0 if self.clip is None else _shrink(norm, self.clip) for norm in _roots(inner_products.squares)]

    def _weights(
        self,
        stage: int,
        step: list[float],
        memory_weights: list[float],
        rejected: dict[int, str] | None = None,
        cosines: Float64 | None = None,
    ) -> Weights:
        """Return the direction sum_i step_i (g_i + alpha * last estimate); `memory_weights` give the next estimate."""
        own = self.alpha * ordered_sum(step)
        following = np.array([[self.alpha * ordered_sum(memory_weights), *memory_weights]])
        return Weights(np.array(step), (own,), following, {"stage": float(stage)}, rejected or {}, cosines)

    def _stage(self, arrivals: Arrivals) -> int:
        mean_loss = ordered_sum(arrivals.losses) / len(arrivals)
        by_loss = self.stage_two_loss is not None and mean_loss <= self.stage_two_loss
        by_version = self.stage_two_version is not None and arrivals.version >= self.stage_two_version
        return 2 if arrivals.scalars["stage"] == 2.0 or by_loss or by_version else 1

    def _trust(self, arrivals: Arrivals) -> list[float]:
        """Return the share of each arrival in the estimate."""
        if self.law is None:
            return [1.0 / len(arrivals)] * len(arrivals)
        staleness = arrivals.staleness.tolist()
        values, total = with_sum("CosineSelection", self.law, staleness, [1.0] * len(staleness))
        return [value / total for value in values]

    def _shares(self, cosines: list[float], rejected: dict[int, str]) -> list[float]:
        """Return the p_i. The largest cosine is subtracted in the exponent, so that exp cannot overflow."""
        top = max(cosines)
        values = [0.0 if i in rejected else exact.exp(self.beta * (cosine - top)) for i, cosine in enumerate(cosines)]
        total = ordered_sum(values)
        return [value / total for value in values]


def _shrink(norm: float, bound: float) -> float:
    """Return the factor that clips a vector of this norm to a bound."""
    return bound / norm if norm > bound else 1.0


def _roots(squares: Float64) -> list[float]:
    return [sqrt(square) for square in squares.tolist()]


def _scaled(shares: list[float], clips: list[float]) -> list[float]:
    return [share * clip for share, clip in zip(shares, clips, strict=True)]


def _clamped(cosine: float) -> float:
    """Return the cosine clamped to [-1, 1], which rounding may exceed. So sim_min = -1 rejects no arrival."""
    return max(-1.0, min(1.0, cosine))


#: The paper's settings for CIFAR-10: `wkafl(**CIFAR10)`. Those for EMNIST are the defaults.
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
    """Weight every M gradients by their cosine with an estimate of the unbiased gradient, and reject small cosines.

    x -= server_lr / (1 + gamma tau_min) * sum_i p_i g'_i over the gradients with cos(g'_i, estimate) >= sim_min:
    Algorithms 2 and 3 and eq. 4 to 10: see CosineSelection for g', p and the two stages. The ablations are the paper's:
    `selection=False` steps with the estimate and reports no cosines; `staleness=False` gives all arrivals equal weights
    in the estimate, with gamma = 0 (section 4.3.4); `momentum=False` has alpha = 0. The latter two have no bound
    `clip`. Stage two begins where `stage_two_loss` or `stage_two_version` says, by default never: the paper gives no
    value for the loss. State on the server: the last estimate, 4 d bytes. Sweeps: two, the inner products and the step;
    one more where a norm exceeds `clip`.
    """
    # Checked here, because an ablation does not use them.
    alpha, gamma = one_or_less("wkafl", "alpha", alpha), not_negative("wkafl", "gamma", gamma)
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
