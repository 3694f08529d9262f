"""FADAS: AMSGrad on the server; its learning rate adapts to delays only with `delay_adaptive="inverse"`.

@inproceedings{wang2024fadas,
  title = {{FADAS}: Towards Federated Adaptive Asynchronous Optimization},
  author = {Wang, Yujia and Wang, Shiqiang and Lu, Songtao and Chen, Jinghui},
  booktitle = {Proceedings of the 41st International Conference on Machine Learning},
  series = {PMLR},
  volume = {235},
  year = {2024}
}
"""

from typing import Literal

from afflux.ops.validation import integer
from afflux.rules.calibration import NONE
from afflux.rules.optimizers import AmsGrad
from afflux.rules.rule import Rule
from afflux.rules.schedules import DelayAdaptive, Rate
from afflux.rules.weights import Uniform

#: Appendix D.2: (beta1, beta2) and epsilon of all experiments of the paper.
BETA1, BETA2, EPSILON = 0.9, 0.99, 1e-8
#: Section 6: M under large worst-case delays (N = 50 clients, 25 at once) and under mild ones (N = 100, 20 at once).
BUFFER_SIZE_LARGE, BUFFER_SIZE_MILD = 5, 10
#: The threshold tau_c above which a buffer's largest staleness shortens the step.
THRESHOLD = 1


def fadas(
    *,
    buffer_size: int = BUFFER_SIZE_LARGE,
    server_lr: Rate = 0.001,
    beta1: float = BETA1,
    beta2: float = BETA2,
    epsilon: float = EPSILON,
    initial_v: float = 0.0,
    bias_correction: bool = False,
    delay_adaptive: Literal["inverse", "minimum"] | None = None,
    threshold: int = THRESHOLD,
) -> Rule:
    """Take an AMSGrad step along the mean of every M updates; `delay_adaptive="inverse"` shortens steps of stale ones.

    By default the learning rate does not adapt to delays: lr is server_lr, however stale the updates are. This is the
    paper's FADAS without delay adaptation. Its delay-adaptive FADAS is `delay_adaptive="inverse"` or "minimum": if the
    largest staleness of the buffer, tau_max, exceeds `threshold`, lr is server_lr / tau_max ("inverse": eq. 77, used in
    the paper's experiments) or min(server_lr, 1 / tau_max) ("minimum": eq. 4).

    The step is x += lr m / (sqrt(v_hat) + epsilon) (Algorithm 1 with eq. 3), of the moments of D = mean(u):

        m = beta1 m + (1 - beta1) D,  v = beta2 v + (1 - beta2) D^2,  v_hat = max(v_hat, v)

    `bias_correction` computes as the authors' code (see afflux.rules.optimizers). State on the server: m, v and v_hat,
    12 d bytes. Sweeps: one.
    """
    threshold = integer(0)("fadas", "threshold", threshold)
    lr: Rate = server_lr if delay_adaptive is None else DelayAdaptive(server_lr, threshold, delay_adaptive)
    step = AmsGrad(lr, beta1, beta2, epsilon, initial_v, bias_correction)
    return Rule("fadas", "update", buffer_size, Uniform(), NONE, step)
