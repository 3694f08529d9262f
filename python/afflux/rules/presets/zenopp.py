"""Zeno++: a gradient is accepted by its score with a validation gradient.

@inproceedings{xie2020zenopp,
  title = {{Zeno++}: Robust Fully Asynchronous {SGD}},
  author = {Xie, Cong and Koyejo, Sanmi and Gupta, Indranil},
  booktitle = {Proceedings of the 37th International Conference on Machine Learning},
  series = {PMLR},
  volume = {119},
  year = {2020}
}
"""

from dataclasses import dataclass
from math import sqrt
from typing import ClassVar

import numpy as np

from afflux.ops.validation import check_fields, flag, not_negative
from afflux.rules.calibration import NONE
from afflux.rules.optimizers import Sgd
from afflux.rules.registry import register
from afflux.rules.rule import Arrivals, Needs, Rule, Weights
from afflux.rules.schedules import Rate


@register("score_test", "weigh")
@dataclass(frozen=True, slots=True)
class ScoreTest:
    """Zeno++'s weights (Xie, Koyejo and Gupta 2020, Algorithm 1).

    With the validation gradient v and g' = g |v| / |g|:

        accept iff gamma <v, g'> - rho |g'|^2 >= -gamma epsilon

    The direction is the mean of the accepted g'. A zero gradient is rejected. If none is accepted, no step is made, and
    the version does not change. v is the rule vector "validation": set it with Server.set_rule_vector, every few
    versions.

    Args:
        scaled: False uses |g|^2 in the place of |g'|^2, as the authors' code does.
    """

    gamma: float = 0.1
    rho: float = 0.02
    epsilon: float = 0.1
    scaled: bool = True
    needs: ClassVar[Needs] = Needs(inner=True, rule_vectors=("validation",), handed_in=("validation",))

    def __post_init__(self) -> None:
        check_fields(self, not_negative, "gamma", "rho", "epsilon")
        check_fields(self, flag, "scaled")

    def __call__(self, arrivals: Arrivals, /) -> Weights:
        """See the class."""
        inner_products = arrivals.inner(rule_vector="validation", own_weight=1.0)
        assert inner_products.products is not None  # products with v, because own_weight was given
        goal, products = inner_products.square, inner_products.products.tolist()
        weights, rejected = np.zeros(len(arrivals)), {}
        for i, square in enumerate(inner_products.squares.tolist()):
            if square == 0:
                rejected[i] = "a zero gradient"
                continue
            weights[i] = sqrt(goal) / sqrt(square)
            score = self.gamma * weights[i] * products[i] - self.rho * (goal if self.scaled else square)
            if score < -self.gamma * self.epsilon:
                rejected[i] = f"score {score:.3g} below {-self.gamma * self.epsilon:.3g}"
                weights[i] = 0.0
        accepted = len(arrivals) - len(rejected)
        return Weights(weights / max(accepted, 1), (0.0,), rejected=rejected, skip=accepted == 0)


#: Table 4 of WKAFL: gamma, rho and epsilon of the score; the validation gradient is refreshed every 2 or 5 steps.
GAMMA, RHO, EPSILON = 0.1, 0.02, 0.1


def zenopp(
    *,
    server_lr: Rate = 0.005,
    gamma: float = GAMMA,
    rho: float = RHO,
    epsilon: float = EPSILON,
    scaled: bool = True,
) -> Rule:
    """Accept a gradient only if its score with a validation gradient is high enough: for clients that may be hostile.

    x -= server_lr * g', g' = g |v| / |g|, iff gamma <v, g'> - rho |g'|^2 >= -gamma epsilon (Algorithm 1), M = 1. v is a
    validation gradient: call `server.set_rule_vector("validation", v)` every few versions. `scaled=False` uses |g|^2 in
    the second term, as the authors' code does. A rejected arrival does not advance the version. State on the server: v,
    4 d bytes. Sweeps: two, the inner products and the step.
    """
    return Rule("zenopp", "gradient", 1, ScoreTest(gamma, rho, epsilon, scaled), NONE, Sgd(server_lr))
