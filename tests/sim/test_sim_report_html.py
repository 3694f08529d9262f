"""report.html: its numbers are those of the results, data are escaped, and nothing comes from elsewhere."""

import re
import tomllib
from dataclasses import asdict, replace
from hashlib import sha256
from html.parser import HTMLParser
from pathlib import Path

import msgspec
import numpy as np
import pytest
from matplotlib.figure import Figure

import afflux
from afflux.sim.results import curves, figures, report_html, run_folder, svg
from afflux.sim.results.audit_log import AuditOutput
from afflux.sim.results.report_html import MOST_POINTS, render_report
from afflux.sim.results.run_folder import Configuration, RuleConfiguration
from afflux.sim.results.run_result import Evaluation, RoundTotals, RunResult, group_by_rule
from afflux.sim.results.statistics import paired_differences
from afflux.sim.runs.compare import compare, make_jobs
from afflux.sim.workload.config import SimConfig
from afflux.sim.workload.metrics import CLASSIFICATION
from afflux.sim.workload.rule_specs import RuleSpec, parse_rule, rule_parameters
from conftest import ROOT

CONFIG = SimConfig(model="logreg", num_clients=20, concurrency=6, arrivals=60, eval_every=10, delays="fadas-mild")
SPECS = [parse_rule("fedbuff:buffer_size=3"), parse_rule("wkafl:buffer_size=5:sim_min=0.5"), parse_rule("fedasync")]
HOSTILE = "a\"b'<script>alert(1)</script>&<img src=x onerror=y>:c=</title></style>"
EMPTY = {"meta", "wbr"}


class Page(HTMLParser):
    """Collects tags, attributes, tables and text; every tag must be closed in its place."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.attributes, self.tables, self.text = [], [], [], [], ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs, closed=True)

    def handle_starttag(self, tag, attrs, closed=False):
        self.tags.append(tag)
        self.attributes += [(tag, *pair) for pair in attrs]
        if tag == "table":
            self.tables.append([])
        if tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self.tables[-1][-1].append("")
        if not closed and tag not in EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data
        if {"td", "th"} & set(self.open):
            self.tables[-1][-1][-1] += data

    def table(self, first):
        return next(table for table in self.tables if table[0][0] == first)


def result_of(label, seed, accuracies, every=10):
    rows = tuple(Evaluation(every * i, i, 2.5 * i, a, 2.0 - a) for i, a in enumerate(accuracies))
    staleness = np.array([0, 1, 3, 9])
    return RunResult(
        RuleSpec(label, (), label),
        seed,
        rows,
        staleness,
        staleness,
        np.array([1e-3]),
        8,
        4,
        np.full(2, seed, np.float32),
        clients=np.array([0, 0, 1, 2]),
        decisions={"joined": 3, "dropped": 1},
        totals=RoundTotals(2, 1.5, 3, 1, {"cosine # below #": 2}, [2, 1], [2.5, 0.5]),
    )


def page_of(results, **changes):
    groups = group_by_rule(results).items()
    rules = [RuleConfiguration(label, runs[0].spec.name, {"a": 1}, {}, label) for label, runs in groups]
    content = Configuration(asdict(CONFIG), {}, rules, [0], {"afflux": "1"}, "machine")
    content = msgspec.structs.replace(content, **changes)
    return render_report(results, "setting", 0.9, content, {"log.jsonl": "0" * 64})


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = run_folder.create_run_folder(tmp_path_factory.mktemp("out") / "run")
    output = run_folder.create_audit_folder(folder)
    assert isinstance(output, AuditOutput)
    results = compare(make_jobs(SPECS, [0, 1]), CONFIG, output=output)
    run_folder.write_results(folder, results, CONFIG)
    return folder, results, Page((folder / "report.html").read_text(encoding="utf-8"))


def test_the_page_needs_nothing_else(written):
    folder, _, page = written
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert not {"script", "link", "img", "iframe", "object", "embed", "image", "use", "base", "form"} & set(page.tags)
    assert not {"src", "href", "srcset", "action", "style", "onload"} & {name for _, name, _ in page.attributes}
    assert not re.search(r"https?:|//[a-z]|url\(|@import", text)
    assert ("meta", "content", "default-src 'none'; style-src 'unsafe-inline'") in page.attributes
    assert ("meta", "content", "width=device-width, initial-scale=1") in page.attributes
    assert "prefers-color-scheme: dark" in text


def test_the_template_is_part_of_the_package():
    files = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]["afflux"]
    template = Path(report_html.__file__).with_name("report.html")
    assert template.is_file()
    assert template.relative_to(Path(afflux.__file__).parent).as_posix() in files


def test_the_summary_is_that_of_the_runs(written):
    _, results, page = written
    table = page.tables[0]
    groups = group_by_rule(results)
    assert table[0] == ["", *groups]
    rows = {row[0]: row[1:] for row in table[1:]}
    for column, runs in enumerate(groups.values()):
        finals = [100 * run.final_accuracy for run in runs]
        assert rows["final accuracy, %"][column] == f"{np.mean(finals):.1f} ± {np.std(finals, ddof=1):.1f}"
        late = [run.weighted_staleness for run in runs]
        assert rows["weighted staleness, τ_ave"][column] == f"{np.mean(late):.2f} ± {np.std(late, ddof=1):.2f}"
        rejected = [run.rejected_arrivals for run in runs]
        assert rows["rejected arrivals"][column] == f"{np.mean(rejected):.0f} ± {np.std(rejected, ddof=1):.0f}"
    assert any(run.rejected_arrivals for run in results)


def test_a_difference_that_is_equal_in_all_seeds_has_no_interval(written, tmp_path):
    _, results, _ = written
    run_folder.write_results(tmp_path, [replace(run, evaluations=results[0].evaluations) for run in results], CONFIG)
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert {row[2] for row in page.table("rules")[1:]} == {"none: equal in all seeds"}


def test_differences_settings_versions_and_digests_are_there(written):
    folder, results, page = written
    differences = page.table("rules")[1:]
    assert [row[0] for row in differences] == [f"{one.first} − {one.second}" for one in paired_differences(results)]
    assert differences[0][1] == f"{100 * paired_differences(results)[0].mean:+.2f}"
    settings = dict(page.table("setting")[1:])
    assert settings["num_clients"] == "20"
    assert settings["seeds"] == "0, 1"
    assert settings["clients' data: partition"] == "dirichlet"
    options = {label: cells for label, *cells in page.table("label")[1:]}
    (parts,) = [table for table in page.tables if table[0] == ["label", "weigh", "calibrate", "step"]]
    for run in results:
        name, shown, _ = options[run.spec.label]
        assert (name, shown.count("=")) == (run.spec.name, len(rule_parameters(name)))
    assert {row[0] for row in parts[1:]} == options.keys()
    assert all("lr=" in row[3] for row in parts[1:])
    assert set(dict(page.table("software")[1:])) == {"afflux", "python", "numpy", "torch", "machine"}
    digests = [row for table in page.tables if table[0][-1] == "SHA-256 of the final params" for row in table[1:]]
    assert [row[2] for row in digests] == [run.digest for run in results]
    logs = dict(page.table("audit log")[1:])
    assert len(logs) == 6
    for name, digest in logs.items():
        assert sha256((folder / "audit" / name).read_bytes()).hexdigest() == digest


def test_decisions_and_rejections_are_counted_over_seeds():
    page = Page(page_of([result_of("a", seed, [0.1, 0.5]) for seed in range(3)]))
    (table,) = [table for table in page.tables if table[0][-1] == "count"]
    assert table[1:] == [
        ["a", "decision", "joined", "9"],
        ["a", "decision", "dropped", "3"],
        ["a", "rejected by the rule", "cosine # below #", "6"],
        ["a", "rounds without a step", "all arrivals rejected", "3"],
    ]


def test_all_text_from_data_is_escaped():
    results = [result_of(label, seed, [0.1, 0.5]) for label in (HOSTILE, "b") for seed in (0, 1)]
    results[0].totals.rejected[HOSTILE] = 1
    results[0].decisions[HOSTILE] = 1
    plain = page_of([result_of(label, seed, [0.1, 0.5]) for label in ("a", "b") for seed in (0, 1)])
    changes = {
        "simulation": {HOSTILE: HOSTILE},
        "versions": {HOSTILE: HOSTILE},
        "machine": HOSTILE,
        "seeds": [HOSTILE],
        "rules": [RuleConfiguration(HOSTILE, HOSTILE, {HOSTILE: HOSTILE}, {}, HOSTILE)],
    }
    text = page_of(results, **changes).replace(":<wbr>", ":")
    page = Page(text)
    assert set(page.tags) <= set(Page(plain).tags)
    assert "<script" not in text
    assert "<img" not in text
    assert page.text.count(HOSTILE) >= 15
    content = Configuration({}, {}, [], [], changes["versions"], changes["machine"])
    logs = render_report(results, HOSTILE, 0.9, content, {HOSTILE: HOSTILE})
    assert set(Page(logs.replace(":<wbr>", ":")).tags) <= set(Page(plain).tags)


def points_of(chart):
    return [
        [tuple(map(float, point.split(","))) for point in line.split()]
        for line in re.findall(r'<polyline[^>]* points="([^"]*)"', chart)
    ]


def test_lines_lie_at_their_values():
    across, up = svg.linear_axis("x", 0, 40), svg.percent_axis("y")
    chart = svg.line_chart("t", across, up, [svg.Series("a", 0, [[(0, 0), (10, 0.5), (40, 1), (20, float("nan"))]])])
    (line,) = points_of(chart.shapes)
    left, right, bottom, top = svg.LEFT, svg.WIDTH - svg.RIGHT, svg.HEIGHT - svg.BOTTOM, svg.TOP
    assert line == [
        (left, bottom),
        (left + (right - left) / 4, (bottom + top) / 2),
        (right, top),
    ]
    Page(chart.shapes)


def test_a_share_axis_is_linear_below_one_percent():
    axis = svg.share_axis("y")
    places = [axis.place(share) for share in (0, 0.005, 0.01, 0.1, 1)]
    assert places == pytest.approx([0, 0.125, 0.25, 0.625, 1])
    logarithmic = svg.logarithmic_axis("x", 999)
    assert [tick for tick, _ in logarithmic.ticks] == [0, 1, 10, 100, 1000]
    assert logarithmic.place(1000) == 1


def test_bars_are_as_high_as_their_shares():
    across = svg.category_axis("x", ["0", "1"])
    chart = svg.bar_chart("t", across, svg.percent_axis("y"), [("a", [0.25, 0.0]), ("b", [1.0, 0.5])])
    heights = [float(height) for height in re.findall(r'<rect[^>]* height="([^"]*)"', chart.shapes)]
    full = svg.HEIGHT - svg.BOTTOM - svg.TOP
    assert heights == pytest.approx([full / 4, full, full / 2], abs=0.1)  # coordinates have one decimal


def test_curves_are_means_with_a_band_or_one_line_for_each_run():
    values = np.random.default_rng(0).random((3, 5))
    runs = [result_of("a", seed, row) for seed, row in enumerate(values)]
    found = curves.curve(runs, "version", "accuracy")
    assert np.array_equal(found.y[0], values.mean(axis=0))
    assert np.array_equal(found.high, values.mean(axis=0) + values.std(axis=0, ddof=1))
    assert found.x[0].tolist() == [0, 1, 2, 3, 4]
    shorter = [runs[0], replace(runs[1], evaluations=runs[1].evaluations[:3])]
    found = curves.curve(shorter, "version", "accuracy")
    assert (found.low, found.high) == (None, None)
    assert [len(y) for y in found.y] == [5, 3]
    page = Page(page_of(shorter))
    assert page.tags.count("polygon") == 0
    assert curves.curve(runs[:1], "version", "loss").low is None


def test_both_pictures_repeat_the_colours_with_other_dashes():
    assert len({curves.colour_and_dashes(index) for index in range(4 * len(curves.COLOURS))}) == 28
    runs = [result_of(f"rule {i}", 0, [0.1, 0.2]) for i in range(9)]
    lines = Page(page_of(runs)).attributes
    assert {value for _, name, value in lines if name == "stroke-dasharray"} == {"6 3"}
    axes = Figure().subplots()
    for index in range(9):
        figures._draw_curve(axes, curves.curve(runs[:1], "version", "accuracy"), "", index, CLASSIFICATION[0])
    assert axes.lines[1].get_color() == axes.lines[8].get_color() == curves.COLOURS[1].picture
    assert [line.is_dashed() for line in axes.lines] == [False] * 7 + [True] * 2


def test_bins_hold_every_staleness():
    for largest in range(70):
        edges, names = curves.staleness_bins(largest)
        assert np.histogram(np.arange(largest + 1), bins=edges)[0].sum() == largest + 1
        assert len(edges) == len(names) + 1
        # The bins of `RoundTotals` are those of the page.
        assert np.searchsorted(edges, largest, "right") - 1 == largest.bit_length()
    assert curves.staleness_bins(8)[1] == ["0", "1", "2-3", "4-7", "8-15"]


def test_long_runs_are_thinned_and_hopeless_ones_drawn():
    accuracies = np.linspace(0, 1, 5000)
    page = page_of([result_of("a", 0, accuracies)])
    longest = max(len(line) for line in points_of(page))
    assert longest == MOST_POINTS
    lost = result_of("a", 0, [0.1, 0.2])
    rows = tuple(Evaluation(*row[:4], float("nan")) for row in lost.evaluations)
    Page(page_of([replace(lost, evaluations=rows, clients=np.zeros(0, np.int64), totals=RoundTotals())]))
    Page(page_of([result_of(f"rule {i}", 0, [0.1, 0.2]) for i in range(30)]))
