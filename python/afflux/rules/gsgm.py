"""GSGM: Li et al., Gradient Scheduling with Global Momentum for Non-IID Distributed Asynchronous Training, 2019."""

from afflux.calibrate import NONE
from afflux.rule import Rule
from afflux.scheduling import GradientScheduling
from afflux.step import Sgd


def gsgm(*, buffer_size: int = 10, server_lr: float = 0.005, alpha: float = 0.1) -> Rule:
    """x -= server_lr * (alpha * momentum + mean(g)); momentum is the mean of the last pass's directions.

    A client enters once per pass over all N clients (WKAFL section 6.1.2). State on the server: momentum and the sum
    of the pass, 8 d bytes, and the arrivals that wait for the next pass. Sweeps: one.
    """
    return Rule("gsgm", "gradient", buffer_size, GradientScheduling(alpha), NONE, Sgd(server_lr))
