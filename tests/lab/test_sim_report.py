"""The run folder and the table."""

import csv
import io
import json
import re
from dataclasses import asdict, replace

import numpy as np
import pytest
from rich.console import Console

from afflux.cli.lab import terminal
from afflux.lab.results import run_folder
from afflux.lab.runs.compare import compare, make_jobs
from afflux.ops.units import in_bytes
from afflux.rules import from_config
from afflux.rules.specs import RuleSpec, parse_rule
from afflux.sim.workload.config import OF_CLIENTS, OF_PRESENCE, SimConfig
from conftest import ROOT, check_refused

CONFIG = SimConfig(model="logreg", num_clients=20, concurrency=6, arrivals=30, eval_every=10, target=0.999)
SPECS = [parse_rule("fedbuff:buffer_size=3:staleness=polynomial(1)"), parse_rule("fedasync")]


@pytest.fixture(scope="module")
def results():
    return compare(make_jobs(SPECS, [0, 1]), CONFIG)


@pytest.fixture(scope="module")
def folder(results, tmp_path_factory):
    path = run_folder.create_run_folder(tmp_path_factory.mktemp("out") / "deep" / "run")
    run_folder.write_results(path, results, CONFIG)
    return path


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def test_the_folder_holds_these_files_and_no_more(folder):
    names = {path.name for path in folder.iterdir()}
    tables = {"metrics.csv", "staleness.csv", "participation.csv", "summary.csv"}
    assert names == tables | {"config.json", "summary.json", "curves.png", "report.html"}
    assert (folder / "curves.png").read_bytes().startswith(b"\x89PNG\r\n")
    assert (folder / "curves.png").stat().st_size > 20_000


def test_the_configuration_can_be_run_again(folder):
    written = json.loads((folder / "config.json").read_text())
    assert SimConfig(**written["simulation"]) == CONFIG
    assert asdict(CONFIG).keys() - written["simulation"].keys() == {
        *("data_dir", "classes", "mu", "control_codec", "stale_models", "sampling", "validation", "refresh_every"),
        *("attack", *OF_CLIENTS, *OF_PRESENCE),
    }
    assert written["seeds"] == [0, 1]
    assert [parse_rule(rule["label"]) for rule in written["rules"]] == SPECS
    assert {"afflux", "python", "numpy", "torch"} == written["versions"].keys()
    assert written["division"] == {"num_clients": 20, "partition": "dirichlet", "alpha": 0.1}


def test_the_configuration_has_the_defaults_of_the_rules(folder):
    written = json.loads((folder / "config.json").read_text())["rules"]
    assert [rule["options"] for rule in written] == [
        {"buffer_size": 3, "server_lr": 1.0, "staleness": "polynomial(1.0)", "normalise": "count", "dialect": "paper"},
        {"alpha": 0.6, "staleness": "polynomial(0.5)"},
    ]
    assert [from_config(rule["parts"]) for rule in written] == [spec.build() for spec in SPECS]


def test_metrics_are_the_results_to_the_last_bit(folder, results):
    rows = rows_of(folder / "metrics.csv")
    expected = [(r.spec.label, r.seed, *row) for r in results for row in r.evaluations]
    assert len(rows) == len(expected) == 4 * 4
    for row, (label, seed, arrivals, version, time, accuracy, loss) in zip(rows, expected, strict=True):
        assert (row["rule"], int(row["seed"])) == (label, seed)
        assert (int(row["arrivals"]), int(row["version"])) == (arrivals, version)
        assert (float(row["virtual_time"]), float(row["accuracy"])) == (time, accuracy)
        assert float(row["loss"]) == loss


def test_the_staleness_histogram_counts_every_arrival(folder, results):
    rows = rows_of(folder / "staleness.csv")
    assert sum(int(row["arrivals"]) for row in rows) == 4 * 30
    first = [row for row in rows if (row["rule"], row["seed"]) == (SPECS[1].label, "1")]
    counts = np.bincount(results[3].staleness)
    assert {int(r["staleness"]): int(r["arrivals"]) for r in first} == {
        value: count for value, count in enumerate(counts) if count
    }


def test_participation_is_a_table_of_every_run(folder, results):
    rows = rows_of(folder / "participation.csv")
    assert sum(int(row["arrivals"]) for row in rows) == 4 * 30
    own = [row for row in rows if (row["rule"], row["seed"]) == (SPECS[1].label, "1")]
    counts = np.bincount(results[3].clients)
    assert {int(r["client"]): int(r["arrivals"]) for r in own} == {i: count for i, count in enumerate(counts) if count}


def test_the_summaries_agree_and_unreached_targets_are_no_numbers(folder, results):
    content = json.loads((folder / "summary.json").read_text())
    assert [run["params_sha256"] for run in content["runs"]] == [r.digest for r in results]
    assert content["runs"][0]["rounds_to_target"] is None
    means = content["mean_and_std_over_seeds"]
    for row in rows_of(folder / "summary.csv"):
        for name in ("final_accuracy", "max_staleness", "state_bytes"):
            assert float(row[name]) == means[row["rule"]][name]["mean"]
            assert float(row[f"{name}_std"]) == means[row["rule"]][name]["std"]
    finals = [r.final_accuracy for r in results if r.spec == SPECS[1]]
    assert means["fedasync"]["final_accuracy"]["mean"] == pytest.approx(np.mean(finals))
    assert means["fedasync"]["final_accuracy"]["std"] == pytest.approx(np.std(finals, ddof=1))


def test_the_table_names_what_it_shows(results):
    console = Console(width=120, record=True, file=io.StringIO())
    console.print(terminal.results_table(results, CONFIG))
    text = console.export_text()
    for word in ("fedasync", "final", "to 99.9%", "server"):
        assert word in text
    assert "±" in text
    assert "nan" not in text


@pytest.mark.parametrize("labels", [["x:fire:y[/b]", "[b]:ok:"], ["x:fire:y[/b]" * 6, "[b]:ok:" * 9, "c" * 60]])
def test_names_are_text_in_the_table(results, labels, capsys):
    """`:compass:` was printed as a compass, and [/y] was an error of the markup."""
    runs = [replace(results[0], spec=RuleSpec(label, (), label), decisions={"faulty": 1}) for label in labels]
    console = terminal.open_console()
    console.width = 80
    console.print(run_folder.describe_setting(CONFIG, [replace(run, leader="x:fire:y[/b]") for run in runs]))
    console.print(terminal.results_table(runs, CONFIG))
    text = capsys.readouterr().out
    assert "all on the updates of x:fire:y[/b]" in " ".join(text.split())
    first_column = "".join(line.split()[0] for line in text.splitlines() if line.strip())
    for label in labels:  # it may be folded, but is never cut
        assert label in text or label in first_column
    assert "faulty" in text
    assert "…" not in text


def test_there_is_one_console():
    files = (ROOT / "python" / "afflux").rglob("*.py")
    assert [path.name for path in files if re.search(r"\bConsole\(", path.read_text())] == ["terminal.py"]


def test_a_folder_with_something_in_it_is_not_written_to(folder, tmp_path):
    check_refused("not an empty folder", run_folder.create_run_folder, folder)
    check_refused("not an empty folder", run_folder.create_run_folder, folder / "config.json")
    check_refused("cannot write", run_folder.create_run_folder, folder / "config.json" / "below")
    assert run_folder.create_run_folder(tmp_path) == tmp_path


@pytest.mark.parametrize(
    ("count", "shown"), [(0, "0 B"), (999, "999 B"), (1000, "1 kB"), (256_300, "256 kB"), (2.5e9, "2.5 GB")]
)
def test_bytes_are_shown_with_a_unit(count, shown):
    assert in_bytes(count) == shown
