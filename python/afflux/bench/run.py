"""Times the engine's operations beside torch: bytes, the machine's own limit, and the error."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import typer

from afflux import ops
from afflux.bench import baselines, machine, report, tables
from afflux.bench.inputs import Case
from afflux.bench.probes import PROBES
from afflux.bench.row import Asked, Row
from afflux.bench.rows import ROWS
from afflux.bench.session import check_memory, execute, native_here

REPEATS, QUICK_REPEATS = 20, 3


def chosen_rows(names: str) -> list[Row]:
    known = {row.name: row for row in ROWS}
    wanted = [name.strip() for name in names.split(",") if name.strip()]
    unknown = [name for name in wanted if name not in known]
    if unknown or not wanted:
        what = f"unknown: {', '.join(unknown)}" if unknown else "no row is named"
        raise typer.BadParameter(f"{what}; known rows: {', '.join(known)}", param_hint="--rows")
    return [known[name] for name in dict.fromkeys(wanted)]


def list_rows(threads: int, sets: int) -> None:
    for row in ROWS:
        cases = "; ".join(map(str, row.cases(Asked(None, None, threads, quick=False, sets=sets))))
        print(f"{row.name:14}{row.formula}\n{'':14}bytes: {row.counted}\n{'':14}cases: {cases}")
        for contender in row.contenders:
            role = f" [{contender.role}]" if contender.role not in ("", "ours") else ""
            note = " (with --compile)" if contender.compiles else ""
            print(f"{'':14}- {contender.name}{role}: {contender.what}{note}")
    print(f"\nprobes: native, in many variants ({native_here() or 'they compile here'}); beside them")
    for probe in PROBES:
        print(f"{'':14}- {probe.name}")


def planned(rows: list[Row], asked: Asked) -> dict[Case, list[Row]]:
    """The cases of these rows, and which rows share each of them."""
    plan: dict[Case, list[Row]] = {}
    for row in rows:
        for case in row.cases(asked):
            plan.setdefault(case, []).append(row)
    return plan


def notes(cases: Iterable[Case], repeats: int) -> list[str]:
    """What keeps this run's figures from being what they look like."""
    found = [
        f"{case}: the input sets are smaller than 4 last-level caches: not memory speed"
        for case in cases
        if not case.warm and 4 * case.d * (case.m + 1) * case.sets < 4 * machine.last_level()
    ]
    if repeats < REPEATS:
        found.append(f"fewer than {REPEATS} repeats")
    if missing := native_here():
        found.append(f"no native probes, so the limit may be too low: {missing}")
    if baselines.torch is None:
        found.append("torch is not installed: no baselines, fewer probes")
    return found


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
        list_rows(threads, sets)
        return
    selected = chosen_rows(rows)
    repeats = repeats or (QUICK_REPEATS if quick else REPEATS)
    for path in (json_path, markdown_path):
        if path and not path.absolute().parent.is_dir():  # before the run, not after it
            raise typer.BadParameter(f"there is no folder for {path}")
    plan = planned(selected, Asked(d, m, threads, quick, sets))
    for case, sharing in plan.items():
        check_memory(case, sharing, compiled)

    box = machine.describe()  # now: the load must be that of others
    cases = [execute(case, sharing, repeats, compiled) for case, sharing in plan.items()]
    settings: dict[str, Any] = {
        "rows": [row.name for row in selected],
        "d": d,
        "m": m,
        "threads": threads,
        "repeats": repeats,
        "sets": sets,
        "compile": compiled,
        "quick": quick,
        "notes": notes(plan, repeats),
    }
    out = report.results(box, selected, cases, settings)
    tables.show(out, selected)
    if json_path:
        json_path.write_text(json.dumps(out, indent=1) + "\n", encoding="utf-8")
    if markdown_path:
        markdown_path.write_text(tables.to_markdown(out, selected), encoding="utf-8")
