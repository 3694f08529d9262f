"""report.html: one page with the results of a run folder, without scripts and without files from other places.

The text is that of the template report.html beside this module. All text that comes from settings, rules, files or
messages is data: the template escapes it. The page's own policy forbids scripts and resources as well.
"""

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jinja2 import Environment, FileSystemLoader, StrictUndefined

from afflux.sim.results import svg
from afflux.sim.results.curves import (
    COLOURS,
    MANY_TIMES,
    SharedSchedule,
    cumulated_shares,
    curve,
    schedules,
    staleness_bins,
    staleness_shares,
)
from afflux.sim.results.run_result import RunResult, group_by_rule, seed_statistics
from afflux.sim.results.statistics import (
    LEVEL,
    PairedDifference,
    p_text,
    paired_differences,
    reach_targets,
    score_of,
    shown_metrics,
    shown_target,
    summary_rows,
    usual_targets,
    wilcoxon_note,
)
from afflux.sim.workload.metrics import Metric

MOST_POINTS = 400  #: the most points of a line
MOST_PAIRS = 45  #: the most pairs of rules in the table of differences: those of ten rules

Groups = Mapping[str, Sequence[RunResult]]
TextRows = list[list[str]]


def render_report(
    results: Sequence[RunResult], setting: str, target: float, configuration: Mapping[str, Any], logs: Mapping[str, str]
) -> str:
    """Return the page.

    Args:
        results: one for each rule and seed; at least one.
        setting: the settings in one line.
        target: score that the settings name.
        configuration: the content of config.json.
        logs: SHA-256 of each audit log, by file name.
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
        svg=svg,
        labels=list(groups),
        runs=results,
        setting=setting,
        metric=metric,
        target=None if goal is None else metric.text(goal),
        level=f"{LEVEL:.0%}",
        summary=[[title, *cells] for title, cells in summary_rows(results, target, brief=False)],
        curves=list(_curves(groups, shown_metrics(results), goal)),
        differences=_differences(differences[:MOST_PAIRS], metric),
        wilcoxon=wilcoxon_note(min((row.seeds for row in differences), default=0)),
        more_pairs=max(len(differences) - MOST_PAIRS, 0),
        targets=_targets(results, target),
        staleness=_staleness(groups),
        shared_staleness="; ".join(schedule.label for schedule in schedules(groups, "staleness")),
        participation=[_participation(schedule) for schedule in schedules(groups, "clients")],
        shares=_shares(groups),
        rejections=list(_rejections(groups)),
        configuration=configuration,
        logs=logs,
    )


def _curves(groups: Groups, metrics: Sequence[Metric], target: float | None) -> Iterator[svg.Chart]:
    for across, up in (("version", metrics[0]), *(("virtual_time", metric) for metric in metrics)):
        series = [_series(label, index, runs, across, up.name) for index, (label, runs) in enumerate(groups.items())]
        title = f"{up.words[0].upper()}{up.words[1:]} over {'rounds' if across == 'version' else 'virtual time'}"
        level = target if up is metrics[0] else None
        yield svg.line_chart(title, *_axes(groups, across, up, level), series, level)


def _axes(groups: Groups, across: str, up: Metric, level: float | None) -> tuple[svg.Axis, svg.Axis]:
    ends = [max(float(getattr(run.evaluations[-1], across)) for run in runs) for runs in groups.values()]
    if across == "version" and max(ends) > MANY_TIMES * max(min(ends), 1):
        horizontal = svg.logarithmic_axis("rounds (logarithmic: buffer sizes differ)", max(ends))
    else:
        title = "rounds" if across == "version" else "virtual time"
        horizontal = svg.linear_axis(title, 0, max(*ends, 1))
    if up.is_share:
        return horizontal, svg.percent_axis(f"test {up.words}")
    values = [getattr(row, up.name) for runs in groups.values() for run in runs for row in run.evaluations]
    ends = [value for value in (*values, *up.bounds, *(() if level is None else (level,))) if math.isfinite(value)]
    low, high = min(ends, default=0.0), max(ends, default=1.0)
    return horizontal, svg.linear_axis(f"test {up.title()}", low, high if high > low else low + 1)


def _series(label: str, index: int, runs: Sequence[RunResult], across: str, up: str) -> svg.Series:
    values = curve(runs, across, up)
    lines = [_points(x, y) for x, y in zip(values.x, values.y, strict=True)]
    band = [] if values.low is None or values.high is None else _points(values.x[0], values.low, values.high)
    return svg.Series(label, index, lines, [row for row in band if all(map(math.isfinite, row))])


def _points(*columns: np.ndarray) -> list[Any]:
    """Return the rows of the columns, at most MOST_POINTS of them, with the first and the last one."""
    table = np.stack(columns, axis=1)
    if len(table) > MOST_POINTS:
        table = table[np.linspace(0, len(table) - 1, MOST_POINTS).round().astype(int)]
    return [tuple(row) for row in table.tolist()]


def _differences(differences: Sequence[PairedDifference], metric: Metric) -> list[list[Any]]:
    text = partial(metric.difference, sign="+")
    largest = max((max(abs(row.low), abs(row.high)) for row in differences), default=0.0)
    return [
        [
            f"{row.first} − {row.second}",
            text(row.mean),
            f"{text(row.low)} to {text(row.high)}" if row.low < row.high else "none: equal in all seeds",
            svg.interval(row.mean, row.low, row.high, largest),
            str(row.seeds),
            p_text(row.p_holm),
            p_text(row.p_wilcoxon),
        ]
        for row in differences
    ]


def _targets(results: Sequence[RunResult], target: float) -> dict[str, TextRows]:
    tables: dict[str, TextRows] = {}
    targets, metric = usual_targets(results, target), score_of(results)
    for title, name, digits in (("rounds to", "rounds", 0), ("virtual time to", "virtual_time", 1)):
        rows = {goal: [metric.text(goal)] for goal in targets}
        for hit in reach_targets(results, targets):
            rows[hit.target].append(getattr(hit, name).text(hit.runs, digits))
        tables[title] = list(rows.values())
    return tables if targets else {}


def _staleness(groups: Groups) -> tuple[svg.Chart, svg.Chart]:
    edges, names = staleness_bins(max(run.max_staleness for runs in groups.values() for run in runs))
    shares, lines = [], []
    for label, index, runs in schedules(groups, "staleness"):
        heights = staleness_shares([run.staleness for run in runs], edges).tolist()
        shares.append(svg.Series(label, index, [list(enumerate(heights))]))
    for index, (label, runs) in enumerate(groups.items()):
        lines.append(svg.Series(label, index, [list(_mean_weights(runs, len(names)))]))
    across = svg.category_axis("staleness (rounds)", names)
    highest = max((y for series in lines for line in series.lines for _, y in line), default=1.0)
    weights = svg.linear_axis("mean weight, relative to an equal share", 0, max(highest, 1.0))
    return (
        svg.line_chart("Staleness of the arrivals", across, svg.share_axis("share of arrivals"), shares, points=True),
        svg.line_chart("Weight by staleness", across, weights, lines, level=1.0, points=True),
    )


def _mean_weights(runs: Sequence[RunResult], bins: int) -> Iterator[tuple[float, float]]:
    """Yield the number of each bin of staleness that is not empty, and its mean relative weight."""
    for bin_ in range(bins):
        totals = [run.totals for run in runs if bin_ < len(run.totals.bin_counts)]
        if count := sum(total.bin_counts[bin_] for total in totals):
            yield bin_, sum(total.bin_weights[bin_] for total in totals) / count


def _participation(schedule: SharedSchedule) -> list[str]:
    label, _, runs = schedule
    rows = [run.participation for run in runs]
    cells = [label]
    for name, digits in (("clients", 0), ("least", 0), ("median", 1), ("most", 0), ("gini", 3), ("busiest_tenth", 3)):
        over_seeds = seed_statistics([float(getattr(row, name)) for row in rows])
        cells.append(over_seeds.text(len(runs), digits))
    return cells


def _shares(groups: Groups) -> svg.Chart:
    series = []
    for label, index, runs in schedules(groups, "clients"):
        if len(runs[0].clients):
            up = cumulated_shares(runs[0])
            series.append(svg.Series(label, index, [_points(np.linspace(0, 1, len(up)), up)]))
    title = f"Share of the arrivals, seed {next(iter(groups.values()))[0].seed}"
    axes = svg.percent_axis("clients, from the busiest on"), svg.percent_axis("arrivals")
    return svg.line_chart(title, *axes, series)


def _rejections(groups: Groups) -> Iterator[list[str]]:
    for label, runs in groups.items():
        for title, counts in (
            ("decision", [run.decisions for run in runs]),
            ("rejected by the rule", [run.totals.rejected for run in runs]),
            ("rounds without a step", [{"all arrivals rejected": run.totals.skipped} for run in runs]),
        ):
            reasons = sum(map(Counter, counts), Counter[str]())
            yield from ([label, title, reason, str(count)] for reason, count in reasons.items())
