"""The command line: what it prints, its exit codes, and that a mistake never shows a traceback."""

import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import typer

from afflux import __version__, cli, ops
from afflux.cli.lab.app import app
from afflux.rules import RULES
from commands import check_exit, invoke
from conftest import ROOT

SMALL = ["--model", "logreg", "--num-clients", "20", "--concurrency", "5", "--arrivals", "20"]


def test_version():
    result = invoke("--version")
    assert (result.exit_code, result.stdout) == (0, f"afflux {__version__}\n")


@pytest.mark.parametrize("command", ["compare", "run"])
def test_help_has_examples_and_the_fields_terms(command):
    result = check_exit(0, command, "--help")
    assert f"afflux {command} --rule" in result.stdout
    for option in ("--concurrency", "--alpha", "--client-lr", "--local-steps", "--buffer-size"):
        assert option in result.stdout


@pytest.mark.parametrize("command", ["compare", "run"])
def test_the_help_is_short_and_help_all_has_every_option(command, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    short, whole = (invoke(command, option).stdout for option in ("--help", "--help-all"))
    assert len(short.splitlines()) <= 100
    assert "\N{HORIZONTAL ELLIPSIS}" not in short + whole
    assert not [line for line in whole.splitlines() if line.endswith("-")]
    assert whole.isascii()
    options = {name for one in typer.main.get_command(app).commands[command].params for name in one.opts}
    assert {"--refill", "--drop-last", "--compile"} < options
    assert [name for name in sorted(options) if f"  {name} " not in whole] == []
    assert "--refill" not in short
    assert "--help-all" in short


def commands_in(parser):
    """The commands of a parser of argparse or typer, by name; empty: it is one itself."""
    groups = [action for action in getattr(parser, "_actions", ()) if isinstance(action.choices, dict)]
    return groups[0].choices if groups else getattr(parser, "commands", {})


def leaves(command, words=()):
    """The words of every command that has no commands of its own, but for tables that are not run."""
    commands = commands_in(command)
    if not commands:
        return [] if getattr(command, "hidden", False) else [words]
    return [leaf for name, part in commands.items() for leaf in leaves(part, (*words, name))]


def every_command():
    simulators, core = typer.main.get_command(app), cli.parser()
    assert {*commands_in(simulators)} == {*cli.SIMULATOR} < {*commands_in(core)}
    return leaves(simulators) + [words for words in leaves(core) if words[0] not in cli.SIMULATOR]


def test_the_help_of_every_command_has_examples_of_it():
    commands = every_command()
    assert len(commands) == 14
    for words in commands:
        shown = invoke(*words, "--help").stdout
        assert "Examples" in shown, words
        assert f"afflux {' '.join(words)}" in shown.partition("Examples")[2], words


@pytest.mark.parametrize("command", cli.MOVED)
def test_a_command_that_is_elsewhere_says_where(command):
    result = invoke(command, "list")
    assert result.exit_code == f"afflux: {command} is now, in a checkout of afflux: {cli.MOVED[command]}"


def test_the_page_lists_every_command():
    page = (ROOT / "docs/reference/commands.md").read_text()
    words = {command[0] for command in every_command()} | {"store reshard"}
    assert [word for word in sorted(words) if not re.search(rf"^afflux {word}\b", page, re.MULTILINE)] == []


def test_backends_lists_what_the_engine_has():
    result = check_exit(0, "backends")
    *lines, threads, policy = result.stdout.splitlines()
    assert threads == f"threads   cpu   {ops.default_threads()} by default"
    assert [line.split()[0] for line in lines] == [backend.name for backend in ops.backends()]
    assert policy.split()[0] == "policy"
    assert sum("chosen" in line for line in lines) == 1


def test_compare_writes_the_folder_and_says_where(tmp_path):
    out = tmp_path / "demo"
    rules = "fedbuff,fedbuff:staleness=hinge(10,4),ca2fl"
    arguments = ["--rules", rules, "--seeds", "0,1", "--jobs", "1", "--buffer-size", "4"]
    result = check_exit(0, "compare", *arguments, "--out", str(out), *SMALL)
    assert f"wrote {out}/" in result.stdout
    for word in ("ca2fl", "fedbuff:staleness=hinge(10,4)", "accuracy, %", "partition dirichlet, alpha 0.1"):
        assert word in result.stdout
    assert result.stderr == "", "no progress bar where there is no terminal"
    assert (out / "summary.csv").read_text().count("\n") == 4


def test_run_is_one_rule_with_one_seed_in_a_dated_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = check_exit(0, "run", "--rule", "fedasync:alpha=0.3", "--seed", "5", *SMALL)
    (folder,) = (tmp_path / "runs").iterdir()
    assert f"wrote runs/{folder.name}/" in result.stdout
    assert (folder / "metrics.csv").read_text().splitlines()[1].startswith("fedasync:alpha=0.3,5,0,0,")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rules", "fedbuf"], "unknown rule 'fedbuf'; did you mean 'fedbuff' or 'dp_fedbuff'? known: "),
        (["--data", "cifar"], "unknown data 'cifar'; did you mean 'cifar10' or 'cifar100'?"),
        (["--model", "vgg"], "unknown model 'vgg'; known: afl-cnn, "),
        (["--delays", "slow"], "unknown delays 'slow'; known: ca2fl, ca2fl-0.5, "),
        (["--partition", "x"], "unknown partition 'x'; known: classes, dirichlet, iid"),
        (["--seeds", "one"], "seeds are whole numbers"),
        (["--seeds", "1,1"], "different"),
        (["--rules", "fedasync", "--buffer-size", "5"], "--buffer-size was given, but fedasync"),
        (["--concurrency", "101"], "concurrency is 101, but there are 100 clients"),
        (["--data", "mnist", "--data-dir", "nowhere"], "data 'mnist': there is no folder nowhere"),
        (["--model", "logreg", "--client-lr", "1e38", "--faults", "raise"], "diverged"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(arguments, message, tmp_path):
    out = tmp_path / "out"
    result = check_exit(2, "compare", "--jobs", "1", "--arrivals", "20", "--out", str(out), *arguments)
    assert message in result.stderr
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""
    assert not out.exists()


LONG = [f"run --rule fedbuff {names}" for names in ("--out LONG", "--out OUT --store LONG")]
LONG.append("compare --grid client_lr=.1 --out LONG")


@pytest.mark.parametrize("command", LONG)
def test_a_name_that_is_too_long_is_one_line_and_exit_code_2(command, tmp_path):
    places = {"LONG": str(tmp_path / ("x" * 300)), "OUT": str(tmp_path / "out")}
    result = check_exit(2, *[places.get(word, word) for word in command.split()], *SMALL)
    assert result.stderr == f"error: cannot write {places['LONG']}: File name too long\n"


def test_an_option_that_is_no_number_is_exit_code_2():
    result = check_exit(2, "compare", "--arrivals", "many")
    assert "--arrivals" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        ("compare --rules fedbuff --arrivals 20 --rules ca2fl", "--rules"),
        ("run --rule fedbuff --alpha .1 --alpha=.1", "--alpha"),
        ("plan --rule fedbuff --params 9 --buffer 2 --buffer-size 3", "--buffer"),
        ("store info here --json --json", "--json"),
    ],
)
def test_an_option_that_is_given_twice(arguments, option):
    result = check_exit(2, *arguments.split())
    assert f"{option} is given twice" in result.stderr


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setattr("afflux.sim.errors.find_spec", lambda name: None)
    result = check_exit(2, "run", "--rule", "fedbuff")
    assert "pip install 'afflux[lab]'" in result.stderr
    assert result.stderr.count("\n") == 1


def test_python_m_afflux_is_the_command_line():
    command = [sys.executable, "-m", "afflux", "--version"]
    assert subprocess.run(command, capture_output=True, text=True, check=True).stdout == f"afflux {__version__}\n"


def test_a_reader_that_ends_is_no_error():
    command = f"{sys.executable} -m afflux rules | head -1"
    done = subprocess.run(command, shell=True, capture_output=True, text=True)
    assert (done.stdout.split()[0], done.stderr) == ("fedavg", "")


def test_help_and_rules_list_every_preset():
    shown, text = invoke("rules").stdout.splitlines(), invoke("compare", "--help").stdout
    assert [line.split()[0] for line in shown[::3]] == list(RULES)
    assert all(name in text for name in RULES)
    assert shown[9].startswith("fedbuff        Update the model from every M updates; the staler an update")
    assert shown[13].split() == ["alpha=0.6", "staleness=polynomial(0.5)"]


@pytest.mark.parametrize("name", RULES)
def test_rules_explains_each(name):
    result = check_exit(0, "rules", name)
    assert result.stdout.startswith(f"{name}    ")
    assert "\noptions:\n  " in result.stdout


def test_rules_of_an_unknown_name():
    result = invoke("rules", "fedbuf")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: unknown rule 'fedbuf'; did you mean 'fedbuff' or 'dp_fedbuff'? known: ")


def test_paired_rules_have_one_leader(tmp_path):
    out = tmp_path / "out"
    arguments = ["--paired", "--rules", "fedasync,ca2fl", "--buffer-size", "4", "--seeds", "0,1", "--jobs", "1"]
    result = check_exit(0, "compare", *arguments, "--out", str(out), *SMALL)
    assert "2 seeds, all on the updates of fedasync" in result.stdout
    assert sorted(path.name for path in (out / "audit").iterdir()) == [
        f"{rule}-seed{seed}.jsonl" for rule in ("ca2fl", "fedasync") for seed in (0, 1)
    ]


RULE_FILE = """
from dataclasses import dataclass
from afflux.rules import fedbuff
from afflux.rules.staleness import Constant

@dataclass(frozen=True)
class Half:
    def __call__(self, staleness, /): return 0.5

def halved(*, buffer_size: int = 10):
    return fedbuff(buffer_size=buffer_size, staleness=Half())

def same(*, buffer_size: int = 10):
    return fedbuff(buffer_size=buffer_size, staleness=Constant())

def wrong(): return 1
"""


def test_a_rule_may_come_from_a_file(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("my rules.py").write_text(RULE_FILE)
    Path("broken.py").write_text("1 / 0")
    Path("imports.py").write_text("\nimport broken")
    Path("syntax.py").write_text("\nx = = 1")
    Path("empty.py").write_text("from afflux.rules import fedbuff")
    rules = "my rules.py:same:buffer_size=5,my rules.py:halved,fedbuff:staleness=constant"
    result = check_exit(0, "compare", "--rules", rules, "--jobs", "1", "--buffer-size", "5", "--out", "out", *SMALL)
    names = ("my_rules.py_same_buffer_size=5", "my_rules.py_halved", "fedbuff_staleness=constant")
    ends = [Path(f"out/audit/{name}-seed0.jsonl").read_text().splitlines()[-1] for name in names]
    assert ends[0] == ends[2] != ends[1]
    for rule, message in [
        ("absent.py:f", "there is no rule file"),
        ("my rules.py", "write my rules.py:FUNCTION"),
        ("my rules.py:halve", "has no function 'halve'; did you mean 'halved'? known: halved, same, wrong"),
        ("broken.py:f", "broken.py failed (broken.py:1): ZeroDivisionError: division by zero"),
        ("imports.py:f", "imports.py failed (imports.py:2, broken.py:1): ZeroDivisionError: division by zero"),
        ("syntax.py:f", "syntax.py failed: SyntaxError: invalid syntax (syntax.py, line 2)"),
        ("empty.py:f", "has no function 'f'; it has none"),
        ("my rules.py:wrong", "it returns 1, not an afflux.Rule"),
        ("my rules.py:same:lr=1", "unknown option of my rules.py:same: 'lr'; known: buffer_size"),
    ]:
        result = invoke("run", "--rule", rule, "--out", "no", *SMALL)
        assert (result.exit_code, result.stdout) == (2, "")
        assert message in result.stderr
    assert not Path("no").exists()


#: A rule whose rounds take 0.1 s.
SLOW_RULE = """
import time
from dataclasses import replace
from afflux.rules import fedbuff

def slow():
    rule = fedbuff(buffer_size=1)

    def weigh(arrivals):
        time.sleep(0.1)
        return rule.weigh(arrivals)

    return replace(rule, weigh=weigh)
"""


def start_slow_runs(folder, seeds, rules, arrivals):
    """Start a comparison of two runs at a time into the folder `out`; {slow} is a rule whose rounds take 0.1 s."""
    rule = folder / "rule.py"
    rule.write_text(SLOW_RULE)
    command = [sys.executable, "-m", "afflux", "compare", "--jobs", "2", "--seeds", seeds, "--out", str(folder / "out")]
    command += ["--rules", rules.format(slow=f"{rule}:slow"), "--model", "logreg"]
    command += ["--arrivals", str(arrivals), "--eval-every", str(arrivals)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


def wait_for_logs(process, out, count):
    while process.poll() is None and len(list((out / "audit").glob("*.jsonl"))) < count:
        time.sleep(0.05)


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="sends Ctrl-C to a process group")
def test_ctrl_c_stops_all_processes_and_keeps_what_is_complete(tmp_path):
    out = tmp_path / "out"
    process = start_slow_runs(tmp_path, "0,1,2", "fedbuff,{slow}", arrivals=100)
    try:
        # There are two processes: the first of the slow runs begins when at least two of the others have ended.
        wait_for_logs(process, out, 4)
        os.killpg(process.pid, signal.SIGINT)
        # Returns when the workers, which share these pipes, have ended too.
        stdout, stderr = process.communicate(timeout=1800)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130
    assert stdout == ""
    *_, kept, stopped = stderr.splitlines()  # after lines of progress, where 10 seconds have passed
    assert stopped == "stopped"
    finished = int(
        kept.removesuffix(f" of 6 runs were finished; kept {out}/; the same command with --out {out} continues")
    )
    assert 2 <= finished <= 3
    assert (out / "metrics.csv").read_text().count("\n") == 1 + 2 * finished
    assert (out / "curves.png").stat().st_size > 20_000


@pytest.mark.soak  # the pool is that of workers, whose end tests/lab/test_workers.py checks
@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="sends SIGKILL")
def test_the_processes_of_compare_end_when_it_is_killed(tmp_path):
    process = start_slow_runs(tmp_path, "0,1", "{slow}", arrivals=3000)
    try:
        wait_for_logs(process, tmp_path / "out", 2)
        process.kill()
        # Returns when the workers, which share these pipes, have ended too; the runs would take five minutes.
        process.communicate(timeout=1800)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL
    assert len(list((tmp_path / "out" / "audit").glob("*.jsonl"))) == 2


#: A run that diverges after its first arrivals.
DIVERGING = ["run", "--rule", "fedbuff:buffer_size=1:server_lr=1e15", *SMALL[2:], "--faults", "raise"]


def test_a_run_that_diverges_is_a_result(tmp_path):
    out, errors = tmp_path / "my runs", []
    for _ in range(2):
        result = check_exit(2, *DIVERGING, "--out", str(out))
        assert f"1 of 1 runs were finished; kept {out}/\n" in result.stderr
        assert sorted(path.name for path in out.iterdir()) == ["audit", "finished.jsonl"]
        errors.append(result.stderr)
    assert errors[0].splitlines()[-1] == errors[1].splitlines()[-1], "it is not made again"
    assert "client" in errors[1]
    assert (out / "finished.jsonl").read_text().count("\n") == 2
    (log,) = (out / "audit").glob("*.jsonl")
    lines = log.read_text()
    assert "holds the runs of another command" in invoke("run", "--rule", "fedbuff", "--out", str(out), *SMALL).stderr
    (out / "notes.txt").touch()
    assert "is not an empty folder" in invoke(*DIVERGING, "--out", str(out)).stderr
    assert log.read_text() == lines


def test_the_folder_of_a_stored_run_is_never_replaced(tmp_path):
    out = tmp_path / "out"
    result = invoke(*DIVERGING, "--store", str(tmp_path / "store"), "--out", str(out))
    assert f"1 of 1 runs were finished; kept {out}/\n" in result.stderr
    (log,) = (out / "audit").glob("*.jsonl")
    assert "is not an empty folder" in invoke(*DIVERGING, "--out", str(out)).stderr
    assert log.exists()


def test_ctrl_c_amid_code_made_from_text_is_130_too(tmp_path):
    # As in the import of a dataclass: one that leaves exec() ends Python by the signal, though it is caught.
    rule = tmp_path / "rule.py"
    rule.write_text(
        "import signal\nfrom afflux.rules import fedbuff\n"
        "exec('signal.raise_signal(signal.SIGINT)')\n"
        "def mine():\n    return fedbuff()\n"
    )
    out = tmp_path / "out"
    command = [sys.executable, "-m", "afflux", "run", "--rule", f"{rule}:mine", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "stopped\n")
    assert not out.exists()


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="sends Ctrl-C to a process group")
def test_ctrl_c_before_anything_has_arrived_leaves_nothing(tmp_path):
    out = tmp_path / "out"
    command = [sys.executable, "-m", "afflux", "compare", "--jobs", "2", "--seeds", "0,1", "--out", str(out)]
    command += ["--local-steps", "1000000"]  # no client is done before the interrupt
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        while process.poll() is None and not (out / "audit").exists():
            time.sleep(0.01)
        # The workers are being started.
        os.killpg(process.pid, signal.SIGINT)
        stdout, stderr = process.communicate(timeout=1800)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130
    assert (stdout, stderr) == ("", "stopped\n")
    assert not out.exists()
