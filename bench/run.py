"""A whole run: the engine's operations and torch's, timed, with their bytes, the machine's limit, and the errors."""

from collections.abc import Iterable
from dataclasses import asdict, replace
from typing import Any

import typer

from afflux import ops
from afflux.ops.errors import UnavailableError
from bench.measure import machine
from bench.measure.library_probes import PROBES
from bench.measure.native_probes import SHARED, why_missing
from bench.output import report, tables
from bench.output.files import Files, write_run
from bench.rows import GROUPS, ROWS
from bench.session import check_memory, execute
from bench.spec.inputs import Case
from bench.spec.optional_torch import torch
from bench.spec.row import Asked, Row, planned

REPEATS, QUICK_REPEATS = 20, 3
#: The note of a run with --quick.
QUICK = "this was a trial (--quick): small vectors and few repeats, so its figures say nothing about speed"
QUIET = 0.1  #: the number of cores that other programs may use without a note


def chosen_rows(names: str) -> list[Row]:
    known = GROUPS | {row.name: [row] for row in ROWS}
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in known]
    if unknown or not wanted:
        what = f"unknown: {', '.join(unknown)}" if unknown else "no row is named"
        raise typer.BadParameter(f"{what}; known rows: {', '.join(known)}", param_hint="--rows")
    return list({row.name: row for name in wanted for row in known[name]}.values())


def list_rows(asked: Asked) -> None:
    wide = max(len(row.name) for row in ROWS) + 1
    indent = " " * wide
    for row in ROWS:
        cases = "; ".join(map(str, row.cases(replace(asked, d=None, m=None, quick=False))))
        print(f"{row.name:{wide}}{row.formula}\n{indent}bytes: {row.counted}\n{indent}cases: {cases}")
        for contender in row.contenders:
            role = f" [{contender.role}]" if contender.role not in ("", "ours") else ""
            note = " (with --compile)" if contender.compiles else ""
            print(f"{indent}- {contender.name}{role}: {contender.what}{note}")
    print(f"\nprobes: native, in many variants ({why_missing() or 'they compile here'}); beside them")
    for probe in PROBES:
        print(f"{indent}- {probe.name}")


def choose(isa: str | None) -> None:
    try:
        if isa:
            ops.choose_isa(isa)
    except UnavailableError as error:
        raise typer.BadParameter(str(error), param_hint="--isa") from None


def left_out(rows: list[Row]) -> list[str]:
    """Return the contenders that cannot run here, by reason."""
    found: dict[str, dict[str, None]] = {}
    for contender in (c for row in rows for c in row.contenders):
        if why := contender.absent():
            found.setdefault(why, {})[contender.name] = None
    return [f"left out: {'; '.join(names)}: {why}" for why, names in found.items()]


def notes_on_load(results: list[dict[str, Any]]) -> list[str]:
    """Return notes about the load of other programs while these results were measured."""
    found = []
    busy = max(result["cores_of_others"] or 0 for result in results)
    if busy > QUIET:
        found.append(f"the machine was not idle: other processes took up to {busy:.1f} cores during the timing")
    slowdown = max(result["additions_slowdown"] or 0 for result in results)
    if slowdown > SHARED:
        found.append(
            f"the cores were shared, maybe with programs that this system cannot see: between samples, additions took "
            f"{slowdown:.1f} times their best time at the median; so does what is bound by computing"
        )
    return found


def notes(
    rows: list[Row], cases: Iterable[Case], results: list[dict[str, Any]], repeats: int, quick: bool = False
) -> list[str]:
    """Return notes about conditions that make this run's figures less reliable."""
    small = [str(c) for c in cases if not c.warm and 4 * c.d * (c.m + 1) * c.sets < 4 * machine.last_level()]
    found = [QUICK] if quick else []
    found += left_out(rows)
    if small:
        found.append(f"the input sets are smaller than 4 last-level caches, so not memory speed: {'; '.join(small)}")
    found += notes_on_load(results)
    if repeats < REPEATS:
        found.append(f"fewer than {REPEATS} repeats")
    if missing := why_missing():
        found.append(f"no native probes, so the limit may be too low: {missing}")
    if torch is None:
        found.append("torch is not installed: no baselines, fewer probes")
    return found


def run(rows: str, asked: Asked, isa: str | None, repeats: int, compiled: bool, files: Files) -> None:
    selected = chosen_rows(rows)
    files.check()
    choose(isa)
    plan = planned(selected, lambda row: row.cases(asked))
    for case, sharing in plan.items():
        check_memory(case, sharing, compiled)

    box = machine.describe()  # now, before this process adds to the load
    cases = [execute(case, sharing, repeats, compiled, asked.quick) for case, sharing in plan.items()]
    noted = {"notes": notes(selected, plan, cases, repeats, asked.quick)}
    settings = asdict(asked) | {"rows": [row.name for row in selected], "repeats": repeats, "compile": compiled} | noted
    out = report.results(box, selected, cases, settings)
    print(tables.to_markdown(out, tables.tables(out, selected), names_only=True))
    write_run(files, out, selected)
