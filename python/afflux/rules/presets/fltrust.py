"""FLTrust: gradients weighted by their cosines with a gradient of the server's own data.

@inproceedings{cao2021fltrust,
  title = {{FLTrust}: {Byzantine}-robust Federated Learning via Trust Bootstrapping},
  author = {Cao, Xiaoyu and Fang, Minghong and Liu, Jia and Gong, Neil Zhenqiang},
  booktitle = {Network and Distributed System Security Symposium},
  year = {2021}
}
"""

from dataclasses import dataclass
from math import sqrt
from typing import ClassVar

import numpy as np

from afflux.ops.exact import ordered_sum
from afflux.rules.calibration import NONE
from afflux.rules.optimizers import Sgd
from afflux.rules.registry import register
from afflux.rules.rule import Arrivals, Needs, Rule, Weights
from afflux.rules.schedules import Rate


@register("trust_scores", "weigh")
@dataclass(frozen=True, slots=True)
class TrustScores:
    """FLTrust's weights (Cao et al. 2021, Algorithm 2): t_i |v| / |g_i| / sum t, with t_i = max(0, cos(g_i, v)).

    v is the rule vector "validation": set it with Server.set_rule_vector, every few versions. An arrival whose score is
    0 is rejected; if all are, no step is made. Each client is in a buffer once.
    """

    needs: ClassVar[Needs] = Needs(inner=True, rule_vectors=("validation",), handed_in=("validation",), once=True)

    def __call__(self, arrivals: Arrivals, /) -> Weights:
        """See the class."""
        inner_products = arrivals.inner(rule_vector="validation", own_weight=1.0)
        assert inner_products.products is not None  # products with v, because own_weight was given
        goal, scores, scales = sqrt(inner_products.square), [], []
        for product, square in zip(inner_products.products.tolist(), inner_products.squares.tolist(), strict=True):
            norm = sqrt(square)
            has_cosine = goal > 0 and norm > 0
            scores.append(min(1.0, max(0.0, product / norm / goal)) if has_cosine else 0.0)
            scales.append(goal / norm if has_cosine else 0.0)
        total = ordered_sum(scores)
        weights = np.array([score * scale / (total or 1.0) for score, scale in zip(scores, scales, strict=True)])
        return Weights(
            weights,
            (0.0,),
            rejected={i: "no positive cosine with the validation gradient" for i, t in enumerate(scores) if t == 0},
            skip=total == 0,
        )


def fltrust(*, buffer_size: int = 10, server_lr: Rate = 0.1) -> Rule:
    """Weight gradients by their cosines with a validation gradient, at its length: for clients that may be hostile.

    x -= server_lr * sum_i t_i (|v| / |g_i|) g_i / sum t, t_i = max(0, cos(g_i, v)) (Algorithm 2). v is a gradient of
    the server's own data: call `server.set_rule_vector("validation", v)` every few versions. Without a positive t_i the
    server takes no step. The authors' code was not seen; the paper takes updates of one synchronous round. State on the
    server: v, 4 d bytes. Sweeps: two, the inner products and the step.
    """
    return Rule("fltrust", "gradient", buffer_size, TrustScores(), NONE, Sgd(server_lr))
