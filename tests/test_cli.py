"""The command line: what it prints, its exit codes, and that a mistake never shows a traceback."""

import os
import signal
import subprocess
import sys
import time

import pytest
from typer.testing import CliRunner

from afflux import __version__, ops
from afflux.cli import app

SMALL = ["--model", "logreg", "--num-clients", "20", "--concurrency", "5", "--arrivals", "20"]


def invoke(*arguments):
    return CliRunner().invoke(app, list(arguments))


def test_version():
    result = invoke("--version")
    assert (result.exit_code, result.stdout) == (0, f"afflux {__version__}\n")


@pytest.mark.parametrize("command", ["compare", "run"])
def test_help_has_examples_and_the_fields_terms(command):
    result = invoke(command, "--help")
    assert result.exit_code == 0
    assert f"afflux {command} --rule" in result.stdout
    for option in ("--concurrency", "--alpha", "--client-lr", "--local-steps", "--buffer-size"):
        assert option in result.stdout


def test_backends_lists_what_the_engine_has():
    result = invoke("backends")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines] == [backend.name for backend in ops.backends()]
    assert sum("chosen" in line for line in lines) == 1


def test_compare_writes_the_folder_and_says_where(tmp_path):
    out = tmp_path / "demo"
    rules = "fedbuff,fedbuff:staleness=hinge(10,4),ca2fl"
    arguments = ["--rules", rules, "--seeds", "0,1", "--jobs", "1", "--buffer-size", "4"]
    result = invoke("compare", *arguments, "--out", str(out), *SMALL)
    assert result.exit_code == 0, result.output
    assert f"wrote {out}/" in result.stdout
    for word in ("ca2fl", "fedbuff:staleness=hinge(10,4)", "final accuracy", "Dirichlet(0.1)"):
        assert word in result.stdout
    assert result.stderr == "", "no progress bar where there is no terminal"
    assert (out / "summary.csv").read_text().count("\n") == 4


def test_run_is_one_rule_with_one_seed_in_a_dated_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = invoke("run", "--rule", "fedasync:alpha=0.3", "--seed", "5", *SMALL)
    assert result.exit_code == 0, result.output
    (folder,) = (tmp_path / "runs").iterdir()
    assert f"wrote runs/{folder.name}/" in result.stdout
    assert (folder / "metrics.csv").read_text().splitlines()[1].startswith("fedasync:alpha=0.3,5,0,0,")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--rules", "fedbuf"], "unknown rule 'fedbuf'; known: afa_cd, afa_cs, ca2fl, fadas, "),
        (["--data", "cifar"], "unknown data 'cifar'; known: digits, mnist"),
        (["--model", "vgg"], "unknown model 'vgg'; known: cnn, logreg"),
        (["--delays", "slow"], "unknown delays 'slow'; known: ca2fl, constant"),
        (["--partition", "x"], "unknown partition 'x'; known: dirichlet, iid"),
        (["--seeds", "one"], "seeds are whole numbers"),
        (["--seeds", "1,1"], "different"),
        (["--rules", "fedasync", "--buffer-size", "5"], "--buffer-size was given, but fedasync"),
        (["--rules", "ca2fl,ca2fl"], "given twice"),
        (["--concurrency", "101"], "concurrency is 101, but there are 100 clients"),
        (["--data", "mnist", "--data-dir", "nowhere"], "nowhere/mnist.npz"),
        (["--model", "logreg", "--client-lr", "1e38"], "diverged"),
    ],
)
def test_mistakes_are_one_line_and_exit_code_2(arguments, message, tmp_path):
    out = tmp_path / "out"
    result = invoke("compare", "--jobs", "1", "--arrivals", "20", "--out", str(out), *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stderr.startswith("error: ")
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""
    assert not out.exists()


def test_an_option_that_is_no_number_is_exit_code_2():
    result = invoke("compare", "--arrivals", "many")
    assert result.exit_code == 2
    assert "--arrivals" in result.stderr


def test_missing_packages_are_named(monkeypatch):
    monkeypatch.setattr("afflux.sim.errors.find_spec", lambda name: None)
    result = invoke("run", "--rule", "fedbuff")
    assert result.exit_code == 2
    assert "pip install 'afflux[sim]'" in result.stderr
    assert result.stderr.count("\n") == 1


def test_without_typer_the_command_says_what_to_install():
    code = "import sys; sys.modules['typer'] = None; import afflux.cli"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr == "afflux: the command line needs typer: pip install 'afflux[sim]'\n"


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="sends Ctrl-C to a process group")
def test_ctrl_c_stops_all_processes_without_a_traceback(tmp_path):
    command = [sys.executable, "-m", "afflux.cli", "compare", "--jobs", "2", "--seeds", "0,1,2"]
    command += ["--arrivals", "1000000", "--model", "logreg", "--out", str(tmp_path / "out")]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        deadline = time.monotonic() + 30
        while not (tmp_path / "out").exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        # The workers are being started or at work: either way they must end.
        time.sleep(1)
        os.killpg(process.pid, signal.SIGINT)
        # Returns when the workers, which share these pipes, have ended too.
        stdout, stderr = process.communicate(timeout=30)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == 130
    assert (stdout, stderr) == ("", "stopped\n")
    assert not (tmp_path / "out").exists()
