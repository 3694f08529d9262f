"""`python -m bench --against OLD`: a comparison of two builds of afflux.

Each build runs in a process of its own, with its own Python package and, if its checkout has a benchmark, its own rows,
because the conventions of the builds may differ. The two processes take turns, on the same inputs.
"""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import typer
from scipy.stats import binom  # type: ignore[import-untyped]

from bench.builds import OWN, OWN_PACKAGE, BuildProcess, NoBuild, find
from bench.measure import machine
from bench.measure.timing import Timed
from bench.output import report, tables
from bench.output.files import Files
from bench.output.tables import Printed
from bench.run import QUICK, choose, chosen_rows, notes_on_load
from bench.session import check_room, measure_all, progress
from bench.spec.columns import Column, milliseconds, number
from bench.spec.inputs import Case
from bench.spec.row import Asked, Row, planned

DEFAULT_ROWS = "ingest,gram,fedbuff,fedbuff-bf16,ca2fl,fadas,wkafl,mf-ca2fl,push,streaming"
REPEATS = 30
FORMAT = 1
#: The least probability with which the interval of a ratio holds its median.
CONFIDENCE = 0.95


def interval_of_median(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the two values that enclose the median with probability CONFIDENCE; None if there are too few values.

    The number of values below the median is binomial, for any distribution of the values.
    """
    below = int(binom.ppf((1 - CONFIDENCE) / 2, len(values), 0.5)) - 1
    ordered = sorted(values)
    return (ordered[below], ordered[-1 - below]) if below >= 0 else None


def verdict(interval: tuple[float, float] | None) -> str:
    if interval is None:
        return ""
    return "faster" if interval[1] < 1 else "slower" if interval[0] > 1 else "alike"


def line_of(case: Case, row: Row, old: Timed, new: Timed, same_bits: bool) -> dict[str, Any]:
    """Return the figures of a contender in both builds, for JSON and tables.

    A ratio is the new build's time divided by the old one's, in one repeat.
    """
    ratios = [after / before for before, after in zip(old.seconds, new.seconds, strict=True)]
    interval = interval_of_median(ratios)
    return {
        "operation": row.name,
        "name": f"{row.name}: {new.name}",
        "what": new.what,
        **asdict(case),
        "old": report.figures(old),
        "new": report.figures(new),
        "ratio": report.summary(ratios)
        | {"interval": interval and dict(zip(("low", "high"), interval, strict=True))}
        | {"of_minima": min(new.seconds) / min(old.seconds)},
        "verdict": verdict(interval),
        "same_bits": same_bits,
        "errors": {"old": old.errors, "new": new.errors},
    }


def spread(low: float, high: float) -> str:
    return f"{low:.3f} .. {high:.3f}"


COLUMNS = (
    number("d", "d", "_d"),
    number("M", "m", "_d"),
    Column("old ms", lambda line: milliseconds(line["old"]["median"])),
    Column("new ms", lambda line: milliseconds(line["new"]["median"])),
    Column("new / old", lambda line: f"{line['ratio']['median']:.3f}"),
    Column("its quartiles", lambda line: spread(line["ratio"]["lower_quartile"], line["ratio"]["upper_quartile"])),
    Column(
        f"{100 * CONFIDENCE:.0f} % interval",
        lambda line: spread(**line["ratio"]["interval"]) if line["ratio"]["interval"] else "",
    ),
    Column("of the minima", lambda line: f"{line['ratio']['of_minima']:.3f}"),
    Column("new is", lambda line: line["verdict"]),
    Column("bits", lambda line: "same" if line["same_bits"] else "DIFFERENT"),
)


def names_of(row: Row, old: BuildProcess) -> list[str]:
    """Return afflux's contenders of a row that both builds have and that can run here."""
    others = old.description["contenders"].get(row.name, [])
    return [by.name for by in row.contenders if by.role == "ours" and by.name in others and not by.absent()]


class Stopwatch:
    """The seconds of the last sample, as the process that made it has measured them."""

    seconds = 0.0

    def prepared(self, build: BuildProcess, case: Case, row: Row, names: list[str]) -> list[Timed]:
        """Prepare contenders in the build's process; return objects that make their samples there."""

        def sample(index: int, number: int) -> None:
            self.seconds = build.request("sample", index=index, number=number)

        contenders = build.request("prepare", case=asdict(case), row=row.name, names=names)
        return [
            Timed(**figures, sample=partial(sample, index), laps=case.laps, row=row.name)
            for index, figures in enumerate(contenders)
        ]

    def __call__(self) -> Callable[[], float]:
        return lambda: self.seconds


def execute(case: Case, rows: list[Row], builds: Sequence[BuildProcess], repeats: int) -> list[dict[str, Any]]:
    """Time the contenders that both builds have, row by row, so that only one row's state is in memory."""
    lines = []
    with progress(case) as step:
        for row in rows:
            step(f"preparing {row.name}")
            watch, names = Stopwatch(), names_of(row, builds[0])
            sides = [watch.prepared(build, case, row, names) for build in builds]
            pairs = list(zip(*sides, strict=True))
            load = measure_all(pairs, repeats, step, watch)
            for index, (old, new) in enumerate(pairs):
                numbers = range(repeats, repeats + case.sets)
                bits = [[build.request("digests", index=index, number=k) for k in numbers] for build in builds]
                lines.append(line_of(case, row, old, new, bits[0] == bits[1]) | load)
    return lines


def run(path: Path, names: str, asked: Asked, isa: str | None, repeats: int, files: Files) -> None:
    """Compare the build at `path` with this one."""
    rows = chosen_rows(names)
    files.check()
    choose(isa)
    box = machine.describe()
    with ExitStack() as processes:
        try:
            build = find(path)
            old, new = (processes.enter_context(closing(BuildProcess(each, isa))) for each in (build, OWN))
        except NoBuild as error:
            raise typer.BadParameter(str(error), param_hint="--against") from None
        both = [row for row in rows if names_of(row, old)]
        if not both:
            raise typer.BadParameter("both builds have none of these rows", param_hint="--rows")
        plan = planned(both, lambda row: row.cases(asked))
        for case, row in ((case, row) for case, sharing in plan.items() for row in sharing):
            ours = [by for by in row.contenders if by.name in names_of(row, old)]
            check_room(case, ours * 2, 0, processes=2)
        pairs = [line for case, sharing in plan.items() for line in execute(case, sharing, [old, new], repeats)]
    left_out = [row.name for row in rows if row not in both]
    notes = [QUICK] if asked.quick else []
    notes += [f"left out, because both builds must have them: {', '.join(left_out)}"] if left_out else []
    notes += notes_on_load(pairs)
    package = {"package": "this build's" if build.package == OWN_PACKAGE else "its own"}
    out = {
        "format": FORMAT,
        "machine": box,
        "software": machine.software(),
        "old": {key: value for key, value in old.description.items() if key != "contenders"} | package,
        "settings": {"repeats": repeats, "sets": asked.sets, "quick": asked.quick, "notes": notes},
        "pairs": pairs,
    }
    print(text := to_markdown(out))
    files.write(out, text)


def table(out: dict[str, Any]) -> Printed:
    lines = [line | {"what": ""} for line in out["pairs"]]
    return Printed("Two builds by turns", "new / old = median of the paired ratios", COLUMNS, lines)


def sentences(out: dict[str, Any]) -> list[str]:
    """Return sentences that describe the two builds, and that say whether their results are the same."""
    lines = table(out).lines
    different = [f"{line['name']} (d = {line['d']:_})" for line in lines if not line["same_bits"]]
    old = out["old"]
    commit = f", commit {old['commit'][:12]}" if old["commit"] else ""
    return [
        f"Old: afflux {old['afflux']} ({old['instruction_set']}, {old['compiler'] or 'compiler ?'}){commit}, "
        f"called by {old['package']} Python package.",
        f"DIFFERENT BITS: {', '.join(different)}." if different else "Both builds wrote the same bits in all rows.",
    ]


def to_markdown(out: dict[str, Any]) -> str:
    paragraphs = [
        f"New: {tables.conditions(out)}.",
        *sentences(out),
        *(f"Note: {note}." for note in out["settings"]["notes"]),
    ]
    return "\n".join([*(line for text in paragraphs for line in (text, "")), *tables.as_markdown(table(out))])
