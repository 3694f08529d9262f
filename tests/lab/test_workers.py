"""Workers: the bits and files of one process; stopped anywhere with trainings in flight, and resumed."""

import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from typer.testing import CliRunner

import own_tasks
import stateful_models
from afflux import UnavailableError
from afflux.cli.lab.app import app
from afflux.lab import Simulation, interrupts
from afflux.lab.results import run_folder
from afflux.lab.results.finished_runs import Job
from afflux.lab.runs import workers as pool
from afflux.lab.runs.compare import compare
from afflux.lab.runs.setup import RunSetup
from afflux.lab.runs.workers import WorkerPool
from afflux.rules.specs import parse_rule
from afflux.sim import ConfigError, partitioned
from afflux.sim.clients.training import SerialTraining
from afflux.sim.errors import ProcessKilledError, TrainingError
from afflux.sim.workload.config import SimConfig
from conftest import ROOT, check_error, check_raises, check_refused, reproducible
from fake_ray import FakeRay
from made_runs import audit_folder, paused_run, resume, run_in_store, run_paired
from pairwise import soak
from stopped_runs import Stopped, press_ctrl_c_at, stop_at

SMALL = SimConfig(model="logreg", num_clients=20, concurrency=5, arrivals=36, eval_every=7, local_steps=2)
ROUNDS = {"protocol": "rounds", "concurrency": SimConfig.concurrency, "stale_models": 3}
SCAFFOLD = replace(SMALL, client_optimizer="scaffold", steps_law="uniform", **ROUNDS)
PRESENCE = replace(
    replace(SMALL, availability="diurnal:period=40:share=0.6", dropout="rates:never=0.1:late=0.3", timeout=30.0),
    selection=f"{ROOT}/examples/oort_selection.py:oort",
    concurrency="5:8@20:3@60",
)
RULE = parse_rule("ca2fl:buffer_size=3")
EVERYTHING = stateful_models.Root(*stateful_models.KINDS["everything"])


def made(folder, config, workers, rules=("ca2fl:buffer_size=3",)):
    """The results and the bytes of all files of a run."""
    folder.mkdir()
    specs = [parse_rule(rule) for rule in rules]
    results = run_paired(specs, 4, config, output=folder, workers=workers)
    return [reproducible(result) for result in results], {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.fixture(scope="module")
def two_workers():
    """Processes that tests share where these are not what the tests check."""
    with closing(WorkerPool(2)) as workers:
        yield workers


def test_the_command_gives_the_bits_of_one_process(tmp_path):
    settings = "--model cnn --client-optimizer fedprox --num-clients 20 --concurrency 5 --arrivals 24 --local-steps 2"
    command = ["run", "--rule", "ca2fl:buffer_size=3", *settings.split()]
    for count, name in ((1, "one"), (2, "two")):
        result = CliRunner().invoke(app, [*command, "--workers", str(count), "--out", str(tmp_path / name)])
        assert result.exit_code == 0, result.output
    one, two = (tmp_path / name for name in ("one", "two"))
    for name in ("config.json", "metrics.csv"):
        assert (one / name).read_bytes() == (two / name).read_bytes()
    (log,) = (one / "audit").iterdir()
    assert log.read_bytes() == (two / "audit" / log.name).read_bytes()


@pytest.mark.soak
@pytest.mark.parametrize(
    ("config", "count"),
    [(replace(SMALL, model="cnn", client_optimizer="fedprox"), 2), (SCAFFOLD, 3)],
    ids=["fedprox", "scaffold, rounds"],
)
def test_workers_give_the_bits_of_one_process(config, count, tmp_path):
    rules = ("ca2fl:buffer_size=3", "fedasync")
    assert made(tmp_path / "workers", config, count, rules) == made(tmp_path / "one", config, 1, rules)


@pytest.mark.parametrize("model", [EVERYTHING, *soak(own_tasks.Net()), *soak(own_tasks.Net)])
def test_a_model_with_buffers_and_a_training_function_of_ones_own(model):
    clients = partitioned(own_tasks.X, own_tasks.Y, 12, "iid")
    settings = {"rules": "fedbuff:buffer_size=3", "arrivals": 30, "concurrency": 6, "delays": "fadas-mild"}
    simulation = Simulation(model, clients, own_tasks.fails_sometimes, own_tasks.TEST, **settings)
    one, two = (simulation.run(workers=count)[0] for count in (1, 2))
    assert reproducible(one) == reproducible(two)
    assert two.decisions["faulty"] + two.decisions["joined"] == 30


def test_results_without_room_are_trained_here(monkeypatch, tmp_path):
    """One place for each worker, clients that overtake others whose results wait there, and as many evaluations."""
    monkeypatch.setattr(pool, "WAITING_BYTES", 0)
    monkeypatch.setattr(pool, "WAITING_LEAST", 0)
    monkeypatch.setattr(pool, "QUEUE", 1)
    config, here = replace(SMALL, concurrency=15, delays="exponential", arrivals=60, eval_every=1), []
    take = SerialTraining.take

    def counted(self, sequence, sent):
        here.append(sequence)
        return take(self, sequence, sent)

    with monkeypatch.context() as patched:
        patched.setattr(SerialTraining, "take", counted)
        workers = made(tmp_path / "workers", config, 2)
    assert workers == made(tmp_path / "one", config, 1)
    assert len(workers[0][0][2]) == 61, "evaluations, more than workers can hold"
    assert 0 < len(here) < 60


def begin(folder, config, progress, seconds=0.0, workers=2):
    output = audit_folder(run_folder.create_run_folder(folder / "run"))
    return run_in_store(folder / "store", RULE, 4, config, output, progress, seconds, workers=workers)


def same_as_one_process(folder, result, config):
    whole = made(folder / "whole", config, 1)
    files = {path.name: path.read_bytes() for path in (folder / "run" / "audit").glob("*seed*")}
    assert ([reproducible(result)], files) == whole


@pytest.mark.parametrize("config", [SCAFFOLD, *soak(PRESENCE), *soak(SMALL)])
def test_stopped_and_resumed_with_other_numbers_of_workers(config, two_workers, tmp_path):
    check_raises(Stopped, begin, tmp_path, config, stop_at(8), workers=two_workers)
    check_raises(Stopped, resume, paused_run(tmp_path / "store"), stop_at(17), 0.0, workers=1)
    result = resume(paused_run(tmp_path / "store"), None, 0.01, workers=two_workers)
    same_as_one_process(tmp_path, result, config)


def test_a_run_stops_at_the_same_target(two_workers):
    config = replace(SCAFFOLD, arrivals=200, eval_every=3, target=0.6, stop_at_target=True)
    one, two = (run_paired([RULE], 3, config, workers=workers)[0] for workers in (1, two_workers))
    assert one.evaluations[-1].accuracy >= 0.6
    assert len(one.staleness) < 200
    assert reproducible(one) == reproducible(two)


def test_a_checkpoint_has_the_evaluations_before_it(two_workers, tmp_path):
    config = replace(SCAFFOLD, eval_every=4)
    check_raises(Stopped, begin, tmp_path, config, stop_at(21), workers=two_workers)
    stored = paused_run(tmp_path / "store")
    assert [row.arrivals for row in stored.notes.history.evaluations] == list(range(0, stored.arrivals + 1, 4))
    (whole,) = run_paired([RULE], 4, config)
    assert reproducible(resume(stored, workers=two_workers)) == reproducible(whole)


def test_ctrl_c_with_trainings_in_flight(two_workers, tmp_path):
    with pytest.raises(KeyboardInterrupt), interrupts.deferred():
        begin(tmp_path, SCAFFOLD, press_ctrl_c_at(10), seconds=1000, workers=two_workers)
    paused = paused_run(tmp_path / "store")
    assert paused.arrivals == 10
    assert paused.notes.stream.training
    same_as_one_process(tmp_path, resume(paused), SCAFFOLD)


PROGRAM = """
import os, signal, sys
from pathlib import Path
sys.path[:0] = {paths!r}
if __name__ == "__main__":
    import test_workers
    def kill(run):
        if run.arrivals == 11:
            os.kill(os.getpid(), signal.SIGKILL)
    test_workers.begin(Path({folder!r}), test_workers.SMALL, kill)
"""


@pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="sends signals")
def test_killed_with_trainings_in_flight(tmp_path):
    """The workers end with their parent."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM.format(paths=sys.path, folder=str(tmp_path)))
    done = subprocess.run([sys.executable, program], capture_output=True, text=True, check=False, timeout=1800)
    assert done.returncode == -signal.SIGKILL, done.stderr
    deadline = time.monotonic() + 1800
    while any(str(tmp_path) in command for command in commands()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [command for command in commands() if str(tmp_path) in command]
    assert paused_run(tmp_path / "store").arrivals == 10
    same_as_one_process(tmp_path, resume(paused_run(tmp_path / "store")), SMALL)


def commands():
    """The environments of processes name their folder if these were started by the program above."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            found.append((path / "cmdline").read_text().replace("\0", " "))
        except OSError:
            continue
    return found


def test_a_worker_that_is_killed_is_named_and_the_run_is_resumed(tmp_path, monkeypatch):
    started, make = [], pool.ProcessPool
    monkeypatch.setattr(pool, "ProcessPool", lambda *given: (started.append(make(*given)), started[-1])[1])

    def kill(run):
        if run.arrivals == 9:
            os.kill(next(iter(started[0]._processes)), signal.SIGKILL)

    text = "a worker process was killed, or could not be started; the run can be"
    check_error(text, begin, tmp_path, SMALL, kill, error=ProcessKilledError)
    assert not started[0]._processes, "all have been ended"
    same_as_one_process(tmp_path, resume(paused_run(tmp_path / "store")), SMALL)


RETURNS = "must return loss, steps, examples, while client [0-9]+ trained"


@pytest.mark.parametrize(
    ("training", "kind", "message"),
    [
        # An OSError, which the pipe of a worker that has ended raises too.
        (own_tasks.finds_no_file, TrainingError, "client [0-9]+ failed to train: FileNotFoundError: .*own_tasks.py"),
        *soak(own_tasks.fails, TrainingError, "client [0-9]+ failed to train: ZeroDivisionError: division"),
        *soak(own_tasks.returns_nothing, ConfigError, RETURNS),
    ],
)
def test_what_fails_in_a_worker_is_raised_here(training, kind, message):
    clients = partitioned(own_tasks.X, own_tasks.Y, 12, "iid")
    settings = {"rules": "fedasync", "arrivals": 30, "concurrency": 6, "faults": "raise"}
    with pytest.raises(kind, match=message):
        Simulation(own_tasks.linear, clients, training, own_tasks.TEST, **settings).run(workers=2)


def test_another_client_optimizer_needs_other_memory_and_so_other_workers(monkeypatch):
    started = []
    monkeypatch.setattr(pool, "ProcessPool", lambda *given: (started.append(Mock()), started[-1])[1])
    with closing(WorkerPool(2)) as workers:
        for config, count in ((SMALL, 1), (replace(SMALL, client_lr=0.3), 1), (SCAFFOLD, 2)):
            workers.for_run(RunSetup(config, 0), None)
            assert len(started) == count
    assert all(each.stop.called for each in started)


@pytest.mark.parametrize(("jobs", "others"), [(1, []), *soak(1, [SCAFFOLD]), *soak(2, [SCAFFOLD])])
def test_runs_that_follow_each_other_share_their_workers(jobs, others, monkeypatch):
    """Of other seeds, rules, settings and lengths, and with followers; not those that need other memory."""
    started, make = [], pool.ProcessPool
    monkeypatch.setattr(pool, "ProcessPool", lambda *given: (started.append(1), make(*given))[1])
    rules = [parse_rule("fedbuff:buffer_size=3"), parse_rule("fedasync")]
    list_of = [Job(rule, seed, config=SMALL) for seed in (0, 1) for rule in rules]
    list_of += [Job(rules[1], 0, followers=(RULE,))]
    list_of += [Job(rules[0], 1, config=config) for config in (replace(SMALL, client_lr=0.3, arrivals=12), *others)]
    one, two = (compare(list_of, SMALL, processes=jobs, workers=count) for count in (1, 2))
    assert [reproducible(result) for result in one] == [reproducible(result) for result in two]
    assert len(started) == (1 + len(others) if jobs == 1 else 0)


def test_impossible_workers(monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    refused = CliRunner().invoke(app, ["compare", "--workers=0"])
    assert (refused.exit_code, "Invalid value for '--workers'" in refused.stderr) == (2, True)
    without_ray = CliRunner().invoke(app, ["run", "--rule", "fedbuff", "--workers", "ray"])
    assert "needs Ray: pip install 'afflux[ray]'" in without_ray.stderr
    check_refused("workers is 0, must be at least 1", run_paired, [RULE], 0, SMALL, workers=0)
    simulation = Simulation(lambda: own_tasks.Net(), [own_tasks.examples(9)] * 6, None, own_tasks.TEST, concurrency=3)
    check_refused("the task cannot be sent to another process", simulation.run, workers=2)


def test_tasks_of_ray_for_which_no_cpu_is_free_are_an_error(monkeypatch):
    """Before the run begins."""
    ray = FakeRay()
    ray.unplaced, ray.put, ray.cancel = 1, Mock(), Mock()
    monkeypatch.setitem(sys.modules, "ray", ray)
    message = r"\[run\] worker 0 .* requests {'num_cpus': 1}\. The cluster has CPU 2; free: nothing \(after 60"
    check_error(message, run_paired, [RULE], 0, SMALL, workers="ray", error=UnavailableError)
    assert ray.waits == [20.0, 40.0]
    ray.cancel.assert_called_once()
