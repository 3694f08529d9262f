"""report.html: one page with the results of a run folder, without scripts and without files from other places.

The text is that of the template report.html beside this module. All text that comes from settings, rules, files or
messages is data: the template escapes it. The page's own policy forbids scripts and resources as well.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup, escape
from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from afflux.lab.results.curves import COLOURS, schedules
from afflux.lab.results.figures import draw_metric, draw_staleness, draw_weights, series_line
from afflux.lab.results.finished_runs import FailedRun
from afflux.lab.results.run_result import RunResult, group_by_rule
from afflux.lab.results.statistics import (
    LEVEL,
    PairedDifference,
    p_text,
    paired_differences,
    score_of,
    shown_metrics,
    shown_target,
    summary_rows,
)
from afflux.sim.workload.evaluation import Metric

WIDTH, HEIGHT = 400, 260  #: of a chart, in pixels
GREY = "#888888"  #: of text and axes, as of the target
#: Matplotlib's settings of a chart, whose text is text.
STYLE: Any = {"svg.fonttype": "none", "svg.hashsalt": "afflux", "font.family": "DejaVu Sans", "font.size": 12}
STYLE |= {"lines.linewidth": 1.8, "lines.markersize": 5, "axes.edgecolor": GREY, "axes.labelcolor": GREY}
STYLE |= {"xtick.color": GREY, "ytick.color": GREY, "figure.facecolor": "none", "axes.facecolor": "none"}
#: Matplotlib's colours, and those of the page, which are others in the dark.
PAGE_COLOURS = {GREY: "soft", "#dddddd": "rule"}
PAGE_COLOURS |= {colour.picture.lower(): f"c{number}" for number, colour in enumerate(COLOURS)}

Groups = Mapping[str, Sequence[RunResult]]
TextRows = list[list[str]]


def render_report(
    results: Sequence[RunResult],
    setting: str,
    target: float,
    configuration: Mapping[str, Any],
    failures: Sequence[FailedRun] = (),
) -> str:
    """Return the page.

    Args:
        results: one for each rule and seed; at least one.
        setting: the settings in one line.
        target: score that the settings name.
        configuration: the content of config.json.
        failures: the runs without a result.
    """
    groups, metric, goal = group_by_rule(results), score_of(results), shown_target(results, target)
    differences = [row for row in paired_differences(results) if row.seeds > 1]
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("report.html").render(
        colours=COLOURS,
        swatches=[_swatch(index) for index in range(len(groups))],
        size=(WIDTH, HEIGHT),
        labels=list(groups),
        runs=results,
        setting=setting,
        metric=metric,
        target=None if goal is None else metric.text(goal),
        level=f"{LEVEL:.0%}",
        summary=_compared(summary_rows(results, target, brief=False, failures=failures)),
        curves=list(_curves(groups, shown_metrics(results), goal)),
        differences=_differences(differences, metric),
        staleness=_staleness(groups),
        shared_staleness="; ".join(schedule.label for schedule in schedules(groups)),
        configuration=configuration,
    )


def _compared(rows: Sequence[tuple[str, list[str]]]) -> TextRows:
    """Return the rows by which rules can be compared: not those of equal numbers, or with the number of one rule."""
    pairs = ((title, cells, sum(cell != "-" for cell in cells)) for title, cells in rows)
    return [[title, *cells] for title, cells, count in pairs if len(cells) == 1 or (count > 1 and len({*cells}) > 1)]


class Chart(NamedTuple):
    """A picture of lines, with the words around it."""

    title: str
    across: str  #: title of the horizontal axis
    up: str
    shapes: Markup  #: elements of SVG


def _chart(title: str, draw: Callable[[Axes], None], labels: Mapping[int, str]) -> Chart:
    """Return the chart that `draw` draws; each line has the label of its series, by number."""
    with rc_context(STYLE):
        figure = Figure(figsize=(WIDTH / 72, HEIGHT / 72), layout="constrained")
        axes = figure.subplots()
        draw(axes)
        for line in axes.lines:
            line.set_gid(f"line{line.get_label()}")
        across, up = axes.get_xlabel(), axes.get_ylabel()
        axes.set(title="", ylabel="")
        return Chart(title, across, up, _shapes(figure, labels))


def _swatch(index: int) -> Markup:
    """Return the line of a series for the legend, 26 by 12 pixels."""
    figure = Figure(figsize=(26 / 72, 12 / 72), facecolor="none")
    figure.add_artist(series_line(index, [0.04, 0.5, 0.96], [0.5] * 3, markevery=[1], linewidth=1.8, markersize=5))
    return _shapes(figure, {})


def _shapes(figure: Figure, labels: Mapping[int, str]) -> Markup:
    """Return the elements of a figure in the colours of the page, with the labels of its lines by number."""
    file = StringIO()
    figure.savefig(file, format="svg", metadata=dict.fromkeys(("Creator", "Date", "Format", "Type")))
    text = " ".join(file.getvalue().split())
    text = text[text.index("</style>") :].partition("</defs>")[2].rpartition("</svg>")[0]
    for colour, name in PAGE_COLOURS.items():
        text = text.replace(colour, f"var(--{name})")
    for number, label in labels.items():
        text = text.replace(f'<g id="line_{number}">', f"<g><title>{escape(label)}</title>")
    return Markup(re.sub(r' id="[\w.]+_\w+"', "", text))  # other charts have the same ids


def _curves(groups: Groups, metrics: Sequence[Metric], target: float | None) -> Iterator[Chart]:
    for x, metric in (("rounds", metrics[0]), *(("time", metric) for metric in metrics)):
        title = f"{metric.words[0].upper()}{metric.words[1:]} over {'rounds' if x == 'rounds' else 'virtual time'}"
        goal = target if metric is metrics[0] else None
        draw = partial(draw_metric, metric=metric, x=x, groups=groups, target=goal)
        yield _chart(title, draw, dict(enumerate(groups)))


def _differences(differences: Sequence[PairedDifference], metric: Metric) -> TextRows:
    text = partial(metric.difference, sign="+")
    return [
        [
            f"{row.first} − {row.second}",
            text(row.mean),
            f"{text(row.low)} to {text(row.high)}" if row.low < row.high else "none: equal in all seeds",
            str(row.seeds),
            p_text(row.p_holm),
        ]
        for row in differences
    ]


def _staleness(groups: Groups) -> tuple[Chart, Chart]:
    shared = {schedule.first: schedule.label for schedule in schedules(groups)}
    return (
        _chart("Staleness of the arrivals", partial(draw_staleness, groups=groups), shared),
        _chart("Weight by staleness", partial(draw_weights, groups=groups), dict(enumerate(groups))),
    )
