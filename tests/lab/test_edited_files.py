"""A rule or a task in a file of the user's: finished and interrupted runs are not continued with another text."""

import json
import sys

import pytest

from afflux.lab import interrupts
from afflux.lab.results.audit_log import read_audit_log
from afflux.lab.results.finished_runs import FinishedRuns
from afflux.rules.files import code_digests
from commands import check_exit, invoke
from pairwise import soak
from stopped_runs import record_ctrl_c_at

RULE = """
from beside import SCALE
from afflux.rules import fedbuff

def halved(server_lr: float = 1.0, buffer_size: int = 10):
    return fedbuff(buffer_size=buffer_size, server_lr=server_lr * SCALE)
"""
TASK = """
import own_tasks
from afflux.sim import Task, partitioned

def mine(num_clients):
    clients = partitioned(own_tasks.X[:200], own_tasks.Y[:200], num_clients, partition="iid")
    return Task(own_tasks.linear, clients, own_tasks.TEST)
"""
SETTINGS = ["--num-clients", "12", "--concurrency", "4", "--eval-every", "10", "--arrivals", "20"]


@pytest.fixture
def files(tmp_path):
    """Write the files, and return a function that changes one."""

    def write(name, text):
        (tmp_path / name).write_text(text)
        for module in [name for name in sys.modules if "file " in name and str(tmp_path) in name] + ["beside"]:
            sys.modules.pop(module, None)

    for name, text in {"rules.py": RULE, "tasks.py": TASK, "beside.py": "SCALE = 0.5\n"}.items():
        write(name, text)
    yield write
    sys.modules.pop("beside", None)


CHANGES = [("rules.py", RULE + "# a comment\n"), ("tasks.py", TASK + "# a comment\n"), ("beside.py", "SCALE = 0.25\n")]


def test_the_digests(files, tmp_path):
    rule, task = f"{tmp_path}/rules.py:halved", f"{tmp_path}/tasks.py:mine"
    before = code_digests(rule, task)
    assert (before.keys(), code_digests("fedbuff", "images")) == ({"rule", "task"}, {})
    for name, text in CHANGES:
        files(name, text)
        other = "task" if name == "tasks.py" else "rule"
        after = code_digests(rule, task)
        assert [key for key in before if before[key] != after[key]] == [other]
        before = after


def ended(out):
    """The lines of the runs of a grid on both parts that have ended."""
    texts = [path.read_text() for path in (out / "finished.jsonl", out / "test" / "finished.jsonl") if path.exists()]
    return [line for line in map(json.loads, "".join(texts).splitlines()) if "status" not in line]


@pytest.mark.parametrize(("name", "text"), [*soak(*CHANGES[0]), *soak(*CHANGES[1]), CHANGES[2]])
def test_a_grid_repeats_the_runs_of_a_file_that_has_changed(name, text, files, tmp_path):
    out = tmp_path / "out"
    command = ["compare", "--rules", f"{tmp_path}/rules.py:halved", "--task", f"{tmp_path}/tasks.py:mine", *SETTINGS]
    command += ["--grid", "halved.server_lr=.1,1", "--jobs", "1", "--out"]

    def made():
        return len(ended(out))

    assert invoke(*command, out).exit_code == 0
    assert made() == 3
    assert invoke(*command, out).exit_code == 0
    assert made() == 3
    files(name, text)
    done = invoke(*command, out)
    assert (done.exit_code, made()) == (0, 5), done.output  # that of the test part replaces the one before
    assert invoke(*command, tmp_path / "straight").exit_code == 0
    assert (out / "grid.json").read_bytes() == (tmp_path / "straight" / "grid.json").read_bytes()


def test_a_rule_that_shares_the_trainings_has_a_file_too(files, tmp_path):
    rules = f"fedbuff,{tmp_path}/rules.py:halved"
    command = ["compare", "--paired", "--rules", rules, *SETTINGS, "--out", tmp_path / "out"]
    assert [invoke(*command).exit_code for _ in range(2)] == [0, 0]
    files("beside.py", "SCALE = 0.25\n")
    changed = invoke(*command)
    assert (changed.exit_code, "files that have changed" in changed.output) == (2, True), changed.output


WORKERS = ["--jobs", "1", "--workers", "2"]


@pytest.mark.parametrize("parallel", [["--jobs", "1"], WORKERS, *soak(["--jobs", "2"])])
def test_a_file_that_changes_during_a_grid(parallel, files, tmp_path, monkeypatch):
    rule, task, out = f"{tmp_path}/rules.py:halved", f"{tmp_path}/tasks.py:mine", tmp_path / "out"
    command = ["compare", "--rules", rule, "--task", task, *SETTINGS, "--grid", "halved.server_lr=.1,1"]
    digests, write = code_digests(rule, task), FinishedRuns.__setitem__

    def change(self, index, results):
        (tmp_path / "tasks.py").write_text(TASK + "# a comment\n")
        write(self, index, results)

    with monkeypatch.context() as patched:
        patched.setattr(FinishedRuns, "__setitem__", change)
        done = invoke(*command, "--seeds", "0,1", *parallel, "--out", out)
    codes = [line["code"] for line in ended(out)]
    assert all(code == digests for code in codes)
    if parallel == ["--jobs", "1"]:  # all runs are made with the text that was loaded
        assert (done.exit_code, len(codes)) == (0, 4), done.output
    else:  # a process that is started later does not execute another text
        assert done.exit_code == 2, done.output
        assert "tasks.py, or a module next to it, has changed since this program began: start it again" in done.stderr


@pytest.mark.parametrize(("name", "text"), [*soak(*CHANGES[0]), CHANGES[1], *soak(*CHANGES[2])])
def test_a_run_is_not_resumed_with_a_file_that_has_changed(name, text, files, tmp_path, monkeypatch):
    rule, task = f"{tmp_path}/rules.py:halved", f"{tmp_path}/tasks.py:mine"
    store, before = tmp_path / "store", (tmp_path / name).read_text()
    with monkeypatch.context() as patched, interrupts.deferred():
        record_ctrl_c_at(12, patched)
        given = ["run", "--rule", rule, "--task", task, *SETTINGS, "--store", store, "--out", tmp_path / "out"]
        assert invoke(*given).exit_code == 130
    files(name, text)
    refused = invoke(*given)
    assert (refused.exit_code, refused.stderr.count("\n")) == (2, 1), refused.output
    assert "is not the one with which the run began: undo the change, or begin a new run" in refused.stderr
    files(name, before)
    check_exit(0, *given)
    (log,) = (tmp_path / "out" / "audit").glob("*.jsonl")
    assert read_audit_log(log).header.code == code_digests(rule, task)


def test_a_rule_with_a_grid_of_its_own_joins_a_page(files, tmp_path):
    out, task = tmp_path / "out", ["--task", f"{tmp_path}/tasks.py:mine", *SETTINGS, "--jobs", "1"]
    check_exit(0, "compare", "--rules", "fedbuff", *task, "--grid", "fedbuff.server_lr=.1,1", "--out", out)
    both = ["compare", "--rules", f"fedbuff,{tmp_path}/rules.py:halved", *task, "--grid", "fedbuff.server_lr=.1,1"]
    check_exit(0, *both, "--grid", "halved.server_lr=.2", "--out", out)
    assert len(ended(out)) == 3 + 2
    assert [entry["rule"] for entry in json.loads((out / "grid.json").read_text())["grid"]][:2] == ["fedbuff"] * 2
    # Another name for an old rule would lose its results.
    assert invoke(*both, "--grid", "halved.server_lr=.2", "--grid", "fedbuff.alpha=1", "--out", out).exit_code == 2
