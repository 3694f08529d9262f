"""FedOpt: adaptive servers, each a step along the mean of a cohort's updates.

@inproceedings{reddi2021fedopt,
  title = {Adaptive Federated Optimization},
  author = {Reddi, Sashank J. and Charles, Zachary and Zaheer, Manzil and Garrett, Zachary and Rush, Keith and
    Konečný, Jakub and Kumar, Sanjiv and McMahan, H. Brendan},
  booktitle = {International Conference on Learning Representations},
  year = {2021}
}
"""

from afflux.rules.calibration import NONE
from afflux.rules.optimizers import Adagrad, Adam, Yogi
from afflux.rules.rule import Rule
from afflux.rules.schedules import Rate
from afflux.rules.weights import Uniform

#: Section 5.3: beta1 and beta2 of FedAdam and FedYogi; FedAdagrad has beta1 = 0. tau, here epsilon, is 1e-3 if it
#: is not tuned, and v starts at tau^2 (here at 0 unless initial_v is given).
BETA1, BETA2, EPSILON = 0.9, 0.99, 1e-3


def fedadam(
    *,
    buffer_size: int = 10,
    server_lr: Rate = 0.01,
    beta1: float = BETA1,
    beta2: float = BETA2,
    epsilon: float = EPSILON,
    initial_v: float = 0.0,
) -> Rule:
    """Take an Adam step along the mean of a cohort's updates.

    x += server_lr m / (sqrt(v) + epsilon), of the moments of D = mean(u), where
    m = beta1 m + (1 - beta1) D, v = beta2 v + (1 - beta2) D^2.

    State on the server: m and v, 8 d bytes. Sweeps: one.
    """
    return Rule("fedadam", "update", buffer_size, Uniform(), NONE, Adam(server_lr, beta1, beta2, epsilon, initial_v))


def fedyogi(
    *,
    buffer_size: int = 10,
    server_lr: Rate = 0.01,
    beta1: float = BETA1,
    beta2: float = BETA2,
    epsilon: float = EPSILON,
    initial_v: float = 0.0,
) -> Rule:
    """Take a Yogi step along the mean of a cohort's updates.

    As fedadam, with v = v - (1 - beta2) D^2 sign(v - D^2). State on the server: m and v, 8 d bytes. Sweeps: one.
    """
    return Rule("fedyogi", "update", buffer_size, Uniform(), NONE, Yogi(server_lr, beta1, beta2, epsilon, initial_v))


def fedadagrad(
    *,
    buffer_size: int = 10,
    server_lr: Rate = 0.01,
    beta1: float = 0.0,
    epsilon: float = EPSILON,
    initial_v: float = 0.0,
) -> Rule:
    """Take an Adagrad step along the mean of a cohort's updates.

    As fedadam, with v = v + D^2. State on the server: m and v, 8 d bytes. Sweeps: one.
    """
    step = Adagrad(server_lr, beta1, epsilon=epsilon, initial_v=initial_v)
    return Rule("fedadagrad", "update", buffer_size, Uniform(), NONE, step)
