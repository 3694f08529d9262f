"""DP-FedBuff: clipped updates and, with `noise_multiplier`, Gaussian noise.

@inproceedings{mcmahan2018private,
  title = {Learning Differentially Private Recurrent Language Models},
  author = {McMahan, H. Brendan and Ramage, Daniel and Talwar, Kunal and Zhang, Li},
  booktitle = {International Conference on Learning Representations},
  year = {2018}
}
"""

from dataclasses import dataclass

import numpy as np

from afflux.ops.errors import AffluxError
from afflux.ops.validation import check_fields, count_of, not_negative, optional, positive
from afflux.rules.calibration import NONE
from afflux.rules.optimizers import Sgd
from afflux.rules.registry import register
from afflux.rules.rule import Arrivals, Needs, Rule, Weights
from afflux.rules.schedules import Rate


@register("clipped_mean", "weigh")
@dataclass(frozen=True, slots=True)
class ClippedMean:
    """w_i = min(1, clip / |u_i|) / divisor, and noise of the standard deviation noise_multiplier * clip / divisor.

    The divisor does not depend on the arrivals. A client is in a buffer once: it adds at most clip / divisor.
    """

    clip: float
    divisor: int
    noise_multiplier: float = 0.0
    participations: int | None = None  #: the most rounds that a client is in; None: any number

    def __post_init__(self) -> None:
        check_fields(self, positive, "clip")
        check_fields(self, count_of(1), "divisor")
        check_fields(self, not_negative, "noise_multiplier")
        check_fields(self, optional(count_of(1)), "participations")
        if self.noise_multiplier > 0 and self.noise_multiplier * self.clip / self.divisor == 0:
            raise AffluxError(f"[ClippedMean] noise_multiplier {self.noise_multiplier} times clip {self.clip} is 0")

    @property
    def needs(self) -> Needs:
        """See afflux.rules.rule.Needs."""
        return Needs(norms=True, once=True, participations=self.participations, noise=self.noise_multiplier > 0)

    def __call__(self, arrivals: Arrivals, /) -> Weights:
        """See the class."""
        weights = [self.on_arrival(0, 1, norm) / self.divisor for norm in arrivals.norms.tolist()]
        return Weights(np.array(weights), noise=self.noise_multiplier * self.clip / self.divisor)

    def on_arrival(self, staleness: int, num_examples: int, norm: float, /) -> float:
        """See afflux.rules.rule.OnArrival."""
        return self.clip / norm if norm > self.clip else 1.0

    def factor(self, arrivals: Arrivals, /) -> float:
        """See afflux.rules.rule.OnArrival."""
        return 1.0 / self.divisor


def dp_fedbuff(
    *,
    buffer_size: int = 10,
    clip: float = 1.0,
    noise_multiplier: float = 0.0,
    participations: int | None = None,
    server_lr: Rate = 1.0,
) -> Rule:
    """Average clipped updates with Gaussian noise: a client's data change what the server publishes by little.

    x += server_lr * (sum_i min(1, clip / |u_i|) u_i + noise_multiplier clip z) / M, z ~ N(0, I), also if a flushed
    buffer holds fewer than M: Algorithm 1 with the fixed divisor, on a buffer. The authors' code was not seen. Without
    a noise_multiplier there is no noise, and no privacy; with one the server needs a `noise_key`. A client is in at
    most `participations` rounds; None: any number. `afflux.rules.privacy.epsilon` reads both from the rule. State on
    the server: params, the buffer, and with `participations` the clients' ids. Sweeps: one.
    """
    weigh = ClippedMean(clip, buffer_size, noise_multiplier, participations)
    return Rule("dp_fedbuff", "update", buffer_size, weigh, NONE, Sgd(server_lr))
