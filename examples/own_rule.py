"""Your own rule: a weigh part of ten lines, composed with parts of the package.

python examples/own_rule.py

One client in five pushes updates that are a thousand times too long. FedBuff follows them; FedBuff with clipped norms
does not. The rule is still applied in one fused sweep over memory.
"""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from afflux import Arrivals, Needs, Rule, Server
from afflux.rules import fedbuff
from afflux.rules.calibration import NONE
from afflux.rules.optimizers import Sgd

CLIENTS, SIZE = 10, 1000


@dataclass(frozen=True, slots=True)
class Clipped:
    """w_i = min(1, clip / norm(u_i)) / M. The sweep that copies a pushed update computes its norm."""

    clip: float
    needs: ClassVar[Needs] = Needs(
        norms=True
    )  # a step then copies the vectors, which have no norm where it reads them in place

    def __call__(self, arrivals: Arrivals, /) -> np.ndarray:
        """The weights, in the order of the arrivals."""
        shrink = [min(1.0, self.clip / norm) if norm > 0 else 1.0 for norm in arrivals.norms]
        return np.array([factor / len(arrivals) for factor in shrink])


def clipped_fedbuff(*, clip: float, buffer_size: int = 10, server_lr: float = 1.0) -> Rule:
    """x += server_lr / M sum_i min(1, clip / norm(u_i)) u_i."""
    return Rule("clipped_fedbuff", "update", buffer_size, Clipped(clip), NONE, Sgd(server_lr))


def distance_after(rule: Rule, arrivals: int = 2000) -> float:
    """Distance from the optimum of a quadratic after these arrivals."""
    rng = np.random.default_rng(0)
    optimum = rng.standard_normal(SIZE)
    server = Server(rule, np.zeros(SIZE))
    for arrival in range(arrivals):
        task = server.checkout(arrival % CLIENTS)
        update = 0.1 * (optimum - task.params) + 0.01 * rng.standard_normal(SIZE)
        if task.client % 5 == 0:
            update = 1000 * rng.standard_normal(SIZE)
        server.push(task=task, update=update)
    return float(np.linalg.norm(server.params - optimum))


if __name__ == "__main__":
    for rule in (fedbuff(buffer_size=10), clipped_fedbuff(clip=1.0)):
        print(f"{rule.name}: {distance_after(rule):.1f} from the optimum")
