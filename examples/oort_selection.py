"""A law of selection of your own: Oort (OSDI 2021, Algorithm 1), clients of high loss and speed, one at a time.

    afflux run --rule fedbuff --selection examples/oort_selection.py:oort:epsilon=0.5

A client's utility after the R-th arrival, with |B| examples, loss l, its last arrival L and its last duration t:
(|B| l + sqrt(0.1 log R / L)) (T / t)^alpha, the last factor if t > T. The next client is drawn in proportion to the
utility from those with at least `cutoff` times the largest one; with probability `epsilon`, which each arrival
multiplies by `decay` down to `least`, uniformly from those without a result yet.

It differs from the paper: T is a quantile of the durations and no pacer's, |B| l stands for |B| times the root of the
mean square of the examples' losses, and no utility is clipped. A faulty result, or one without a loss, has l 0.
"""

from dataclasses import dataclass

import numpy as np

import afflux


@dataclass
class Oort:
    """See the module."""

    num_clients: int
    epsilon: float
    decay: float
    least: float
    cutoff: float
    alpha: float
    quantile: float

    def __post_init__(self):
        """Check the options, and begin without any result."""
        shares = (self.epsilon, self.decay, self.least, self.cutoff, self.quantile)
        if not (all(0 <= share <= 1 for share in shares) and 0 <= self.alpha < np.inf):
            raise ValueError("oort: options are shares from 0 to 1, but alpha is at least 0")
        # Of each client: examples times loss, duration, number of its last arrival, 0: none.
        self.loss, self.duration, self.last = np.zeros((3, self.num_clients))
        self.arrivals = 0

    def observe(self, result):
        """Note a result."""
        self.arrivals += 1
        loss = 0.0 if result.faulty or result.loss is None else result.examples * abs(result.loss)
        self.loss[result.client], self.duration[result.client] = loss, result.duration
        self.last[result.client] = self.arrivals

    def pick(self, idle, now, stream):
        """Explore or exploit. The functions of afflux give the same bits on every processor."""
        clients = np.array(idle)
        is_known = self.last[clients] > 0
        explores = stream.random() < max(self.least, self.epsilon * afflux.pow(self.decay, float(self.arrivals)))
        if not is_known.any() or (explores and not is_known.all()):
            new = clients[~is_known]
            return int(new[stream.integers(len(new))])
        clients, durations = clients[is_known], np.sort(self.duration[self.last > 0])
        utilities = self.loss[clients] + np.sqrt(0.1 * afflux.log(float(self.arrivals)) / self.last[clients])
        preferred = durations[int(self.quantile * (len(durations) - 1))]
        slowness = np.maximum(self.duration[clients] / preferred, 1.0) if preferred else np.ones(len(clients))
        utilities /= [afflux.pow(float(factor), self.alpha) for factor in slowness]
        admitted = utilities >= self.cutoff * utilities.max()
        ends = np.cumsum(utilities[admitted])
        place = np.searchsorted(ends, stream.random() * ends[-1], side="right")
        return int(clients[admitted][min(place, len(ends) - 1)])


def oort(
    num_clients,
    stream,
    epsilon: float = 0.9,
    decay: float = 0.98,
    least: float = 0.2,
    cutoff: float = 0.95,
    alpha: float = 2.0,
    quantile: float = 0.5,
):
    """Return the law for so many clients."""
    return Oort(num_clients, epsilon, decay, least, cutoff, alpha, quantile)
