"""FedAvg: the mean of a cohort's updates, by their numbers of examples.

@inproceedings{mcmahan2017fedavg,
  title = {Communication-Efficient Learning of Deep Networks from Decentralized Data},
  author = {McMahan, Brendan and Moore, Eider and Ramage, Daniel and Hampson, Seth and {Agüera y Arcas}, Blaise},
  booktitle = {Artificial Intelligence and Statistics},
  series = {PMLR},
  pages = {1273--1282},
  year = {2017}
}
"""

from afflux.rules.calibration import NONE
from afflux.rules.optimizers import Sgd
from afflux.rules.rule import Rule
from afflux.rules.schedules import Rate
from afflux.rules.weights import Examples


def fedavg(*, buffer_size: int = 10, server_lr: Rate = 1.0) -> Rule:
    """Average a cohort's updates, weighted by their numbers of examples: the synchronous baseline.

    x += server_lr * sum_i (n_i / sum n) u_i (Algorithm 1), where M is the size of the cohort. State on the server: only
    params and the buffer. Sweeps: one.
    """
    return Rule("fedavg", "update", buffer_size, Examples(), NONE, Sgd(server_lr))
