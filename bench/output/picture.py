"""Two pictures of a run: the share of its limit that each operation reaches, and the growth of the time of a round."""

from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from bench.output.report import lines_of
from bench.spec.columns import Line
from bench.spec.row import Row

COLOURS = {"afflux": "#0b6e4f", "torch best": "#e08e45", "torch plain": "#a9a296", "best peer": "#7a6ff0"}
ROLES = {"torch best": "best", "torch plain": "plain", "best peer": "peer"}
LIMIT_COLOUR = "#b3001b"
ALONG = {"d": "elements, d", "m": "updates a round, M", "clients": "clients, N"}
MARKERS = ("o", "s", "^", "D", "v")


def write(path: Path, out: dict[str, Any], rows: list[Row]) -> list[Path]:
    """Draw the operations into `path`, and the growth beside it, or into `path` if nothing else was timed.

    Returns:
        The files that were written.
    """
    growing = [row for row in rows if row.along]
    others = [row for row in rows if not row.along]
    where = out["machine"]["cpu"] + f", {out['software']['instruction_set']}"
    figures = {}
    if others:
        figures[path] = operations(out["cases"], others, where)
    if growing:
        figures[path.with_stem(f"{path.stem}-scaling") if others else path] = growth(out["cases"], growing, where)
    for file, figure in figures.items():
        figure.savefig(file, dpi=150)
    return list(figures)


def groups(cases: list[dict[str, Any]], rows: list[Row]) -> list[tuple[str, list[Line]]]:
    """Return the label and the lines of each row that has one case; of every case, if all rows have several."""
    of_rows = [
        [(f"{row.name}\n{size(case)}", case["rows"][row.name]) for case in cases if row.name in case["rows"]]
        for row in rows
    ]
    return list(chain(*([group for group in of_rows if len(group) == 1] or of_rows)))


def size(case: dict[str, Any]) -> str:
    return f"d = {short(case['d'])}\nM = {short(case['m'])}"


def short(number: int) -> str:
    units = ((10**9, "G"), (10**6, "M"), (10**3, "k"))
    return next((f"{number / unit:.3g}{letter}" for unit, letter in units if number >= unit), str(number))


def bars(lines: list[Line]) -> dict[str, float]:
    """Return the GB/s of afflux, and of the fastest contender of each role that computes the whole operation."""
    found = {"afflux": lines[0]["gbps"]}
    for name, role in ROLES.items():
        able = [line["gbps"] for line in lines if line["role"] == role and not line["part"]]
        if able:
            found[name] = max(able)
    return found


def operations(cases: list[dict[str, Any]], rows: list[Row], where: str) -> Figure:
    """Draw a group of bars for each operation, and its limit as a line across them."""
    wanted = groups(cases, rows)
    names = [name for name in COLOURS if any(name in bars(lines) for _, lines in wanted)]
    figure = Figure(figsize=(max(6.0, 1.7 + 1.35 * len(wanted)), 5), layout="constrained")
    axes = figure.add_subplot()
    width = 0.8 / len(names)
    for index, (_, lines) in enumerate(wanted):
        present = bars(lines)
        limit = lines[0]["limit"]
        for place, name in enumerate(names):
            if name in present:
                left = index - 0.4 + place * width
                axes.bar(left, present[name], width, align="edge", color=COLOURS[name])
        axes.hlines(limit, index - 0.44, index + 0.44, color=LIMIT_COLOUR, linewidth=2)
        share = f"{lines[0]['percent_of_limit']:.0f} %"
        axes.annotate(share, (index, limit), (0, 4), textcoords="offset points", ha="center", color=LIMIT_COLOUR)
    axes.set_xticks(range(len(wanted)), [label for label, _ in wanted])
    axes.set_ylabel("GB/s of the bytes that must move")
    axes.set_title("What each operation reaches of this machine's limit (%: afflux's share)", fontsize=11)
    axes.set_ylim(0, 1.12 * max(lines[0]["limit"] for _, lines in wanted))
    handles: list[Artist] = [Patch(color=COLOURS[name], label=name) for name in names]
    handles.append(Line2D([], [], color=LIMIT_COLOUR, linewidth=2, label="limit in the same run"))
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
    finish(axes, where)
    return figure


def growth(cases: list[dict[str, Any]], rows: list[Row], where: str) -> Figure:
    """Draw the time of a round over the size in which the row's cases differ, both logarithmic."""
    figure = Figure(figsize=(1 + 4.4 * len(rows), 4.6), layout="constrained")
    for axes, row in zip(figure.subplots(1, len(rows), squeeze=False)[0], rows, strict=True):
        lines = lines_of(row, cases)
        for marker, name in zip(MARKERS, dict.fromkeys(line["name"] for line in lines), strict=False):
            curve(axes, [line for line in lines if line["name"] == name], row.along, marker)
        guide(axes, [line for line in lines if line["first"]], row.along)
        axes.set_xscale("log")
        axes.set_yscale("log")
        low, high = axes.get_ylim()
        if high < 10 * low:  # so that noise does not look like growth
            axes.set_ylim(low / 4, high * 4)
        axes.set_xlabel(ALONG[row.along])
        axes.set_ylabel("ms a round")
        axes.set_title(f"{row.formula}\n{fixed(lines[0], row.along)}", fontsize=10)
        axes.legend(frameon=False, fontsize=8)
        finish(axes, where if row is rows[-1] else "")
    return figure


def fixed(line: Line, along: str) -> str:
    """Return the text with the sizes that all cases have in common."""
    return ", ".join(f"{name} = {short(line[key])}" for key, name in (("d", "d"), ("m", "M")) if key != along)


def curve(axes: Axes, lines: Sequence[Line], along: str, marker: str) -> None:
    name, role = lines[0]["name"], lines[0]["role"]
    colour = {"ours": "afflux", "best": "torch best", "plain": "torch plain", "peer": "best peer"}.get(role, "")
    xs = [line[along] for line in lines]
    times = [1e3 * line["median"] for line in lines]
    spread = [
        [1e3 * (line["median"] - line["min"]) for line in lines],
        [1e3 * (line["max"] - line["median"]) for line in lines],
    ]
    axes.errorbar(
        xs, times, spread, marker=marker, markersize=5, linewidth=1.5, capsize=2, label=name, color=COLOURS.get(colour)
    )


def guide(axes: Axes, ours: Sequence[Line], along: str) -> None:
    """Draw time proportional to the bytes, through the last point: a line of slope 1 over d, a level line over N."""
    pace = 1e3 * ours[-1]["median"] / ours[-1]["bytes"]
    xs, level = [line[along] for line in ours], [pace * line["bytes"] for line in ours]
    axes.plot(xs, level, linestyle=":", color="#555555", linewidth=1, label="proportional to the bytes", zorder=0)


def finish(axes: Axes, where: str) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="#e6e6e6", linewidth=0.6)
    axes.set_axisbelow(True)
    if where:
        axes.text(1, 1.13, where, transform=axes.transAxes, ha="right", fontsize=7, color="#777777")
