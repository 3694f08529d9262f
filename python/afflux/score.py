"""Zeno++'s weighing: arrivals are scored against a validation gradient that the server is handed."""

from dataclasses import dataclass
from math import sqrt
from typing import ClassVar

import numpy as np

from afflux.ops.validation import check_fields, flag, not_negative
from afflux.rule import Arrivals, Needs, Weights


@dataclass(frozen=True, slots=True)
class ScoreTest:
    """Zeno++'s weights (Xie, Koyejo and Gupta 2020, Algorithm 1).

    With the validation gradient v and g' = g |v| / |g|:

        accept iff gamma <v, g'> - rho |g'|^2 >= -gamma epsilon

    The direction is the mean of the accepted g'. A zero gradient is rejected. If none is accepted, no step is made and
    the version stays. v is the memory "validation": hand it in with Server.set_memory, every few versions.

    Args:
        scaled: False takes |g|^2 for |g'|^2, as the authors' code does.
    """

    gamma: float = 0.1
    rho: float = 0.02
    epsilon: float = 0.1
    scaled: bool = True
    needs: ClassVar[Needs] = Needs(gram=True, memories=("validation",), handed_in=("validation",))

    def __post_init__(self) -> None:
        check_fields(self, not_negative, "gamma", "rho", "epsilon")
        check_fields(self, flag, "scaled")

    def __call__(self, arrivals: Arrivals, /) -> Weights:
        """See the class."""
        gram = arrivals.gram
        assert gram is not None  # the rule needs it
        goal = float(gram[0, 0])
        weights, rejected = np.zeros(len(arrivals)), {}
        for i in range(len(arrivals)):
            square = float(gram[i + 1, i + 1])
            if square == 0:
                rejected[i] = "a zero gradient"
                continue
            weights[i] = sqrt(goal) / sqrt(square)
            score = self.gamma * weights[i] * float(gram[0, i + 1]) - self.rho * (goal if self.scaled else square)
            if score < -self.gamma * self.epsilon:
                rejected[i] = f"score {score:.3g} below {-self.gamma * self.epsilon:.3g}"
                weights[i] = 0.0
        accepted = len(arrivals) - len(rejected)
        return Weights(weights / max(accepted, 1), (0.0,), rejected=rejected, skip=accepted == 0)
