"""Anarchic FL: clients take part when they like; AFA-CS keeps the last gradient of each.

@inproceedings{yang2022anarchic,
  title = {Anarchic Federated Learning},
  author = {Yang, Haibo and Zhang, Xin and Khanduri, Prashant and Liu, Jia},
  booktitle = {Proceedings of the 39th International Conference on Machine Learning},
  series = {PMLR},
  volume = {162},
  pages = {25331--25363},
  year = {2022}
}
"""

from typing import Literal

from afflux.ops.codecs import Codec, Name, named
from afflux.rules.calibration import NONE
from afflux.rules.optimizers import Sgd
from afflux.rules.rule import Calibrate, Rule
from afflux.rules.schedules import Rate
from afflux.rules.weights import Uniform

#: Appendix E: the global and the local learning rate on MNIST and CIFAR-10; server_lr here is their product.
GLOBAL_LR, LOCAL_LR = 1.0, 0.1
SERVER_LR = GLOBAL_LR * LOCAL_LR


def afa_cd(*, buffer_size: int = 10, server_lr: Rate = SERVER_LR) -> Rule:
    """Step along the mean of every M gradients: Anarchic FL for many clients (cross-device).

    x -= server_lr * mean(G_i) (Algorithm 2). Clients push G_i, the mean of their stochastic gradients. The paper's
    algorithm prints eta, but its proofs use eta * eta_L: server_lr is this product. State on the server: only params
    and the buffer. Sweeps: one.
    """
    return Rule("afa_cd", "gradient", buffer_size, Uniform(), NONE, Sgd(server_lr))


def afa_cs(
    *,
    buffer_size: int = 10,
    server_lr: Rate = SERVER_LR,
    divide_by: Literal["all", "seen"] = "all",
    codec: Codec | Name | None = None,
) -> Rule:
    """Step along the mean of all clients' last gradients, after every M: Anarchic FL for few clients (cross-silo).

    x -= server_lr / N * sum of all N clients' last G_i, those of this round included (Algorithm 3). Clients that have
    never pushed count as 0; `divide_by="seen"` takes the mean over those that have. State on the server: 4 d bytes per
    client that has pushed, or the bytes of the codec, and 8 d for the float64 sum, which is updated incrementally.
    Sweeps: one.
    """
    rows = Calibrate(cached=True, direction="mean", divide_by=divide_by, codec=named(codec))
    return Rule("afa_cs", "gradient", buffer_size, Uniform(), rows, Sgd(server_lr))
