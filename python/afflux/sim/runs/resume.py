"""A run whose server lies in a store: its start, and how it goes on from its last checkpoint."""

from contextlib import ExitStack
from pathlib import Path

from afflux.rule import Rule
from afflux.server import Server
from afflux.sim.clients.training import one_thread
from afflux.sim.results import audit_log
from afflux.sim.results.run_result import RunResult
from afflux.sim.results.updates_file import Keep, KeptUpdates
from afflux.sim.runs.run_checkpoint import Checkpoints, Paused
from afflux.sim.runs.setup import World
from afflux.sim.runs.simulated_server import Follower, Progress, follow
from afflux.sim.runs.simulation import kept
from afflux.sim.runs.training_stream import Live
from afflux.sim.workload.config import SimConfig
from afflux.sim.workload.rule_specs import RuleSpec

SECONDS = 10.0  #: between two checkpoints


def start(
    path: Path,
    spec: RuleSpec,
    seed: int,
    config: SimConfig,
    keep: Keep,
    progress: Progress | None = None,
    seconds: float = SECONDS,
) -> RunResult:
    """`run`, with the server in a new store; the same bits.

    Args:
        path: the store's folder; new.
        spec: the rule.
        seed: see `run`.
        config: likewise.
        keep: what is written beside it; a run that goes on goes on with these files.
        progress: see `run`.
        seconds: between two checkpoints; 0: after every event. Ctrl-C makes one, too.
    """
    return _run(path, spec, seed, config, keep, progress, seconds, None)


def resume(paused: Paused, progress: Progress | None = None, seconds: float = SECONDS) -> RunResult:
    """Go on with an interrupted run, to the bits of one that was not; what the last checkpoint lacks is done again."""
    run = paused.header
    return _run(paused.path, paused.spec, run.seed, paused.config, paused.keep, progress, seconds, paused)


def _run(
    path: Path,
    spec: RuleSpec,
    seed: int,
    config: SimConfig,
    keep: Keep,
    progress: Progress | None,
    seconds: float,
    paused: Paused | None,
) -> RunResult:
    with one_thread(), ExitStack() as files:
        world = World.of(config, seed)
        world.events(spec)  # refuses what cannot be, before anything is written
        if paused is not None:
            paused.refuse_other(world)

        def serve(rule: Rule) -> Server:
            if paused is None:
                server = world.server(rule, store=path, commit_every=None)
            else:
                server = Server.open(path, rule, num_threads=1, commit_every=None)
            # What came after the last checkpoint has no history: it is not to be committed.
            files.callback(server.close, checkpoint=False)
            if paused is not None:
                paused.refuse_pushed(server)
            return server

        lead = Follower(spec, world, config.arrivals, serve=serve, history=None if paused is None else paused.history)
        live = Live(world, lead)
        if paused is not None:
            versions = {**lead.server.kept, lead.server.version: lead.server.pull()}
            live.load(paused.live, paused.read_arrays(), versions)
        name = audit_log.file_name(spec.label, seed)
        log_path, updates_path = keep.folder / f"{name}.jsonl", keep.folder / f"{name}.updates.npy"
        header, size = lead.header(updates_path.name if keep.updates else None), 0
        if paused is not None and paused.arrivals:
            header, size = paused.header, paused.log_bytes
        elif paused is not None:  # nothing had arrived: the files may be gone, or hold what was not committed
            keep.folder.mkdir(parents=True, exist_ok=True)
            for old in (log_path, updates_path):
                old.unlink(missing_ok=True)
        log = lead.log = files.enter_context(audit_log.Writer(log_path, header, size))
        checkpoints = Checkpoints(path, live, lead, log, keep, seconds)
        events = live.stream(checkpoints)
        if keep.updates:
            count = 0 if paused is None else paused.arrivals
            events = kept(events, files.enter_context(KeptUpdates(updates_path, len(world.first), count)))
        checkpoints.save()
        follow(events, [lead], progress or (lambda arrivals: None))
        checkpoints.save()
        return lead.result()
