"""WKAFL: Zhou, Li, Ren and Yang, Towards Efficient and Stable K-Asynchronous FL ..., IEEE TPDS 2022."""

from typing import Any, Literal

from afflux.calibrate import NONE
from afflux.ops.validation import finite, flag, optional, positive_or_inf
from afflux.rates import MinimumStaleness
from afflux.rule import Rule
from afflux.selection import CosineSelection
from afflux.step import Sgd
from afflux.weigh import Exponential

#: The paper's settings: `wkafl(**CIFAR10)`. alpha and sim_min are the same in both.
EMNIST_MNIST: dict[str, Any] = {"beta": 10.0, "gamma": 0.1, "clip": 100.0, "stage_two_clip": 10.0, "server_lr": 0.005}
CIFAR10: dict[str, Any] = {"beta": 50.0, "gamma": 0.01, "clip": 70.0, "stage_two_clip": 5.0, "server_lr": 0.0005}


def wkafl(
    *,
    buffer_size: int = 10,
    server_lr: float = 0.005,
    alpha: float = 0.1,
    sim_min: float = 0.3,
    beta: float = 10.0,
    gamma: float = 0.1,
    clip: float | None = 100.0,
    stage_two_clip: float = 10.0,
    stage_two_loss: float | None = None,
    stage_two_version: int | None = None,
    selection: bool = True,
    staleness: bool = True,
    momentum: bool = True,
    memory: Literal["estimate", "aggregate"] = "estimate",
) -> Rule:
    """x -= server_lr / (1 + gamma tau_min) * sum_i p_i g'_i over the gradients that agree with their estimate.

    Algorithms 2 and 3 and eq. 4 to 10: see afflux.selection.CosineSelection for g', p and the two stages. The ablations
    are the paper's: `selection=False` steps with the estimate; `staleness=False` weighs all alike in it, and
    `momentum=False` has alpha = 0, both without the bound `clip`. The paper gives no value for `stage_two_loss`. State
    on the server: the last estimate, 4 d bytes. Sweeps: two, the inner products and the step.
    """
    # Checked here, because an ablation leaves them out.
    alpha = finite("wkafl", "alpha", alpha)
    clip = optional(positive_or_inf)("wkafl", "clip", clip)
    staleness, momentum = flag("wkafl", "staleness", staleness), flag("wkafl", "momentum", momentum)
    weigh = CosineSelection(
        alpha if momentum else 0.0,
        sim_min,
        beta,
        clip if staleness and momentum else None,
        stage_two_clip,
        Exponential() if staleness else None,
        selection,
        memory,
        stage_two_loss,
        stage_two_version,
    )
    return Rule("wkafl", "gradient", buffer_size, weigh, NONE, Sgd(MinimumStaleness(server_lr, gamma)))
