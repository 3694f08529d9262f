"""Times the engine's operations beside torch: bytes, the machine's own limit, and the error."""

import gc
import json
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

import baselines
import inputs as data
import machine
import report
from afflux import ops
from contender import Contender
from measure import Timed, check, measure
from probes import PROBES
from rows import ROWS, Row

HELP = """Time the engine's operations beside their torch formulas.

Each gets its bytes by definition, GB/s, per cent of the best bandwidth seen in the same run, \
and its largest error against float64.

[bold]Examples[/bold]

  python bench/run.py

  python bench/run.py --rows fedbuff -d 1_000_000 -M 32 --threads 1

  python bench/run.py --repeats 40 --json results.json --markdown results.md

  python bench/run.py --quick
"""
D, QUICK_D = 25_000_000, 200_000
REPEATS, QUICK_REPEATS = 20, 3

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")


def chosen_rows(names: str) -> list[Row]:
    known = {row.name: row for row in ROWS}
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in known]
    if unknown or not wanted:
        what = f"unknown: {', '.join(unknown)}" if unknown else "no row is named"
        raise typer.BadParameter(f"{what}; known rows: {', '.join(known)}", param_hint="--rows")
    return [known[name] for name in dict.fromkeys(wanted)]


def list_rows() -> None:
    for row in ROWS:
        print(f"{row.name:12}{row.formula}\n{'':12}bytes: {row.counted}")
        for contender in row.contenders:
            note = " (with --compile)" if contender.compiles else ""
            print(f"{'':12}- {contender.name}: {contender.what}{note}")
    print("\nprobes")
    for probe in PROBES:
        print(f"{'':12}- {probe.name}: {probe.what}")


def needed_bytes(contenders: list[Contender], d: int, m: int, sets: int) -> int:
    """The peak: what is shared, everyone's own state, and the largest temporaries."""
    kept = sum(c.kept(d, m) for c in contenders)
    temporary = max(c.temporary(d, m) for c in contenders)
    return int(1.05 * (data.shared_bytes(d, m, sets) + kept + temporary)) + data.LIBRARIES


def notes(d: int, m: int, sets: int, repeats: int) -> list[str]:
    """What keeps this run's figures from being what they look like."""
    found = []
    largest = max(machine.cache_bytes().values(), default=0)
    if 4 * d * (m + 1) * sets < 4 * largest:
        found.append("the input sets are smaller than 4 last-level caches: not memory speed")
    if repeats < REPEATS:
        found.append(f"fewer than {REPEATS} repeats")
    if baselines.torch is None:
        found.append("torch is not installed: no baselines, fewer probes")
    return found


def execute(
    rows: list[Row], d: int, m: int, sets: int, threads: int, repeats: int, compiled: bool
) -> tuple[list[Timed], list[Timed]]:
    """Prepares, checks and times everyone; returns probes and contenders."""
    entrants = [(row, c) for row in rows for c in row.contenders if compiled or not c.compiles]
    baselines.set_threads(threads)
    columns = (
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
        shared = data.make(d, m, sets, threads)
        progress.update(task, total=len(entrants) + len(PROBES))
        contenders = []
        for row, c in entrants:
            progress.update(task, description=f"checking {c.name}", refresh=True)
            ready = c.make(shared)
            timed = Timed(c.name, c.what, row.bytes(d, m), ready.run, row.name, c.plain)
            timed.errors = check(row, shared, ready)
            contenders.append(timed)
            warm_up(timed, sets)
            step()
        probes = [Timed(p.name, p.what, p.bytes(d, m), p.make(shared), kind=p.kind) for p in PROBES]
        for timed in probes:
            timed.run(0)
            warm_up(timed, sets)
            step("trying probes")
        everyone = [*probes, *contenders]
        progress.reset(task, total=repeats * len(everyone), description="timing")
        measure(everyone, repeats, sets, step)
    return probes, contenders


def warm_up(timed: Timed, sets: int) -> None:
    """The sets after 0: timing begins with set 0, and rows must then be those of the last set."""
    for k in range(1, sets):
        timed.run(k)
    gc.collect()


@app.command(help=HELP)
def main(
    rows: Annotated[str, typer.Option(help="Operations, by name; see --list.")] = ",".join(row.name for row in ROWS),
    d: Annotated[int | None, typer.Option("-d", min=1, help=f"Length of the vectors; default {D:_}.")] = None,
    m: Annotated[int, typer.Option("-M", min=1, help="Updates a round.")] = 10,
    threads: Annotated[int | None, typer.Option(min=1, help="For everyone; default: all usable cores.")] = None,
    repeats: Annotated[int | None, typer.Option(min=1, help=f"Samples of everyone; default {REPEATS}.")] = None,
    sets: Annotated[int, typer.Option(min=2, help="Input sets that take turns.")] = 2,
    compiled: Annotated[bool, typer.Option("--compile", help="Also torch.compile; it needs a C++ compiler.")] = False,
    quick: Annotated[bool, typer.Option("--quick", help=f"d = {QUICK_D:_}, {QUICK_REPEATS} repeats: a trial.")] = False,
    json_path: Annotated[
        Path | None, typer.Option("--json", dir_okay=False, help="Everything, samples included.")
    ] = None,
    markdown_path: Annotated[Path | None, typer.Option("--markdown", dir_okay=False, help="The tables.")] = None,
    list_only: Annotated[bool, typer.Option("--list", help="List rows, contenders and probes, and stop.")] = False,
) -> None:
    if list_only:
        list_rows()
        return
    selected = chosen_rows(rows)
    d = d or (QUICK_D if quick else D)
    repeats = repeats or (QUICK_REPEATS if quick else REPEATS)
    threads = threads or ops.default_threads()
    for path in (json_path, markdown_path):
        if path and not path.absolute().parent.is_dir():  # before the run, not after it
            raise typer.BadParameter(f"there is no folder for {path}")
    entrants = [c for row in selected for c in row.contenders if compiled or not c.compiles]
    needed, available = needed_bytes(entrants, d, m, sets), data.available_bytes()
    if available is not None and needed > available:
        raise typer.BadParameter(data.does_not_fit(needed, available, d), param_hint="-d")

    box = machine.describe()  # now: the load must be that of others
    probes, contenders = execute(selected, d, m, sets, threads, repeats, compiled)
    settings: dict[str, Any] = {
        "rows": [row.name for row in selected],
        "d": d,
        "m": m,
        "threads": threads,
        "repeats": repeats,
        "sets": sets,
        "compile": compiled,
        "quick": quick,
        "notes": notes(d, m, sets, repeats),
    }
    out = report.results(box, selected, probes, contenders, settings)
    report.show(out)
    if json_path:
        json_path.write_text(json.dumps(out, indent=1) + "\n", encoding="utf-8")
    if markdown_path:
        markdown_path.write_text(report.to_markdown(out), encoding="utf-8")


if __name__ == "__main__":
    app()
