"""FedAsync: every arriving model is mixed in, by its staleness.

@article{xie2019fedasync,
  title = {Asynchronous Federated Optimization},
  author = {Xie, Cong and Koyejo, Sanmi and Gupta, Indranil},
  journal = {arXiv preprint arXiv:1903.03934},
  year = {2019}
}
"""

from afflux.ops.validation import one_or_less
from afflux.rules.calibration import NONE
from afflux.rules.optimizers import Sgd
from afflux.rules.rule import Rule
from afflux.rules.staleness import Polynomial, StalenessLaw
from afflux.rules.weights import Staleness


def fedasync(*, alpha: float = 0.6, staleness: StalenessLaw = Polynomial(0.5)) -> Rule:  # noqa: B008 - frozen
    """Mix each client's model into the global model as it arrives; the staler a model, the smaller its share.

    x = (1 - alpha_t) x + alpha_t y, alpha_t = alpha * s(staleness) (Algorithm 1). Clients push their models y. A round
    of several, as by `Server.step`, is the mean of what each alone would give. State on the server: only params and one
    slot. Sweeps: one.
    """
    weigh = Staleness(staleness, scale=one_or_less("fedasync", "alpha", alpha))
    return Rule("fedasync", "model", 1, weigh, NONE, Sgd(1.0))
