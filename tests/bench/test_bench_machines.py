"""The tables that put the runs of several machines side by side."""

import json

import pytest

from benching import bench
from conftest import ROOT

pytest.importorskip("rich")
pytest.importorskip("typer")

from bench.output.machines import SHOWN, markdown
from bench.rows import ROWS

MACHINES = ROOT / "bench" / "results" / "machines"


def test_the_readme_has_the_tables_of_all_tracked_results():
    text = (ROOT / "bench" / "README.md").read_text()
    _, rest = text.split("<!-- machines -->\n")
    tables, _ = rest.split("<!-- end of machines -->")
    assert tables == markdown(MACHINES)


def test_the_operations_are_rows_of_the_benchmark():
    assert set(SHOWN) <= {row.name for row in ROWS}


def test_a_run_is_a_file_and_a_file_a_column(tmp_path):
    pytest.importorskip("torch")
    done = bench("--quick", "-d", 5000, "--rows", "fedbuff,ingest", "--json", tmp_path / "here.json")
    assert done.returncode == 0, done.stderr
    (tmp_path / "older.json").write_text((MACHINES / "xeon-2.5ghz.json").read_text())
    done = bench("--machines", tmp_path)
    assert done.returncode == 0, done.stderr
    about, operations = (table.splitlines() for table in done.stdout.split("\n\n"))
    assert [line.split(" | ")[0] for line in about[2:]] == ["| here", "| older"]
    assert "prefetch=" in about[2]
    assert "none yet" in about[3]
    assert operations[0].count("GB/s, % of limit, x best torch") == 2
    assert [line.split(" | ")[:2] for line in operations[2:4]] == [["| ingest", "5_000"], ["| ingest", "25_000_000"]]
    assert operations[2].endswith(" |  |")


@pytest.mark.parametrize("text", ["", "{", "[]", "3", "null", '{"format": 3}', '{"format": 4}'])
def test_what_holds_no_results_is_named(tmp_path, text):
    (tmp_path / "a.json").write_text(text)
    done = bench("--machines", tmp_path)
    assert done.returncode == 2
    assert "a.json" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_folder_without_results_says_how_to_make_some(tmp_path):
    with pytest.raises(ValueError, match=r"has no results: python -m bench --json"):
        markdown(tmp_path)
    assert json.loads((MACHINES / "xeon-2.5ghz.json").read_text())["format"] == 4


def test_options_that_would_be_ignored_are_refused(tmp_path):
    done = bench("--machines", tmp_path, "--repeats", 3, "-d", 10)
    assert done.returncode == 2
    assert "does not go with -d, --repeats" in done.stderr
