"""The tables that put the runs of several machines side by side."""

import json
import re

import pytest

from bench.output.machines import BEGIN, END, markdown, write
from bench.output.report import to_json, without_samples
from bench.rows import ROWS
from benching import bench
from conftest import ROOT, check_error

MACHINES = ROOT / "bench" / "results" / "machines"


def test_one_command_makes_the_tables_and_pictures_of_all_tracked_results(tmp_path):
    pytest.importorskip("matplotlib")
    folder, page = tmp_path / "results" / "machines", tmp_path / "README.md"
    folder.mkdir(parents=True)
    shown = (ROOT / "bench" / "README.md").read_text(encoding="utf-8")
    before, rest = shown.split(BEGIN)
    page.write_text(f"{before}{BEGIN}older tables\n{END}{rest.split(END)[1]}", encoding="utf-8")
    for path in MACHINES.glob("*.json"):
        text = path.read_text(encoding="utf-8")
        assert text == to_json(without_samples(json.loads(text)))
        (folder / path.name).write_text(text, encoding="utf-8")
    write(page, folder, ROWS)
    assert page.read_text(encoding="utf-8") == shown
    assert {path.name for path in folder.iterdir()} == {path.name for path in MACHINES.iterdir()}
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in folder.glob("*.png"))


def test_a_page_without_a_place_for_tables_stays(tmp_path):
    page = tmp_path / "README.md"
    page.write_text(BEGIN)
    check_error("has no lines <!-- machines -->", write, page, MACHINES, ROWS, error=ValueError)
    assert page.read_text() == BEGIN


def test_a_run_is_a_file_and_a_file_a_table(tmp_path):
    pytest.importorskip("torch")
    done = bench("--quick", "-d", 5000, "--rows", "fedbuff,ingest", "--json", tmp_path / "here.json")
    assert done.returncode == 0, done.stderr
    (tmp_path / "older.json").write_text((MACHINES / "epyc-zen3.json").read_text())
    done = bench("--machines", tmp_path)
    assert done.returncode == 0, done.stderr
    here, older = done.stdout.split("### ")[1:]
    assert here.startswith("here\n")
    assert older.startswith("older\n")
    assert [line.split()[1:4] for line in here.splitlines() if line.startswith("| ") and "5_000" in line] == [
        ["ingest", "|", "5_000"],
        ["fedbuff", "|", "5_000"],
    ]
    assert "commit c1d4b536b336" in older
    assert re.search(r"\| wkafl +\| 25_000_000 \|", older)


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", '{"format": 3}', '{"format": 4}'])
def test_what_holds_no_results_is_named(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    done = bench("--machines", tmp_path)
    assert done.returncode == 2
    assert "a.json" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_folder_without_results_says_how_to_make_some(tmp_path):
    check_error(r"has no results: python -m bench --json", markdown, tmp_path, ROWS, error=ValueError)


def test_options_that_would_be_ignored_are_refused(tmp_path):
    done = bench("--machines", tmp_path, "--repeats", 3, "-d", 10)
    assert done.returncode == 2
    assert "does not go with -d, --repeats" in done.stderr
