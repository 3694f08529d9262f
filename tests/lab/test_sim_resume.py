"""A simulation on a store, stopped anywhere and resumed, ends with the bits and files of one that nothing disturbed."""

import io
import os
import random
import signal
import subprocess
import sys
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest
from rich.console import Console

import afflux
from afflux import Server, StoreError
from afflux.cli.lab.terminal import show_progress
from afflux.lab import interrupts
from afflux.lab.results import run_folder
from afflux.lab.results.finished_runs import Job
from afflux.lab.runs.run_checkpoint import InterruptedRun
from afflux.ops.errors import ConfigError
from afflux.rules import ca2fl
from afflux.rules.specs import parse_rule
from afflux.sim.workload.config import SimConfig
from commands import invoke
from conftest import check_error, check_raises, check_refused, needs_fork, reproducible
from crashes import in_child, killing
from made_runs import audit_folder, paused_run, resume, run, run_in_store
from pairwise import soak
from stopped_runs import Stopped, press_ctrl_c_at, stop_at

SMALL = SimConfig(model="logreg", num_clients=20, concurrency=5, arrivals=36, eval_every=7, local_steps=2)
ROUNDS = replace(SMALL, protocol="rounds", concurrency=SimConfig.concurrency, stale_models=3, num_clients=9)
CASES = {
    "fedbuff": SMALL,
    "fedasync": SMALL,
    "fedavg": SMALL,
    "ca2fl": SMALL,
    "mf_ca2fl": SMALL,
    "fadas": replace(SMALL, steps_law="uniform", client_optimizer="fedprox", clip_norms=1.0),
    "wkafl": replace(SMALL, refill=3),
    "gsgm": replace(SMALL, selection="blocked-until-pass-ends"),
    "zenopp": SMALL,
    "twafl": ROUNDS,
    "sasgd": replace(
        replace(SMALL, availability="diurnal:period=40:share=0.6", dropout="rates:never=0.1:late=0.3", timeout=30.0),
        selection="examples",
        concurrency="5:8@20:3@60",
    ),
    "afa_cs": replace(SMALL, client_optimizer="scaffold"),
    "afa_cd": replace(ROUNDS, client_optimizer="scaffold"),
    "dp_fedbuff:noise_multiplier=0.5": SMALL,
}


def spec_of(name):
    return parse_rule(name, {"buffer_size": 3})


def files(folder):
    return {path.name: path.read_bytes() for path in folder.glob("audit/*seed*")}


def begin(name, folder, progress=None, seconds=0.0):
    keep = audit_folder(run_folder.create_run_folder(folder / "run"))
    return run_in_store(folder / "store", spec_of(name), 4, CASES[name], keep, progress, seconds)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    """Results and files of undisturbed runs, without a store."""
    made = {}

    def result(name):
        if name not in made:
            folder = run_folder.create_run_folder(tmp_path_factory.mktemp("whole") / "run")
            keep = audit_folder(folder)
            made[name] = reproducible(run(spec_of(name), 4, CASES[name], output=keep)), files(folder)
        return made[name]

    return result


@pytest.mark.parametrize("name", CASES)
def test_a_run_on_a_store_is_the_same_run(name, expected, tmp_path):
    result = begin(name, tmp_path, seconds=1000)
    assert (reproducible(result), files(tmp_path / "run")) == expected(name)


#: Each rule with one of the two.
SECONDS = {name: (0.0, 0.01)[number % 2] for number, name in enumerate(CASES)}


@pytest.mark.parametrize(
    ("name", "seconds"), [*SECONDS.items(), *(row for name in CASES for row in soak(name, 0.01 - SECONDS[name]))]
)
def test_stopped_again_and_again(name, seconds, expected, tmp_path):
    """With a checkpoint after every event, and with few of them, so that arrivals come twice."""
    check_raises(Stopped, begin, name, tmp_path, stop_at(2), seconds)
    before = 2
    for count in (5, 6, 14, 20, 31, 36):
        paused = paused_run(tmp_path / "store")
        assert paused.arrivals < before if seconds else paused.arrivals == before - 1
        check_raises(Stopped, resume, paused, stop_at(count), seconds)
        before = count
    for _ in range(2):  # the second time there is nothing left to do
        result = resume(paused_run(tmp_path / "store"), None, seconds)
        assert (reproducible(result), files(tmp_path / "run")) == expected(name)
        assert result.seconds > paused.notes.history.cpu_seconds > 0, "those before each interruption count"
    assert not list((tmp_path / "store").glob("*.new"))


def kill_after(arrivals, lines):
    """A progress that counts arrivals up to a number, then executed lines of afflux, and then kills the process."""
    trace = killing(str(Path(afflux.__file__).parent), lines)

    def progress(_):
        nonlocal arrivals
        arrivals -= 1
        if arrivals == 0:
            frame = sys._getframe(1)
            while frame is not None:  # calls that have begun are traced too
                frame.f_trace = trace
                frame = frame.f_back
            sys.settrace(trace)

    return progress


@needs_fork
@pytest.mark.parametrize("name", ["afa_cs", *soak("ca2fl"), *soak("gsgm"), *soak("sasgd")])
def test_killed_again_and_again(name, expected, tmp_path):
    """At any moment: during a commit, a line of the log."""
    whole, chance, kills = expected(name), random.Random(name), 0
    store = tmp_path / "store"

    def go_on(progress):
        if store.exists():
            resume(paused_run(store), progress, 0.0)
        else:
            begin(name, tmp_path, progress)

    while kills == 0 or paused_run(store).arrivals < 20:
        progress = kill_after(chance.randint(1, 3), chance.randrange(3000))
        child, reading = in_child(lambda tell, progress=progress: go_on(progress))
        os.close(reading)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        kills += 1
    assert kills >= 3
    assert (reproducible(resume(paused_run(store))), files(tmp_path / "run")) == whole


def test_ctrl_c_makes_a_checkpoint(expected, tmp_path):
    with pytest.raises(KeyboardInterrupt), interrupts.deferred():
        begin("ca2fl", tmp_path, press_ctrl_c_at(10), seconds=1000)
    paused = paused_run(tmp_path / "store")
    assert paused.arrivals == 10
    seen = []
    result = resume(paused, seen.append)
    assert [run.arrivals for run in seen] == list(range(11, 37))
    assert [run.mean_staleness for run in seen] == [result.staleness[:count].mean() for count in range(11, 37)]
    assert (reproducible(result), files(tmp_path / "run")) == expected("ca2fl")


def test_a_run_folder_that_has_moved(expected, tmp_path):
    check_raises(Stopped, begin, "fedbuff", tmp_path, stop_at(10))
    (tmp_path / "run").rename(tmp_path / "moved")
    where = rf"a run is resumed in its run folder, which was {tmp_path}/run; give --out if it has moved"
    for folder in (None, tmp_path / "elsewhere"):
        expected_at = (folder or tmp_path / "run") / "audit" / "fedbuff-seed4.jsonl"
        check_refused(f"there is no {expected_at}: {where}", paused_run, tmp_path / "store", folder)
    result = resume(paused_run(tmp_path / "store", tmp_path / "moved"))
    assert (reproducible(result), files(tmp_path / "moved")) == expected("fedbuff")


def test_a_log_that_lacks_what_the_checkpoint_has(tmp_path):
    check_raises(Stopped, begin, "fedbuff", tmp_path, stop_at(10))
    (file,) = (tmp_path / "run" / "audit").glob("*.jsonl")
    whole = file.read_bytes()
    os.truncate(file, 700)
    check_refused(r"is shorter than the [0-9]+ bytes of the checkpoint", resume, paused_run(tmp_path / "store"))
    assert file.stat().st_size == 700
    file.write_bytes(whole)
    resume(paused_run(tmp_path / "store"))


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def another(folder, **changes):
    """A run folder of another run, whose files have the same names."""
    keep = audit_folder(run_folder.create_run_folder(folder))
    config = replace(CASES["fedbuff"], **changes)
    run_folder.write_results(folder, [run(spec_of("fedbuff"), 4, config, output=keep)], config)
    return contents(folder)


@pytest.mark.parametrize("count", [1, 10])
def test_another_runs_folder_is_refused(count, expected, tmp_path):
    """With what arrived before the checkpoint, and with nothing."""
    before = another(tmp_path / "other", client_lr=0.05)
    check_raises(Stopped, begin, "fedbuff", tmp_path, stop_at(count))
    said = f"other/audit/fedbuff-seed4.jsonl was not written by the run of {tmp_path}/store"
    check_refused(said, paused_run, tmp_path / "store", tmp_path / "other")
    assert contents(tmp_path / "other") == before
    result = resume(paused_run(tmp_path / "store"))
    assert (reproducible(result), files(tmp_path / "run")) == expected("fedbuff")


def forge(store, **changes):
    with Server.open(store) as server:
        kept = [server.retained_versions[version] for version in server.retained_versions]
        server.checkpoint({**server.notes, **changes}, keep=[one for one in kept if one.version != server.version])


@pytest.mark.parametrize("count", [10, *(row.values[0] for row in soak(1))])
def test_a_forged_store_writes_into_no_other_run_folder(count, tmp_path):
    """Its log has the same bytes: the runs have the same settings. Only the id of the folder differs."""
    for name in ("mine", "downloaded"):
        check_raises(Stopped, begin, "fedbuff", tmp_path / name, stop_at(count))
    mine, store = tmp_path / "mine" / "run", tmp_path / "downloaded" / "store"
    (mine / "report.html").write_text("mine")
    before = contents(mine)
    forge(store, audit=str(mine / "audit"))
    forge(store, audit=str(mine / "audit"), run_id="0" * 32)
    check_refused(f"{mine} is the folder of another run than that of {store};", paused_run, store, mine)
    assert contents(mine) == before
    forge(store, audit=str(tmp_path / "new" / "audit"))
    check_refused(f"{tmp_path}/new", paused_run, store)
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("line", [0, 3])
def test_a_log_that_was_edited_is_refused(line, tmp_path):
    check_raises(Stopped, begin, "fedbuff", tmp_path, stop_at(10))
    (log,) = (tmp_path / "run").glob("audit/*.jsonl")
    whole = log.read_text()
    lines = whole.splitlines(keepends=True)
    lines[line] = lines[line].replace("1", "2")
    log.write_text("".join(lines))
    before = contents(tmp_path / "run")
    check_refused("it is another run's log, or was changed", paused_run, tmp_path / "store")
    assert contents(tmp_path / "run") == before
    log.write_text(whole)
    resume(paused_run(tmp_path / "store"))


def test_where_other_runs_lie_too_is_refused(expected, tmp_path):
    """A comparison's folder, and, for a run to which nothing has arrived, one with anything in it."""
    check_raises(Stopped, begin, "fedbuff", tmp_path, stop_at(10))
    beside = tmp_path / "run" / "audit" / "ca2fl-seed4.jsonl"
    beside.touch()
    check_refused(r"run/audit holds other runs' logs: ca2fl-seed4.jsonl", paused_run, tmp_path / "store")
    new = tmp_path / "new"
    check_raises(Stopped, begin, "fedbuff", new, stop_at(1))
    with pytest.raises(ConfigError, match=f"{tmp_path}/run holds other things than the run of {new}/store"):
        for name in ("fedbuff-seed4.jsonl", "run_id.txt"):
            (tmp_path / "run" / "audit" / name).unlink()
        paused_run(new / "store", tmp_path / "run")
    (new / "run" / "audit" / "fedbuff-seed4.jsonl").unlink()  # as a run leaves it that goes on and is killed at once
    resume(paused_run(new / "store"))
    assert files(new / "run") == expected("fedbuff")[1]


@pytest.mark.parametrize("count", [9, 11])
def test_a_server_that_was_pushed_to_is_refused(count, tmp_path):
    """Whether the push makes a round or waits."""
    check_raises(Stopped, begin, "fedbuff", tmp_path, stop_at(count))
    before = contents(tmp_path / "run")
    with Server.open(tmp_path / "store") as server:
        server.push(client=1, update=np.zeros(server.params.size), version=server.version)
    said = r"store: (version|joins) is [0-9]+, but was [0-9]+ when .*; the server was used since"
    check_refused(said, resume, paused_run(tmp_path / "store"))
    assert contents(tmp_path / "run") == before


def test_a_server_whose_arrivals_or_versions_are_gone_is_refused(tmp_path):
    check_raises(Stopped, begin, "fedbuff", tmp_path, stop_at(12))
    with Server.open(tmp_path / "store") as server:
        server.checkpoint(server.notes)  # without what was kept
    check_refused(r"the store no longer keeps version [0-9]+ of params", resume, paused_run(tmp_path / "store"))
    with Server.open(tmp_path / "store") as server:
        assert server.discard() == 2
    check_refused("store: arrivals_waiting is 0, but was 2 when", resume, paused_run(tmp_path / "store"))


def test_looking_into_the_server_is_harmless(expected, tmp_path):
    check_raises(Stopped, begin, "ca2fl", tmp_path, stop_at(11))
    with Server.open(tmp_path / "store") as server:
        server.pull()
    result = resume(paused_run(tmp_path / "store"))
    assert (reproducible(result), files(tmp_path / "run")) == expected("ca2fl")


def test_what_is_no_run_is_refused(tmp_path, monkeypatch):
    with Server(ca2fl(buffer_size=2), np.zeros(3), num_clients=4, store=tmp_path / "server") as server:
        server.checkpoint(["mine"])
    output, job = tmp_path / "run" / "audit", Job(spec_of("fedbuff"), 4)
    expected = "server is the store of a server without a run to resume"
    check_refused(expected, InterruptedRun, tmp_path / "server", output, job, SMALL)
    check_error("there is no folder", InterruptedRun, tmp_path / "nowhere", output, job, SMALL, error=StoreError)
    check_raises(Stopped, begin, "fedbuff", tmp_path, stop_at(10))
    paused = paused_run(tmp_path / "store")

    def with_notes(**changes):
        changed = copy(paused)
        changed.notes = msgspec.structs.replace(paused.notes, **changes)
        return changed

    with pytest.raises(ConfigError, match="other inputs: first params;"):
        resume(with_notes(header=msgspec.structs.replace(paused.notes.header, first_params_sha256="0")))
    stream = paused.notes.stream
    (sequence, client, *rest), *others = stream.training
    training = [(sequence, client + 1, *rest), *others]
    check_refused("other clients train", resume, with_notes(stream=msgspec.structs.replace(stream, training=training)))
    monkeypatch.setattr("afflux.lab.runs.run_checkpoint.FORMAT", 3)
    check_refused("holds a run of format 2, this afflux reads 3", paused_run, tmp_path / "store")


def test_controls_of_more_than_two_gib_are_read(expected, tmp_path, monkeypatch):
    """Their archive ends with other records than that of a small one."""
    monkeypatch.setattr("zipfile.ZIP64_LIMIT", 100)
    check_raises(Stopped, begin, "afa_cs", tmp_path, stop_at(10))
    assert reproducible(resume(paused_run(tmp_path / "store"))) == expected("afa_cs")[0]


def test_damaged_controls_are_an_error(tmp_path):
    check_raises(Stopped, begin, "afa_cs", tmp_path, stop_at(10))
    (file,) = (tmp_path / "store").glob("clients-*.npz")
    os.truncate(file, 1000)
    check_error(f"cannot read {file}", resume, paused_run(tmp_path / "store"), error=StoreError)


SETTINGS = "--rule ca2fl:buffer_size=3 --model logreg --num-clients 20 --concurrency 5 --arrivals 200 --eval-every 100"
LOG = "audit/ca2fl_buffer_size=3-seed0.jsonl"


def called(*arguments):
    """The command in this process, whose imports are made."""
    return invoke("run", *arguments)


#: The command, which gets a signal during one of its pushes.
SIGNALLED = """
import os, sys
from afflux import Server
from afflux.cli import main

sent, left, push = int(sys.argv.pop(1)), int(sys.argv.pop(1)), Server.push

def counted(self, *args, **options):
    global left
    left -= 1
    if left == 0:
        os.kill(os.getpid(), sent)
    return push(self, *args, **options)

Server.push = counted
main()
"""


def stopped(sent, pushes, *arguments):
    """The command in a process of its own, which gets a signal at this push."""
    command = [sys.executable, "-c", SIGNALLED, str(int(sent)), str(pushes), "run", *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1800, check=False)
    return done.returncode, done.stdout, done.stderr


@pytest.mark.skipif(not hasattr(os, "killpg"), reason="sends signals")
def test_the_command_is_killed_interrupted_and_resumed(tmp_path):
    on, off, store = tmp_path / "on", tmp_path / "off", tmp_path / "my.store"
    keep = ["--store", store, "--checkpoint-every", "0.05"]
    status, *_ = stopped(signal.SIGKILL, 60, *SETTINGS.split(), "--out", on, *keep)
    assert status == -signal.SIGKILL
    command = [*SETTINGS.split(), "--out", on, *keep]
    kept = f"0 of 1 runs were finished; kept {on}/; the same command with --out {on} continues"
    status, out, told = stopped(signal.SIGINT, 60, *command)
    assert (status, out, told) == (130, "", f"{kept}\nstopped\n")
    interrupted = paused_run(store).arrivals
    assert 0 < interrupted < 200
    status, out, told = stopped(signal.SIGTERM, 40, *command)
    assert (status, out, told) == (143, "", f"{kept}\nstopped\n")
    assert interrupted < paused_run(store).arrivals < 200
    result = called(*command)
    assert (result.exit_code, result.stderr) == (0, "")
    assert "wrote " in result.stdout
    bits = (on / LOG).read_bytes()
    result = called(*command)
    assert (result.exit_code, (on / LOG).read_bytes()) == (0, bits), "its results are written again"
    assert called(*SETTINGS.split(), "--out", off).exit_code == 0
    for name in ("config.json", "metrics.csv", "staleness.csv", LOG):
        assert (on / name).read_bytes() == (off / name).read_bytes(), name
    assert (on / "curves.png").stat().st_size > 20_000


def test_the_progress_bar_goes_on_where_it_was(tmp_path):
    check_raises(Stopped, begin, "fedbuff", tmp_path, stop_at(10))
    console = Console(file=io.StringIO(), force_terminal=True, width=100)
    with show_progress(["fedbuff"], SMALL.arrivals, console) as watch:
        resume(paused_run(tmp_path / "store"), partial(watch, 0))
    shown = console.file.getvalue()
    assert "10/36 arrivals" in shown
    assert "36/36 arrivals" in shown


def test_the_commands_mistakes(tmp_path):
    def error(*arguments):
        result = called(*arguments)
        assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
        return result.stderr

    assert error("--seed", "3") == "error: give --rule or --paper\n"
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "file").touch()
    there = str(tmp_path / "there")
    assert error("--rule", "fedbuff", "--store", there).startswith("error: --store needs --out, the run folder")
    new = ["--rule", "fedbuff", "--out", str(tmp_path / "new"), "--store"]
    assert error(*new, there) == f"error: {there} is a folder that is not empty; choose another --store\n"
    assert error(*new, f"{there}/file") == f"error: {there}/file is not a folder; choose another --store\n"
    base = tmp_path / "base"
    Server(ca2fl(buffer_size=2), np.zeros(3), num_clients=4, store=base).close()
    said = (
        f"error: {base} is the store of a server without a run to resume; choose another --store; if a run was killed"
    )
    assert error(*new, base) == f"{said} before its first checkpoint, remove {base} and the folder of the run\n"
    check_raises(Stopped, begin, "fedbuff", tmp_path, stop_at(2))
    run_in = tmp_path / "store"
    said = "arrivals, concurrency, eval_every, local_steps, model, options, seed: only the same command continues it"
    assert error(*new, run_in) == f"error: {run_in} holds a run with another {said}\n"
    for command in (["check"], ["info"], ["repair", "--yes"], ["export", "--out", "rows.npy"]):
        result = invoke("store", command[0], tmp_path / "run", *command[1:])
        assert result.stderr == f"error: {tmp_path}/run is the folder of a run, with audit/; its store is {run_in}\n"
    part = tmp_path / "part"
    (part / "audit").mkdir(parents=True)
    killed = "if a run with --store was killed before its first checkpoint, remove it"
    said = error("--rule", "fedbuff", "--store", tmp_path / "other", "--out", part)
    assert said.endswith(f"choose another --out; {killed}\n")
    (part / "lock").touch()
    assert error(*new, part).endswith(f"before its first checkpoint, remove {part} and the folder of the run\n")
    said = "error: --checkpoint-every was given, but without --store there are no checkpoints\n"
    assert error("--rule", "fedbuff", "--checkpoint-every", "10") == said
    absent = ["--data", "mnist", "--data-dir", there, "--store", str(tmp_path / "s"), "--out", str(tmp_path / "o")]
    assert "mnist.npz" in error("--rule", "fedbuff", *absent)
    assert not (tmp_path / "s").exists()
    assert not (tmp_path / "o").exists()
