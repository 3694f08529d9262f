"""Zeno++: Xie, Koyejo and Gupta, Zeno++: Robust Fully Asynchronous SGD, ICML 2020."""

from afflux.calibrate import NONE
from afflux.rule import Rule
from afflux.score import ScoreTest
from afflux.step import Sgd

#: Table 4 of WKAFL: gamma, rho and epsilon of the score; the validation gradient is refreshed every 2 or 5 steps.
GAMMA, RHO, EPSILON = 0.1, 0.02, 0.1


def zenopp(
    *,
    server_lr: float = 0.005,
    gamma: float = GAMMA,
    rho: float = RHO,
    epsilon: float = EPSILON,
    scaled: bool = True,
) -> Rule:
    """x -= server_lr * g', g' = g |v| / |g|, iff gamma <v, g'> - rho |g'|^2 >= -gamma epsilon (Algorithm 1), M = 1.

    v is a validation gradient: `server.set_memory("validation", v)`, again every few versions. `scaled=False` takes
    |g|^2 in the second term, as the authors' code does. A rejected arrival does not advance the version. State on the
    server: v, 4 d bytes. Sweeps: two, the inner products and the step.
    """
    return Rule("zenopp", "gradient", 1, ScoreTest(gamma, rho, epsilon, scaled), NONE, Sgd(server_lr))
