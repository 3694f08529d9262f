"""`--task FILE.py:FUNCTION` and the ends of a run on the command line; logs and stores never make such a file run."""

import json
import shutil
import sys
from pathlib import Path

import pytest

import own_tasks
from afflux.cli.common import parse_rules
from afflux.lab import Simulation, interrupts, read_audit_log
from afflux.lab.tasks.registry import build_task
from afflux.rules.specs import parse_rule
from afflux.sim.workload.config import SimConfig
from commands import check_exit, invoke
from conftest import check_refused
from pairwise import soak
from stopped_runs import record_ctrl_c_at

SETTINGS = ["--num-clients", "12", "--concurrency", "4", "--alpha", "1", "--eval-every", "10"]


@pytest.fixture
def task(tmp_path, monkeypatch):
    """The text of --task; the file notes that it was executed."""
    path = tmp_path / "my tasks.py"
    text = Path(own_tasks.__file__).read_text()
    path.write_text(f"{text}\nwith open({str(tmp_path / 'executed')!r}, 'a') as file:\n    file.write('x')\n")
    return f"{path}:own_task:shift=0.25"


def test_the_command_gives_the_bits_of_the_library(task, tmp_path):
    out = tmp_path / "out"
    rules = "fedbuff:buffer_size=3,fedasync"
    command = ["compare", "--rules", rules, "--task", task, "--seeds", "0,1", "--arrivals", "30", "--out", out]
    result = check_exit(0, *command, "--jobs", "1", "--buffer-size", "3", *SETTINGS)
    assert f"12 clients, task {task}, concurrency 4, " in result.stdout.replace("\n", "")
    config = SimConfig(task=task, num_clients=12, concurrency=4, alpha=1.0, eval_every=10, arrivals=30)
    made = build_task(config)
    for each in (
        Simulation.of(config, rules.split(","), [0, 1]),
        Simulation.of(config, rules.split(","), [0, 1], task=made),
    ):
        for run in each.run():
            name = run.spec.label.replace(":", "_")
            assert read_audit_log(out / "audit" / f"{name}-seed{run.seed}.jsonl").end.params_sha256 == run.digest


def test_an_error_says_what_called_the_function(tmp_path):
    path = tmp_path / "own.py"
    path.write_text(
        f"{Path(own_tasks.__file__).read_text()}\n"
        "def raises():\n    raise RuntimeError('mine')\n"
        "def none():\n    return Task(nn.Linear(FEATURES, CLASSES), [(X, Y)] * 12, TEST, returns_nothing)\n"
    )
    settings = ["--rule", "fedasync", "--concurrency", "4", "--arrivals", "6"]
    result = invoke("run", "--task", f"{path}:raises", *settings, "--out", tmp_path / "a")
    assert (str(result.exception), result.exception.__notes__) == ("mine", [f"while task {path}:raises was made"])
    result = check_exit(2, "run", "--task", f"{path}:none", *settings, "--out", tmp_path / "b")
    assert "error: training returns None, must return loss, steps, examples, while client " in result.stderr


@pytest.mark.parametrize(
    ("end", "arrivals"),
    [(["--rounds", "7"], 21), (["--rounds", "7", "--arrivals", "12"], 12), (["--virtual-time", "9"], None)],
)
def test_the_ends_of_a_run(end, arrivals, tmp_path):
    out, store = tmp_path / "out", tmp_path / "store"
    settings = [*SETTINGS, "--model", "logreg", "--delays", "fadas-mild", "--rule", "fedbuff:buffer_size=3", *end]
    check_exit(0, "run", *settings, "--out", out)
    log = read_audit_log(next((out / "audit").glob("*.jsonl")))
    assert arrivals in (None, len(log.arrivals))
    if arrivals is None:
        assert 0 < len(log.arrivals) < 1600
        assert log.arrivals[-1].time <= 9
    check_exit(0, "run", *settings, "--out", tmp_path / "stored", "--store", store)
    for name in ("config.json", "metrics.csv", f"audit/{log.path.name}"):
        assert (tmp_path / "stored" / name).read_bytes() == (out / name).read_bytes()
    before = log.path.read_bytes()
    check_exit(0, "run", *settings, "--out", tmp_path / "stored", "--store", store)
    assert (tmp_path / "stored" / "audit" / log.path.name).read_bytes() == before


def test_a_run_on_a_store_is_continued_by_the_same_command(task, tmp_path, monkeypatch):
    store, out = tmp_path / "store", tmp_path / "out"
    settings = [*SETTINGS, "--rule", "fedbuff:buffer_size=3", "--arrivals", "20", "--task", task]
    assert invoke("run", *settings, "--out", tmp_path / "whole").exit_code == 0
    places = ["--store", store, "--out", out]
    with monkeypatch.context() as patched:
        record_ctrl_c_at(8, patched)
        with interrupts.deferred():
            stopped = invoke("run", *settings, *places)
    assert stopped.exit_code == 130, stopped.output
    other = check_exit(2, "run", *settings[:-1], task.replace("0.25", "0.5"), *places)
    assert "holds a run with another task" in other.stderr
    check_exit(0, "run", *settings, *places)
    (log,) = (out / "audit").glob("*.jsonl")
    assert log.read_bytes() == (tmp_path / "whole" / "audit" / log.name).read_bytes()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--task", "absent.py:f"], "there is no task file"),
        (["--task", "{file}"], "write {file}:FUNCTION"),
        (["--task", "{file}:absent"], "has no function 'absent'"),
        (["--task", "{file}:wrong_task"], "it returns 1, not an afflux.sim.Task"),
        (["--task", "{file}:own_task:sift=1"], "unknown option of {file}:own_task: 'sift'; did you mean 'shift'"),
        (["--task", "nothing"], "unknown task 'nothing'; known: images"),
        (["--task", "python:own"], "was made in Python"),
        (["--task", "{file}:own_task", "--model", "logreg"], "model is logreg, which is read only with task images"),
        (["--rounds", "-1"], "rounds is -1"),
        (["--virtual-time", "inf"], "virtual_time is inf"),
        (["--delays", "task"], "delays is task, which is for a task that has delays of its own"),
    ],
)
def test_mistakes(arguments, message, tmp_path):
    file = shutil.copy(own_tasks.__file__, tmp_path / "tasks.py")
    given = [argument.replace("{file}", str(file)) for argument in arguments]
    result = invoke("run", "--rule", "fedasync", "--arrivals", "5", "--out", tmp_path / "out", *given)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1), result.output
    assert message.replace("{file}", str(file)) in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (["--alpha", "0.3"], "alpha is 0.3, but the function lazy_task of task {task} does not take it; "),
        (["--alpha", "0.1"], "alpha is 0.1, but the function lazy_task"),
        (["--partition", "iid"], "partition is iid, but the function lazy_task"),
        (
            ["--batch-size", "16"],
            "batch_size is 16, but the training function momentum of task {task} does not take it; ",
        ),
        (["--local-epochs", "2"], "does not take it; it takes client_lr, local_steps"),
    ],
)
@pytest.mark.parametrize("command", [["run", "--rule", "fedasync"], ["compare", "--rules", "fedasync,fedbuff"]])
def test_settings_that_the_task_does_not_take(command, given, message, tmp_path):
    task = f"{own_tasks.__file__}:lazy_task"
    settings = ["--task", task, "--num-clients", "40", "--arrivals", "5", "--out", tmp_path / "out"]
    result = invoke(*command, *settings, *given)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1), result.output
    assert message.replace("{task}", task) in result.stderr
    assert not (tmp_path / "out").exists()


def test_a_task_of_a_function_may_read_settings_in_its_training(tmp_path):
    """The task is made by the command, or by a program that gives it: its training then shows no settings."""
    file = tmp_path / "inner.py"
    file.write_text(
        "import own_tasks\n"
        "from dataclasses import replace\n"
        "def inner(settings):\n"
        "    def training(model, data, rng):\n"
        "        return own_tasks.momentum(model, data, rng, client_lr=0.1, local_steps=settings.local_steps)\n"
        "    return replace(own_tasks.lazy_task(12), training=training)\n"
    )
    settings = {"num_clients": 12, "concurrency": 4, "eval_every": 10, "arrivals": 20, "local_steps": 2}
    config = SimConfig(task=f"{file}:inner", **settings)
    (named,) = Simulation.of(config, "fedasync").run()
    (given,) = Simulation.of(config, "fedasync", task=build_task(config)).run(out=tmp_path / "out")
    assert given.digest == named.digest
    recorded = json.loads((tmp_path / "out" / "config.json").read_text())["simulation"]
    assert (recorded["local_steps"], "batch_size" in recorded) == (2, False)


def test_a_number_of_clients_that_the_task_does_not_take(tmp_path):
    file = tmp_path / "fixed.py"
    file.write_text("import own_tasks\ndef fixed():\n    return own_tasks.own_task(12, alpha=1.0)\n")
    common = ["run", "--rule", "fedasync", "--task", f"{file}:fixed", "--concurrency", "3", "--arrivals", "5"]
    for count in (13, 100):  # 100 is the default
        result = check_exit(2, *common, "--num-clients", count)
        assert f"num_clients is {count}, but the function fixed of task {file}:fixed does not take it" in result.stderr
    for index, given in enumerate((["--num-clients", "12"], [])):
        out = tmp_path / str(index)
        assert invoke(*common, *given, "--out", out).exit_code == 0
        written = json.loads((out / "config.json").read_text())["simulation"]
        assert written["num_clients"] == 12
        assert not {"alpha", "classes", "partition", "data", "model"} & written.keys()
    assert read_audit_log(out / "audit" / "fedasync-seed0.jsonl").header.num_clients == 12


def test_the_configuration_has_the_settings_that_the_task_takes(tmp_path):
    settings = ["--num-clients", "40", "--concurrency", "3", "--arrivals", "6", "--rule", "fedasync"]
    for name, taken, ignored in [
        ("own_task", {"num_clients": 40, "alpha": 0.1, "batch_size": 16}, {"partition"}),
        ("lazy_task", {"num_clients": 40, "client_lr": 0.1, "local_steps": 3}, {"alpha", "batch_size", "mu"}),
    ]:
        out = tmp_path / name
        check_exit(0, "run", *settings, "--task", f"{own_tasks.__file__}:{name}", "--out", out)
        written = json.loads((out / "config.json").read_text())["simulation"]
        assert taken.items() <= written.items()
        assert not ignored & written.keys()


@pytest.mark.parametrize("processes", [["--jobs", "2"], *soak(["--jobs", "1", "--workers", "2"])])
def test_a_file_imports_modules_beside_it(processes, tmp_path):
    """In all processes, also when the function is called; sys.path is as before."""
    folder = tmp_path / "code"
    folder.mkdir()
    stem = f"beside_{len(processes)}"  # a name of its own: modules are imported once a process
    (folder / f"{stem}.py").write_text(f"from own_tasks import *\nimport {stem}_data\n")
    (folder / f"{stem}_data.py").write_text("count = 12\n")
    (folder / f"{stem}_late.py").write_text("shift = 0.25\n")
    (folder / "tasks.py").write_text(
        f"import {stem}\n"
        "def mine():\n"
        f"    from {stem}_late import shift\n"
        f"    return {stem}.own_task({stem}.{stem}_data.count, alpha=1.0, shift=shift)\n"
    )
    (folder / "rules.py").write_text(
        f"from {stem}_data import count\n"
        "from afflux.rules import fedbuff\n"
        "def mine():\n"
        f"    from {stem}_late import shift\n"
        "    return fedbuff(buffer_size=count // 4, server_lr=4 * shift)\n"
    )
    before = list(sys.path)
    command = ["compare", "--task", folder / "tasks.py:mine", "--rules", f"{folder / 'rules.py'}:mine,fedasync"]
    check_exit(0, *command, *processes, "--concurrency", "4", "--arrivals", "12", "--out", tmp_path / "out")
    assert sys.path == before
    plain = SimConfig(task=f"{own_tasks.__file__}:own_task:shift=0.25", num_clients=12, concurrency=4, arrivals=12)
    (expected,) = Simulation.of(plain, ["fedbuff:buffer_size=3:server_lr=1.0:staleness=polynomial(0.5)"]).run()
    logs = [read_audit_log(path) for path in (tmp_path / "out" / "audit").glob("*.jsonl")]
    assert expected.digest in {log.end.params_sha256 for log in logs}


def test_a_module_beside_a_file_does_not_replace_another_one(tmp_path):
    (tmp_path / "json.py").write_text("raise SystemExit\n")
    for line, module in (("import json", "json"), ("from json import dumps", "json")):
        (tmp_path / "tasks.py").write_text(f"{line}\nfrom own_tasks import own_task\n")
        result = invoke("run", "--rule", "fedasync", "--task", tmp_path / "tasks.py:own_task", "--arrivals", "5")
        assert (result.exit_code, result.stderr.count("\n")) == (2, 1)
        assert f"tasks.py imports {module}, but gets " in result.stderr
        assert "not the one next to it: rename that one" in result.stderr
    (tmp_path / "tasks.py").write_text("import absent_module\n")
    result = invoke("run", "--rule", "fedasync", "--task", tmp_path / "tasks.py:own_task", "--arrivals", "5")
    assert "tasks.py failed (tasks.py:1): ModuleNotFoundError: No module named 'absent_module'" in result.stderr


def test_lazy_clients_of_a_task(tmp_path):
    task = f"{own_tasks.__file__}:lazy_task"
    settings = ["--num-clients", "200000", "--concurrency", "3", "--arrivals", "12", "--client-lr", "0.3"]
    result = invoke("run", "--rule", "fedbuff:buffer_size=3", "--task", task, *settings, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    log = read_audit_log(next((tmp_path / "out" / "audit").glob("*.jsonl")))
    assert (log.header.num_clients, log.header.client_lr) == (200_000, 0.3)
    assert max(line.client for line in log.arrivals) > 10_000
    assert (log.header.rule, log.header.options) == ("fedbuff", {"buffer_size": 3})


@pytest.mark.parametrize("text", ["helper{0} import count", "common{0} import count", "lib{0}.helper import count"])
def test_values_of_an_earlier_module_with_the_same_name_are_refused(text, tmp_path):
    """Also if the module beside the file imports it, and if it is in a folder; a number does not name its module."""
    stem = f"_of_two_{text[:3]}"
    text = text.format(stem)
    for number, name in enumerate(("first", "second")):
        folder = tmp_path / name
        (folder / f"lib{stem}").mkdir(parents=True)
        for module in (f"common{stem}", f"lib{stem}/helper"):
            (folder / f"{module}.py").write_text(f"count = {number + 3}\n")
        (folder / f"helper{stem}.py").write_text(f"from common{stem} import count\n")
        if text.startswith("common") and name == "second":
            (folder / f"helper{stem}2.py").write_text(f"from common{stem} import count\n")
            text = f"helper{stem}2 import count"
        (folder / "rules.py").write_text(
            f"from {text}\nfrom afflux.rules import fedbuff\ndef mine():\n    return fedbuff(buffer_size=count)\n"
        )
    assert parse_rule(f"{tmp_path}/first/rules.py:mine").build().buffer_size == 3
    check_refused("not the one next to it: rename that one", parse_rule, f"{tmp_path}/second/rules.py:mine")
    assert parse_rule(f"{tmp_path}/first/rules.py:mine").build().buffer_size == 3


def test_a_module_beside_a_file_may_be_a_link(tmp_path):
    (tmp_path / "shared").mkdir()
    (tmp_path / "shared" / "linked_helper.py").write_text("count = 4\n")
    (tmp_path / "linked_helper.py").symlink_to(tmp_path / "shared" / "linked_helper.py")
    (tmp_path / "rules.py").write_text(
        "from linked_helper import count\nfrom afflux.rules import fedbuff\n"
        "def mine():\n    return fedbuff(buffer_size=count)\n"
    )
    assert parse_rule(f"{tmp_path}/rules.py:mine").build().buffer_size == 4


def test_own_rules_keep_their_default_for_m(tmp_path):
    """A function without a default for buffer_size takes the 10 of presets; what the user sets counts for all."""
    (tmp_path / "rules.py").write_text(
        "from afflux.rules import fedbuff\n"
        "def four(buffer_size: int = 4):\n    return fedbuff(buffer_size=buffer_size)\n"
        "def any_size(buffer_size: int):\n    return fedbuff(buffer_size=buffer_size)\n"
        "def three():\n    return fedbuff(buffer_size=3)\n"
    )
    rules = [*(f"{tmp_path}/rules.py:{name}" for name in ("four", "any_size", "three")), "fedbuff", "fadas", "fedasync"]
    for buffer_size, sizes in ((None, [4, 10, 3, 10, 10, 1]), (5, [5, 5, 3, 5, 5, 1])):
        library = Simulation.of("images", rules, buffer_size=buffer_size)
        assert [job.spec.build().buffer_size for job in library.jobs] == sizes
        assert [spec.build().buffer_size for spec in parse_rules(rules, buffer_size=buffer_size)] == sizes


def test_options_of_own_rules_by_their_annotations(tmp_path):
    """A text is given as it is; without an annotation, the message names what is missing."""
    (tmp_path / "rules.py").write_text(
        "from afflux.rules import fedbuff\n"
        "def mine(lrs: str = '', lr=1.0, more: list = ()):\n"
        "    return fedbuff(buffer_size=3, server_lr=float(lrs.split('+')[1]))\n"
    )
    spec = parse_rule(f"{tmp_path}/rules.py:mine:lrs=0.5+0.25")
    assert spec.build().step.lr == 0.25
    assert parse_rule(spec.text).options == spec.options
    check_refused(r"lr: '0\.5' cannot be read: .* no annotation", parse_rule, f"{tmp_path}/rules.py:mine:lr=0.5")
    check_refused(r"more: '1' cannot be read: .*<class 'list'>", parse_rule, f"{tmp_path}/rules.py:mine:more=1")
