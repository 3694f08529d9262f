"""Curves over the evaluations of a rule's runs: the mean over seeds with its band, or each seed by itself."""

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from afflux.sim.results.run_result import Evaluation


class Evaluated(Protocol):
    """Anything with the evaluations of a run."""

    @property
    def evaluations(self) -> tuple[Evaluation, ...]:
        """In the order of the arrivals."""


class Curve(NamedTuple):
    """Values at the evaluations of a rule's runs.

    Runs that stop at different times may have different evaluations. A mean over the remaining runs would jump when one
    stops. In this case each run is a separate curve.
    """

    x: list[np.ndarray]  #: one curve, or one for each run
    y: list[np.ndarray]
    low: np.ndarray | None  #: mean - standard deviation; None without a band
    high: np.ndarray | None


def curve(runs: Sequence[Evaluated], across: str, up: str) -> Curve:
    """Return the curve of a rule.

    Args:
        runs: of one rule, one for each seed.
        across: a field of `Evaluation`: arrivals, version or virtual_time.
        up: a field of `Evaluation`: accuracy or loss.
    """
    x = [np.array([getattr(row, across) for row in run.evaluations], float) for run in runs]
    y = [np.array([getattr(row, up) for row in run.evaluations], float) for run in runs]
    if len({tuple(row.arrivals for row in run.evaluations) for run in runs}) > 1:
        return Curve(x, y, None, None)
    mean = np.mean(y, axis=0)
    if len(runs) == 1:
        return Curve([np.mean(x, axis=0)], [mean], None, None)
    std = np.std(y, axis=0, ddof=1)
    return Curve([np.mean(x, axis=0)], [mean], mean - std, mean + std)


def staleness_bins(largest: int) -> np.ndarray:
    """Return the edges of the bins 0, 1, 2-3, 4-7, ... that hold 0 to `largest`."""
    return np.array([0, *(2**power for power in range(int(largest).bit_length() + 1))])


def bin_names(edges: np.ndarray) -> list[str]:
    """Return the names of the bins: 0, 1, 2-3, ..."""
    pairs = zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True)
    return [f"{low}" if high == low + 1 else f"{low}-{high - 1}" for low, high in pairs]
