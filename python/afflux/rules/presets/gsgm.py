"""GSGM: passes over all clients, and a global momentum, as a baseline of WKAFL.

@article{li2019gsgm,
  title = {Gradient Scheduling with Global Momentum for Non-{IID} Data Distributed Asynchronous Training},
  author = {Li, Chengjie and Li, Ruixuan and Wang, Haozhao and Li, Yuhua and Zhou, Pan and Guo, Song and Li, Keqin},
  journal = {arXiv preprint arXiv:1902.07848},
  year = {2019}
}
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from afflux.ops.validation import check_fields, one_or_less
from afflux.rules.calibration import NONE
from afflux.rules.optimizers import Sgd
from afflux.rules.registry import register
from afflux.rules.rule import Arrivals, Needs, Rule, Weights
from afflux.rules.schedules import Rate


@register("gradient_scheduling", "weigh")
@dataclass(frozen=True, slots=True)
class GradientScheduling:
    """v = alpha * momentum + mean(g); after a pass, momentum = the mean of its rounds' directions v.

    GSGM (Li et al. 2020) with M gradients per step, as in the comparisons of WKAFL's authors. Each client enters once
    per pass; then it is blocked until the pass ends. The last buffer of a pass may be short.
    """

    alpha: float = 0.1
    needs: ClassVar[Needs] = Needs(rule_vectors=("momentum", "pass_sum"), scalars={"rounds_in_pass": 0.0}, passes=True)

    def __post_init__(self) -> None:
        check_fields(self, one_or_less, "alpha")

    def __call__(self, arrivals: Arrivals, /) -> Weights:
        """See the class."""
        share = np.full(len(arrivals), 1.0 / len(arrivals))
        rounds = arrivals.scalars["rounds_in_pass"] + 1.0
        total = np.array([self.alpha, 1.0, *share])  # pass_sum + v, over [momentum, pass_sum, g_1 .. g_M]
        next_ = np.zeros((2, len(total)))
        if arrivals.ends_pass:
            next_[0] = total / rounds
            rounds = 0.0
        else:
            next_[0, 0] = 1.0
            next_[1] = total
        return Weights(share, (self.alpha, 0.0), next_, {"rounds_in_pass": rounds})


def gsgm(*, buffer_size: int = 10, server_lr: Rate = 0.005, alpha: float = 0.1) -> Rule:
    """Take each client's gradient once per pass over all clients, with a global momentum: a baseline of WKAFL.

    x -= server_lr * (alpha * momentum + mean(g)); momentum is the mean of the last pass's directions. A client enters
    once per pass over all N clients (WKAFL section 6.1.2). State on the server: momentum and the sum of the pass, 8 d
    bytes. Sweeps: one.
    """
    return Rule("gsgm", "gradient", buffer_size, GradientScheduling(alpha), NONE, Sgd(server_lr))
