"""CA2FL: Wang, Cao, Wu, Chen and Chen, Tackling the Data Heterogeneity in Asynchronous FL ..., ICLR 2024."""

from afflux.calibrate import CACHED_DIFFERENCE
from afflux.rule import Rule
from afflux.step import Sgd
from afflux.weigh import Uniform

#: Section 6: M and the global learning rate of the main experiments (N = 100 clients, 20 at once).
BUFFER_SIZE, SERVER_LR = 10, 1.0


def ca2fl(*, buffer_size: int = BUFFER_SIZE, server_lr: float = SERVER_LR) -> Rule:
    """v = h + 1/|S| * sum_{i in S} (u_i - h_i), x += server_lr * v, then h_i = u_i (Algorithm 2).

    h is the mean of all N clients' cached rows, which start at 0. Algorithm 2 prints a plain sum where its proofs use
    the mean: the mean. State on the server: 4 d bytes per client seen and 8 d for the float64 sum. Sweeps: one.
    """
    return Rule("ca2fl", "update", buffer_size, Uniform(), CACHED_DIFFERENCE, Sgd(server_lr))
