"""FedMedian: the median or a trimmed mean of each element, against a minority of hostile clients.

@inproceedings{yin2018byzantine,
  title = {{Byzantine}-Robust Distributed Learning: Towards Optimal Statistical Rates},
  author = {Yin, Dong and Chen, Yudong and Ramchandran, Kannan and Bartlett, Peter},
  booktitle = {International Conference on Machine Learning},
  series = {PMLR},
  volume = {80},
  pages = {5650--5659},
  year = {2018}
}
"""

from afflux.rules.calibration import NONE
from afflux.rules.optimizers import Sgd
from afflux.rules.rule import Rule
from afflux.rules.schedules import Rate
from afflux.rules.weights import Trimmed, Uniform


def fedmedian(*, buffer_size: int = 10, server_lr: Rate = 1.0) -> Rule:
    """Step by the median of the updates, element by element: for fewer than M / 2 hostile clients in a buffer.

    x += server_lr * median(u_1, ..., u_M) (Definition 1), for an even M the mean of the two middle values. The authors'
    code was not seen. State on the server: only params and the buffer. Sweeps: one.
    """
    return Rule("fedmedian", "update", buffer_size, Trimmed(Uniform(), 0.5), NONE, Sgd(server_lr))


def fedtrimmedavg(*, buffer_size: int = 10, trim: float = 0.2, server_lr: Rate = 1.0) -> Rule:
    """Average the updates without their `trim` M largest and smallest values, element by element.

    x += server_lr * mean of what is left (Definition 2), for at most `trim` M hostile clients in a buffer. If `trim` M
    is no integer, a part of a value's weight is cut. The authors' code was not seen. State on the server: only params
    and the buffer. Sweeps: one.
    """
    return Rule("fedtrimmedavg", "update", buffer_size, Trimmed(Uniform(), trim), NONE, Sgd(server_lr))
