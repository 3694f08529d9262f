"""TWAFL: weights by examples and by staleness, as a baseline of WKAFL.

@article{chen2019twafl,
  title = {Communication-Efficient Federated Deep Learning with Layerwise Asynchronous Model Update and Temporally
    Weighted Aggregation},
  author = {Chen, Yang and Sun, Xiaoyan and Jin, Yaochu},
  journal = {IEEE Transactions on Neural Networks and Learning Systems},
  year = {2019}
}
"""

from typing import Literal

from afflux.ops.validation import one_of
from afflux.rules.calibration import NONE
from afflux.rules.optimizers import Sgd
from afflux.rules.rule import Rule
from afflux.rules.schedules import Rate
from afflux.rules.staleness import Exponential
from afflux.rules.weights import Staleness


def twafl(*, buffer_size: int = 10, server_lr: Rate = 0.005, normalise: Literal["count", "weights"] = "count") -> Rule:
    """Weight every M gradients by examples and by staleness: a baseline of WKAFL.

    x -= server_lr * sum_i (n_i / n) (e/2)^-staleness_i g_i, n = sum n_i (WKAFL section 6.1.2). n_i is the client's
    mini-batch size. `normalise="weights"` divides by the sum of the weights, as WKAFL's authors' code does. State on
    the server: only params and the buffer. Sweeps: one.
    """
    one_of("count", "weights")("twafl", "normalise", normalise)  # undivided, a step would be n times too long
    weigh = Staleness(Exponential(), normalise, by_examples=True)
    return Rule("twafl", "gradient", buffer_size, weigh, NONE, Sgd(server_lr))
