"""What the figures draw: curves over evaluations, bins of staleness, colours, dashes and markers."""

from collections.abc import Mapping, Sequence
from itertools import pairwise, zip_longest
from typing import NamedTuple

import numpy as np

from afflux.lab.results.run_result import Evaluated, RunResult

#: Ratio of the rules' numbers of rounds from which the axis of the rounds is logarithmic.
MANY_TIMES = 3


class Colour(NamedTuple):
    """The colour of a series: in pictures, and in a light and in a dark page, where thin lines need more contrast."""

    picture: str
    light: str
    dark: str


#: Okabe and Ito's colours, which colour-blind readers can distinguish, darkest first.
COLOURS = (
    Colour("#0072B2", "#0072b2", "#4ba3e3"),
    Colour("#D55E00", "#d55e00", "#f0803c"),
    Colour("#009E73", "#009e73", "#2fc79b"),
    Colour("#CC79A7", "#b8538d", "#e08fbd"),
    Colour("#E69F00", "#b57d00", "#e9b949"),
    Colour("#56B4E9", "#2c8fc9", "#8ccaf2"),
    Colour("#000000", "#1c2024", "#e6e9ec"),
)
#: Lengths of lines and gaps.
DASHES: tuple[tuple[int, ...], ...] = ((), (6, 3), (2, 2), (8, 3, 2, 3))
#: Names of matplotlib; the first four series have none.
MARKERS = ("", "o", "s", "^")
MOST_MARKERS = 8  #: the most markers of a line


class SeriesStyle(NamedTuple):
    """How a line is drawn. The first 16 lines differ in dashes or marker: they can be told apart without colours."""

    colour: int  #: index into COLOURS
    dashes: tuple[int, ...]
    marker: str


def series_style(index: int) -> SeriesStyle:
    """Return the style of a series."""
    kinds = len(DASHES)
    return SeriesStyle(index % len(COLOURS), DASHES[index % kinds], MARKERS[index // kinds % len(MARKERS)])


class SharedSchedule(NamedTuple):
    """Rules whose arrivals are the same in a respect."""

    label: str
    first: int  #: number of the first rule
    runs: Sequence[RunResult]  #: of the first rule


def schedules(groups: Mapping[str, Sequence[RunResult]]) -> list[SharedSchedule]:
    """Return the schedules of the rules: those whose arrivals have the same staleness share one."""
    labels: dict[tuple[bytes, ...], list[str]] = {}
    for label, runs in groups.items():
        labels.setdefault(tuple(run.staleness.tobytes() for run in runs), []).append(label)
    rules = list(groups)
    return [
        SharedSchedule(
            "all rules" if len(same) == len(rules) > 1 else ", ".join(same), rules.index(same[0]), groups[same[0]]
        )
        for same in labels.values()
    ]


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
        up: the name of a metric.
    """
    x = [np.array([getattr(row, across) for row in run.evaluations], float) for run in runs]
    y = [np.array([getattr(row, up) for row in run.evaluations], float) for run in runs]
    y = [np.where(np.isfinite(values), values, np.nan) for values in y]
    if len({tuple(row.arrivals for row in run.evaluations) for run in runs}) > 1:
        return Curve(x, y, None, None)
    mean = np.mean(y, axis=0)
    if len(runs) == 1:
        return Curve([np.mean(x, axis=0)], [mean], None, None)
    std = np.std(y, axis=0, ddof=1)
    return Curve([np.mean(x, axis=0)], [mean], mean - std, mean + std)


def staleness_bins(largest: int) -> tuple[np.ndarray, list[str]]:
    """Return the edges of the bins 0, 1, 2-3, 4-7, ... that hold 0 to `largest`, and their names."""
    edges = [0, *(2**power for power in range(int(largest).bit_length() + 1))]
    return np.array(edges), [f"{low}" if high == low + 1 else f"{low}-{high - 1}" for low, high in pairwise(edges)]


def staleness_shares(staleness: Sequence[np.ndarray], edges: np.ndarray) -> np.ndarray:
    """Return the share of the arrivals of all runs in each bin."""
    arrivals = np.concatenate(staleness)
    counts, _ = np.histogram(arrivals, bins=edges)
    return np.asarray(counts / max(len(arrivals), 1))


def mean_weights(runs: Sequence[RunResult]) -> tuple[np.ndarray, np.ndarray]:
    """Return the number of each bin of staleness that is not empty, and its mean relative weight."""
    counts, weights = (
        np.array([sum(values) for values in zip_longest(*(getattr(run.totals, name) for run in runs), fillvalue=0)])
        for name in ("bin_counts", "bin_weights")
    )
    bins = np.flatnonzero(counts)
    return bins, weights[bins] / counts[bins]
