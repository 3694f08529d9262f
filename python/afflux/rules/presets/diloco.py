"""DiLoCo: Nesterov's momentum over the updates of workers that train for many local steps.

@article{douillard2023diloco,
  title = {{DiLoCo}: Distributed Low-Communication Training of Language Models},
  author = {Douillard, Arthur and Feng, Qixuan and Rusu, Andrei A. and Chhaparia, Rachita and Donchev, Yani and
    Kuncoro, Adhiguna and Ranzato, Marc'Aurelio and Szlam, Arthur and Shen, Jiajun},
  journal = {arXiv preprint arXiv:2311.08105},
  year = {2023}
}
"""

from afflux.rules.calibration import NONE
from afflux.rules.optimizers import Momentum
from afflux.rules.rule import Rule
from afflux.rules.schedules import Rate
from afflux.rules.weights import Uniform


def diloco(*, buffer_size: int = 8, server_lr: Rate = 0.7, beta: float = 0.9, dampening: float = 0.0) -> Rule:
    """Average workers' updates, and take the outer step of DiLoCo, Nesterov's momentum: for few, long local trainings.

    With D = mean(u): velocity = beta velocity + (1 - dampening) D, x += server_lr (D + beta velocity) (Algorithm 1,
    whose outer gradients are -u_i; the momentum is that of torch.optim.SGD). dampening = beta is momentum look-ahead.
    The authors' code was not seen. State on the server: the velocity, 4 d bytes. Sweeps: one.
    """
    step = Momentum(server_lr, beta, dampening, nesterov=True)
    return Rule("diloco", "update", buffer_size, Uniform(), NONE, step)
