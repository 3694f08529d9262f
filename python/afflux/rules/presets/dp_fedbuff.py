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

from afflux.ops.errors import AffluxError, UnavailableError
from afflux.ops.validation import check_fields, count_of, not_negative, positive
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

    def __post_init__(self) -> None:
        check_fields(self, positive, "clip")
        check_fields(self, count_of(1), "divisor")
        check_fields(self, not_negative, "noise_multiplier")
        if self.noise_multiplier > 0 and self.noise_multiplier * self.clip / self.divisor == 0:
            raise AffluxError(f"[ClippedMean] noise_multiplier {self.noise_multiplier} times clip {self.clip} is 0")

    @property
    def needs(self) -> Needs:
        """See afflux.rules.rule.Needs."""
        return Needs(norms=True, once=True, noise=self.noise_multiplier > 0)

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
    *, buffer_size: int = 10, clip: float = 1.0, noise_multiplier: float = 0.0, server_lr: Rate = 1.0
) -> Rule:
    """Average clipped updates with Gaussian noise: a client's data change what the server publishes by little.

    x += server_lr * (sum_i min(1, clip / |u_i|) u_i + noise_multiplier clip z) / M, z ~ N(0, I), also if a flushed
    buffer holds fewer than M: Algorithm 1 with the fixed divisor, on a buffer. The authors' code was not seen. Without
    a noise_multiplier there is no noise, and no privacy; with one the server needs a `noise_key`. State on the server:
    only params and the buffer. Sweeps: one.
    """
    weigh = ClippedMean(clip, buffer_size, noise_multiplier)
    return Rule("dp_fedbuff", "update", buffer_size, weigh, NONE, Sgd(server_lr))


def epsilon(noise_multiplier: float, participations: int, delta: float) -> float:
    """Return epsilon of (epsilon, delta)-differential privacy for a client that is in at most so many rounds.

    By dp-accounting, for the composition of Gaussian mechanisms without amplification by sampling. Neighbours differ
    by a client whose updates are all 0; arrival times must not depend on data.

    Raises:
        AffluxError: noise_multiplier is not positive, participations no count from 1, or delta not between 0 and 1.
        UnavailableError: dp-accounting is not installed.
    """
    positive("epsilon", "noise_multiplier", noise_multiplier)
    count_of(1)("epsilon", "participations", participations)
    if not 0 < delta < 1:
        raise AffluxError(f"[epsilon] delta is {delta!r}, must be between 0 and 1")
    try:
        from dp_accounting import GaussianDpEvent, NeighboringRelation
        from dp_accounting.pld import PLDAccountant
    except ImportError as error:
        raise UnavailableError(f"[epsilon] needs dp-accounting: pip install 'afflux[dp]' ({error})") from None
    accountant = PLDAccountant(NeighboringRelation.REPLACE_SPECIAL)
    accountant.compose(GaussianDpEvent(noise_multiplier), participations)
    return float(accountant.get_epsilon(delta))
