"""`afflux bench --against OLD`: a comparison of two builds of afflux, timed alternately in one process on the same
inputs.

The Python package of each build calls the build's engine and brings its own rows of the benchmark, because the
conventions of the builds may differ. Both builds must share only the benchmark's vocabulary: `Row`, `Contender` and
`Round`, and the fields of `Inputs`.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import comb
from pathlib import Path
from typing import Any

import numpy as np
import typer

from afflux import ops
from afflux.bench import builds
from afflux.bench.builds import Build
from afflux.bench.measure import machine
from afflux.bench.measure.timing import Timed, entrant
from afflux.bench.output import report, tables
from afflux.bench.output.files import Files
from afflux.bench.output.tables import Printed
from afflux.bench.run import QUICK, QUICK_REPEATS, choose, chosen_rows, notes_on_load
from afflux.bench.session import check_room, measure_all, progress
from afflux.bench.spec import inputs
from afflux.bench.spec.columns import Column, milliseconds, number
from afflux.bench.spec.contender import Contender
from afflux.bench.spec.inputs import Case
from afflux.bench.spec.optional_torch import set_threads
from afflux.bench.spec.row import Asked, Row, planned
from afflux.ops.errors import UnavailableError

DEFAULT_ROWS = "ingest,gram,fedbuff,fedbuff-bf16,ca2fl,fadas,wkafl,mf-ca2fl,push,streaming"
REPEATS = 30
FORMAT = 1
#: The least probability with which the interval of a ratio holds its median.
CONFIDENCE = 0.95


@dataclass
class Pair:
    """One contender, in both builds."""

    old: Timed
    new: Timed
    same_bits: bool = False

    @property
    def ratios(self) -> list[float]:
        """Return the new build's time divided by the old one's, for each repeat."""
        return [new / old for old, new in zip(self.old.seconds, self.new.seconds, strict=True)]


def interval_of_median(values: Sequence[float]) -> tuple[float, float] | None:
    """Return the two values that enclose the median with probability CONFIDENCE; None if there are too few values.

    The number of values below the median is binomial, for any distribution of the values.
    """
    n, ordered = len(values), sorted(values)
    below, tail = -1, 0.0
    while (tail := tail + comb(n, below + 1) / 2**n) <= (1 - CONFIDENCE) / 2:
        below += 1
    return (ordered[below], ordered[n - 1 - below]) if below >= 0 else None


def verdict(interval: tuple[float, float] | None) -> str:
    if interval is None:
        return ""
    return "faster" if interval[1] < 1 else "slower" if interval[0] > 1 else "alike"


def line_of(case: Case, row: Row, pair: Pair) -> dict[str, Any]:
    """Return the figures of a pair, for JSON and tables."""
    ratios, interval = pair.ratios, interval_of_median(pair.ratios)
    by = pair.new.by
    return {
        "operation": row.name,
        "name": f"{row.name}: {pair.new.name}",
        "what": "" if by is None else by.what,
        **asdict(case),
        "old": report.figures(pair.old),
        "new": report.figures(pair.new),
        "ratio": report.summary(ratios)
        | {"interval": interval and dict(zip(("low", "high"), interval, strict=True))}
        | {"of_minima": min(pair.new.seconds) / min(pair.old.seconds)},
        "verdict": verdict(interval),
        "same_bits": pair.same_bits,
        "errors": {"old": pair.old.errors, "new": pair.new.errors},
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


def pairs_of(row: Row, other: Row | None) -> list[tuple[Contender, Contender]]:
    """Return afflux's contenders of a row that both builds have and that can run here."""
    if other is None:
        return []
    old = {by.name: by for by in other.contenders if by.role == "ours"}
    able = [by for by in row.contenders if by.role == "ours" and by.name in old and not by.absent()]
    return [(old[by.name], by) for by in able]


def outputs(timed: Timed, number: int) -> dict[str, str]:
    """Return digests of the outputs of the sample with this number. The sample is not timed."""
    with timed.around():
        timed.prepare(number)
        written = timed.after(timed.sample(number))
        return {name: hashlib.sha256(np.ascontiguousarray(array).data).hexdigest() for name, array in written.items()}


def execute(case: Case, rows: list[Row], old: Build, old_rows: dict[str, Row], repeats: int) -> list[dict[str, Any]]:
    """Time all pairs of these rows in this case, row by row, so that only the vectors of one row are in memory."""
    set_threads(case.threads)
    found, new = [], builds.own()
    with progress(case) as step:
        shared = inputs.make(case, 0)
        for row in rows:
            step(f"preparing {row.name}")
            pairs = []
            for old_by, new_by in pairs_of(row, old_rows.get(row.name)):
                with old.active():
                    before = entrant(case, old_rows[row.name], old_by, shared)
                after = entrant(case, row, new_by, shared)
                # The same for both builds: after a rest, code that runs before a sample makes the sample's first
                # microseconds faster.
                before.around, after.around = old.active, new.active
                pairs.append(Pair(before, after))
            load = measure_all([[pair.old, pair.new] for pair in pairs], repeats, step)
            for pair in pairs:
                numbers = range(repeats, repeats + case.sets)
                pair.same_bits = all(outputs(pair.old, number) == outputs(pair.new, number) for number in numbers)
            found += [line_of(case, row, pair) | load for pair in pairs]
    return found


def described(build: Build) -> dict[str, Any]:
    """Return the description of a build, without paths."""
    module = build.modules["afflux"]
    return {
        "afflux": module.__version__,
        "commit": machine.commit(build.engine.parent),
        "compiler": machine.compiler(build.engine),
        "instruction_set": next(backend.name for backend in build.module("ops").backends() if backend.chosen),
        "package": "this build's" if build.package == builds.OWN_PACKAGE else "its own",
    }


def loaded(path: Path, isa: str | None) -> tuple[Build, dict[str, Row]]:
    """Load the old build; return it and its rows by name."""
    try:
        old = builds.load(path)
        with old.active():
            if isa:
                old.module("ops").choose_isa(isa)
            rows = {row.name: row for row in old.module("bench.rows").ROWS}
    except (builds.NoBuild, UnavailableError) as error:
        raise typer.BadParameter(str(error), param_hint="--against") from None
    return old, rows


def run(
    path: Path,
    names: str,
    d: int | None,
    m: int | None,
    threads: int | None,
    isa: str | None,
    repeats: int | None,
    sets: int,
    quick: bool,
    files: Files,
) -> None:
    """Compare the build at `path` with this one."""
    repeats = repeats or (QUICK_REPEATS if quick else REPEATS)
    rows = chosen_rows(names)
    files.check()
    if isa:
        choose(isa)
    old, old_rows = loaded(path, isa)
    both = [row for row in rows if pairs_of(row, old_rows.get(row.name))]
    if not both:
        raise typer.BadParameter("both builds have none of these rows", param_hint="--rows")
    asked = Asked(d, m, threads or ops.default_threads(), quick, sets)
    plan = planned(both, lambda row: row.cases(asked))
    for case, row in ((case, row) for case, sharing in plan.items() for row in sharing):
        check_room(case, [by for pair in pairs_of(row, old_rows[row.name]) for by in pair], 0)
    box = machine.describe()
    pairs = [pair for case, sharing in plan.items() for pair in execute(case, sharing, old, old_rows, repeats)]
    left_out = [row.name for row in rows if row not in both]
    told = [QUICK] if quick else []
    told += [f"left out, because both builds must have them: {', '.join(left_out)}"] if left_out else []
    told += notes_on_load(pairs)
    out = {
        "format": FORMAT,
        "machine": box,
        "software": machine.software(),
        "old": described(old),
        "settings": {"repeats": repeats, "sets": sets, "quick": quick, "notes": told},
        "pairs": pairs,
    }
    show(out)
    files.write(out, to_markdown(out))


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
    said = [
        f"New: {tables.conditions(out)}.",
        *sentences(out),
        *(f"Note: {note}." for note in out["settings"]["notes"]),
    ]
    return "\n".join([*(line for text in said for line in (text, "")), *tables.as_markdown(table(out))])


def show(out: dict[str, Any]) -> None:
    console = tables.terminal()
    console.print(f"New: {tables.conditions(out)}", style="dim", highlight=False, markup=False)
    tables.print_table(console, table(out))
    console.print()
    for text in (*sentences(out), *(f"Note: {note}" for note in out["settings"]["notes"])):
        console.print(text, highlight=False, markup=False, soft_wrap=True)
