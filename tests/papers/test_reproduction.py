"""The papers' tables as data; their runs, kept as lines of JSON; pages, limits, and the check of a finished run."""

import json
from dataclasses import replace
from math import inf, isnan, nan, sqrt
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest
from typer.testing import CliRunner

from afflux.lab.results.finished_runs import key_of, line_key
from afflux.lab.results.run_result import Evaluation, params_sha256
from afflux.lab.runs import compare as compare_module
from afflux.lab.runs.setup import RunSetup
from afflux.lab.tasks.registry import build_task
from afflux.ops.errors import ConfigError
from afflux.rules.specs import parse_rule
from afflux.sim.data import read_data_set
from afflux.sim.data.image_set import ImageSet
from afflux.sim.errors import TrainingError
from afflux.sim.workload.config import SimConfig
from afflux.sim.workload.delays import delay_law
from bench.papers import reproduction
from bench.papers.all_tables import TABLES
from bench.papers.command import app
from bench.papers.comparison import Line
from bench.papers.paper_tables import (
    BEST_OF_EVERY_FIFTH,
    LAST,
    LOG_STABILITY,
    MEAN_OF_SIX,
    MEAN_OF_TEN,
    STABILITY,
    Cell,
    Search,
    Table,
    rounds_to,
)
from bench.papers.reproduction import (
    Budget,
    Changes,
    check,
    folder_page,
    folder_pages,
    job_of,
    reproduce,
    runs_of,
    states,
)
from bench.papers.staleness import simulate_staleness
from bench.papers.staleness_pages import CA2FL_TABLE_4, FADAS_CLAIMS, PAGES, schedules_page, weights_page
from conftest import ROOT, check_refused
from pairwise import soak
from small_tables import CELLS, SETTINGS, SMALL


@pytest.fixture
def made(monkeypatch):
    """The labels of the runs that are made."""
    labels, simulate = [], compare_module.simulate

    def counting(specs, seed, *arguments, **options):
        labels.append((specs[0].name, seed))
        return simulate(specs, seed, *arguments, **options)

    monkeypatch.setattr(compare_module, "simulate", counting)
    return labels


def small(folder, **options):
    return reproduce(SMALL, folder, (0, 1), limits=Budget(processes=1, **options))


def test_every_cell_is_a_run_and_has_a_name_of_its_own():
    for table in TABLES.values():
        assert len({cell.name for cell in table.cells}) == len(table.cells)
        assert bool(table.cells or table.computed) != bool(table.open)
        runs, waiting = runs_of(table, table.cells, [0], [])
        assert len({run.cell.name for run in runs}) == len(runs)
        assert waiting == sum(cell.search is not None for cell in table.cells)
        runs_of_all, waiting = runs_of(table, table.cells, range(table.seeds), [])
        assert table.count == len(runs_of_all) + waiting
        for run in runs:
            run.job.spec.build()
    assert {"Anarchic FL", "WKAFL", "CA2FL", "FADAS", "afflux"} == {table.paper for table in TABLES.values()}
    assert [len(TABLES[name].cells) for name in ("afl-table2", "afl-table3", "wkafl-table2-mnist")] == [48, 32, 9]
    page = (ROOT / "docs" / "background" / "papers.md").read_text()
    absent = [name for name in TABLES if f"`{name}`" not in page and f"results/{name}.md" not in page]
    assert absent == [], "each has a row or a link"


def test_the_papers_numbers_are_those_that_it_prints():
    """The smallest and the largest of each table, and sums of rows and columns."""
    numbers = {name: [cell.paper for cell in table.cells] for name, table in TABLES.items()}
    afl = numbers["afl-table2"]
    assert (min(afl), max(afl)) == (0.8661, 0.9143)
    assert sum(afl[4:8]) == pytest.approx(0.8906 + 0.8981 + 0.8901 + 0.8931)
    assert afl[35::4] == [0.8938, 0.9000, 0.9078, 0.9125]
    assert (min(numbers["afl-table3"]), max(numbers["afl-table3"])) == (0.8669, 0.9075)
    assert sum(numbers["wkafl-table2-cifar10"]) == pytest.approx(1.2771 + 1.1955 + 0.7897)
    assert sum(numbers["wkafl-table3-mnist"][2::4]) == pytest.approx(0.9057 + 0.9080 + 0.9075)
    assert numbers["ca2fl-table2"][::2] == [0.5015, 0.5330, 0.5272, 0.5273]
    assert numbers["ca2fl-table1"] == [0.5023, 0.5366, 0.5338, 0.5354, 0.4155, None]
    assert numbers["ca2fl-table1-rounds"] == [284, 294, 329, 314, None, None]
    assert sum(numbers["ca2fl-table2-resnet"][1::2]) == pytest.approx(0.5731 + 0.6837 + 0.6775 + 0.6879)
    assert sum(numbers["fadas-table8"][:4]) == pytest.approx(0.5029 + 0.4492 + 0.7057 + 0.7264)
    assert (min(numbers["fadas-table9"]), max(numbers["fadas-table4"])) == (0.1597, 0.8391)


def test_the_cells_of_ca2fl_and_fadas_are_their_presets():
    for name, number, methods in (("ca2fl-table2", 22, {"fedbuff", "ca2fl", "mf_ca2fl"}), ("ca2fl-table1", 16, None)):
        runs, _ = runs_of(TABLES[name], TABLES[name].cells, range(3), [])
        assert len(runs) == number, "some cells have fewer seeds"
        assert methods is None or {run.job.spec.name for run in runs} == methods
        for run in runs:
            assert (run.job.config.rounds, run.job.config.eval_every, run.job.config.refill) == (500, 50, 10)
    keys = {(c.rule, str(c.settings)) for table in ("ca2fl-table1", "ca2fl-table2") for c in TABLES[table].cells}
    for name in ("ca2fl-table1-rounds", "ca2fl-figure2", "ca2fl-figure3"):
        assert {(cell.rule, str(cell.settings)) for cell in TABLES[name].cells} <= keys, "the same runs"
    ranking = {cell.name.partition(", ")[2]: cell for cell in TABLES["fadas-ranking"].cells}
    assert [cell.settings["client_lr"] for cell in ranking.values()] == [0.003, 0.03, 0.1, 0.1], "Table 10"
    task = "papers:dataset=cifar10:network=ca2fl-cnn:augment=crop-flip"
    assert {cell.settings["task"] for cell in ranking.values()} == {task}
    thresholds = TABLES["fadas-figure1a"].cells
    assert thresholds[0].rule == ranking["FADAS_da"].rule
    assert [parse_rule(cell.rule).build().step.lr.threshold for cell in thresholds] == [1, 4, 8, 10]
    sizes = [cell.settings["refill"] for cell in TABLES["fadas-figure1b-f"].cells]
    assert sizes == [parse_rule(cell.rule).build().buffer_size for cell in TABLES["fadas-figure1b-f"].cells]


def test_the_settings_of_table_2_are_the_papers():
    for cell in TABLES["afl-table2"].cells[:16]:
        job = job_of(cell, 0, Changes("somewhere"))
        rule, config = job.spec.build(), job.config
        assert (rule.name, rule.kind, rule.buffer_size) == ("afa_cd", "gradient", 5)
        assert (config.data, config.model, config.data_dir) == ("mnist", "logreg", "somewhere")
        assert (config.arrivals, config.eval_every) == (150 * 5, 5)
        assert (config.num_clients, config.batch_size, config.local_steps, config.client_lr) == (10, 64, 5, 0.1)
        assert (config.protocol, config.partition) == ("rounds", "classes")
    blocked = [cell for cell in TABLES["wkafl-table3-mnist"].cells if "selection" in cell.settings]
    assert [cell.name.partition(",")[0] for cell in blocked] == ["GSGM"] * 3


def test_readings():
    rows = [Evaluation(number, number, float(number), 0.5 + 0.01 * number, 1.0) for number in range(34)]
    rows[23] = Evaluation(23, 23, 23.0, 0.99, 1.0)
    assert BEST_OF_EVERY_FIFTH.of(rows) == pytest.approx(0.5 + 0.30)
    assert MEAN_OF_SIX.of(rows) == pytest.approx(0.5 + 0.01 * 17.5)
    assert LAST.of(rows) == pytest.approx(0.83)
    assert MEAN_OF_TEN.of(rows) == pytest.approx(0.5 + 0.01 * 28.5)
    assert STABILITY.of(rows[24:]) == pytest.approx(0.01 * sqrt(110 / 12))
    turns = [Evaluation(row.arrivals, row.version, 0.0, 2.0 ** (row.version % 2), 1.0) for row in rows[:10]]
    assert LOG_STABILITY.of(turns) == pytest.approx(sqrt(10 / 9) * 0.34657359)
    assert rounds_to(0.6).of(rows) == 10
    assert isnan(rounds_to(1.0).of(rows)), "nan: it was not reached"


def test_the_interval_is_that_of_the_papers_runs():
    line = Line(Cell("x", "fedbuff", {}, 0.52), (0.4, 0.6), {}, 0.0)
    low, high = line.interval
    half = 12.706204736 * sqrt(0.02) * sqrt(1.5)  # t with one degree of freedom, the deviation of two values
    assert (low, high) == (pytest.approx(0.5 - half), pytest.approx(0.5 + half))
    assert line.verdict == "", "so long an interval says nothing"
    of_three = Line(Cell("x", "fedbuff", {}, 0.92), (0.4, 0.5, 0.6), {}, 0.0, 3)
    half = 4.302652730 * 0.1 * sqrt(1 / 3 + 1 / 3)
    assert of_three.interval == (pytest.approx(0.5 - half), pytest.approx(0.5 + half))
    assert (of_three.verdict, replace(of_three, mean_of=1).verdict) == ("out", "in")
    assert Line(Cell("x", "fedbuff", {}, 0.9), (0.5, 0.5001, 0.4999), {}, 0.0).verdict == "out"
    assert Line(Cell("x", "fedbuff", {}, 0.5003), (0.5, 0.5, 0.5), {}, 0.0).verdict == "near"
    assert Line(Cell("x", "fedbuff", {}, 0.5), (0.5,), {}, 0.0).verdict == ""
    assert Line(Cell("x", "fedbuff", {}, 0.5), (nan, nan), {}, 0.0).verdict == ""


def test_runs_are_kept_and_shared_between_tables(tmp_path, made, monkeypatch):
    page, left = small(tmp_path, runs=1)
    assert (left, made) == (3, [("fedbuff", 0)])
    assert [cell["cell"] for cell in page.content["cells"]] == ["first"]
    monkeypatch.setattr("afflux.lab.results.finished_runs.__version__", "another")
    page, left = small(tmp_path)
    assert (left, made) == (0, [("fedbuff", 0), ("fedasync", 0), ("fedbuff", 1), ("fedasync", 1)])
    records = [json.loads(line) for line in (tmp_path / "small.jsonl").read_text().splitlines()]
    assert [(record["cell"], record["seed"]) for record in records[:2]] == [("first", 0), ("second", 0)]
    for record in records:
        assert len(record["schedule"]) == len(record["params"]) == 64
        assert {"cpu", "torch", "kernels"} == record["machine"].keys()
        assert record["seconds"] > 0
        assert [row[0] for row in record["evaluations"]] == [0, 6, 12]
    first = page.content["cells"][0]
    values = [record["evaluations"][-1][3] for record in records if record["cell"] == "first"]
    assert first["values"] == values
    assert first["difference"] == pytest.approx(sum(values) / 2 - 0.5)
    assert first["others"]["first one"] == pytest.approx(sum(r["evaluations"][0][3] for r in records[::2]) / 2)
    other = Table("other", "Ours", "the same runs", "", 0.0, CELLS[:1], 2)
    assert reproduce(other, tmp_path, (0, 1))[1] == 0
    twice = replace(other, cells=(CELLS[0], CELLS[0]._replace(name="again")))
    assert reproduce(twice, tmp_path, (2,), limits=Budget(processes=1))[1] == 0
    assert len(made) == 5, "two cells show one run"
    monkeypatch.setattr(reproduction, "TABLES", {"small": SMALL, "other": other})
    assert [page.name for page in folder_pages(tmp_path, SMALL)] == ["small"]
    (tmp_path / "other.md").touch()
    assert [page.name for page in folder_pages(tmp_path, SMALL)] == ["small", "other"], "that shows the new runs"
    assert len(made) == 5
    assert folder_page(SMALL, tmp_path).content == page.content
    page.draw(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("processes", [1, *soak(2)])
def test_a_budget_of_hours_ends_after_the_runs_that_have_started(processes, tmp_path):
    _, left = reproduce(SMALL, tmp_path, range(20), limits=Budget(hours=1e-9, processes=processes))
    assert 20 < left < 40
    assert reproduce(SMALL, tmp_path, range(20), limits=Budget(hours=0.0, processes=processes))[1] == left


def test_a_page_holds_all_that_the_folder_holds(tmp_path):
    """Whatever part of the table the last command has asked for."""
    one = Budget(processes=1)
    reproduce(SMALL, tmp_path, (0, 1, 2), limits=one)
    part, _ = reproduce(SMALL, tmp_path, (1,), pattern="first", limits=one)
    assert (part.content["seeds"], len(part.content["cells"])) == ([1], 1)
    whole = folder_page(SMALL, tmp_path)
    assert whole.content["seeds"] == [0, 1, 2]
    assert [len(cell["values"]) for cell in whole.content["cells"]] == [3, 3]
    assert folder_page(SMALL, tmp_path / "empty") is None


def test_the_pages_of_the_repository_show_its_finished_runs():
    folder = ROOT / "docs" / "results"
    stale = [page.name for page in folder_pages(folder) if page.markdown != (folder / f"{page.name}.md").read_text()]
    assert stale == [], "`python -m bench.papers run TABLE --hours 0` writes them"


def test_every_line_of_the_repository_is_found_by_its_settings():
    """A setting that lines record differently from now on, such as a new one that has its default, loses them all."""
    lines = reproduction._on_any_device(reproduction._lines_in(ROOT / "docs" / "results"))
    keys = set[str]()
    for name, table in TABLES.items():
        seeds = sorted({line["seed"] for line in lines if line["table"] == name})
        keys |= {key_of(run.job) for run in runs_of(table, table.cells, seeds, lines)[0]}
    assert len(lines) >= 1343
    assert {line_key(line) for line in lines} <= keys


@pytest.fixture
def tuned():
    """A table with two tuned cells of one search, and two trials."""
    settings = SETTINGS | {"arrivals": 6, "eval_every": 3}
    search = Search("ours", "fedasync", settings | {"part": "validation"}, ("alpha=0.1..1",), 2)
    cells = [
        Cell(name, "fedasync", settings | more, 0.5, search) for name, more in (("a", {}), ("b", {"num_clients": 9}))
    ]
    return Table("tuned", "Ours", "tuned", "digits", 0.0, tuple(cells), 2)


def test_trials_come_first_and_the_best_sets_the_options_of_all_its_cells(tuned, tmp_path, made):
    assert reproduce(tuned, tmp_path, (0, 1), limits=Budget(runs=1, processes=1))[1] == 1 + 4
    page, left = reproduce(tuned, tmp_path, (0, 1), limits=Budget(processes=1))
    assert (left, [seed for _, seed in made]) == (0, [9, 9, 0, 0, 1, 1])
    records = [json.loads(line) for line in (tmp_path / "tuned.jsonl").read_text().splitlines()]
    trials, rows = records[:2], records[2:]
    assert [record["config"].get("part") for record in records] == ["validation"] * 2 + [None] * 4
    best = max(trials, key=lambda record: record["evaluations"][-1][3])
    assert {record["options"]["alpha"] for record in rows} == {best["options"]["alpha"]}
    assert trials[0]["options"] != trials[1]["options"]
    text = f"alpha={best['options']['alpha']}"
    assert [record["cell"] for record in rows] == [f"a, {text}", f"b, {text}"] * 2
    assert [cell["cell"] for cell in page.content["cells"]] == [record["cell"] for record in records[:4]]
    assert [cell["paper"] for cell in page.content["cells"]] == [None, None, 0.5, 0.5]
    assert folder_page(tuned, tmp_path).content == page.content
    assert reproduce(tuned, tmp_path, (0, 1))[1] == 0
    assert len(made) == 6


def test_hours_that_the_trials_spend_leave_none_for_the_rows(tuned, tmp_path, made):
    for left in (1 + 4, 4, 3):
        assert reproduce(tuned, tmp_path, (0, 1), limits=Budget(hours=1e-9, processes=1))[1] == left


def test_a_search_whose_trials_all_diverge_is_an_error(tuned, tmp_path, monkeypatch):
    wild = tuned.cells[0].search._replace(rule="fedbuff:buffer_size=3", ranges=("server_lr=1..2",))
    settings = wild.settings | {"client_lr": 1e38, "local_steps": 3}
    cells = (tuned.cells[0]._replace(rule=wild.rule, search=wild._replace(settings=settings)),)
    table = replace(tuned, cells=cells)
    for _ in range(2):
        check_refused("diverged in every trial", reproduce, table, tmp_path, (0,), limits=Budget(processes=1))
    monkeypatch.setattr(reproduction, "TABLES", {"tuned": table})
    assert [(state.runs, state.wanted) for state in states(tmp_path)] == [(2, 4)], "the list still has it"


def test_a_figure_has_a_panel_for_each_first_part_of_a_name(tmp_path, monkeypatch):
    """And shares the runs of its table, and the paper's numbers, which are points of its curves."""
    drawn, crosses, pictures = [], {}, set()
    cells = [cell.curve(f"p = 1, {cell.name}") for cell in CELLS]
    cells += [Cell("p = 2, third, of two", CELLS[0].rule, SETTINGS | {"num_clients": 9})]
    for shown in ([cell._replace(points=()) for cell in cells], cells):
        table = Table("x", "Ours", "", "", 0.0, tuple(shown), 1)
        page, _ = reproduce(table, tmp_path, (0,), limits=Budget(processes=1))
        page.draw(tmp_path / "picture.png")
        pictures.add((tmp_path / "picture.png").read_bytes())
    assert len(pictures) == 2
    monkeypatch.setattr(
        "bench.papers.comparison.draw_scores",
        lambda panels, path, points: (drawn.extend(panels), crosses.update(points)),
    )
    page.draw(tmp_path / "picture.png")
    assert [(name, [label for label, _ in curves]) for name, curves in drawn] == [
        ("p = 1", ["first", "second"]),
        ("p = 2", ["third, of two"]),
    ]
    assert crosses == {
        "p = 1, first": ((inf, CELLS[0].paper),),
        "p = 1, second": ((inf, CELLS[1].paper),),
        "p = 2, third, of two": (),
    }
    assert "the accuracy of a run, at its end. The paper's" in page.markdown
    bits = {cell.name: cell.points for cell in TABLES["ca2fl-figure3"].cells}
    assert bits["bits, CA2FL"] == ((2940, 0.5), (inf, 0.5366)), "round 294 of 10 arrivals, Table 1"
    for name, table in (("afl-figure2", "afl-table2"), ("wkafl-figure8", "wkafl-table2-cifar10")):
        runs = {(cell.rule, str(cell.settings)) for cell in TABLES[table].cells}
        assert {(cell.rule, str(cell.settings)) for cell in TABLES[name].cells} <= runs
    panels = {cell.name.partition(", ")[0] for cell in TABLES["wkafl-figure9"].cells}
    assert panels == {"L_num = 1", "L_num = 5", "L_num = 10"}


def test_numbers_have_the_digits_of_their_unit(tmp_path):
    table = Table("x", "Ours", "", "", 0.0, (Cell("one", CELLS[0].rule, SETTINGS, 2.0),), 2, rounds_to(0.0))
    page, _ = reproduce(table, tmp_path, (0, 1), limits=Budget(processes=1))
    assert "| one | 2.0 | 0.0 | 0.0 to 0.0 | -2.0 |" in page.markdown
    assert "Mean absolute difference 2.0, largest -2.0 (one)" in page.markdown


def test_figure_2_of_wkafl_needs_no_training(tmp_path):
    small = {"num_clients": 20, "concurrency": 20, "buffer_size": 4, "steps": 50}
    page = weights_page(TABLES["wkafl-figure2"], small)
    rows = page.content["rows"]
    assert [row["base"] for row in rows] == sorted(row["base"] for row in rows)
    for name in ("staleness", "aggregated", "large"):
        values = [row[name] for row in rows]
        assert values == sorted(values, reverse=True), "a larger base leaves fewer and fresher ones"
    assert sum(page.content["shares"]) == pytest.approx(1)
    page.draw(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_schedules_have_both_readings_of_when_new_clients_start():
    table = replace(TABLES["ca2fl-table4"], seeds=2)
    page = schedules_page(table, CA2FL_TABLE_4[1:2], steps=30)
    cells = {cell["cell"]: cell for cell in page.content["cells"]}
    setting = {"num_clients": 100, "concurrency": 20, "buffer_size": 10, "steps": 30}
    for refill in (10, 1):
        runs = [simulate_staleness(delay_law("ca2fl"), **setting, refill=refill, seed=seed) for seed in (0, 1)]
        for name, paper in (("largest", 4), ("mean", 0.9184)):
            cell = cells[f"ca2fl, 20/10, refill {refill}, {name}"]
            assert (cell["paper"], cell["values"]) == (paper, [getattr(run, name) for run in runs])
    (largest, *_, mean) = schedules_page(table, FADAS_CLAIMS, "mean_largest", 30).content["cells"]
    assert (largest["paper"], mean["paper"]) == (127, 10.89)
    assert PAGES.keys() == {name for name, table in TABLES.items() if table.computed}


def test_the_servers_examples_have_as_many_classes_as_the_task_says():
    config = SimConfig(task="papers:dataset=digits:network=logreg:server_classes=2", num_clients=4, concurrency=2)
    x, y = build_task(config).validation
    assert len(x) == len(y)
    assert set(y.tolist()) == {0, 1}
    for number, more, message in (
        (11, {}, "server_classes is 11, must be 0 or a number of classes of digits's images"),
        (2, {"part": "validation"}, "those of the validation part, too"),
    ):
        task = f"papers:dataset=digits:network=logreg:server_classes={number}"
        check_refused(message, build_task, replace(config, task=task, **more))


def test_a_cell_that_diverges_is_a_result(tmp_path, made):
    wild = Cell("wild", "fedbuff:buffer_size=3", SETTINGS | {"client_lr": 1e38, "local_steps": 3}, 0.5)
    table = Table("wild", "Ours", "one that diverges", "digits", 0.0, (wild, CELLS[0]), 1)
    page, left = reproduce(table, tmp_path, (0,), limits=Budget(processes=1))
    assert (left, len(made)) == (0, 2)
    assert [cell["ours"] is None for cell in page.content["cells"]] == [True, False]
    assert reproduce(table, tmp_path, (0,), limits=Budget(processes=1))[1] == 0
    assert len(made) == 2, "it is not tried again"
    reproduce(replace(table, long=True), tmp_path / "long", (0,), limits=Budget(processes=1))
    assert not (tmp_path / "long" / reproduction.UNFINISHED).exists()
    page.draw(tmp_path / "picture.png")


def test_a_run_that_fails_is_left_and_told(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(compare_module, "simulate", Mock(side_effect=TrainingError("no memory")))
    assert reproduce(SMALL, tmp_path, (0,), limits=Budget(processes=1))[1] == 2
    assert "no memory; the other runs go on" in caplog.text


def test_a_check_finds_another_schedule_other_params_and_another_accuracy(tmp_path, monkeypatch):
    monkeypatch.setattr(reproduction, "TABLES", {"small": SMALL})
    check_refused("holds no finished run", check, tmp_path, None)
    reproduce(SMALL, tmp_path, (0, 1), pattern="first", limits=Budget(processes=1))
    path = tmp_path / "small.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    said = check(tmp_path, None, seed=1)
    assert ([line.partition(":")[0] for line in said.lines[1:]], said.compared) == (["schedule", "params"], "params")

    def write(**facts):
        path.write_text("".join(json.dumps(record | facts) + "\n" for record in records))

    elsewhere = {"machine": {"cpu": "other", "torch": "1", "kernels": "none"}, "params": "0" * 64}
    for facts, message in (
        ({"schedule": "0" * 64}, "schedule: .* differs, it was 0000"),
        ({"params": "0" * 64}, "params: .* differs, it was 0000"),
    ):
        write(**facts)
        check_refused(message, check, tmp_path, None)
    write(**elsewhere)
    said = check(tmp_path, None)
    assert (said.compared, "at most 0 apart; they may be 0.0001 apart" in said.lines[-1]) == ("accuracies", True)
    rows = [[*row[:3], row[3] + 2e-4, row[4]] for row in records[0]["evaluations"]]
    for record in records:
        record["evaluations"] = rows if record["seed"] == 0 else record["evaluations"]
    write(**elsewhere)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reproduction, "Random", lambda seed: Mock(choice=lambda choices: choices[0]))
        check_refused("at most 0.0002 apart; they may be 0.0001 apart", check, tmp_path, None)


def test_a_check_of_other_models_needs_three_seeds(tmp_path, monkeypatch):
    """Elsewhere: their deviation says how far accuracies may be apart. Without it the command's status is 1."""
    cell = CELLS[0]._replace(settings={**CELLS[0].settings, "model": "cnn"})
    table = Table("small", "Ours", "a table", "digits", 0.0, (cell,), 3)
    monkeypatch.setattr(reproduction, "TABLES", {"small": table})
    reproduce(table, tmp_path, (0,), limits=Budget(processes=1))
    path = tmp_path / "small.jsonl"
    (record,) = [json.loads(line) for line in path.read_text().splitlines()]
    elsewhere = {"machine": {"cpu": "other", "torch": "1", "kernels": "none"}, "params": "0" * 64}
    monkeypatch.setattr(reproduction, "schedule_digest", lambda result, inputs: record["schedule"])  # also of copies

    def write(count, **facts):
        rows = [record | elsewhere | facts | {"seed": seed} for seed in range(count)]
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    write(2)
    done = CliRunner().invoke(app, ["check", "--out", str(tmp_path)])
    assert (done.exit_code, done.stdout.splitlines()[-1]) == (1, "compared: only the schedule")
    write(3)
    monkeypatch.setattr(reproduction, "Random", lambda seed: Mock(choice=lambda choices: choices[0]))
    assert check(tmp_path, None).compared == "accuracies"
    write(3, evaluations=[[*row[:3], row[3] / 3 + 0.3, row[4]] for row in record["evaluations"]])
    check_refused("they may be 0.0250 apart", check, tmp_path, None)


def test_a_check_draws_no_trial(tmp_path, monkeypatch):
    monkeypatch.setattr(reproduction, "TABLES", {"small": SMALL})
    reproduce(SMALL, tmp_path, (0,), limits=Budget(processes=1))
    before = reproduction.runs_of
    monkeypatch.setattr(
        reproduction, "runs_of", lambda *given: ([run._replace(is_trial=True) for run in before(*given)[0]], 0)
    )
    check_refused("holds no finished run", check, tmp_path, None)


def test_the_commands(tmp_path, monkeypatch):
    def run(*arguments):
        return CliRunner().invoke(app, [*arguments, "--out", str(tmp_path / "out")])

    listed = run("list")
    assert listed.exit_code == 0, listed.output
    assert all(f"| {name} |" in listed.stdout for name in TABLES)
    assert "| 0 of 240 runs |" in listed.stdout
    assert f"{tmp_path}/out/ is not here" in listed.stdout
    assert "fadas-table6 is not run: checkpoint and data are not at hand" in run("run", "fadas-table6").stderr
    assert run("run", "afl-table2", "--cells", "no such").exit_code == 2
    missing = run("run", "afl-table2", "--data-dir", "nowhere")
    assert (missing.exit_code, "there is no folder nowhere" in missing.stderr) == (2, True)
    assert not (tmp_path / "out").exists()
    assert CliRunner().invoke(app, ["check", "--out", str(tmp_path)]).exit_code == 2


def test_runs_of_gsgm_block_clients_until_the_pass_ends():
    """Another selection is an error before any run is made, also if other rules are compared."""
    settings = SETTINGS | {"selection": "blocked-until-pass-ends", "arrivals": 40}
    cells = [Cell("blocked", "gsgm:buffer_size=2", settings)]
    (blocked,) = compare_module.compare([job_of(cell, 0) for cell in cells], reproduction.SimConfig())
    assert blocked.decisions == {"joined": 40}
    cells = [Cell("other", "fedbuff", SETTINGS), Cell("free", "gsgm", SETTINGS)]
    finished = {}
    with pytest.raises(ConfigError, match=r"gsgm takes each client once per pass .*: give selection=blocked"):
        compare_module.compare([job_of(cell, 0) for cell in cells], reproduction.SimConfig(), finished=finished)
    assert not finished
    free = compare_module.make_jobs([parse_rule("gsgm"), parse_rule("fedbuff")], [0], paired=True)
    check_refused("selection=blocked-until-pass-ends", compare_module.compare, free, reproduction.SimConfig(**SETTINGS))


#: Logs of arrivals and their updates, as commits before 0.1.0 have kept them.
LOGS = sorted((Path(__file__).parent / "logs").glob("*/*.jsonl"))


def served(path):
    """The header, the end and the last params of a log whose updates a new server gets, at the times of the log."""
    header, *lines, end = map(json.loads, path.read_text().splitlines())
    updates = np.load(path.with_name(header["updates"]))
    setup = RunSetup(reproduction.SimConfig(**header["config"]), header["seed"])
    server = setup.new_server(parse_rule(header["label"]))
    assert params_sha256(server.params) == header["first_params_sha256"]
    models = [server.pull()]
    for line in lines:
        if line["type"] == "arrival":
            start = models[line["dispatched_after"]]
            facts = {"client": line["client"], "num_examples": line["examples"], "loss": line["loss"]}
            facts |= {"client_lr": header["client_lr"], "local_steps": line["steps"]}
            server.push(version=start, update=updates[line["update"]], **facts)
            if server.rule.needs.passes and (line["number"] + 1) % header["num_clients"] == 0:
                server.end_pass()
            models.append(server.pull())
    return header, end, server.params


@pytest.mark.parametrize("path", LOGS, ids=lambda path: path.stem.partition("_")[0] + path.parent.name)
def test_the_server_has_the_bits_of_the_machine_that_made_the_log(path):
    """The updates are kept, so that torch's kernels have no part in it: this must hold on every machine."""
    header, end, params = served(path)
    assert header["rule"] in path.name
    assert params_sha256(params) == end["params_sha256"]


def test_the_tables_of_two_papers_have_logs():
    rules = {path.name.partition("_buffer")[0].partition("_alpha")[0].partition("_stale")[0] for path in LOGS}
    assert rules == {"afa_cd", "afa_cs", "wkafl", "twafl", "sasgd", "gsgm"}


def test_images_keep_the_scale_that_the_task_names():
    digits = read_data_set("digits")
    assert isinstance(digits, ImageSet)
    raw, unit, standardised = (digits.scaled(inputs)[0] for inputs in ("raw", "unit", "standardised"))
    assert raw.max() == 16
    assert (unit * 255 == raw).all()
    assert abs(standardised.mean()) < 1e-3
    check_refused("unknown inputs 'log'", digits.scaled, "log")
