"""FedAMS: AMSGrad on the server.

@inproceedings{wang2022fedams,
  title = {Communication-Efficient Adaptive Federated Learning},
  author = {Wang, Yujia and Lin, Lu and Chen, Jinghui},
  booktitle = {Proceedings of the 39th International Conference on Machine Learning},
  series = {PMLR},
  volume = {162},
  pages = {22802--22838},
  year = {2022}
}
"""

from afflux.rules.calibration import NONE
from afflux.rules.optimizers import AmsGrad
from afflux.rules.rule import Rule
from afflux.rules.schedules import Rate
from afflux.rules.weights import Uniform


def fedams(
    *,
    buffer_size: int = 10,
    server_lr: Rate = 0.01,
    beta1: float = 0.9,
    beta2: float = 0.99,
    epsilon: float = 1e-8,
    initial_v: float = 0.0,
) -> Rule:
    """Take an AMSGrad step along the mean of a cohort's updates.

    As fedadam, with v_hat = max(v_hat, v) under the root and epsilon outside it, as in FADAS. Its authors' code starts
    v and v_hat at 1e-3 (`initial_v`). State on the server: m, v and v_hat, 12 d bytes. Sweeps: one.
    """
    step = AmsGrad(server_lr, beta1, beta2, epsilon, initial_v)
    return Rule("fedams", "update", buffer_size, Uniform(), NONE, step)
