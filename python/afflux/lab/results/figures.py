"""Figures of a comparison: curves of metrics, staleness and participation."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, PercentFormatter

from afflux.lab.results.curves import (
    COLOURS,
    MANY_TIMES,
    MOST_MARKERS,
    Curve,
    curve,
    mean_weights,
    schedules,
    series_style,
    staleness_bins,
    staleness_shares,
)
from afflux.lab.results.run_result import RunResult, group_by_rule
from afflux.lab.results.statistics import shown_metrics, shown_target
from afflux.ops.errors import ConfigError
from afflux.ops.validation import known
from afflux.sim.workload.evaluation import Metric

LEGEND_COLUMNS = 4
FORMATS = ("pdf", "png", "svg")
STALENESS = "staleness"  #: the panel beside those of metrics
#: Fields of `Evaluation`, and titles, of the axes below curves.
ACROSS = {
    "rounds": ("version", "rounds"),
    "time": ("virtual_time", "virtual time (units of the delays)"),
    "arrivals": ("arrivals", "arrivals"),
}
NARROW = 4.0  #: inches of a panel below which text is small
SMALL: Any = {"font.size": 7.5, "axes.titlesize": 7.5, "lines.linewidth": 1.1, "lines.markersize": 3.5}
LARGE: Any = {"axes.titlesize": 10, "lines.linewidth": 1.6, "lines.markersize": 4.5}
#: Fonts are embedded as TrueType, and the same figure has the same bytes.
FILES: Any = {"pdf.fonttype": 42, "svg.hashsalt": "afflux"}
UNDATED: dict[str, Any] = {"pdf": {"CreationDate": None}, "svg": {"Date": None}, "png": {}}


def draw_comparison(
    results: Sequence[RunResult],
    title: str,
    target: float,
    path: Path,
    panels: Sequence[str] = ("score", "staleness"),
    x: Sequence[str] = ("rounds", "time"),
    size: float | tuple[float, float] | None = None,
) -> None:
    """Write a figure: lines are means over seeds, bands one standard deviation; see `SimulationResults.draw`."""
    suffix = path.suffix[1:].lower()
    metrics, goal = {metric.name: metric for metric in shown_metrics(results)}, shown_target(results, target)
    score = metrics["score"] = next(iter(metrics.values()))
    kinds = [("panel", panels, (*metrics, STALENESS)), ("x", x, ACROSS), ("kind of file", (suffix,), FORMATS)]
    for what, names, choices in kinds:
        for name in names:
            known(what, name, choices)
    drawn = [(panel, axis) for panel in panels for axis in (x if panel in metrics else [""])]
    if not drawn:
        raise ConfigError("give at least one panel and, for curves, one x")
    lengths = (4.5,) if size is None else size if isinstance(size, tuple) else (size,)
    if not all(0.5 <= length <= 100 for length in lengths):
        raise ConfigError(f"size is {size}, must be from 0.5 to 100 inches")
    width = 4.5 * len(drawn) if size is None else lengths[0]
    rows = -(-len(drawn) // max(1, int(width / 2.2)))
    columns = -(-len(drawn) // rows)
    groups = group_by_rule(results)
    small = width / columns < NARROW
    label_width = 0.7 + (0.06 if small else 0.08) * max(map(len, groups))
    legend_columns = max(1, min(LEGEND_COLUMNS, len(groups) + 1, int(width / label_width)))
    if not isinstance(size, tuple):
        legend_rows = len(groups) // legend_columns + 1
        size = (width, 4.7 if size is None else rows * 0.75 * width / columns + 0.17 * legend_rows)
    with rc_context({**FILES, **(SMALL if small else LARGE)}):
        figure = Figure(figsize=size, layout="constrained")
        places = figure.subplots(rows, columns, squeeze=False).ravel()
        for axes in places[len(drawn) :]:
            axes.set_visible(False)
        for axes, (panel, axis) in zip(places, drawn, strict=False):
            if axis:
                draw_metric(axes, metrics[panel], axis, groups, goal if metrics[panel] is score else None)
            else:
                draw_staleness(axes, groups)
        handles = [series_line(index) for index in range(len(groups))]
        labels = list(groups)
        if goal is not None and score in map(metrics.get, panels):
            handles.append(Line2D([], [], color="#888888", linewidth=0.8, linestyle=":"))
            labels.append(f"target {score.text(goal, '.0f')}")
        legend = figure.legend(
            handles,
            list(map(str, range(len(handles)))),  # a label that begins with _ would be left out
            loc="outside lower center",
            ncols=legend_columns,
            frameon=False,
            handlelength=3.6,  # shows all dashes
        )
        for text, label in zip(legend.get_texts(), labels, strict=True):
            text.set_parse_math(False)
            text.set_text(label)
        if title:
            figure.suptitle(title, fontsize=11, parse_math=False)
        figure.savefig(path, format=suffix, dpi=150 if size[0] > 7 else 300, metadata=UNDATED[suffix])


def draw_metric(
    axes: Axes, metric: Metric, x: str, groups: Mapping[str, Sequence[RunResult]], target: float | None
) -> None:
    """Draw a metric over one of ACROSS, and the target; the axis of the metric ends where its range does."""
    across, title = ACROSS[x]
    for index, runs in enumerate(groups.values()):
        draw_curve(axes, curve(runs, across, metric.name), "", index)
    style_axes(axes)
    axes.set_xlim(left=0)
    ends = [float(np.mean([run.evaluations[-1].version for run in runs])) for runs in groups.values()]
    if x == "rounds" and max(ends) > MANY_TIMES * min(ends):
        # A round is one arrival for some rules and a bufferful for others.
        axes.set_xscale("symlog", linthresh=10)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        title = "rounds (logarithmic: buffer sizes differ)"
    axes.set_xlabel(title)
    if metric.is_share:
        axes.yaxis.set_major_formatter(PercentFormatter(1.0, decimals=0))
    axes.set_ylabel(f"test {metric.words if metric.is_share else metric.title()}", parse_math=False)
    if target is not None:
        axes.axhline(target, color="#888888", linewidth=0.8, linestyle=":")
    low, high = axes.get_ylim()  # fits the curves and the target, with a margin
    axes.set_ylim(max(low, metric.bounds[0]), min(high, metric.bounds[1]))
    if metric.is_share and not metric.lower_is_better:
        late = [y[len(y) // 4 :] for runs in groups.values() for y in curve(runs, across, metric.name).y]
        if late:
            _break_axis(axes, np.concatenate([*late, [] if target is None else [target]]))


def _break_axis(axes: Axes, values: np.ndarray) -> None:
    """Begin the vertical axis below the least of these values, with a mark, if that leaves out a third of it."""
    low, high = axes.get_ylim()
    start = np.nanmin(values, initial=high)
    if low + (high - low) / 3 < start < high:
        axes.set_ylim(start - (high - start) / 10, high)
        mark: Any = {"marker": [(-1, -0.6), (1, 0.6)], "markersize": 8, "color": "#888888", "linestyle": "none"}
        axes.plot([0, 0], [0.02, 0.05], transform=axes.transAxes, clip_on=False, **mark)


def draw_curve(axes: Axes, drawn: Curve, label: str, index: int | None) -> None:
    """Draw a curve in the style of a series; None: grey."""
    colour = "#bbbbbb" if index is None else COLOURS[series_style(index).colour].picture
    if drawn.low is not None and drawn.high is not None:
        axes.fill_between(drawn.x[0], drawn.low, drawn.high, color=colour, alpha=0.15, linewidth=0)
    for number, (x, y) in enumerate(zip(drawn.x, drawn.y, strict=True)):
        own: Any = {"label": label} if number == 0 and label else {}
        axes.add_line(series_line(index or 0, x, y, color=colour, markevery=len(x) // MOST_MARKERS + 1, **own))
    axes.autoscale_view()


def series_line(index: int, x: Any = (), y: Any = (), **own: Any) -> Line2D:
    """Return a line in the style of a series, or `own`; its label, which no legend shows, has the number."""
    colour, dashes, marker = series_style(index)
    style: Any = {"color": COLOURS[colour].picture, "linestyle": (0, dashes) if dashes else "-"}
    return Line2D(x, y, **style | {"marker": marker or "None", "label": f"_{index}"} | own)


def style_axes(axes: Axes) -> None:
    """Remove the frame except two axes, and draw a grid behind the data."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(True, color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)


def draw_staleness(axes: Axes, groups: Mapping[str, Sequence[RunResult]]) -> None:
    """Draw the share of the arrivals by staleness."""
    edges = _staleness_axis(axes, groups)
    lines = schedules(groups)
    if len(lines) < len(groups):
        axes.set_title("all rules" if len(lines) == 1 else "rules of one schedule share a line")
    for _, index, runs in lines:
        shares = staleness_shares([run.staleness for run in runs], edges)
        axes.add_line(series_line(index, np.arange(len(shares)), shares))
    axes.autoscale_view()
    # The shares span three orders of magnitude under the large-delay law: linear below 1% only.
    axes.set_yscale("symlog", linthresh=0.01, linscale=0.5)
    axes.set_ylim(bottom=0)
    axes.set_yticks([0, 0.01, 0.1, 1], ["0", "1%", "10%", "100%"])
    axes.set_ylabel("share of arrivals")


def draw_weights(axes: Axes, groups: Mapping[str, Sequence[RunResult]]) -> None:
    """Draw the mean weight of the arrivals by staleness, relative to an equal share, with a point for each bin."""
    _staleness_axis(axes, groups)
    for index, runs in enumerate(groups.values()):
        axes.add_line(series_line(index, *mean_weights(runs), marker=series_style(index).marker or "."))
    axes.axhline(1.0, color="#888888", linewidth=0.8, linestyle=":")
    axes.autoscale_view()
    axes.set_ylim(bottom=0)
    axes.set_ylabel("mean weight, relative to an equal share")


def _staleness_axis(axes: Axes, groups: Mapping[str, Sequence[RunResult]]) -> np.ndarray:
    """Label the axis of staleness, whose values are the numbers of its bins, and return the edges of these."""
    edges, names = staleness_bins(max(1, *(run.max_staleness for runs in groups.values() for run in runs)))
    style_axes(axes)
    axes.set_xticks(np.arange(len(names)), names)
    axes.tick_params(axis="x", labelrotation=40)
    axes.set_xlabel("staleness (rounds)")
    return edges
