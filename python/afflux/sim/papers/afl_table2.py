"""Table 2 of Yang, Zhang, Khanduri and Liu, Anarchic Federated Learning, ICML 2022: logistic regression on MNIST."""

from collections.abc import Sequence
from typing import NamedTuple

from afflux import __version__
from afflux.sim.errors import ConfigError
from afflux.sim.papers.finished_runs import Outcome
from afflux.sim.papers.publishing import Measure, Page, final_accuracy, markdown_table
from afflux.sim.results.run_result import SeedStatistics, seed_statistics
from afflux.sim.runs.compare import Job
from afflux.sim.workload.config import SimConfig
from afflux.sim.workload.rule_specs import parse_rule

#: Appendix E.1: rounds and batch size; eta = 1 and eta_L = .1. The rule's server_lr is eta * eta_L, the step of the
#: paper's proofs: its Algorithm 2 prints eta alone, with which the table is not met.
ROUNDS = 150
BATCH = 64
CLIENT_LR = 0.1
SERVER_LR = 0.1


class Column(NamedTuple):
    """One of the table's four settings."""

    title: str
    stale_models: int
    steps_law: str


COLUMNS = (
    Column("sync, constant", 1, "constant"),
    Column("sync, dynamic", 1, "uniform"),
    Column("async, constant", 5, "constant"),
    Column("async, dynamic", 5, "uniform"),
)

#: Test accuracy by (workers m/M, local steps), then by classes p of a worker; in the order of COLUMNS.
PAPER: dict[tuple[str, int], dict[int, tuple[float, float, float, float]]] = {
    ("5/10", 5): {
        1: (0.8916, 0.8915, 0.8888, 0.8868),
        2: (0.8906, 0.8981, 0.8901, 0.8931),
        5: (0.9072, 0.9075, 0.9059, 0.9048),
        10: (0.9114, 0.9111, 0.9129, 0.9143),
    },
    ("5/10", 10): {
        1: (0.8743, 0.8786, 0.8701, 0.8734),
        2: (0.8687, 0.8813, 0.8661, 0.8819),
        5: (0.9016, 0.9050, 0.9034, 0.9065),
        10: (0.9124, 0.9135, 0.9112, 0.9111),
    },
    ("20/100", 5): {
        1: (0.8898, 0.8973, 0.8909, 0.8938),
        2: (0.8968, 0.9007, 0.8955, 0.9000),
        5: (0.9088, 0.9088, 0.9097, 0.9078),
        10: (0.9111, 0.9106, 0.9126, 0.9125),
    },
}


class Cell(NamedTuple):
    """One number of the table, and afflux's result over seeds."""

    classes: int
    column: str
    paper: float
    ours: SeedStatistics
    best: SeedStatistics
    """The best evaluation of a run, at every tenth round."""

    @property
    def difference(self) -> float:
        """afflux's accuracy minus the paper's."""
        return self.ours.mean - self.paper


def make_jobs(workers: str, steps: int, seeds: Sequence[int], data_dir: str | None = None) -> list[Job]:
    """Return the runs, seed by seed, row by row; raise ConfigError if the table has no such row."""
    if (workers, steps) not in PAPER:
        known = ", ".join(f"{m} with {c}" for m, c in PAPER)
        raise ConfigError(f"the table has no row {workers} with {steps} steps; it has {known}")
    cohort, num_clients = map(int, workers.split("/"))
    rule = parse_rule(f"afa_cd:buffer_size={cohort}:server_lr={SERVER_LR}")
    return [
        Job(
            rule,
            seed,
            config=SimConfig(
                data="mnist",
                data_dir=data_dir,
                model="logreg",
                num_clients=num_clients,
                protocol="rounds",
                stale_models=column.stale_models,
                steps_law=column.steps_law,
                arrivals=ROUNDS * cohort,
                delays="exponential",
                partition="classes",
                classes=classes,
                client_lr=CLIENT_LR,
                local_steps=steps,
                batch_size=BATCH,
                eval_every=10 * cohort,
            ),
        )
        for seed in seeds
        for classes in PAPER[workers, steps]
        for column in COLUMNS
    ]


def table_cells(workers: str, steps: int, results: Sequence[Outcome]) -> list[Cell]:
    """Return the table's cells, row by row, from the results of `make_jobs`."""
    places = [(p, i) for p in PAPER[workers, steps] for i in range(len(COLUMNS))]
    table = []
    for place, (p, i) in enumerate(places):
        runs = results[place :: len(places)]
        best = seed_statistics([run.best_accuracy for run in runs])
        table.append(Cell(p, COLUMNS[i].title, PAPER[workers, steps][p][i], final_accuracy(runs), best))
    return table


def make_page(workers: str, steps: int, seeds: Sequence[int], results: Sequence[Outcome]) -> Page:
    """Make the page: afflux's results beside those of the paper."""
    table = table_cells(workers, steps, results)
    lines = [
        [f"{cell.classes}", cell.column, f"{cell.paper:.4f}", _shown(cell.ours), f"{cell.difference:+.4f}"]
        for cell in table
    ]
    mean = sum(abs(cell.difference) for cell in table) / len(table)
    largest = max(table, key=lambda cell: abs(cell.difference))
    markdown = (
        f"Anarchic FL, Table 2: logistic regression on MNIST, {workers} workers, {steps} local steps, {ROUNDS} rounds; "
        f"accuracy on the test part after the last round, seeds {', '.join(map(str, seeds))}.\n\n"
        + markdown_table(("p", "setting", "paper", "ours", "difference"), lines)
        + f"\nMean absolute difference {mean:.4f}, largest {largest.difference:+.4f} "
        f"(p = {largest.classes}, {largest.column}).\n"
    )
    content = {
        "source": __doc__,
        "afflux": __version__,
        "workers": workers,
        "local_steps": steps,
        "rounds": ROUNDS,
        "rule": results[0].rule,
        "seeds": list(seeds),
        "mean_absolute_difference": mean,
        "cells": [
            {**cell._asdict(), "ours": cell.ours._asdict(), "best": cell.best._asdict(), "difference": cell.difference}
            for cell in table
        ],
    }
    return Page("afl-table2", markdown, content)


def reproduce(workers: str, steps: int, seeds: Sequence[int], data_dir: str | None, measure: Measure) -> Page:
    """Run the part of the table with these workers and local steps."""
    return make_page(workers, steps, seeds, measure(make_jobs(workers, steps, seeds, data_dir)))


def _shown(value: SeedStatistics) -> str:
    return f"{value.mean:.4f}" + (f" ± {value.std:.4f}" if value.seeds > 1 else "")
