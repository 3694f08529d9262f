"""FedAsync: Xie, Koyejo and Gupta, Asynchronous Federated Optimization, 2019."""

from afflux.calibrate import NONE
from afflux.errors import AffluxError
from afflux.rule import Rule
from afflux.step import Sgd
from afflux.weigh import Polynomial, Staleness, StalenessLaw


def fedasync(*, alpha: float = 0.6, staleness: StalenessLaw = Polynomial(0.5)) -> Rule:  # noqa: B008 - frozen
    """x = (1 - alpha_t) x + alpha_t y, alpha_t = alpha * s(staleness) (Algorithm 1), at every arrival.

    Clients push their models y. State on the server: nothing but params and one slot. Sweeps: one.
    """
    if not 0 <= alpha <= 1:
        raise AffluxError(f"[fedasync] alpha is {alpha}, must be between 0 and 1")
    weigh = Staleness(staleness, normalise=None, scale=alpha)
    return Rule("fedasync", "model", 1, weigh, NONE, Sgd(1.0))
