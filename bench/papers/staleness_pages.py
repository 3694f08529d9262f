"""Tables and figures of the papers about the staleness alone: they need a schedule of arrivals, and no training."""

from collections.abc import Callable, Mapping
from functools import lru_cache, partial
from math import e
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from afflux.lab.publishing import Page, markdown_table
from afflux.sim.workload.delays import delay_law
from bench.papers.comparison import Line, table_page
from bench.papers.paper_tables import Cell, Table
from bench.papers.staleness import StalenessSummary, simulate_staleness

#: WKAFL, section 4.1: the bases b of the weights b^-staleness, TWAFL's e/2 among them; w_g; mu, which has no
#: value in the paper: an arrival counts as aggregated from the largest weight / mu on; clients, K and iterations.
BASES, LEAST_WEIGHT, MU = (1.02, 1.05, 1.1, 1.2, e / 2, 2.0), 0.1, 10.0
SETTING = {"num_clients": 1000, "concurrency": 1000, "buffer_size": 10, "steps": 5000}


def weights_page(table: Table, setting: Mapping[str, int] = SETTING) -> Page:
    """Return the page of WKAFL's Figure 2: K-async arrivals weighed by b^-staleness, the weights of a step sum to 1."""
    lines, counts = [], np.zeros(0)
    runs = [
        simulate_staleness(delay_law("exponential"), seed=seed, **setting).by_step.astype(float)
        for seed in range(table.seeds)
    ]
    staleness = np.concatenate(runs)
    for base in BASES:
        # Relative to the freshest, so that no weight is 0 but by its own staleness.
        weights = base ** (staleness.min(axis=1, keepdims=True) - staleness)
        weights /= weights.sum(axis=1, keepdims=True)
        many = (weights >= weights.max(axis=1, keepdims=True) / MU).sum(axis=1)
        large = (weights > LEAST_WEIGHT).sum(axis=1)
        if base == e / 2:
            counts = np.bincount(large, minlength=staleness.shape[1] + 1) / len(large)
        lines.append([base, float((weights * staleness).sum(axis=1).mean()), float(many.mean()), float(large.mean())])
    correlation = float(np.corrcoef([line[1] for line in lines], [line[2] for line in lines])[0, 1])
    at_most_five = float(counts[:6].sum())
    header = ("b", "mean staleness by weight", "arrivals from p_max / 10 on", f"arrivals above {LEAST_WEIGHT}")
    markdown = (
        f"{table.paper}, {table.shows}. {table.needs}; seeds {', '.join(map(str, range(table.seeds)))}, means over "
        f"steps. {table.note}\n\n"
        + markdown_table(header, [[f"{base:.4g}", *(f"{x:.2f}" for x in own)] for base, *own in lines])
        + f"\nCorrelation of the first two columns: {correlation:.3f}. Share of the steps by the number of arrivals "
        f"with a weight above {LEAST_WEIGHT}, b = e/2: at most five in {at_most_five:.1%}.\n\n"
        + markdown_table([str(k) for k in range(len(counts))], [[f"{share:.3f}" for share in counts]])
    )
    content = {
        "table": table.name,
        "setting": dict(setting),
        "rows": [dict(zip(("base", "staleness", "aggregated", "large"), line, strict=True)) for line in lines],
        "correlation": correlation,
        "shares": counts.tolist(),
    }
    return Page(table.name, markdown, content, partial(_draw, content))


class PaperSchedule(NamedTuple):
    """A schedule of 500 rounds, and the staleness that its paper prints."""

    law: str
    concurrency: int
    buffer_size: int
    largest: float | None  #: Over all arrivals; None: it is not printed.
    mean: float  #: Of all arrivals (CA2FL); of the largest ones of the rounds (FADAS).
    num_clients: int = 100


CA2FL_TABLE_4 = (
    PaperSchedule("ca2fl", 15, 10, 3, 0.4888),
    PaperSchedule("ca2fl", 20, 10, 4, 0.9184),
    PaperSchedule("ca2fl", 25, 10, 5, 1.312),
    PaperSchedule("ca2fl", 20, 15, 2, 0.3264),
    PaperSchedule("ca2fl", 20, 5, 9, 2.6512),
)
#: The paper's U(0, 5), U(0, 1), U(0, .5), and halfnorm(5) for all clients, whose tau_max is not printed.
CA2FL_TABLE_5 = (
    PaperSchedule("ca2fl", 20, 10, 4, 0.9184),
    PaperSchedule("ca2fl-1", 20, 10, 6, 0.9092),
    PaperSchedule("ca2fl-0.5", 20, 10, 6, 0.8992),
    PaperSchedule("ca2fl-fixed", 20, 10, None, 0.9946),
)
FADAS_CLAIMS = (PaperSchedule("fadas-large", 25, 5, 127, 10.89, 50),)


@lru_cache
def _staleness(law: str, refill: int, seed: int, steps: int, **setting: int) -> StalenessSummary:
    return simulate_staleness(delay_law(law), refill=refill, seed=seed, steps=steps, **setting)


def schedules_page(table: Table, schedules: tuple[PaperSchedule, ...], mean: str = "mean", steps: int = 500) -> Page:
    """Return the page of the schedules, with both readings of when new clients start; `mean`: of `Staleness`."""
    lines = []
    for one in schedules:
        setting = {"num_clients": one.num_clients, "concurrency": one.concurrency, "buffer_size": one.buffer_size}
        for refill in (one.buffer_size, 1):
            runs = [_staleness(one.law, refill, seed, steps, **setting) for seed in range(table.seeds)]
            for number, paper in (("largest", one.largest), (mean, one.mean)):
                name = f"{one.law}, {one.concurrency}/{one.buffer_size}, refill {refill}, {number.replace('_', ' ')}"
                values = tuple(float(getattr(run, number)) for run in runs)
                lines.append(Line(Cell(name, "", {}, paper), values, {}, 0.0))
    return table_page(table, lines, range(table.seeds), {})


#: The pages of the tables without training, by name.
PAGES: dict[str, Callable[[Table], Page]] = {
    "wkafl-figure2": weights_page,
    "ca2fl-table4": partial(schedules_page, schedules=CA2FL_TABLE_4),
    "ca2fl-table5": partial(schedules_page, schedules=CA2FL_TABLE_5),
    "fadas-claims": partial(schedules_page, schedules=FADAS_CLAIMS, mean="mean_largest"),
}


def _draw(content: Mapping[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    from afflux.lab.results.curves import COLOURS
    from afflux.lab.results.figures import style_axes

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.bar(range(len(content["shares"])), content["shares"], color=COLOURS[0].picture)
    left.set_xlabel(f"arrivals of a step with a weight above {LEAST_WEIGHT}, b = e/2")
    left.set_ylabel("share of the steps")
    rows = content["rows"]
    right.plot([row["aggregated"] for row in rows], [row["staleness"] for row in rows], "o-", color=COLOURS[0].picture)
    for row in rows:
        place = {"xytext": (4, -10), "textcoords": "offset points", "fontsize": 8}
        right.annotate(f"b = {row['base']:.3g}", (row["aggregated"], row["staleness"]), **place)
    right.set_xlabel("mean number of aggregated arrivals")
    right.set_ylabel("mean staleness by weight")
    for axes in (left, right):
        style_axes(axes)
    figure.savefig(path, dpi=150)
