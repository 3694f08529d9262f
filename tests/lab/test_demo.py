"""The demo: its rules, and a run that is killed and resumed."""

import json
import re

from typer.testing import CliRunner

from afflux.cli.lab import demo
from afflux.cli.lab.app import app
from afflux.lab.runs import compare as runs_compare
from afflux.rules.specs import parse_rule
from afflux.sim.workload.config import SimConfig
from conftest import check_error

SMALL = SimConfig(model="logreg", num_clients=20, concurrency=5, arrivals=30, eval_every=10)
RULE = parse_rule("ca2fl:buffer_size=5")


def test_the_demo_ends_with_the_digests_of_a_killed_run(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(runs_compare, "default_processes", lambda least: 1)
    out = tmp_path / "out"
    result = CliRunner().invoke(app, ["demo", "--seeds", "4", "--arrivals", "40", "--out", str(out)])
    assert result.exit_code == 0, result.output
    for rule in demo.RULES:
        assert rule in result.stdout
    (resumed_from,) = re.findall("SIGKILL after 20 of 40 arrivals; resumed from arrival ([0-9]+)", result.stdout)
    assert int(resumed_from) <= 20
    assert result.stdout.count("SHA-256: the same") == 1
    assert {"report.html", "curves.png", "killed"} <= {path.name for path in out.iterdir()}
    (log,) = (out / "killed" / "run" / "audit").glob("*.jsonl")
    lines = log.read_text().splitlines(keepends=True)
    assert sum(json.loads(line)["type"] == "arrival" for line in lines) == 40
    assert demo.print_comparison(out / "audit" / log.name, log)
    cut = tmp_path / "cut.jsonl"
    cut.write_text("".join(lines[:-1]))
    assert not demo.print_comparison(log, cut)
    assert "SHA-256: different" in capsys.readouterr().out


def test_other_bits_have_exit_code_1(tmp_path, monkeypatch):
    def kill_and_resume(folder, spec, seed, config, after):
        return folder / "run" / "audit" / "log.jsonl", after

    monkeypatch.setattr(demo, "RULES", (demo.KILLED,))
    monkeypatch.setattr(demo, "kill_and_resume", kill_and_resume)
    monkeypatch.setattr(demo, "print_comparison", lambda *logs: False)
    result = CliRunner().invoke(app, ["demo", "--seeds", "4", "--arrivals", "20", "--out", str(tmp_path / "out")])
    assert result.exit_code == 1
    assert "other bits" in result.stderr


def test_a_run_that_ends_before_it_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "run_until", "".format)  # returns at once
    check_error("ended with exit code 0", demo.kill_and_resume, tmp_path, RULE, 3, SMALL, 31)
