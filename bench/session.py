"""One case: all contenders and probes are prepared, checked, timed, and freed."""

import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from bench.measure import library_probes, machine, native_probes, probe_variants
from bench.measure.library_probes import COPIED, PROBES
from bench.measure.native_probes import AdditionTimer
from bench.measure.probe_variants import wanted
from bench.measure.timing import Clock, Timed, entrant, measure_groups, wall_clock
from bench.output import report
from bench.spec import inputs as data
from bench.spec.contender import REST_OF_OPENBLAS, Contender
from bench.spec.inputs import Case, Inputs
from bench.spec.optional_torch import set_threads
from bench.spec.row import Row

#: (the work that starts, its number of steps); without a number, one step of the work is done
Step = Callable[..., None]


def entrants(rows: list[Row], compiled: bool) -> list[tuple[Row, Contender]]:
    """Return the contenders of these rows that can run here."""
    return [(row, c) for row in rows for c in row.contenders if (compiled or not c.compiles) and not c.absent()]


def scratch(case: Case, rows: list[Row]) -> int:
    """Return the number of vectors that the probes write."""
    return max(COPIED, probe_variants.scratch(wanted(case, rows)))


def check_memory(case: Case, rows: list[Row], compiled: bool) -> None:
    """Raise an error if no contender can run, or if the peak of memory is too high.

    The peak is the shared vectors, the state of all contenders, and the largest temporaries.
    """
    contenders = [contender for _, contender in entrants(rows, compiled)]
    if not contenders:
        names = ", ".join(row.name for row in rows)
        why = next(reason for row in rows for c in row.contenders if (reason := c.absent()))
        raise typer.BadParameter(f"nothing in {names} can run here: {why}", param_hint="--rows")
    check_room(case, contenders, scratch(case, rows))


def check_room(case: Case, contenders: Sequence[Contender], scratch_vectors: int, processes: int = 1) -> None:
    """Raise an error if the memory of these contenders, and of the inputs of each process, is not available."""
    resident = sum(c.kept_bytes(case.d, case.m) for c in contenders)
    temporary = max(c.temporary_bytes(case.d, case.m) for c in contenders)
    shared = processes * data.shared_bytes(case, scratch_vectors)
    needed = int(1.05 * (shared + resident + temporary)) + processes * data.LIBRARIES
    available = machine.available_bytes()
    if available is not None and needed > available:
        raise typer.BadParameter(data.does_not_fit(needed, available, case), param_hint="-d")


@contextmanager
def progress(case: Case) -> Iterator[Step]:
    """Return a progress bar for terminals, without a refresh thread, which would disturb the timing."""
    columns = (
        TextColumn(f"{case}:"),
        TextColumn("{task.description:32}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not sys.stderr.isatty(), auto_refresh=False) as bar:
        task = bar.add_task("making inputs", total=None)

        def step(description: str | None = None, total: int | None = None) -> None:
            if total is not None:
                bar.reset(task, total=total, description=description or "")
            bar.update(task, advance=total is None, description=description, refresh=True)

        yield step


def probes(case: Case, rows: list[Row], shared: Inputs, step: Step, quick: bool) -> list[Timed]:
    """Return the fastest native probes, and those of NumPy and torch."""
    time.sleep(REST_OF_OPENBLAS)
    found = []
    for traffic, keep in {} if native_probes.why_missing() else wanted(case, rows).items():
        step("trying native probes")
        found += probe_variants.tried(shared, case, traffic, keep, quick=quick)
    for probe in PROBES:
        step("trying probes")
        found.append(library_probes.timed(probe, case, shared))
    return found


def execute(case: Case, rows: list[Row], repeats: int, compiled: bool, quick: bool) -> dict[str, Any]:
    """Measure these rows in this case; return all figures."""
    set_threads(case.threads)
    with progress(case) as step:
        shared = data.make(case, scratch(case, rows))
        taking_part = entrants(rows, compiled)
        step("checking", total=len(taking_part) + len(wanted(case, rows)) + len(PROBES))
        contenders = []
        for row, by in taking_part:
            step(f"checking {by.name}")
            contenders.append(entrant(case, row, by, shared))
        found = probes(case, rows, shared, step, quick)
        load = measure_all([[timed] for timed in (*found, *contenders)], repeats, step)
    return report.of_case(case, rows, found, contenders) | load


def measure_all(
    groups: Sequence[Sequence[Timed]], repeats: int, step: Step, clock: Clock = wall_clock
) -> dict[str, float | None]:
    """Time these groups; return the load of other programs meanwhile."""
    step("timing", total=repeats * sum(map(len, groups)))
    additions = AdditionTimer()

    def turn() -> None:
        additions.sample()
        step()

    start, before = time.perf_counter(), machine.others_cpu()
    measure_groups(groups, repeats, turn, clock)
    seconds, after = time.perf_counter() - start, machine.others_cpu()
    others = None if before is None or after is None else (after - before) / seconds
    return {"cores_of_others": others, "additions_slowdown": additions.slowdown}
