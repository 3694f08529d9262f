"""FedAvgM: FedAvg with momentum on the server.

@article{hsu2019fedavgm,
  title = {Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification},
  author = {Hsu, Tzu-Ming Harry and Qi, Hang and Brown, Matthew},
  journal = {arXiv preprint arXiv:1909.06335},
  year = {2019}
}
"""

from afflux.rules.calibration import NONE
from afflux.rules.optimizers import Momentum
from afflux.rules.rule import Rule
from afflux.rules.schedules import Rate
from afflux.rules.weights import Examples


def fedavgm(*, buffer_size: int = 10, server_lr: Rate = 1.0, beta: float = 0.9, nesterov: bool = False) -> Rule:
    """Average a cohort's updates by their numbers of examples, and step with momentum: steadier if clients differ.

    velocity = beta velocity + sum_i (n_i / sum n) u_i, x += server_lr velocity (section 4.2), where M is the size of
    the cohort. With `nesterov`, x += server_lr (sum_i (n_i / sum n) u_i + beta velocity). State on the server: the
    velocity, 4 d bytes. Sweeps: one.
    """
    return Rule("fedavgm", "update", buffer_size, Examples(), NONE, Momentum(server_lr, beta, nesterov=nesterov))
