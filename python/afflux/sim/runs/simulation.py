"""One run: one seed, and one rule from whose params the clients train; others may follow beside it."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

from afflux.sim.clients.training import one_thread
from afflux.sim.results.audit_log import Writer, file_name
from afflux.sim.results.run_result import RunResult
from afflux.sim.results.updates_file import Keep, KeptUpdates
from afflux.sim.runs.setup import World
from afflux.sim.runs.simulated_server import Finished, Follower, Progress, Pull, follow
from afflux.sim.runs.training_stream import Live
from afflux.sim.workload.config import SimConfig
from afflux.sim.workload.rule_specs import RuleSpec


def run(
    spec: RuleSpec, seed: int, config: SimConfig, progress: Progress | None = None, keep: Keep | None = None
) -> RunResult:
    """Simulate `spec` with `seed`.

    The same arguments give the same bits, in this process or another; runs with one seed share
    partition, first model, dispatches, delays and batches, whatever the rule.
    """
    return run_paired([spec], seed, config, progress, keep)[0]


def run_paired(
    specs: Sequence[RuleSpec],
    seed: int,
    config: SimConfig,
    progress: Progress | None = None,
    keep: Keep | None = None,
) -> list[RunResult]:
    """Simulate several rules over one stream of updates: clients train from the params of the first rule.

    The first result has the bits of `run(specs[0], ...)`. The others get the same updates at the same times; the
    staleness of an arrival is each rule's own.
    """
    with one_thread(), ExitStack() as files:
        world = World.of(config, seed)
        lead = Follower(specs[0], world, config.arrivals)
        followers = [lead, *(Follower(spec, world, config.arrivals, specs[0].label) for spec in specs[1:])]
        events = Live(world, lead).stream()
        if keep is not None:
            name = f"{file_name(lead.spec.label, seed)}.updates.npy" if keep.updates else None
            if name is not None:
                events = kept(events, files.enter_context(KeptUpdates(keep.folder / name, len(world.first))))
            write_logs(followers, keep.folder, seed, name, files)
        follow(events, followers, progress or (lambda arrivals: None))
        return [follower.result() for follower in followers]


def kept(events: Iterator[Pull | Finished], updates: KeptUpdates) -> Iterator[Pull | Finished]:
    """Yield `events`, with each update written before the rules, and so their logs, see it."""
    for event in events:
        if isinstance(event, Finished):
            updates.append(event.update)
        yield event


def write_logs(followers: Sequence[Follower], folder: Path, seed: int, updates: str | None, files: ExitStack) -> None:
    """Give each follower a log in `folder`, which `files` closes."""
    for follower in followers:
        path = folder / f"{file_name(follower.spec.label, seed)}.jsonl"
        follower.log = files.enter_context(Writer(path, follower.header(updates)))
