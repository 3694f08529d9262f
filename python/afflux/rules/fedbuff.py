"""FedBuff: Nguyen et al., Federated Learning with Buffered Asynchronous Aggregation, 2022."""

from afflux.calibrate import NONE
from afflux.rule import Rule
from afflux.step import Sgd
from afflux.weigh import Normalise, Polynomial, Staleness, StalenessLaw


def fedbuff(
    *,
    buffer_size: int = 10,
    server_lr: float = 1.0,
    staleness: StalenessLaw = Polynomial(0.5),  # noqa: B008 - frozen
    normalise: Normalise = "count",
) -> Rule:
    """x += server_lr / M * sum_i s(staleness_i) u_i (Algorithm 1), s(t) = (1 + t)^-1/2 by default (section 5).

    `normalise="weights"` divides by sum s instead of M. With `staleness=Constant()` this is the Async FL baseline of
    CA2FL and FADAS. State on the server: nothing but params and the buffer. Sweeps: one.
    """
    weigh = Staleness(staleness, normalise)
    return Rule("fedbuff", "update", buffer_size, weigh, NONE, Sgd(server_lr))
