"""report.html: one page with the results of a run folder, without scripts and without files from other places.

All text that comes from settings, rules, files or messages is data: it is escaped. The page's own policy forbids
scripts and resources as well.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np

from afflux.sim.results import svg
from afflux.sim.results.curves import bin_names, curve, staleness_bins
from afflux.sim.results.page_style import STYLE
from afflux.sim.results.participation import arrivals_per_client
from afflux.sim.results.run_result import RunResult, group_by_rule, seed_statistics
from afflux.sim.results.statistics import LEVEL, paired_differences, reach_targets, usual_targets
from afflux.sim.results.summary_table import format_number, summary_rows

MOST_POINTS = 400  #: the most points of a line
MOST_PAIRS = 45  #: the most pairs of rules in the table of differences: those of ten rules
MANY_TIMES = 3  #: ratio of the rules' numbers of rounds from which the axis is logarithmic
PARTS = ("weigh", "calibrate", "step")  #: the parts of a rule that the report shows
POLICY = "default-src 'none'; style-src 'unsafe-inline'"

Groups = Mapping[str, Sequence[RunResult]]


def render_report(
    results: Sequence[RunResult], setting: str, target: float, configuration: Mapping[str, Any], logs: Mapping[str, str]
) -> str:
    """Return the page.

    Args:
        results: one for each rule and seed; at least one.
        setting: the settings in one line.
        target: accuracy that the settings name.
        configuration: the content of config.json.
        logs: SHA-256 of each audit log, by file name.
    """
    groups = group_by_rule(results)
    sections = (
        _results(results, groups, target),
        _section("Curves", _legend(groups), _curves(groups, target)),
        _differences(results),
        _targets(results, target),
        _section("Staleness and weights", _legend(groups), _staleness(groups)),
        _participation(groups),
        _rejections(groups),
        _settings(configuration),
        _digests(results, logs),
    )
    title = f"afflux: {', '.join(groups)}"
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"<h1>Results of {len(results)} run{'s' if len(results) > 1 else ''}</h1>\n"
        f'<p class="soft">{escape(setting)}</p>\n{"".join(sections)}</body>\n</html>\n'
    )


def _section(title: str, *parts: str) -> str:
    return f"<section>\n<h2>{escape(title)}</h2>\n{''.join(parts)}</section>\n"


def _note(text: str) -> str:
    return f'<p class="soft">{escape(text)}</p>\n'


def _table(header: Iterable[str], rows: Iterable[Sequence[str]], kind: str = "") -> str:
    """Return a table; header and cells are text. The first cell of a row is its header."""
    head = "".join(f'<th scope="col">{_name(cell)}</th>' for cell in header)
    body = (
        f'<tr><th scope="row">{_name(first)}</th>{"".join(f"<td>{_cell(cell)}</td>" for cell in cells)}</tr>\n'
        for first, *cells in rows
    )
    start = f'<div class="scroll"><table class="{kind}">\n<thead><tr>{head}</tr></thead>'
    return f"{start}\n<tbody>\n{''.join(body)}</tbody></table></div>\n"


def _name(text: str) -> str:
    """Return a name that may be broken after colons, which separate the options of a rule."""
    return escape(text).replace(":", ":<wbr>")


class _Markup(str):
    """A cell with markup of this module, without data, which is not escaped."""


def _cell(cell: str) -> str:
    return cell if isinstance(cell, _Markup) else escape(cell)


def _legend(groups: Groups) -> str:
    items = (f"<li>{svg.swatch(index)}{escape(label)}</li>" for index, label in enumerate(groups))
    return f'<ul class="legend">{"".join(items)}</ul>\n'


def _results(results: Sequence[RunResult], groups: Groups, target: float) -> str:
    rows = ([title, *cells] for title, cells in summary_rows(results, target, brief=False))
    note = (
        "Mean ± standard deviation over seeds. The last tenth is that of the evaluations. τ_ave and N_ave are WKAFL's: "
        "the mean over rounds of Σ p τ, and of the number of arrivals with p ≥ p_max/10, p being an arrival's weight "
        "divided by the sum over its round."
    )
    return _section("Summary", _table(["", *groups], rows), _note(note))


def _curves(groups: Groups, target: float) -> str:
    charts = []
    for across, up, title in (
        ("version", "accuracy", "Accuracy over rounds"),
        ("virtual_time", "accuracy", "Accuracy over virtual time"),
        ("virtual_time", "loss", "Loss over virtual time"),
    ):
        series = [_series(label, index, runs, across, up) for index, (label, runs) in enumerate(groups.items())]
        charts.append(svg.line_chart(title, *_axes(groups, across, up), series, target if up == "accuracy" else None))
    several = max(len(runs) for runs in groups.values()) > 1
    note = "Lines are means over seeds, bands one standard deviation. " if several else ""
    note += f"Dotted: the target, {100 * target:g}%."
    return _note(note) + _charts(charts)


def _axes(groups: Groups, across: str, up: str) -> tuple[svg.Axis, svg.Axis]:
    ends = [max(float(getattr(run.evaluations[-1], across)) for run in runs) for runs in groups.values()]
    if across == "version" and max(ends) > MANY_TIMES * max(min(ends), 1):
        horizontal = svg.logarithmic_axis("rounds (logarithmic: buffer sizes differ)", max(ends))
    else:
        title = "rounds" if across == "version" else "virtual time"
        horizontal = svg.linear_axis(title, 0, max(*ends, 1))
    if up == "accuracy":
        return horizontal, svg.percent_axis("test accuracy")
    losses = [row.loss for runs in groups.values() for run in runs for row in run.evaluations]
    finite = [loss for loss in losses if math.isfinite(loss)]
    return horizontal, svg.linear_axis("test loss", min(0, *finite, 0), max(finite, default=1.0) or 1.0)


def _series(label: str, index: int, runs: Sequence[RunResult], across: str, up: str) -> svg.Series:
    found = curve(runs, across, up)
    lines = [
        [(float(a), float(b)) for a, b in zip(_thin(x), _thin(y), strict=True)]
        for x, y in zip(found.x, found.y, strict=True)
    ]
    band = []
    if found.low is not None and found.high is not None:
        columns = (_thin(found.x[0]), _thin(found.low), _thin(found.high))
        band = [(float(x), float(low), float(high)) for x, low, high in zip(*columns, strict=True)]
    finite = [row for row in band if all(map(math.isfinite, row))]
    return svg.Series(label, index, lines, finite)


def _thin(values: np.ndarray) -> np.ndarray:
    """Return at most MOST_POINTS of the values, with the first and the last one."""
    if len(values) <= MOST_POINTS:
        return values
    chosen: np.ndarray = values[np.linspace(0, len(values) - 1, MOST_POINTS).round().astype(int)]
    return chosen


def _charts(charts: Iterable[str]) -> str:
    return f'<div class="charts">{"".join(charts)}</div>\n'


def _differences(results: Sequence[RunResult]) -> str:
    found = [row for row in paired_differences(results) if row.seeds > 1]
    if not found:
        return ""
    dropped, found = len(found) - MOST_PAIRS, found[:MOST_PAIRS]
    largest = max(max(abs(row.low), abs(row.high)) for row in found)
    rows = []
    for row in found:
        picture = _Markup(svg.interval_bar(row.mean, row.low, row.high, largest))
        interval = "none: equal in all seeds"
        if row.low < row.high:
            interval = f"{100 * row.low:+.2f} to {100 * row.high:+.2f}"
        rows.append([f"{row.first} − {row.second}", f"{100 * row.mean:+.2f}", interval, picture, str(row.seeds)])
    note = (
        f"Final accuracy of one rule less that of another, seed by seed, in points, with Student's {LEVEL:.0%} "
        "interval of the mean. Each interval is for itself: none is corrected for the number of pairs."
    )
    more = _note(f"{dropped} further pairs are left out.") if dropped > 0 else ""
    header = ("rules", "mean", f"{LEVEL:.0%} interval", "", "seeds")
    return _section("Paired differences", _note(note), _table(header, rows), more)


def _targets(results: Sequence[RunResult], target: float) -> str:
    targets = usual_targets(results, target)
    found = {(row.rule, row.target): row for row in reach_targets(results, targets)}
    labels = list(group_by_rule(results))
    tables = []
    for title, name, digits in (("rounds to", "rounds", 0), ("virtual time to", "virtual_time", 1)):
        rows = []
        for goal in targets:
            own = [found[label, goal] for label in labels]
            cells = [format_number(getattr(row, name), row.runs, digits) for row in own]
            rows.append([f"{100 * goal:g}%", *cells])
        tables.append(_table([title, *labels], rows))
    note = 'At the first evaluation with at least this accuracy; "-": no run reached it.'
    return _section("Targets", _note(note), *tables)


def _staleness(groups: Groups) -> str:
    edges = staleness_bins(max(run.max_staleness for runs in groups.values() for run in runs))
    names = bin_names(edges)
    bars, lines = [], []
    for index, (label, runs) in enumerate(groups.items()):
        staleness = np.concatenate([run.staleness for run in runs])
        counts, _ = np.histogram(staleness, bins=edges)
        bars.append((label, (counts / max(len(staleness), 1)).tolist()))
        points = [(float(k), mean) for k, mean in enumerate(_mean_weights(runs, len(names))) if math.isfinite(mean)]
        lines.append(svg.Series(label, index, [points]))
    across = svg.category_axis("staleness (rounds)", names)
    highest = max((y for one in lines for line in one.lines for _, y in line), default=1.0)
    note = (
        "Weights are those of the server's reports, divided by the mean over their round: 1 is an equal share. "
        "A rule that steps with every arrival has nothing to compare: always 1."
    )
    return _note(note) + _charts(
        (
            svg.bar_chart("Staleness of the arrivals", across, svg.share_axis("share of arrivals"), bars),
            svg.line_chart(
                "Weight by staleness",
                across,
                svg.linear_axis("mean weight, relative to an equal share", 0, max(highest, 1.0)),
                lines,
                level=1.0,
                markers=True,
            ),
        )
    )


def _mean_weights(runs: Sequence[RunResult], bins: int) -> list[float]:
    """Return the mean relative weight of each bin of staleness; nan for an empty one."""
    counts, weights = np.zeros(bins), np.zeros(bins)
    for run in runs:
        own = min(bins, len(run.totals.bin_counts))
        counts[:own] += run.totals.bin_counts[:own]
        weights[:own] += run.totals.bin_weights[:own]
    return [float(w / c) if c else math.nan for w, c in zip(weights, counts, strict=True)]


def _participation(groups: Groups) -> str:
    rows, series = [], []
    for index, (label, runs) in enumerate(groups.items()):
        facts = [run.participation._asdict() for run in runs]
        over_seeds = {name: seed_statistics([float(own[name]) for own in facts]) for name in facts[0]}
        shown = (("clients", 0), ("least", 0), ("median", 1), ("most", 0), ("gini", 3), ("busiest_tenth", 3))
        rows.append([label, *(format_number(over_seeds[name], len(runs), digits) for name, digits in shown)])
        counts = arrivals_per_client(runs[0].clients, runs[0].num_clients)[::-1]
        if counts.sum():
            up = np.concatenate([[0.0], np.cumsum(counts) / counts.sum()])
            points = zip(_thin(np.linspace(0, 1, len(up))).tolist(), _thin(up).tolist(), strict=True)
            series.append(svg.Series(label, index, [list(points)]))
    header = ("rule", "clients", "least", "median", "most", "Gini", "share of busiest tenth")
    note = (
        "The number of clients that arrived at least once, and the arrivals of a client, over all that hold data. "
        "Gini coefficient: 0 if all arrive equally often, towards 1 if few send everything."
    )
    chart = svg.line_chart(
        f"Share of the arrivals, seed {next(iter(groups.values()))[0].seed}",
        svg.percent_axis("clients, from the busiest on"),
        svg.percent_axis("arrivals"),
        series,
    )
    return _section("Participation", _note(note), _table(header, rows), _legend(groups), _charts([chart]))


def _rejections(groups: Groups) -> str:
    rows = []
    for label, runs in groups.items():
        for title, counts in (
            ("decision", [run.decisions for run in runs]),
            ("rejected by the rule", [run.totals.rejected for run in runs]),
            ("rounds without a step", [{"all arrivals rejected": run.totals.skipped} for run in runs]),
        ):
            reasons: dict[str, int] = {}
            for own in counts:
                for reason, count in own.items():
                    reasons[reason] = reasons.get(reason, 0) + count
            rows += [[label, title, reason, str(count)] for reason, count in reasons.items() if count]
    note = "Counts over all seeds; numbers in a reason are replaced by #. The audit logs hold each arrival."
    return _section("Decisions and rejections", _note(note), _table(("rule", "", "reason", "count"), rows, "text"))


def _settings(configuration: Mapping[str, Any]) -> str:
    rules = [
        [str(rule["label"]), str(rule["name"]), _options(rule["options"]), str(rule["updates_of"])]
        for rule in configuration["rules"]
    ]
    parts = [
        [str(rule["label"]), *(_part(rule["parts"][name]) for name in PARTS)]
        for rule in configuration["rules"]
        if rule.get("parts")
    ]
    settings = [[name, "" if value is None else str(value)] for name, value in configuration["simulation"].items()]
    division = configuration.get("division", {})
    settings += [[f"clients' data: {name}", str(value)] for name, value in division.items()]
    settings.append(["seeds", ", ".join(map(str, configuration["seeds"]))])
    versions = [[name, str(value)] for name, value in configuration["versions"].items()]
    versions.append(["machine", str(configuration["machine"])])
    return (
        _section(
            "Rules",
            _note("All options, defaults included, and the parts that they make."),
            _table(("label", "rule", "options", "clients train from"), rules, "text"),
            _table(("label", *PARTS), parts, "text") if parts else "",
        )
        + _section("Settings", _table(("setting", "value"), settings, "text"))
        + _section("Versions", _table(("software", "version"), versions, "text"))
    )


def _options(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={_value(value)}" for name, value in options.items()) or "none"


def _part(part: Any) -> str:
    """Return a part of a rule as text: polynomial(a=0.5)."""
    fields = ", ".join(f"{name}={_value(value)}" for name, value in part.items() if name not in ("part", "own"))
    return f"{part.get('part', part.get('own'))}({fields})"


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return _part(value)
    return "none" if value is None else str(value)


def _digests(results: Sequence[RunResult], logs: Mapping[str, str]) -> str:
    rows = [[run.spec.label, str(run.seed), _code(run.digest)] for run in results]
    files = [[name, _code(digest)] for name, digest in logs.items()]
    note = "Equal digests are equal bits: the same command gives the same ones, in any number of processes."
    parts = [_note(note), _table(("rule", "seed", "SHA-256 of the final params"), rows, "text")]
    if files:
        parts.append(_table(("audit log", "SHA-256"), files, "text"))
    return _section("Digests", *parts)


def _code(text: str) -> str:
    return _Markup(f"<code>{escape(text)}</code>")
