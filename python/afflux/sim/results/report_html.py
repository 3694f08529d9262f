"""report.html: one page with the results of a run folder, without scripts and without files from other places.

The text is that of the template report.html beside this module. All text that comes from settings, rules, files or
messages is data: the template escapes it. The page's own policy forbids scripts and resources as well.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from afflux.sim.results import figures, svg
from afflux.sim.results.curves import COLOURS, Schedule, schedules
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

MOST_PAIRS = 45  #: the most pairs of rules in the table of differences: those of ten rules

Groups = Mapping[str, Sequence[RunResult]]
Rows = list[list[str]]


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
        staleness=[
            _chart("Staleness of the arrivals", figures.draw_staleness, groups),
            _chart("Weight by staleness", figures.draw_weights, groups),
        ],
        shared_staleness="; ".join(schedule.label for schedule in schedules(groups, "staleness")),
        participation=[_participation(schedule) for schedule in schedules(groups, "clients")],
        shares=_chart(f"Share of the arrivals, seed {results[0].seed}", figures.draw_participation, groups),
        rejections=list(_rejections(groups)),
        configuration=configuration,
        logs=logs,
    )


def _chart(title: str, draw: Callable[..., None], *arguments: Any) -> svg.Chart:
    """Return the chart of a panel."""
    axes = svg.new_axes()
    draw(axes, *arguments)
    return svg.chart(title, axes)


def _curves(groups: Groups, metrics: Sequence[Metric], target: float | None) -> Iterator[svg.Chart]:
    for across, up in (("rounds", metrics[0]), *(("time", metric) for metric in metrics)):
        title = f"{up.words[0].upper()}{up.words[1:]} over {'rounds' if across == 'rounds' else 'virtual time'}"
        yield _chart(title, figures.draw_metric, up, across, groups, target if up is metrics[0] else None)


def _differences(differences: Sequence[PairedDifference], metric: Metric) -> list[list[Any]]:
    text = partial(metric.difference, sign="+")
    largest = max((max(abs(row.low), abs(row.high)) for row in differences), default=0.0)
    return [
        [
            f"{row.first} − {row.second}",
            text(row.mean),
            f"{text(row.low)} to {text(row.high)}" if row.low < row.high else "none: equal in all seeds",
            [place / largest if largest else 0.0 for place in (row.mean, row.low, row.high)],
            str(row.seeds),
            p_text(row.p_holm),
            p_text(row.p_wilcoxon),
        ]
        for row in differences
    ]


def _targets(results: Sequence[RunResult], target: float) -> dict[str, Rows]:
    tables: dict[str, Rows] = {}
    targets, metric = usual_targets(results, target), score_of(results)
    for title, name, digits in (("rounds to", "rounds", 0), ("virtual time to", "virtual_time", 1)):
        rows = {goal: [metric.text(goal)] for goal in targets}
        for hit in reach_targets(results, targets):
            rows[hit.target].append(getattr(hit, name).text(hit.runs, digits))
        tables[title] = list(rows.values())
    return tables if targets else {}


def _participation(schedule: Schedule) -> list[str]:
    label, _, runs = schedule
    rows = [run.participation for run in runs]
    cells = [label]
    for name, digits in (("clients", 0), ("least", 0), ("median", 1), ("most", 0), ("gini", 3), ("busiest_tenth", 3)):
        over_seeds = seed_statistics([float(getattr(row, name)) for row in rows])
        cells.append(over_seeds.text(len(runs), digits))
    return cells


def _rejections(groups: Groups) -> Iterator[list[str]]:
    for label, runs in groups.items():
        for title, counts in (
            ("decision", [run.decisions for run in runs]),
            ("rejected by the rule", [run.totals.rejected for run in runs]),
            ("rounds without a step", [{"all arrivals rejected": run.totals.skipped} for run in runs]),
        ):
            reasons = sum(map(Counter, counts), Counter[str]())
            yield from ([label, title, reason, str(count)] for reason, count in reasons.items())
