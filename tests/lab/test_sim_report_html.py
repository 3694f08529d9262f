"""report.html: its numbers are those of the results, data are escaped, and nothing comes from elsewhere."""

import re
import tomllib
from dataclasses import asdict, replace
from functools import partial
from html.parser import HTMLParser
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

import afflux
from afflux.lab.results import curves, figures, report_html, run_folder
from afflux.lab.results.report_html import render_report
from afflux.lab.results.run_result import Evaluation, RoundTotals, RunResult, group_by_rule
from afflux.lab.results.simulation_results import SimulationResults
from afflux.lab.results.statistics import paired_differences
from afflux.lab.runs.compare import compare, make_jobs
from afflux.rules.specs import RuleSpec, parse_rule, rule_parameters
from afflux.sim.workload.config import SimConfig
from conftest import ROOT, check_refused
from made_runs import audit_folder

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
    decisions, totals = {"joined": 3, "dropped": 1}, RoundTotals(1, {"cosine # below #": 2}, [2, 1], [2.5, 0.5])
    more = {"clients": np.array([0, 0, 1, 2]), "decisions": decisions, "totals": totals}
    arrays = (staleness, staleness, np.array([1e-3]))
    return RunResult(RuleSpec(label, (), label), seed, rows, *arrays, 8, 4, np.full(2, seed, np.float32), **more)


def rule_row(label, name, options, updates_of):
    return {"label": label, "name": name, "options": options, "parts": {}, "updates_of": updates_of}


def page_of(results, **changes):
    groups = group_by_rule(results).items()
    rules = [rule_row(label, runs[0].spec.name, {"a": 1}, label) for label, runs in groups]
    content = {"simulation": asdict(CONFIG), "division": {}, "rules": rules, "seeds": [0]}
    content |= {"versions": {"afflux": "1"}, "machine": "machine"} | changes
    return render_report(results, "setting", 0.9, content)


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = run_folder.create_run_folder(tmp_path_factory.mktemp("out") / "run")
    output = audit_folder(folder)
    assert isinstance(output, Path)
    results = compare(make_jobs(SPECS, [0, 1]), CONFIG, output=output)
    run_folder.write_results(folder, results, CONFIG)
    return folder, results, Page((folder / "report.html").read_text(encoding="utf-8"))


def test_the_page_needs_nothing_else(written):
    folder, _, page = written
    text = (folder / "report.html").read_text(encoding="utf-8")
    assert not {"script", "link", "img", "iframe", "object", "embed", "image", "base", "form"} & set(page.tags)
    assert not {"src", "href", "srcset", "action", "onload"} & {name for _, name, _ in page.attributes}
    assert not re.search(r"https?:|//[a-z]|url\((?!#)|@import", text)
    references = {value for _, name, value in page.attributes if name == "xlink:href"}
    references |= {f"#{name}" for name in re.findall(r"url\(#(\w+)\)", text)}
    assert references
    assert references <= {f"#{value}" for _, name, value in page.attributes if name == "id"}
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
        rejected = [run.rejected_arrivals for run in runs]
        assert rows["rejected arrivals"][column] == f"{np.mean(rejected):.0f} ± {np.std(rejected, ddof=1):.0f}"
    assert any(run.rejected_arrivals for run in results)


def test_a_difference_that_is_equal_in_all_seeds_has_no_interval(written, tmp_path):
    _, results, _ = written
    run_folder.write_results(tmp_path, [replace(run, evaluations=results[0].evaluations) for run in results], CONFIG)
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert {row[2] for row in page.table("rules")[1:]} == {"none: equal in all seeds"}


def test_differences_settings_versions_and_digests_are_there(written):
    _, results, page = written
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


def test_all_text_from_data_is_escaped():
    results = [result_of(label, seed, [0.1, 0.5]) for label in (HOSTILE, "b") for seed in (0, 1)]
    results[0].decisions[HOSTILE] = 1
    plain = page_of([result_of(label, seed, [0.1, 0.5]) for label in ("a", "b") for seed in (0, 1)])
    changes = {
        "simulation": {HOSTILE: HOSTILE},
        "versions": {HOSTILE: HOSTILE},
        "machine": HOSTILE,
        "seeds": [HOSTILE],
        "rules": [rule_row(HOSTILE, HOSTILE, {HOSTILE: HOSTILE}, HOSTILE)],
    }
    text = page_of(results, **changes).replace(":<wbr>", ":")
    page = Page(text)
    assert set(page.tags) <= set(Page(plain).tags)
    assert "<script" not in text
    assert "<img" not in text
    assert page.text.count(HOSTILE) >= 15
    content = {"simulation": {}, "division": {}, **changes, "rules": [], "seeds": []}
    logs = render_report(results, HOSTILE, 0.9, content)
    assert set(Page(logs.replace(":<wbr>", ":")).tags) <= set(Page(plain).tags)


def test_a_chart_has_the_colours_of_the_page_and_names_its_lines():
    runs = {label: [result_of(label, 0, [0.1, 0.5])] for label in (HOSTILE, "b")}
    chart = report_html._chart("t", partial(figures.draw_staleness, groups=runs), {0: HOSTILE})
    page = Page(str(chart.shapes))
    assert HOSTILE in page.text
    assert (page.tags.count("title"), chart.across, chart.up) == (1, "staleness (rounds)", "share of arrivals")
    assert "var(--c0)" in chart.shapes
    assert not re.search(r"(stroke|fill): #", chart.shapes)
    assert not [
        value for _, name, value in page.attributes if name == "id" and not re.fullmatch("[mp][0-9a-f]+", value)
    ]


def test_weights_are_means_over_seeds():
    runs = [result_of("a", seed, [0.1, 0.5]) for seed in range(2)]
    runs[1].totals.bin_counts[:], runs[1].totals.bin_weights[:] = [1, 0, 0, 4], [0.5, 0, 0, 2.0]
    bins, weights = curves.mean_weights(runs)
    assert (bins.tolist(), weights.tolist()) == ([0, 1, 3], [1.0, 0.5, 0.5])
    axes = Figure().subplots()
    figures.draw_weights(axes, {"a": runs})
    assert axes.lines[0].get_marker() == ".", "a single bin is seen"


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
    assert "fill-opacity" not in page_of(shorter)
    assert "fill-opacity" in page_of(runs)
    assert curves.curve(runs[:1], "version", "loss").low is None


#: Linear RGB seen by readers without red, green or blue cones: Machado, Oliveira and Fernandes (2009), severity 1.
VISION = {
    "all cones": np.eye(3),
    "protanopia": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranopia": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritanopia": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}
TO_XYZ = np.array(
    [[0.4124564, 0.3575761, 0.1804375], [0.2126729, 0.7151522, 0.072175], [0.0193339, 0.119192, 0.9503041]]
)


def lab(colour, vision):
    """CIELAB (D65) of an sRGB colour as `vision` sees it."""
    srgb = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    x, y, z = TO_XYZ @ np.clip(VISION[vision] @ linear, 0, 1) / TO_XYZ.sum(axis=1)
    f = [t ** (1 / 3) if t > (6 / 29) ** 3 else t / (3 * (6 / 29) ** 2) + 4 / 29 for t in (x, y, z)]
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def ciede2000(one, two):
    """The difference of two colours in CIELAB: Sharma, Wu and Dalal (2005), equations 2 to 22."""
    chroma = (np.hypot(*one[1:]) + np.hypot(*two[1:])) / 2
    g = 0.5 * (1 - np.sqrt(chroma**7 / (chroma**7 + 25.0**7)))
    (l1, c1, h1), (l2, c2, h2) = (
        (light, np.hypot((1 + g) * a, b), np.degrees(np.arctan2(b, (1 + g) * a)) % 360) for light, a, b in (one, two)
    )
    turn = 0.0 if c1 * c2 == 0 else (h2 - h1 + 180) % 360 - 180
    dl, dc, dh = l2 - l1, c2 - c1, 2 * np.sqrt(c1 * c2) * np.sin(np.radians(turn / 2))
    mean_l, mean_c = (l1 + l2) / 2, (c1 + c2) / 2
    mean_h = h1 + h2 if c1 * c2 == 0 else (h1 + turn / 2) % 360
    cosines = zip((-0.17, 0.24, 0.32, -0.20), (1, 2, 3, 4), (-30, 0, 6, -63), strict=True)
    t = 1 + sum(factor * np.cos(np.radians(times * mean_h + shift)) for factor, times, shift in cosines)
    sl = 1 + 0.015 * (mean_l - 50) ** 2 / np.sqrt(20 + (mean_l - 50) ** 2)
    sc, sh = 1 + 0.045 * mean_c, 1 + 0.015 * mean_c * t
    bend = 60 * np.exp(-(((mean_h - 275) / 25) ** 2))
    rt = -2 * np.sqrt(mean_c**7 / (mean_c**7 + 25.0**7)) * np.sin(np.radians(bend))
    return np.sqrt((dl / sl) ** 2 + (dc / sc) ** 2 + (dh / sh) ** 2 + rt * dc / sc * dh / sh)


def confusions(styles):
    """Pairs of series with the same dashes and marker whose colours are less than 10 apart for some reader."""
    return {
        (i, j)
        for (i, one), (j, two) in combinations(enumerate(styles), 2)
        for vision in VISION
        for kind in curves.Colour._fields
        if one[1:] == two[1:]
        and ciede2000(*(lab(getattr(curves.COLOURS[style[0]], kind), vision) for style in (one, two))) < 10
    }


@pytest.mark.parametrize(
    ("one", "two", "difference"),
    [  # of the table of Sharma, Wu and Dalal
        ((50, 2.6772, -79.7751), (50, 0, -82.7485), 2.0425),
        ((50, 2.49, -0.001), (50, -2.49, 0.0011), 7.2195),
        ((50, 2.5, 0), (73, 25, -18), 27.1492),
        ((2.0776, 0.0795, -1.135), (0.9033, -0.0636, -0.5514), 0.9082),
        ((22.7233, 20.0904, -46.694), (23.0331, 14.973, -42.5619), 2.0373),
    ],
)
def test_the_formula_of_colour_differences(one, two, difference):
    assert ciede2000(np.array(one), np.array(two)) == pytest.approx(difference, abs=5e-5)


def test_fourteen_rules_can_be_told_apart_by_all_readers_in_light_and_dark():
    """Rules 2 and 5 differed by less than 1 for readers without green cones, and had the same line."""
    assert confusions([curves.series_style(index) for index in range(14)]) == set()
    before = [(index % 7, curves.DASHES[index // 7], "") for index in range(14)]
    assert (1, 4) in confusions(before)
    orange, yellow = (lab(curves.COLOURS[index].light, "deuteranopia") for index in (1, 4))
    assert ciede2000(orange, yellow) < 1


def test_page_and_print_have_the_same_styles(tmp_path):
    runs = [result_of(f"rule {i}", 0, [0.1, 0.2]) for i in range(14)]
    legend = page_of(runs).split('<ul class="legend">')[1].split("</ul>")[0].split("<li>")[1:]
    axes = Figure().subplots()
    for index, swatch in enumerate(legend):
        colour, dashes, marker = curves.series_style(index)
        figures.draw_curve(axes, curves.curve(runs[:1], "version", "accuracy"), "", index)
        line = axes.lines[index]
        assert line.get_color() == curves.COLOURS[colour].picture
        assert line.is_dashed() == bool(dashes)
        assert line.get_marker() == (marker or "None")
        assert {*re.findall(r"stroke: var\(--c(\d)\)", swatch)} == {str(colour)}
        widths = [1.8 * length for length in dashes]
        assert [list(map(float, text.split(","))) for text in re.findall("dasharray: ([^;]*);", swatch)] == (
            [pytest.approx(widths)] * bool(dashes)
        )
        assert ("<use" in swatch) == bool(marker)


def test_rules_of_one_schedule_share_a_line():
    """Bars and lines of one schedule lay over each other."""
    late = np.array([0, 1, 3, 8])
    runs = [result_of(label, seed, [0.1, 0.5]) for label in ("a", "b", "c") for seed in (0, 1)]
    runs[4:] = [replace(run, staleness=late, clients=run.clients[::-1]) for run in runs[4:]]
    groups = group_by_rule(runs)
    assert [schedule[:2] for schedule in curves.schedules(groups)] == [("a, b", 0), ("c", 2)]
    page = Page(page_of(runs))
    assert "share a line: a, b; c." in page.text
    one = {label: rows for label, rows in groups.items() if label != "c"}
    assert [schedule.label for schedule in curves.schedules(one)] == ["all rules"]
    axes = Figure().subplots()
    figures.draw_staleness(axes, groups)
    assert [line.get_color() for line in axes.lines] == [curves.COLOURS[index].picture for index in (0, 2)]
    shares = [
        curves.staleness_shares([late, late], curves.staleness_bins(9)[0]).tolist(),
        axes.lines[1].get_ydata().tolist(),
    ]
    assert shares[0] == shares[1]


@pytest.mark.parametrize(("suffix", "start"), [("pdf", b"%PDF"), ("svg", b"<?xml"), ("png", b"\x89PNG")])
def test_a_figure_of_one_column(suffix, start, tmp_path):
    runs = [result_of(label, seed, [0.1, 0.5]) for label in ("_mine", "$x_1", "b") for seed in (0, 1)]
    results = SimulationResults(runs, CONFIG)
    for name in ("one", "two"):
        results.draw(tmp_path / f"{name}.{suffix}", panels=["accuracy", "staleness"], x="time", size=3.3, title="$y_")
    content = (tmp_path / f"one.{suffix}").read_bytes()
    assert content.startswith(start)
    assert content == (tmp_path / f"two.{suffix}").read_bytes(), "no date, no random ids"
    if suffix == "pdf":
        (width,) = re.findall(rb"/MediaBox \[ 0 0 (\S+) ", content)
        assert float(width) == pytest.approx(3.3 * 72)
        assert b"/Type3" not in content, "publishers refuse bitmaps of fonts"
    if suffix == "svg":
        assert {b"<!-- _mine -->", b"<!-- $x_1 -->", b"<!-- $y_ -->"} <= {line.strip() for line in content.splitlines()}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"panels": ["speed"]}, "unknown panel 'speed'"),
        ({"x": "days"}, "unknown x 'days'"),
        ({"x": []}, None),
        ({"x": [], "panels": ["loss"]}, "give at least one panel"),
        ({"size": 0.1}, "size is 0.1, must be from 0.5 to 100 inches"),
        ({"size": (3, float("nan"))}, "size is "),
    ],
)
def test_a_figure_that_cannot_be_drawn(options, message, tmp_path):
    results = SimulationResults([result_of("a", 0, [0.1, 0.5])], CONFIG)
    if message is None:
        results.draw(tmp_path / "one.png", **options)
        return
    check_refused(message, results.draw, tmp_path / "one.png", **options)
    check_refused("unknown kind of file 'gif'", results.draw, tmp_path / "one.gif")
    assert not list(tmp_path.iterdir())


def test_bins_hold_every_staleness():
    for largest in range(70):
        edges, names = curves.staleness_bins(largest)
        assert np.histogram(np.arange(largest + 1), bins=edges)[0].sum() == largest + 1
        assert len(edges) == len(names) + 1
        # The bins of `RoundTotals` are those of the page.
        assert np.searchsorted(edges, largest, "right") - 1 == largest.bit_length()
    assert curves.staleness_bins(8)[1] == ["0", "1", "2-3", "4-7", "8-15"]


def test_long_runs_are_simplified_and_hopeless_ones_drawn():
    accuracies = np.linspace(0, 1, 5000)
    assert len(page_of([result_of("a", 0, accuracies)])) < len(page_of([result_of("a", 0, accuracies[::100])])) + 5000
    lost = result_of("a", 0, [0.1, 0.2])
    rows = tuple(Evaluation(*row[:4], float("nan")) for row in lost.evaluations)
    Page(page_of([replace(lost, evaluations=rows, clients=np.zeros(0, np.int64), totals=RoundTotals())]))
    Page(page_of([result_of(f"rule {i}", 0, [0.1, 0.2]) for i in range(30)]))
