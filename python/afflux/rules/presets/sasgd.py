"""SASGD: each gradient divided by its staleness, as a baseline of WKAFL.

@inproceedings{zhang2016sasgd,
  title = {Staleness-Aware Async-{SGD} for Distributed Deep Learning},
  author = {Zhang, Wei and Gupta, Suyog and Lian, Xiangru and Liu, Ji},
  booktitle = {Proceedings of the 25th International Joint Conference on Artificial Intelligence},
  note = {arXiv:1511.05950},
  year = {2016}
}
"""

from afflux.rules.calibration import NONE
from afflux.rules.optimizers import Sgd
from afflux.rules.rule import Rule
from afflux.rules.schedules import Rate
from afflux.rules.staleness import Inverse, StalenessLaw
from afflux.rules.weights import Staleness


def sasgd(*, buffer_size: int = 10, server_lr: Rate = 0.005, staleness: StalenessLaw = Inverse()) -> Rule:  # noqa: B008 - frozen
    """Divide each of every M gradients by its staleness: a baseline of WKAFL.

    x -= server_lr / M * sum_i g_i / max(staleness_i, 1) (WKAFL section 6.1.2).

    Args:
        buffer_size: M.
        server_lr: eta_0.
        staleness: another law; `Polynomial(1)`, 1 / (staleness + 1), counts the staleness from 1, as WKAFL's appendix
            D.1 does.

    State on the server: only params and the buffer. Sweeps: one.
    """
    return Rule("sasgd", "gradient", buffer_size, Staleness(staleness), NONE, Sgd(server_lr))
