"""AFLGuard: a gradient is accepted if it is close to a gradient of the server's own data.

@inproceedings{fang2022aflguard,
  title = {{AFLGuard}: {Byzantine}-robust Asynchronous Federated Learning},
  author = {Fang, Minghong and Liu, Jia and Gong, Neil Zhenqiang and Bentley, Elizabeth S.},
  booktitle = {Annual Computer Security Applications Conference},
  year = {2022}
}
"""

from dataclasses import dataclass
from math import sqrt
from typing import ClassVar

import numpy as np

from afflux.ops.validation import check_fields, not_negative
from afflux.rules.calibration import NONE
from afflux.rules.optimizers import Sgd
from afflux.rules.registry import register
from afflux.rules.rule import Arrivals, Needs, Rule, Weights
from afflux.rules.schedules import Rate


@register("distance_test", "weigh")
@dataclass(frozen=True, slots=True)
class DistanceTest:
    """AFLGuard's test (Fang et al. 2022, Algorithm 1): g_i is accepted iff |g_i - v| <= lambda |v|, lambda = `most`.

    The direction is the mean of the accepted gradients; if none is accepted, no step is made. v is the rule vector
    "validation": set it with Server.set_rule_vector, every few versions.
    """

    most: float = 1.5
    needs: ClassVar[Needs] = Needs(inner=True, rule_vectors=("validation",), handed_in=("validation",))

    def __post_init__(self) -> None:
        check_fields(self, not_negative, "most")

    def __call__(self, arrivals: Arrivals, /) -> Weights:
        """See the class."""
        inner_products = arrivals.inner(rule_vector="validation", own_weight=1.0)
        assert inner_products.products is not None  # products with v, because own_weight was given
        goal, weights, rejected = inner_products.square, np.zeros(len(arrivals)), {}
        pairs = zip(inner_products.products.tolist(), inner_products.squares.tolist(), strict=True)
        for i, (product, square) in enumerate(pairs):
            distance = max(square - 2.0 * product + goal, 0.0)
            if distance > self.most * self.most * goal:
                rejected[i] = f"distance {sqrt(distance):.3g} above {self.most * sqrt(goal):.3g}"
            else:
                weights[i] = 1.0
        accepted = len(arrivals) - len(rejected)
        weights *= 1.0 / max(accepted, 1)
        return Weights(weights, (0.0,), rejected=rejected, skip=accepted == 0)


def aflguard(*, buffer_size: int = 1, server_lr: Rate = 0.1, most: float = 1.5) -> Rule:
    """Accept a gradient only if it is close to a validation gradient: for clients that may be hostile, M = 1.

    x -= server_lr * g iff |g - v| <= most |v| (Algorithm 1, lambda = `most`), of a larger buffer by the mean of the
    accepted gradients. v is a gradient of the server's own data: call `server.set_rule_vector("validation", v)` every
    few versions. A rejected arrival does not advance the version. The authors' code was not seen. State on the server:
    v, 4 d bytes. Sweeps: two, the inner products and the step.
    """
    return Rule("aflguard", "gradient", buffer_size, DistanceTest(most), NONE, Sgd(server_lr))
