"""Runs by settings, as the simulator makes them inside: `simulate`, without or with a store, and a run that goes on."""

from contextlib import ExitStack, closing
from pathlib import Path

import msgspec

import own_tasks
from afflux.lab import Simulation
from afflux.lab.results.audit_log import Header
from afflux.lab.results.finished_runs import Job
from afflux.lab.runs.run_checkpoint import CHECKPOINT_SECONDS, InterruptedRun, StoredRun
from afflux.lab.runs.simulation import simulate
from afflux.lab.runs.workers import WorkerPool
from afflux.rules.specs import RuleSpec, parse_rule
from afflux.sim import partitioned
from afflux.store import info

CLIENTS = partitioned(own_tasks.X, own_tasks.Y, 12, "iid")


def simulation(training=None, clients=CLIENTS, model=own_tasks.linear, evaluate=own_tasks.TEST, **settings):
    """A simulation of the small tasks of own_tasks."""
    return Simulation(model, clients, training, evaluate, **settings)


def run_paired(specs, seed, config, progress=None, output=None, task=None, workers=1, store=None, on_evaluation=None):
    """The results of several rules on one stream of updates; `workers` is a number, or a pool that others use, too."""
    with ExitStack() as files:
        pool = workers if isinstance(workers, WorkerPool) else files.enter_context(closing(WorkerPool(workers)))
        return simulate(specs, seed, config, progress, output, task, pool, store, on_evaluation)


def run(spec, seed, config, progress=None, output=None, task=None, workers=1, store=None, on_evaluation=None):
    """The result of one rule."""
    return run_paired([spec], seed, config, progress, output, task, workers, store, on_evaluation)[0]


def run_in_store(
    path,
    spec,
    seed,
    config,
    output,
    progress=None,
    seconds=CHECKPOINT_SECONDS,
    task=None,
    workers=1,
    interrupted=None,
    on_evaluation=None,
):
    """The result of a run whose server is kept in a store."""
    store = StoredRun(path, seconds, interrupted)
    return run(spec, seed, config, progress, output, task, workers, store, on_evaluation)


def paused_run(store, folder=None):
    """The run in a store, read as by the command that has begun it; `folder` is its run folder, if it has moved."""
    notes = info(store).notes
    header = msgspec.convert(notes["header"], Header)
    options = parse_rule(RuleSpec(header.rule, tuple(header.options.items())).text).options
    job = Job(RuleSpec(header.rule, options, header.label), header.seed)
    output = Path(notes["audit"]) if folder is None else folder / "audit"
    return InterruptedRun(store, output, job, header.settings(store))


def resume(interrupted, progress=None, seconds=CHECKPOINT_SECONDS, task=None, workers=1, on_evaluation=None):
    """The result of a run that goes on from its last checkpoint."""
    facts = (interrupted.path, interrupted.spec, interrupted.notes.header.seed, interrupted.config, interrupted.output)
    return run_in_store(*facts, progress, seconds, task, workers, interrupted, on_evaluation)


def audit_folder(folder):
    """The output of runs into a run folder."""
    output = folder / "audit"
    output.mkdir()
    return output
