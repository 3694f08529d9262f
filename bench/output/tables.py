"""The results as Markdown, for files and for the terminal."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from bench.output.report import lines_of
from bench.spec.columns import LIMIT, PROBE, SPAN, SUMMARY, Column, Line
from bench.spec.row import Row


@dataclass(frozen=True)
class Printed:
    title: str
    formula: str
    columns: Sequence[Column]
    lines: list[Line]

    def used(self) -> list[Column]:
        """Return the table without the columns that are empty in all lines."""
        return [column for column in self.columns if any(map(column.cell, self.lines))]


def size(amount: float) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20)):
        if amount >= factor:
            return f"{amount / factor:.3g} {unit}"
    return f"{amount / 2**10:.3g} KiB"


def processor(box: dict[str, Any]) -> str:
    """Return the name of the processor's model, and its family if the results have it."""
    return str(box["cpu"]) + (f" ({box['family']})" if box.get("family") else "")


def conditions(out: dict[str, Any]) -> str:
    """Return one paragraph about the machine, the software and the settings."""
    box, soft, chosen = out["machine"], out["software"], out["settings"]
    caches = ", ".join(f"{name} {size(amount)}" for name, amount in box["caches"].items())
    parts = [
        box.get("gpu", ""),
        f"{processor(box)}, {box['usable_cores']} of {box['cores']} cores",
        caches,
        f"{size(box['memory'])} memory" if box["memory"] else "",
        f"afflux {soft['afflux']} ({soft['instruction_set']}, {soft['compiler'] or 'compiler ?'})",
        f"policy {soft['policy']}" if soft.get("policy") else "",
        f"commit {soft['commit'][:12]}{'+' * soft['commit'].endswith('+')}" if soft["commit"] else "",
        f"Python {soft['python']}, NumPy {soft['numpy']}, torch {soft['torch'] or 'absent'}",
        f"{chosen['repeats']} repeats, {chosen['sets']} input sets",
    ]
    return "; ".join(part for part in parts if part)


def summary(rows: list[Row], cases: list[dict[str, Any]]) -> Printed:
    """Return a table of afflux's figures, with one line for each row and case."""
    ours = [line | {"name": row.name, "what": ""} for row in rows for line in lines_of(row, cases) if line["first"]]
    return Printed("Operations", "", SUMMARY, ours)


def of_row(row: Row, cases: list[dict[str, Any]]) -> Printed:
    """Return the table of all contenders of a row; the title has the sizes that all lines have in common."""
    lines = lines_of(row, cases)
    first = lines[0]
    common = [row.dtype, f"{first['threads']} thread{'s' * (first['threads'] > 1)}", first["isa"]]
    own = [case for case in cases if row.name in case["rows"]]
    if len(own) == 1:
        common = [own[0]["name"], *common, f"{first['bytes'] / 1e6:.4g} MB"]
    return Printed(f"{row.name}: {', '.join(common)}", row.formula, row.columns, lines)


def limits(cases: list[dict[str, Any]]) -> Printed:
    lines = []
    for case in cases:
        for name, limit in case["limits"].items():
            line = {"name": f"{name}, {case['name']}", "what": "", "threads": case["threads"]}
            lines.append(line | limit | case["best"])
    return Printed("Limits, and the machine's best of each kind of traffic, in GB/s", "", LIMIT, lines)


def tables(out: dict[str, Any], rows: list[Row]) -> list[Printed]:
    """Return the tables: summary, rows, limits, and the probes if the run has one size.

    The JSON has the probes of all sizes.
    """
    cases = out["cases"]
    found = [summary(rows, cases), *(of_row(row, cases) for row in rows), limits(cases)]
    if len(cases) == 1:
        probes = [probe | {"what": ""} for probe in cases[0]["probes"]]
        found.append(Printed("Bandwidth probes", "", PROBE, probes))
    if "launches" in out:
        found.append(Printed("Launches: calls that move next to nothing", "", SPAN, out["launches"]))
    return found


def where_we_lose(out: dict[str, Any]) -> list[str]:
    """Return a sentence for each contender that is faster than afflux in some case."""
    return [sentence(loss) for loss in out["where_we_lose"]] or ["nowhere in this run"]


def sentence(loss: dict[str, Any]) -> str:
    low, high = (f"{edge(loss['times']):.2f}x" for edge in (min, max))
    often = low if low == high else f"{low} to {high}"
    where = ""
    for key, name in (("d", "d"), ("m", "M"), ("clients", "N")):
        values = sorted({at[key] for at in loss["at"] if at[key] is not None})
        if len(values) > 1:
            where += f", {name} = {', '.join(f'{value:_}' for value in values)}"
    caveat = f" ({loss['caveat']})" if loss["caveat"] else ""
    return f"{loss['row']}: {loss['name']} {often} faster{where}{caveat}"


def to_markdown(out: dict[str, Any], printed: list[Printed], *, names_only: bool = False) -> str:
    """Return the conditions of a run, these tables, and who is faster than afflux; names_only: for a terminal."""
    lines = [conditions(out) + ".", ""]
    for table in printed:
        lines += as_markdown(table, names_only=names_only)
    lines += ["**Where we lose**", "", *(f"- {loss}" for loss in where_we_lose(out)), ""]
    lines += [line for note in out["settings"]["notes"] for line in (f"Note: {note}.", "")]
    return "\n".join(lines)


def as_markdown(printed: Printed, *, names_only: bool = False) -> list[str]:
    """Return the lines of a table, whose columns are aligned; names_only: without what each contender does."""
    columns = printed.used()
    cells = [["", *(c.head for c in columns)]]
    for entry in printed.lines:
        what = f": `{entry['what']}`" if entry["what"] and not names_only else ""
        cells.append([entry["name"] + what, *(c.cell(entry) for c in columns)])
    first, *widths = (max(3, *map(len, column)) for column in zip(*cells, strict=True))
    lines = [" | ".join([name.ljust(first), *map(str.rjust, texts, widths)]) for name, *texts in cells]
    lines.insert(1, " | ".join(["-" * first, *("-" * (width - 1) + ":" for width in widths)]))
    title = f"**{printed.title}**" + (f": `{printed.formula}`" if printed.formula else "")
    return [title, "", *(f"| {line} |" for line in lines), ""]
