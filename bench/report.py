"""The results as JSON, as a Markdown table, and as tables on the terminal."""

from typing import Any

from rich.console import Console
from rich.table import Table

import machine
from measure import Timed
from rows import Row

HEADS = ["", "median ms", "min .. max", "GB/s", "% of limit"]
ROW_HEADS = [*HEADS, "x plain", "error", "ulp"]
PROBE_HEADS = [*HEADS, "kind"]


def figures(timed: Timed, limit: float) -> dict[str, Any]:
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


def results(
    box: dict[str, Any],
    rows: list[Row],
    probes: list[Timed],
    contenders: list[Timed],
    settings: dict[str, Any],
) -> dict[str, Any]:
    """Everything there is to say about a run, ready for JSON."""
    fastest = max([*probes, *contenders], key=lambda t: t.gbps)
    where = fastest.row or "probe"
    by_kind: dict[str, float] = {}
    for probe in probes:
        by_kind[probe.kind] = max(by_kind.get(probe.kind, 0), probe.gbps)
    out: dict[str, Any] = {
        "format": 1,
        "machine": box,
        "software": machine.software(),
        "settings": settings,
        "limit": {
            "gbps": fastest.gbps,
            "by": f"{where}: {fastest.name}",
            "what": fastest.what,
            "probes_by_kind": by_kind,
        },
        "probes": [figures(p, fastest.gbps) | {"kind": p.kind} for p in probes],
        "rows": [],
    }
    for row in rows:
        own = [t for t in contenders if t.row == row.name]
        plain = next((t for t in own if t.plain), None)
        entries = [
            figures(t, fastest.gbps)
            | {
                "plain": t is plain,
                "times_plain": plain.median / t.median if plain else None,
                "errors": t.errors,
            }
            for t in own
        ]
        out["rows"].append(
            {
                "name": row.name,
                "formula": row.formula,
                "counted": row.counted,
                "bytes": own[0].bytes,
                "dtype": "float32",
                "contenders": entries,
            }
        )
    return out


def cells(entry: dict[str, Any]) -> list[str]:
    """One line of a table, of a probe or of a contender."""
    line = [
        entry["name"],
        f"{1e3 * entry['median']:.1f}",
        f"{1e3 * entry['min']:.1f} .. {1e3 * entry['max']:.1f}",
        f"{entry['gbps']:.1f}",
        f"{entry['percent_of_limit']:.0f}",
    ]
    if "kind" in entry:
        return [*line, entry["kind"]]
    times, error = entry["times_plain"], entry["errors"]["params"]
    return [*line, f"{times:.2f}" if times else "", f"{error['abs']:.1e}", f"{error['ulp']:.3g}"]


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
        f"d = {chosen['d']:_}, M = {chosen['m']}, {chosen['threads']} threads, "
        f"{chosen['repeats']} repeats, {chosen['sets']} input sets",
    ]
    return "; ".join(part for part in parts if part)


def limit_line(out: dict[str, Any]) -> str:
    limit = out["limit"]
    kinds = ", ".join(f"{kind} {gbps:.1f}" for kind, gbps in limit["probes_by_kind"].items())
    return f"Limit of this run: {limit['gbps']:.1f} GB/s ({limit['by']}: {limit['what']}); best probe by kind: {kinds}"


def tables(out: dict[str, Any]) -> list[tuple[str, list[str], list[dict[str, Any]]]]:
    """(title, heads, entries) of every table, the rows first."""
    found = [
        (f"{row['name']}, {row['bytes'] / 1e9:.3g} GB: {row['formula']}", ROW_HEADS, row["contenders"])
        for row in out["rows"]
    ]
    return [*found, ("bandwidth probes", PROBE_HEADS, out["probes"])]


def to_markdown(out: dict[str, Any]) -> str:
    lines = [conditions(out) + ".", "", limit_line(out) + ".", ""]
    lines += [line for note in out["settings"]["notes"] for line in (f"Note: {note}.", "")]
    for title, heads, entries in tables(out):
        name, _, formula = title.partition(": ")
        lines += [f"**{name}**" + (f": `{formula}`" if formula else ""), ""]
        lines += ["| " + " | ".join(heads) + " |", "|---|" + "---:|" * (len(heads) - 1)]
        for entry in entries:
            first, *rest = cells(entry)
            lines.append("| " + " | ".join([f"{first}: `{entry['what']}`", *rest]) + " |")
        lines.append("")
    return "\n".join(lines)


def show(out: dict[str, Any]) -> None:
    console = Console()
    if not console.is_terminal:
        console = Console(width=120)  # a pipe has no width: do not fold at 80
    console.print(conditions(out), style="dim", highlight=False, markup=False)
    for title, heads, entries in tables(out):
        table = Table(title=title, title_justify="left", title_style="bold", box=None)
        for index, head in enumerate(heads):
            table.add_column(head, justify="right" if index else "left", no_wrap=True)
        for entry in entries:
            table.add_row(*cells(entry), style="bold" if entry["name"] == "afflux" else None)
        console.print()
        console.print(table)
    console.print()
    console.print(limit_line(out), style="bold", highlight=False, markup=False)
    for note in out["settings"]["notes"]:
        console.print(f"Note: {note}", style="yellow", highlight=False, markup=False)
