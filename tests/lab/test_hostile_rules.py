"""A log or a store names the rule of its run; it never makes a rule file run that the user has not typed."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

from afflux.lab import read_audit_log, read_results
from afflux.lab.tasks.lora_task import checkpoint_folder
from afflux.lab.tasks.registry import build_task
from afflux.ops.errors import ConfigError
from afflux.rules.files import code_digests
from afflux.rules.specs import RuleSpec, parse_rule
from afflux.sim.workload.availability import availability_law
from afflux.sim.workload.config import SimConfig
from commands import check_exit, invoke
from conftest import check_raises, check_refused, raising
from pairwise import soak

SMALL = ["--arrivals", "16", "--model", "logreg", "--num-clients", "10", "--concurrency", "4", "--eval-every", "8"]

RULE_FILE = """
from pathlib import Path
from afflux.rules import fedbuff

Path(__file__).with_name("executed").touch()

def mine(*, buffer_size: int = 10):
    return fedbuff(buffer_size=buffer_size)

def other(*, buffer_size: int = 10):
    return fedbuff(buffer_size=buffer_size, server_lr=0.5)
"""


@pytest.fixture
def rule_file(tmp_path, request):
    """A rule file that leaves a trace; each has a name of its own, as Python executes a module once a process."""
    path = tmp_path / "rules" / f"{request.node.name.partition('[')[0]}.py"
    path.parent.mkdir()
    path.write_text(RULE_FILE)
    return path


def executed(rule_file):
    return rule_file.with_name("executed").exists()


def with_rule(log, rule, options):
    header, _, rest = log.read_bytes().partition(b"\n")
    content = json.loads(header) | {"rule": rule, "options": options}
    log.write_bytes(json.dumps(content).encode() + b"\n" + rest)


@pytest.mark.parametrize(
    ("suffix", "options"),
    [(":mine", {"buffer_size": 4}), *soak(":mine:buffer_size=4", {}), ("", {}), *soak(":mine", {"x": "y"})],
)
def test_a_log_makes_no_file_run(suffix, options, rule_file, tmp_path):
    check_exit(0, "run", "--rule", "fedbuff:buffer_size=4", "--out", tmp_path / "run", *SMALL)
    (log,) = (tmp_path / "run/audit").glob("*.jsonl")
    with_rule(log, f"{rule_file}{suffix}", options)
    read_audit_log(log)
    read_results(tmp_path / "run")
    assert not executed(rule_file)


def test_a_store_makes_no_file_run(rule_file, tmp_path, monkeypatch):
    """Only the command that names the rule's file continues the run. Another one is an error, and runs no file."""
    from afflux.lab.runs import simulation

    store, command = tmp_path / "store", ["run", "--rule", f"{rule_file}:mine", "--buffer-size", "4"]
    places = ["--store", store, "--out", tmp_path / "run", *SMALL]
    with monkeypatch.context() as patched:
        patched.setattr(simulation, "record_events", raising(KeyboardInterrupt))
        assert invoke(*command, *places).exit_code == 130
    rule_file.with_name("executed").unlink()
    monkeypatch.delitem(sys.modules, f"afflux rule file {rule_file}")
    result = check_exit(2, "run", "--rule", "fedbuff:buffer_size=4", *places)
    assert "holds a run with another label, rule: only the same command continues it" in result.stderr
    assert not executed(rule_file)
    check_exit(0, *command, *places)
    check_exit(0, "run", "--rule", "fedbuff:buffer_size=4", "--out", tmp_path / "once", *SMALL)
    logs = [next((tmp_path / run / "audit").glob("*.jsonl")) for run in ("run", "once")]
    assert len({log.read_text().splitlines()[-1] for log in logs}) == 1


LONG = "x" * 5000


@pytest.mark.parametrize("name", [f"{LONG}.py:f", "a\0b.py:f", *soak("\ud800.py:f"), *soak("a/" * 3000 + "x.py:f")])
def test_names_that_no_file_can_have(name):
    """The system's errors about them are not those of afflux."""
    for function in (parse_rule, lambda text: RuleSpec(text).build(), lambda text: code_digests(text, text)):
        check_raises(ConfigError, function, name)
    check_raises(ConfigError, lambda: build_task(SimConfig(task=name)))


@pytest.mark.parametrize("folder", [LONG, "a\0b"])
def test_data_in_a_folder_that_cannot_be(folder):
    law = availability_law(f"devices:file={folder}")
    check_refused("there is no file", law, 3, np.random.Generator(np.random.PCG64(0)))
    for task in ("papers:dataset=mnist", "images"):
        with pytest.raises(ConfigError):
            build_task(SimConfig(task=task, data="mnist" if task == "images" else "digits", data_dir=folder))
    check_raises(ConfigError, checkpoint_folder, folder, Path("."))
