"""Tables and figures of the papers about the staleness alone: they need a schedule of arrivals, and no training."""

from collections.abc import Mapping
from functools import partial
from math import e
from pathlib import Path
from typing import Any

import numpy as np

from afflux.sim.clients.schedule import simulate_staleness
from afflux.sim.papers.paper_tables import Table
from afflux.sim.papers.publishing import Page, markdown_table
from afflux.sim.results.run_result import RoundTotals
from afflux.sim.workload.delays import delay_law

#: WKAFL, section 4.1: the bases b of the weights b^-staleness, TWAFL's e/2 among them; w_g; clients, K and iterations.
BASES, LEAST_WEIGHT = (1.02, 1.05, 1.1, 1.2, e / 2, 2.0), 0.1
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
        many = (weights >= weights.max(axis=1, keepdims=True) / RoundTotals.AGGREGATED_ABOVE).sum(axis=1)
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


#: The pages of the tables without training, by name.
PAGES = {"wkafl-figure2": weights_page}


def _draw(content: Mapping[str, Any], path: Path) -> None:
    from matplotlib.figure import Figure

    from afflux.sim.results.curves import COLOURS
    from afflux.sim.results.figures import style_axes

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
