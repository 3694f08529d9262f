"""Times the engine's operations beside torch: bytes, the machine's own limit, and the error."""

import gc
import json
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from afflux import ops
from afflux.bench import baselines, machine, report
from afflux.bench import inputs as data
from afflux.bench.contender import Contender
from afflux.bench.inputs import Case
from afflux.bench.measure import Timed, check, measure
from afflux.bench.probes import PROBES
from afflux.bench.row import Asked, Row
from afflux.bench.rows import ROWS

REPEATS, QUICK_REPEATS = 20, 3


def chosen_rows(names: str) -> list[Row]:
    known = {row.name: row for row in ROWS}
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in known]
    if unknown or not wanted:
        what = f"unknown: {', '.join(unknown)}" if unknown else "no row is named"
        raise typer.BadParameter(f"{what}; known rows: {', '.join(known)}", param_hint="--rows")
    return [known[name] for name in dict.fromkeys(wanted)]


def list_rows(threads: int) -> None:
    for row in ROWS:
        cases = "; ".join(map(str, row.cases(Asked(None, None, threads, quick=False))))
        print(f"{row.name:12}{row.formula}\n{'':12}bytes: {row.counted}\n{'':12}cases: {cases}")
        for contender in row.contenders:
            note = " (with --compile)" if contender.compiles else ""
            print(f"{'':12}- {contender.name}: {contender.what}{note}")
    print("\nprobes")
    for probe in PROBES:
        print(f"{'':12}- {probe.name}: {probe.what}")


def planned(rows: list[Row], asked: Asked) -> dict[Case, list[Row]]:
    """The cases of these rows, and which rows share each of them."""
    plan: dict[Case, list[Row]] = {}
    for row in rows:
        for case in row.cases(asked):
            plan.setdefault(case, []).append(row)
    return plan


def entrants(rows: list[Row], compiled: bool) -> list[tuple[Row, Contender]]:
    """Those who take part in these rows."""
    return [(row, c) for row in rows for c in row.contenders if (compiled or not c.compiles) and not c.absent()]


def check_memory(case: Case, contenders: list[Contender], sets: int) -> None:
    """The peak: what is shared, everyone's own state, and the largest temporaries."""
    kept = sum(c.kept(case.d, case.m) for c in contenders)
    temporary = max(c.temporary(case.d, case.m) for c in contenders)
    needed = int(1.05 * (data.shared_bytes(case, sets) + kept + temporary)) + data.LIBRARIES
    available = data.available_bytes()
    if available is not None and needed > available:
        raise typer.BadParameter(data.does_not_fit(needed, available, case), param_hint="-d")


def notes(rows: list[Row], cases: Iterable[Case], sets: int, repeats: int) -> list[str]:
    """What keeps this run's figures from being what they look like."""
    largest = max(machine.cache_bytes().values(), default=0)
    found = [
        f"{case}: the input sets are smaller than 4 last-level caches: not memory speed"
        for case in cases
        if 4 * case.d * (case.m + 1) * sets < 4 * largest
    ]
    left_out: dict[str, list[str]] = {}
    for contender in (c for row in rows for c in row.contenders):
        if (why := contender.absent()) and contender.name not in left_out.setdefault(why, []):
            left_out[why].append(contender.name)
    found += [f"left out: {'; '.join(names)}: {why}" for why, names in left_out.items()]
    if repeats < REPEATS:
        found.append(f"fewer than {REPEATS} repeats")
    if baselines.torch is None:
        found.append("torch is not installed: no baselines, fewer probes")
    return found


def execute(case: Case, rows: list[Row], sets: int, repeats: int, compiled: bool) -> dict[str, Any]:
    """Prepares, checks and times everyone at one size of inputs, and frees it all; returns the figures."""
    baselines.set_threads(case.threads)
    columns = (
        TextColumn(f"{case}:"),
        TextColumn("{task.description:32}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    # No refresh thread: it would take part in the timing.
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not sys.stderr.isatty(), auto_refresh=False) as progress:
        task = progress.add_task("making inputs", total=None)

        def step(description: str | None = None) -> None:
            progress.update(task, advance=1, description=description, refresh=True)

        progress.refresh()
        shared = data.make(case, sets)
        everybody = entrants(rows, compiled)
        progress.update(task, total=len(everybody) + len(PROBES))
        contenders = []
        for row, c in everybody:
            progress.update(task, description=f"checking {c.name}", refresh=True)
            ready = c.make(shared)
            amount = (c.part or row.bytes)(case.d, case.m)
            timed = Timed(c.name, c.what, amount, ready.run, row.name, c.plain, bool(c.part), prepare=ready.prepare)
            timed.errors = check(row, shared, ready)
            contenders.append(timed)
            warm_up(timed, sets)
            step()
        probes = [Timed(p.name, p.what, p.bytes(case.d, case.m), p.make(shared), kind=p.kind) for p in PROBES]
        for timed in probes:
            timed.run(0)
            warm_up(timed, sets)
            step("trying probes")
        everyone = [*probes, *contenders]
        progress.reset(task, total=repeats * len(everyone), description="timing")
        measure(everyone, repeats, sets, step)
    return report.of_case(case, rows, probes, contenders)


def warm_up(timed: Timed, sets: int) -> None:
    """The sets after 0: timing begins with set 0, and rows must then be those of the last set."""
    for k in range(1, sets):
        timed.prepare(k)
        timed.run(k)
    gc.collect()


def run(
    rows: str,
    d: int | None,
    m: int | None,
    threads: int | None,
    repeats: int | None,
    sets: int,
    compiled: bool,
    quick: bool,
    json_path: Path | None,
    markdown_path: Path | None,
    list_only: bool,
) -> None:
    threads = threads or ops.default_threads()
    if list_only:
        list_rows(threads)
        return
    selected = chosen_rows(rows)
    repeats = repeats or (QUICK_REPEATS if quick else REPEATS)
    for path in (json_path, markdown_path):
        if path and not path.absolute().parent.is_dir():  # before the run, not after it
            raise typer.BadParameter(f"there is no folder for {path}")
    plan = planned(selected, Asked(d, m, threads, quick))
    for case, sharing in plan.items():
        check_memory(case, [c for _, c in entrants(sharing, compiled)], sets)

    box = machine.describe()  # now: the load must be that of others
    cases = [execute(case, sharing, sets, repeats, compiled) for case, sharing in plan.items()]
    settings: dict[str, Any] = {
        "rows": [row.name for row in selected],
        "d": d,
        "m": m,
        "threads": threads,
        "repeats": repeats,
        "sets": sets,
        "compile": compiled,
        "quick": quick,
        "notes": notes(selected, plan, sets, repeats),
    }
    out = report.results(box, selected, cases, settings)
    report.show(out, selected)
    if json_path:
        json_path.write_text(json.dumps(out, indent=1) + "\n", encoding="utf-8")
    if markdown_path:
        markdown_path.write_text(report.to_markdown(out, selected), encoding="utf-8")
