"""DiLoCo: Nesterov's momentum over the updates of workers that train for many local steps.

@article{douillard2023diloco,
  title = {{DiLoCo}: Distributed Low-Communication Training of Language Models},
  author = {Douillard, Arthur and Feng, Qixuan and Rusu, Andrei A. and Chhaparia, Rachita and Donchev, Yani and
    Kuncoro, Adhiguna and Ranzato, Marc'Aurelio and Szlam, Arthur and Shen, Jiajun},
  journal = {arXiv preprint arXiv:2311.08105},
  year = {2023}
}

@article{liu2024asynchronous,
  title = {Asynchronous Local-{SGD} Training for Language Modeling},
  author = {Liu, Bo and Chhaparia, Rachita and Douillard, Arthur and Kale, Satyen and Rusu, Andrei A. and Shen, Jiajun
    and Szlam, Arthur and Ranzato, Marc'Aurelio},
  journal = {arXiv preprint arXiv:2401.09135},
  year = {2024}
}
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from afflux.ops.errors import AffluxError
from afflux.ops.validation import check_fields, count_of, less_than_one
from afflux.rules.calibration import NONE
from afflux.rules.optimizers import Momentum, Sgd
from afflux.rules.registry import register
from afflux.rules.rule import Arrivals, Needs, Rule, Weights
from afflux.rules.schedules import Rate
from afflux.rules.weights import Uniform


@register("delayed_nesterov", "weigh")
@dataclass(frozen=True, slots=True)
class DelayedNesterov:
    """Delayed Nesterov's momentum (Liu et al. 2024, with c = 0): the velocity changes and acts in each P-th step only.

    With D = mean(u) and P = `period`, v = D / P and sum = sum + D. In each P-th step also velocity = beta velocity +
    sum / P, then v = v + beta velocity and sum = 0. `period` 1 is Nesterov's momentum.
    """

    period: int
    beta: float = 0.9
    needs: ClassVar[Needs] = Needs(rule_vectors=("delayed_velocity", "delayed_sum"), scalars={"steps": 0.0})

    def __post_init__(self) -> None:
        check_fields(self, count_of(1), "period")
        check_fields(self, less_than_one, "beta")

    def __call__(self, arrivals: Arrivals, /) -> Weights:
        """See the class."""
        period, steps, following = float(self.period), arrivals.scalars["steps"] + 1.0, np.zeros((2, 2 + len(arrivals)))
        following[1, 2:] = 1.0 / len(arrivals)
        direction = following[1] / period
        following[0, 0] = following[1, 1] = 1.0  # velocity stays, and D is added to sum
        if steps >= period:
            following[0] = self.beta * following[0] + following[1] / period
            direction, following[1], steps = direction + self.beta * following[0], 0.0, 0.0
        return Weights(direction[2:], tuple(direction[:2].tolist()), following, {"steps": steps})


def diloco(
    *,
    buffer_size: int = 8,
    server_lr: Rate = 0.7,
    beta: float = 0.9,
    dampening: float = 0.0,
    delayed: int | None = None,
) -> Rule:
    """Average workers' updates, and take the outer step of DiLoCo, Nesterov's momentum: for few, long local trainings.

    With D = mean(u): velocity = beta velocity + (1 - dampening) D, x += server_lr (D + beta velocity) (Algorithm 1,
    whose outer gradients are -u_i; the momentum is that of torch.optim.SGD). dampening = beta is momentum look-ahead.
    `delayed=P` is Delayed Nesterov for asynchronous workers (`buffer_size=1`): x += server_lr D / P at each step; the
    momentum acts at each P-th step only, and takes in the mean of P of them (Liu et al. 2024). The authors' code was
    not seen. State on the server: the velocity, 4 d bytes; `delayed`: 4 d more. Sweeps: one.
    """
    if delayed is not None:
        if dampening:
            raise AffluxError(f"[diloco] dampening is {dampening}, must be 0 with delayed")
        return Rule("diloco", "update", buffer_size, DelayedNesterov(delayed, beta), NONE, Sgd(server_lr))
    step = Momentum(server_lr, beta, dampening, nesterov=True)
    return Rule("diloco", "update", buffer_size, Uniform(), NONE, step)
