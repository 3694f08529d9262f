"""The numbers of a paper beside ours: intervals over seeds, a page and a picture for each table."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf, isinf, isnan, nan, sqrt
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from afflux.lab.publishing import Page, markdown_table, or_none
from afflux.lab.results.curves import COLOURS, curve
from afflux.lab.results.run_result import Evaluated, Evaluation, SeedStatistics, seed_statistics
from afflux.lab.results.statistics import t_quantile
from afflux.sim.workload.evaluation import CLASSIFICATION, Metric
from bench.papers.paper_tables import Cell, Reading, Table

#: A difference below this is not looked into.
SMALL = 0.005


@dataclass(frozen=True)
class Line:
    """One cell of a table, with our runs."""

    cell: Cell
    #: The table's reading of each seed's run; nan: it has no value, as for a target that was not reached.
    values: tuple[float, ...]
    others: Mapping[str, tuple[float, ...]]  #: The other readings of each seed's run.
    seconds: float  #: CPU seconds of all runs.
    mean_of: int = 1  #: Number of runs of which the paper's number is the mean.

    @property
    def ours(self) -> SeedStatistics:
        """Mean and deviation over the seeds that have a value."""
        return seed_statistics(self.values)

    @property
    def difference(self) -> float:
        """Our mean minus the paper's number; nan without one."""
        return nan if self.cell.paper is None else self.ours.mean - self.cell.paper

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % prediction interval of the mean of k further runs, m ± t s sqrt(1/k + 1/n); k is `mean_of`.

        If the paper's number is that of the same experiment, it lies in 95 of 100 such intervals. nan with fewer than
        two seeds.
        """
        mean, std, count = self.ours
        if count < 2:
            return nan, nan
        half = t_quantile(count - 1, 0.975) * std * sqrt(1 / self.mean_of + 1 / count)
        return mean - half, mean + half

    @property
    def verdict(self) -> str:
        """Whether the paper's number is *in* the interval, *near* (less than `SMALL` from our mean), or *out*.

        Empty: no comparison. Two seeds give an interval that is in effect all numbers.
        """
        low, high = self.interval
        if self.cell.paper is None or self.ours.seeds < 3:
            return ""
        return "in" if low <= self.cell.paper <= high else "near" if abs(self.difference) < SMALL else "out"


def line_of(table: Table, cell: Cell, runs: Sequence[Sequence[Evaluation]], seconds: float) -> Line:
    """Return the line of a cell from the evaluations of its runs; a run without any, which has diverged, reads nan."""

    def values(reading: Reading) -> tuple[float, ...]:
        return tuple(reading.of(run) if run else nan for run in runs)

    others = {reading.name: values(reading) for reading in table.others}
    return Line(cell, values(table.reading), others, seconds, table.mean_of)


def table_page(
    table: Table, lines: Sequence[Line], seeds: Sequence[int], curves: Mapping[str, Any], where: str = ""
) -> Page:
    """Return the page of a table: paper, ours, difference, seeds' range and CPU time of each cell.

    `where` tells of runs on other devices than the CPU.
    """
    others = [reading.name for reading in table.others]
    shown = partial(_shown, digits=table.reading.digits)
    header = ("cell", "paper", "ours", "range", "difference", "95 %", *others, "CPU s")
    body = [
        (
            line.cell.name,
            "" if line.cell.paper is None else shown(line.cell.paper),
            _mean_shown(line.values, table.reading.digits),
            _range(line, table.reading.digits),
            "" if isnan(line.difference) else shown(line.difference, sign="+"),
            _compared(line, table.reading.digits),
            *(_mean_shown(line.others[reading.name], reading.digits) for reading in table.others),
            f"{line.seconds:.0f}",
        )
        for line in lines
    ]
    compared = [line for line in lines if not isnan(line.difference)]
    text = [
        f"{table.paper}, {table.shows}. {table.needs}; seeds {', '.join(map(str, seeds))}{where}.",
        f"*paper*, *ours*: {table.reading.name}, mean over seeds.",
    ]
    if compared:
        mean = sum(abs(line.difference) for line in compared) / len(compared)
        of = "one run" if table.mean_of == 1 else f"a mean of {table.mean_of} runs"
        largest = max(compared, key=lambda line: abs(line.difference))
        text.append(
            f"Mean absolute difference {shown(mean)}, largest {shown(largest.difference, sign='+')} "
            f"({largest.cell.name}). *95 %*: whether the paper's number is in the prediction interval for {of} by "
            f"three or more seeds of ours, or nearer than {SMALL}; and half the length of the interval: a long one "
            "holds anything."
        )
    if any(map(_among, (values for line in lines for values in (line.values, *line.others.values())))):
        text.append(
            "*n of m*: so many runs have such a number; in the others a client diverged, or the run missed the goal."
        )
    if points := [x for line in lines for x, _ in line.cell.points]:
        more = "" if min(points) == inf else ", or .50, in the round in which a run reaches it"
        text.append(
            f"A cross in the figure is a number that the paper prints: the accuracy of a run, at its end{more}. "
            "The paper's curves are pictures, without numbers."
        )
    if table.note:
        text.append(table.note)
    markdown = "\n".join(text) + "\n\n" + markdown_table(header, body)
    content = {
        "table": table.name,
        "seeds": list(seeds),
        "reading": table.reading.name,
        "cells": [
            {
                "cell": line.cell.name,
                "paper": line.cell.paper,
                "ours": or_none(line.ours.mean),
                "values": [or_none(value) for value in line.values],
                "interval": [or_none(value) for value in line.interval],
                "difference": or_none(line.difference),
                "others": {name: or_none(seed_statistics(values).mean) for name, values in line.others.items()},
                "seconds": round(line.seconds, 1),
            }
            for line in lines
        ],
    }
    return Page(table.name, markdown, content, lambda path: draw(table, lines, curves, path))


def _among(values: Sequence[float]) -> str:
    """Return how many of the runs have a value, if some have none."""
    count = seed_statistics(values).seeds
    return f" ({count} of {len(values)})" if count < len(values) else ""


def _mean_shown(values: Sequence[float], digits: int) -> str:
    return _shown(seed_statistics(values).mean, digits) + _among(values)


def _range(line: Line, digits: int) -> str:
    if isnan(line.ours.mean):
        return ""
    return f"{_shown(np.nanmin(line.values), digits)} to {_shown(np.nanmax(line.values), digits)}"


def _compared(line: Line, digits: int) -> str:
    word, (low, high) = line.verdict, line.interval
    return word and f"{'**out**' if word == 'out' else word}, ± {_shown((high - low) / 2, digits)}"


def _shown(value: float, digits: int, sign: str = "") -> str:
    return "-" if isnan(value) else f"{value:{sign}.{digits}f}"


def draw(table: Table, lines: Sequence[Line], curves: Mapping[str, Any], path: Path) -> None:
    """Write a PNG: a row per cell, with the paper's number, our mean and our seeds; without such numbers the curves."""
    if all(line.cell.paper is None for line in lines):
        panels: dict[str, list[tuple[str, Any]]] = {}
        for name, runs in curves.items():
            panel, _, label = name.partition(", ")
            panels.setdefault(panel, []).append((label, runs))
        draw_scores(list(panels.items()), path, points={line.cell.name: line.cell.points for line in lines})
        return
    ours, theirs = COLOURS[0].picture, COLOURS[1].picture

    def marks(axes: Any) -> None:
        for place, line in enumerate(lines):
            axes.plot(line.values, [place] * len(line.values), "|", color=ours, markersize=8)
        places = range(len(lines))
        axes.plot(
            [line.ours.mean for line in lines], places, "o", color=ours, markersize=4, label="afflux: mean, seeds"
        )
        paper = [nan if line.cell.paper is None else line.cell.paper for line in lines]
        axes.plot(paper, places, "x", color=theirs, markersize=6, label="paper")

    names = [line.cell.name for line in lines]
    draw_rows(names, marks, table.reading.name, f"{table.paper}: {table.shows}", path)


def draw_rows(names: Sequence[str], marks: Callable[[Any], None], what: str, title: str, path: Path) -> None:
    """Write a PNG with a row for each name, the first on top; `marks` draws into the axes, at y = 0, 1, ..."""
    from matplotlib.figure import Figure

    from afflux.lab.results.figures import style_axes

    figure = Figure(figsize=(8, 1.6 + 0.24 * len(names)), layout="constrained")
    axes = figure.subplots()
    marks(axes)
    style_axes(axes)
    axes.grid(False, axis="y")
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.invert_yaxis()
    axes.set_xlabel(what)
    axes.legend(loc="best", frameon=False, fontsize=8)
    figure.suptitle(title, fontsize=9)  # over the names, too: a title of the axes would be cut
    figure.savefig(path, dpi=150)


def draw_scores(
    panels: Sequence[tuple[str, Sequence[tuple[str, Sequence[Evaluated]]]]],
    path: Path,
    metric: Metric = CLASSIFICATION[0],
    points: Mapping[str, Sequence[tuple[float, float]]] = MappingProxyType({}),
) -> None:
    """Write a PNG with the score over the arrivals, one panel beside the other.

    Args:
        panels: the title of each, and its curves: a label and the runs of each seed. If there are more curves than
            colours, the last ones are grey.
        path: of the file.
        metric: the score.
        points: of a paper, for a curve by the panel's title, a comma and its label: arrivals and score. Beyond the
            curve's end they are drawn there.
    """
    from matplotlib.figure import Figure
    from matplotlib.ticker import PercentFormatter

    from afflux.lab.results.figures import draw_curve, style_axes

    figure = Figure(figsize=(5.5 * len(panels), 4.7), layout="constrained")
    for axes, (title, curves) in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        style_axes(axes)
        for index, (label, runs) in reversed(list(enumerate(curves))):  # the first on top
            named = index < len(COLOURS)
            line = curve(runs, "arrivals", metric.name)
            draw_curve(axes, line, label if named else "", index if named else None)
            for x, y in points.get(f"{title}, {label}", ()):
                colour = COLOURS[index].picture if named else "#bbbbbb"
                axes.plot(min(x, line.x[0][-1]), y, "x", color=colour, markersize=8, markeredgewidth=2, clip_on=False)
        if metric.is_share:
            axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
        axes.set_ylim(*(None if isinf(end) else end for end in metric.bounds))
        axes.locator_params(axis="x", nbins=5)
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.set_xlabel("arrivals")
        axes.set_ylabel(metric.words if metric.is_share else metric.title(), parse_math=False)
        more = len(curves) - len(COLOURS)
        axes.set_title(title + (f" (grey: {more} more)" if more > 0 else ""), fontsize=10)
        handles, labels = axes.get_legend_handles_labels()
        axes.legend(
            handles[::-1], labels[::-1], fontsize=8, loc="upper right" if metric.lower_is_better else "lower right"
        )
    figure.savefig(path, dpi=120)
