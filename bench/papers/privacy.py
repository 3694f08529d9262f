"""DP-FedBuff: the accuracy that an epsilon costs, with many clients that are in few rounds each."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bench.papers.paper_tables import LAST, Cell, Search, Table
from bench.papers.referee import GUESS, Difference

if TYPE_CHECKING:
    from afflux.lab.publishing import Page
    from afflux.lab.results.run_result import Evaluation

CLIENTS, BUFFER, PARTICIPATIONS, DELTA = 3000, 300, 4, 1e-5
#: Each client trains once in each quarter of a run. So no push is rejected.
SETTINGS: Mapping[str, Any] = {
    "data": "mnist",
    "model": "logreg",
    "partition": "classes",
    "num_clients": CLIENTS,
    "concurrency": 600,
    "selection": "blocked-until-pass-ends",
    "delays": "exponential",
    "arrivals": PARTICIPATIONS * CLIENTS,
    "local_steps": 5,
    "client_lr": 0.1,
    "eval_every": CLIENTS,
}
LIMITED = f"dp_fedbuff:buffer_size={BUFFER}:participations={PARTICIPATIONS}"
#: By label: epsilon, the least noise multiplier with it (rounded up to hundredths), the rule, and what is tuned.
RATES, CLIPS = "server_lr=0.3..10", "clip=0.1,0.2,0.4,0.8"
RULES: Mapping[str, tuple[float | None, float, str, tuple[str, ...]]] = {
    "FedBuff": (None, 0.0, f"fedbuff:buffer_size={BUFFER}:staleness=constant", (RATES,)),
    "clipped, no noise": (None, 0.0, LIMITED, (RATES, CLIPS)),
    **{
        f"epsilon {epsilon:g}": (epsilon, noise, f"{LIMITED}:noise_multiplier={noise}", (RATES, CLIPS))
        for epsilon, noise in ((8.0, 1.21), (4.0, 2.17), (2.0, 3.99))
    },
}
TRIALS, SEEDS = 8, 3
CLAIM = f"""\
### What is claimed

(epsilon, {DELTA:g})-differential privacy of a client, for all params that the server publishes.
`afflux.rules.privacy.epsilon` computes epsilon from the rule. The claim holds under these conditions:

- **Neighbours.** Two runs differ by one client. Its arrivals are in both; in one run its updates are 0 ("zero-out").
- **Arrival times** do not depend on data, and no push is invalid: the later ones would move to other rounds.
- **Participations.** A client is in at most {PARTICIPATIONS} rounds. The server enforces this: with
  `dp_fedbuff(participations={PARTICIPATIONS})` later pushes are `rejected`. A person must not have two ids.
- **One rule.** No rule of the server has had less noise, or another clip, buffer or divisor (`replace_rule`).
- **Composition** of {PARTICIPATIONS} Gaussian mechanisms, by dp-accounting, without amplification by sampling.
- **Noise** is real numbers, as in the ideal mechanism. Noise in floating point has
  [known attacks](https://doi.org/10.1145/2382196.2382264) (Mironov 2012, and later ones).

The claim does not cover:

- reports, logs and stores: they hold norms, weights, losses and updates;
- readers of the noise key: from key and log they can compute the noise;
- rates and clips that were chosen by data, as in this table;
- a server that continues from an older state, or from an older copy of its store: it counts too few rounds;
- a power failure with `durability="process"`: the counts of the last rounds may be lost.
"""


def privacy() -> Iterator[Table]:
    """Yield the table."""
    cells = tuple(
        Cell(label, rule, SETTINGS, search=Search(label, rule, {**SETTINGS, "part": "validation"}, ranges, TRIALS))
        for label, (_, _, rule, ranges) in RULES.items()
    )
    shows = "accuracy of DP-FedBuff by epsilon, and of FedBuff"
    needs = (
        f"MNIST, softmax regression (7,850 parameters), {CLIENTS:,} clients of 20 images of two digits, 600 at once, "
        f"buffers of {BUFFER}, 40 rounds, each client in at most {PARTICIPATIONS}; {TRIALS} trials of a rule on "
        "validation data"
    )
    yield Table("privacy", "afflux", shows, needs, 0.13, cells, SEEDS, LAST, page=privacy_page)


def privacy_page(
    table: Table,
    runs: Sequence[Any],
    lines: Mapping[int, Mapping[str, Any]],
    timed: Callable[[Mapping[str, Any]], Sequence["Evaluation"]],
) -> "Page":
    """Return the page of the runs that have ended; the arguments are those of `referee.referee_page`."""
    from afflux.lab.publishing import Page, markdown_table
    from afflux.lab.results.run_result import seed_statistics

    accuracies: dict[str, dict[int, float]] = {}
    tuned: dict[str, str] = {}
    for index, line in lines.items():
        cell, job = runs[index].cell, runs[index].job
        if cell.search is not None:  # no trial
            label = cell.search.name
            tuned[label] = cell.name.removeprefix(f"{label}, ").replace(":", ", ")
            accuracies.setdefault(label, {})[job.seed] = table.reading.of(timed(line)) if line["evaluations"] else GUESS
    rows, content = [], dict[str, Any]()
    for label, (epsilon, noise, _, _) in RULES.items():
        values, reference = accuracies.get(label, {}), accuracies.get("FedBuff", {})
        mean, std, _ = seed_statistics(list(values.values()))
        difference = Difference.of([value - reference[seed] for seed, value in values.items() if seed in reference])
        accuracy = f"{100 * mean:.1f} ± {100 * std:.1f}" if values else ""
        minus = str(difference) if values and label != "FedBuff" else ""
        rows.append((label, f"{noise:g}" if epsilon else "", accuracy, minus, tuned.get(label, "")))
        content[label] = {"epsilon": epsilon, "noise_multiplier": noise, "accuracy": values, "tuned": tuned.get(label)}
    header = ("rule", "noise multiplier", "test accuracy, %", "minus FedBuff, points, 95 %", "tuned")
    text = (
        f"{table.shows[0].upper()}{table.shows[1:]}. {table.needs}; {len(lines)} of {table.count} runs. Mean and "
        f"standard deviation of the last accuracy over {SEEDS} seeds; differences seed by seed.\n\n"
    )
    return Page(table.name, f"{text}{markdown_table(header, rows)}\n{CLAIM}", content, partial(_draw, content))


def _draw(content: Mapping[str, Mapping[str, Any]], path: Path) -> None:
    """Write a PNG: a row for each rule, with the accuracy of each seed."""
    from afflux.lab.results.curves import COLOURS
    from bench.papers.comparison import draw_rows

    def marks(axes: Any) -> None:
        for place, facts in enumerate(content.values()):
            values = [100 * value for value in facts["accuracy"].values()]
            axes.plot(values, [place] * len(values), "o", color=COLOURS[0].picture, label="" if place else "one seed")

    draw_rows([*content], marks, "test accuracy, %", "FedBuff and DP-FedBuff", path)
