"""The figure of a comparison: its score over rounds and over virtual time, and the staleness."""

from collections.abc import Sequence
from math import isinf
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, PercentFormatter

from afflux.sim.results.curves import (
    COLOURS,
    MANY_TIMES,
    Curve,
    colour_and_dashes,
    curve,
    staleness_bins,
    staleness_shares,
)
from afflux.sim.results.run_result import Evaluated, RunResult, group_by_rule
from afflux.sim.results.statistics import score_of, shown_target
from afflux.sim.workload.metrics import CLASSIFICATION, Metric

LEGEND_COLUMNS = 4


def draw_comparison(results: Sequence[RunResult], title: str, target: float, path: Path) -> None:
    """Write a figure (PNG, PDF, by the name of `path`): lines are means over seeds, bands one standard deviation."""
    figure = Figure(figsize=(13.5, 4.7), layout="constrained")
    left, middle, right = figure.subplots(1, 3)
    groups, metric, goal = group_by_rule(results), score_of(results), shown_target(results, target)
    for index, (label, runs) in enumerate(groups.items()):
        for axes, across in ((left, "version"), (middle, "virtual_time")):
            _draw_curve(axes, curve(runs, across, metric.name), label, index, metric)
    _score_axes(left, metric, goal)
    _score_axes(middle, metric, goal)
    middle.set_ylim(left.get_ylim())
    left.set_title(f"{metric.words} over rounds (server steps)")
    left.set_xlabel("rounds")
    ends = [float(np.mean([run.evaluations[-1].version for run in runs])) for runs in groups.values()]
    if max(ends) > MANY_TIMES * min(ends):
        # A round is one arrival for some rules and a bufferful for others.
        left.set_xscale("symlog", linthresh=10)
        left.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        left.set_xlabel("rounds (logarithmic: buffer sizes differ)")
    middle.set_title(f"{metric.words} over virtual time")
    middle.set_xlabel("virtual time (units of the delay law)")
    if max(len(runs) for runs in groups.values()) > 1:
        left.set_ylabel(f"{left.get_ylabel()} (band: one standard deviation)")
    _staleness(right, groups)
    handles, labels = left.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=min(len(labels), LEGEND_COLUMNS), frameon=False)
    figure.suptitle(title, fontsize=11)
    figure.savefig(path, dpi=150)


def draw_scores(
    panels: Sequence[tuple[str, Sequence[tuple[str, Sequence[Evaluated]]]]],
    path: Path,
    metric: Metric = CLASSIFICATION[0],
) -> None:
    """Write a PNG with the score over the arrivals, one panel beside the other.

    Args:
        panels: the title of each, and its curves: a label and the runs of each seed. If there are more curves than
            colours, the last ones are grey.
        path: of the file.
        metric: the score.
    """
    figure = Figure(figsize=(5.5 * len(panels), 4.7), layout="constrained")
    for axes, (title, curves) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        style_axes(axes)
        for index, (label, runs) in reversed(list(enumerate(curves))):  # the first on top
            named = index < len(COLOURS)
            line = curve(runs, "arrivals", metric.name)
            _draw_curve(axes, line, label if named else "", index if named else None, metric)
        if metric.is_share:
            axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.set_ylim(*(None if isinf(end) else end for end in metric.bounds))
        axes.set_xlabel("arrivals")
        axes.set_ylabel(metric.words if metric.is_share else metric.title())
        more = len(curves) - len(COLOURS)
        axes.set_title(title + (f" (grey: {more} more)" if more > 0 else ""), fontsize=10)
        handles, labels = axes.get_legend_handles_labels()
        axes.legend(handles[::-1], labels[::-1], fontsize=8, loc="lower right")
    figure.savefig(path, dpi=120)


def _draw_curve(axes: Axes, drawn: Curve, label: str, index: int | None, metric: Metric) -> None:
    """Draw a curve in the colour and dashes of a series; None: grey."""
    place, dashes = colour_and_dashes(index or 0)
    colour = "#bbbbbb" if index is None else COLOURS[place].picture
    if drawn.low is not None and drawn.high is not None:
        low, high = np.maximum(drawn.low, metric.bounds[0]), np.minimum(drawn.high, metric.bounds[1])
        axes.fill_between(drawn.x[0], low, high, color=colour, alpha=0.15, linewidth=0)
    for number, (x, y) in enumerate(zip(drawn.x, drawn.y, strict=True)):
        name = label if number == 0 and label else None
        axes.plot(
            x,
            np.where(np.isfinite(y), y, np.nan),
            color=colour,
            linestyle=(0, dashes) if dashes else "-",
            linewidth=1.6,
            label=name,
        )


def style_axes(axes: Axes) -> None:
    """Remove the frame except two axes, and draw a grid behind the data."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)


def _score_axes(axes: Axes, metric: Metric, target: float | None) -> None:
    style_axes(axes)
    if metric.is_share:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_xlim(left=0)
    axes.set_ylabel(f"test {metric.words if metric.is_share else metric.title()}")
    if target is not None:
        name = f"target {metric.text(target, '.0f')}"
        axes.axhline(target, color="#888888", linewidth=0.8, linestyle=":", label=name)
    low, high = axes.get_ylim()  # fits the curves and the target, with a margin
    axes.set_ylim(max(low, metric.bounds[0]), min(high, metric.bounds[1]))


def _staleness(axes: Axes, groups: dict[str, list[RunResult]]) -> None:
    # Staleness spans three orders of magnitude under the large-delay law.
    edges, names = staleness_bins(max(1, *(run.max_staleness for runs in groups.values() for run in runs)))
    width = 0.8 / len(groups)
    for index, (label, runs) in enumerate(groups.items()):
        place = np.arange(len(names)) + (index - (len(groups) - 1) / 2) * width
        shares = staleness_shares([run.staleness for run in runs], edges)
        axes.bar(place, shares, width, color=COLOURS[index % len(COLOURS)].picture, label=label)
    style_axes(axes)
    axes.grid(False, axis="x")
    axes.set_xticks(np.arange(len(names)), names)
    axes.tick_params(axis="x", labelsize=8, labelrotation=40)
    axes.set_yscale("symlog", linthresh=0.01, linscale=0.5)
    axes.set_ylim(bottom=0)
    axes.set_yticks([0, 0.01, 0.1, 1], ["0", "1%", "10%", "100%"])
    axes.set_title("staleness of the arrivals")
    axes.set_xlabel("staleness (rounds)")
    axes.set_ylabel("share of arrivals (linear below 1%)")
