"""The results as JSON, as Markdown, and as tables on the terminal."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from afflux.bench import machine
from afflux.bench.columns import LIMIT, PROBE, Column, Line
from afflux.bench.inputs import Case
from afflux.bench.measure import Timed
from afflux.bench.row import Row


def figures(timed: Timed, limit: float) -> Line:
    return {
        "name": timed.name,
        "what": timed.what,
        "bytes": timed.bytes,
        "median": timed.median,
        "min": min(timed.seconds),
        "max": max(timed.seconds),
        "gbps": timed.gbps,
        "percent_of_limit": 100 * timed.gbps / limit,
        "seconds": timed.seconds,
    }


def of_case(case: Case, rows: list[Row], probes: list[Timed], contenders: list[Timed]) -> dict[str, Any]:
    """What was found at one size of inputs: the limit there, and everyone's figures by row."""
    fastest = max([*probes, *contenders], key=lambda t: t.gbps)
    by_kind: dict[str, float] = {}
    for probe in probes:
        by_kind[probe.kind] = max(by_kind.get(probe.kind, 0), probe.gbps)
    where = asdict(case)
    found: dict[str, Any] = {
        "name": str(case),
        **where,
        "limit": {
            "gbps": fastest.gbps,
            "by": f"{fastest.row or 'probe'}: {fastest.name}",
            "what": fastest.what,
            "probes_by_kind": by_kind,
        },
        "probes": [figures(p, fastest.gbps) | {"kind": p.kind} for p in probes],
        "rows": {},
    }
    for row in rows:
        own = [t for t in contenders if t.row == row.name]
        plain = next((t for t in own if t.plain), None)
        found["rows"][row.name] = [
            where
            | figures(t, fastest.gbps)
            | {
                "plain": t is plain,
                "part": t.part,
                "times_plain": plain.median / t.median if plain and not t.part else None,
                "errors": t.errors,
            }
            for t in own
        ]
    return found


def lines_of(row: Row, cases: list[dict[str, Any]]) -> list[Line]:
    return [line for case in cases for line in case["rows"].get(row.name, [])]


def results(
    box: dict[str, Any], rows: list[Row], cases: list[dict[str, Any]], settings: dict[str, Any]
) -> dict[str, Any]:
    """Everything there is to say about a run, ready for JSON."""
    for row in rows:
        row.compare(lines_of(row, cases))
    return {
        "format": 2,
        "machine": box,
        "software": machine.software(),
        "settings": settings,
        "rows": [
            {"name": row.name, "formula": row.formula, "counted": row.counted, "dtype": "float32"} for row in rows
        ],
        "cases": cases,
    }


def size(amount: float) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20)):
        if amount >= factor:
            return f"{amount / factor:.3g} {unit}"
    return f"{amount / 2**10:.3g} KiB"


def conditions(out: dict[str, Any]) -> str:
    """The machine, software and settings in one paragraph."""
    box, soft, chosen = out["machine"], out["software"], out["settings"]
    caches = ", ".join(f"{name} {size(amount)}" for name, amount in box["caches"].items())
    parts = [
        f"{box['cpu']}, {box['usable_cores']} of {box['cores']} cores",
        caches,
        f"{size(box['memory'])} memory" if box["memory"] else "",
        f"afflux {soft['afflux']} ({soft['instruction_set']}, {soft['compiler'] or 'compiler ?'})",
        f"commit {soft['commit'][:12]}{'+' * soft['commit'].endswith('+')}" if soft["commit"] else "",
        f"Python {soft['python']}, NumPy {soft['numpy']}, torch {soft['torch'] or 'absent'}",
        f"{chosen['repeats']} repeats, {chosen['sets']} input sets",
    ]
    return "; ".join(part for part in parts if part)


#: title, formula, columns, lines
Printed = tuple[str, str, Sequence[Column], list[Line]]


def limits(cases: list[dict[str, Any]]) -> Printed:
    lines = []
    for case in cases:
        limit = case["limit"]
        line = {"name": case["name"], "what": "", "threads": case["threads"], "gbps": limit["gbps"]}
        lines.append(line | limit["probes_by_kind"] | {"by": limit["by"]})
    return "Limit of this run: anyone's best GB/s, and the best probe of each kind", "", LIMIT, lines


def of_row(row: Row, cases: list[dict[str, Any]]) -> Printed:
    lines = lines_of(row, cases)
    amounts = {line["bytes"] for line in lines if not line["part"]}
    amount = f", {amounts.pop() / 1e9:.3g} GB" if len(amounts) == 1 else ""
    return row.name + amount, row.formula, row.columns, lines


def tables(out: dict[str, Any], rows: list[Row]) -> list[Printed]:
    """The rows, the limits, and the probes of a run at one size; those of more are in the JSON."""
    cases = out["cases"]
    found = [*(of_row(row, cases) for row in rows), limits(cases)]
    if len(cases) == 1:
        found.append(("bandwidth probes", "", PROBE, cases[0]["probes"]))
    return found


def to_markdown(out: dict[str, Any], rows: list[Row]) -> str:
    lines = [conditions(out) + ".", ""]
    lines += [line for note in out["settings"]["notes"] for line in (f"Note: {note}.", "")]
    for title, formula, columns, entries in tables(out, rows):
        lines += [f"**{title}**" + (f": `{formula}`" if formula else ""), ""]
        lines += ["| " + " | ".join(["", *(c.head for c in columns)]) + " |", "|---|" + "---:|" * len(columns)]
        for entry in entries:
            what = f": `{entry['what']}`" if entry["what"] else ""
            cells = [entry["name"] + what, *(c.cell(entry) for c in columns)]
            lines.append("| " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def show(out: dict[str, Any], rows: list[Row]) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=140)  # a pipe has no width: do not fold at 80
    console.print(conditions(out), style="dim", highlight=False, markup=False)
    for title, formula, columns, entries in tables(out, rows):
        heading = f"{title}: {formula}" if formula else title
        table = Table(title=heading, title_justify="left", title_style="bold", box=None)
        table.add_column("", no_wrap=True)
        for column in columns:
            table.add_column(column.head, justify="right", no_wrap=True)
        for entry in entries:
            cells = (entry["name"], *(column.cell(entry) for column in columns))
            table.add_row(*cells, style="bold" if entry["name"] == "afflux" else None)
        console.print()
        console.print(table)
    console.print()
    for note in out["settings"]["notes"]:
        console.print(f"Note: {note}", style="yellow", highlight=False, markup=False)
