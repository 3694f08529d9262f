"""The referee: all rules under four conditions, each tuned by the same number of trials, and compared with FedBuff.

The main number, fixed before the runs: mean test accuracy over the last quarter of equal virtual time. It is compared
with FedBuff's, pair by pair of condition and seed.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from afflux.lab.results.run_result import Evaluation, RunResult, seed_statistics
from afflux.lab.results.statistics import LEVEL, holm, t_quantile
from afflux.sim.workload.config import SimConfig
from bench.papers.paper_tables import Cell, Reading, Search, Table

if TYPE_CHECKING:
    from afflux.lab.publishing import Page
    from afflux.lab.results.finished_runs import Job

#: The rule with which all others are compared.
REFERENCE = "fedbuff"
CONDITIONS: Mapping[str, Mapping[str, Any]] = {
    "Dir(0.1), large delays by chance": {"alpha": 0.1, "delays": "fadas-large"},
    "Dir(0.1), large delays of classes 8 and 9": {"alpha": 0.1, "delays": "fadas-large:tied=8+9"},
    "Dir(0.5), mild delays": {"alpha": 0.5, "delays": "fadas-mild"},
    "Dir(0.5), large delays": {"alpha": 0.5, "delays": "fadas-large"},
}
#: By the rule's label: its text without the tuned options, and their ranges. Beside them client_lr is tuned. A
#: gradient's server_lr of s is an update's of s / (3 client_lr), as clients make three steps.
LAWS = "staleness=constant,polynomial(0.5)"
RULES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "fedbuff": ("fedbuff:buffer_size=10", ("server_lr=0.1..3", LAWS)),
    "fedasync": ("fedasync", ("alpha=0.05..1", LAWS)),
    # A large threshold is FADAS without adaptation to delay.
    "fadas": ("fadas:buffer_size=10:delay_adaptive=inverse", ("server_lr=0.0003..0.03", "threshold=1,4,8,1000")),
    "afa_cd": ("afa_cd:buffer_size=10", ("server_lr=0.03..1",)),
    "afa_cs": ("afa_cs:buffer_size=10", ("server_lr=0.03..1", "divide_by=all,seen")),
    "ca2fl": ("ca2fl:buffer_size=10", ("server_lr=0.1..3",)),
    "mf_ca2fl, 4 bits": ("mf_ca2fl:buffer_size=10:bits=4", ("server_lr=0.1..3", "codec=affine-vector,rotated")),
    "wkafl": ("wkafl:buffer_size=10", ("server_lr=0.03..1", "beta=1..50", "sim_min=0..0.5")),
    "twafl": ("twafl:buffer_size=10", ("server_lr=0.03..1", "normalise=count,weights")),
    "sasgd": ("sasgd:buffer_size=10", ("server_lr=0.03..1",)),
    "gsgm": ("gsgm:buffer_size=10", ("server_lr=0.03..1", "alpha=0.05..1")),
    "zenopp": ("zenopp", ("server_lr=0.03..1", "rho=0.001..0.1")),
    "fedavg": ("fedavg:buffer_size=10", ("server_lr=0.1..3",)),
    "fedams": ("fedams:buffer_size=10", ("server_lr=0.0003..0.03",)),
}
#: Rules against hostile clients, beside FedBuff.
ROBUST: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "fedbuff": RULES["fedbuff"],
    "krum": ("krum:buffer_size=10", ("server_lr=0.1..3",)),
    "multi_krum": ("multi_krum:buffer_size=10", ("server_lr=0.1..3",)),
    "fedmedian": ("fedmedian:buffer_size=10", ("server_lr=0.1..3",)),
    "fedtrimmedavg": ("fedtrimmedavg:buffer_size=10", ("server_lr=0.1..3", "trim=0.2,0.3")),
    "fltrust": ("fltrust:buffer_size=10", ("server_lr=0.03..1",)),
    "aflguard": ("aflguard", ("server_lr=0.03..1", "most=1..3")),
    "zenopp": RULES["zenopp"],
}
#: What twenty of the hundred clients push, as the setting `attack` and in words; two of ten in a buffer, on average.
ATTACKS: Mapping[str, tuple[str, str]] = {
    "sign-flip": ("sign-flip:clients=20:factor=-4", "-4 times their updates"),
    "scaled": ("scaled:clients=20:factor=10", "10 times their updates"),
    "copies": ("copies:clients=20:factor=10", "one direction, at 10 times the length of their updates"),
}
#: These wait for all ten clients of a round. They make few steps in the time of the others, and each is evaluated.
SYNCHRONOUS = ("fedavg", "fedams")
CLIENT_LR = "client_lr=0.03..0.5"
TRIALS, SEEDS, ARRIVALS = 8, 5, 2400
#: A mean difference of at most so much is called level.
BAND = 0.005
#: The accuracy of a run in which a client has diverged: a guess.
GUESS = 0.1
TARGET = 0.9
COMMON_NOTE = (
    "- *better* or *worse* than FedBuff: the mean difference is larger than .5 points, and Holm's p is below .05. "
    "*level*: it is at most .5 points; rules may still differ, as most intervals are wider.\n- The pairs are not "
    "independent: five seeds share one tuned setting. *by condition* has the interval of the four conditions' means.\n"
    "- *by arrivals*: over the last quarter of the arrivals.\n- Diverged runs count as guesses, and are left out from "
    "*time to 90%* on.\n"
)
NOTE = (
    f"{COMMON_NOTE}- gsgm's runs are older than its present form, which blocks a client until a pass ends.\n- Not "
    "shown: other models, data and numbers of clients; longer runs; more trials; codecs; faulty or hostile clients.\n"
)


def late_in_time(rows: Sequence[Evaluation], share: float = 0.25) -> float:
    """Return the mean accuracy over the last `share` of the virtual time; a model holds until the next evaluation."""
    begin = (1 - share) * rows[-1].virtual_time
    times = np.maximum([row.virtual_time for row in rows], begin)
    lengths = np.diff(times)
    if not lengths.sum():
        return rows[-1].accuracy
    return float(np.average([row.accuracy for row in rows[:-1]], weights=lengths))


def sign_flip(differences: Sequence[float]) -> float:
    """Return the exact two-sided p of the mean, over all signs of the differences.

    Under the hypothesis that a pair's two numbers may be exchanged, all 2^n sums are equally likely.
    """
    sums = np.zeros(1)
    for difference in differences:
        sums = np.concatenate([sums - difference, sums + difference])
    least = abs(sum(differences)) - 1e-9 * sum(map(abs, differences))  # equal sums differ in rounding
    return float((np.abs(sums) >= least).mean())


class Difference(NamedTuple):
    """Accuracy of a rule minus FedBuff's, over pairs."""

    mean: float
    half: float  #: half of the 95 % interval of Student's law; nan for one pair
    pairs: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Difference":
        """Return the difference over these pairs."""
        mean, std, count = seed_statistics(values)
        half = t_quantile(count - 1, (1 + LEVEL) / 2) * std / math.sqrt(count) if count > 1 else math.nan
        return cls(mean, half, count)

    def __str__(self) -> str:
        half = "" if math.isnan(self.half) else f" ± {100 * self.half:.1f}"
        return f"{100 * self.mean:+.1f}{half}" if self.pairs else ""


def verdict(mean: float, p: float) -> str:
    """Return what a mean difference and Holm's p say."""
    if abs(mean) <= BAND:
        return "level"
    return ("better" if mean > 0 else "worse") if p < 1 - LEVEL else "not decided"


def lowest_tenth(job: "Job", result: RunResult) -> dict[str, float]:
    """Return the mean accuracy of the tenth of the clients with the lowest one, with the final model.

    A client's accuracy is that of the test part's classes, weighted by the classes of its own examples.
    """
    import torch

    from afflux.lab.tasks.registry import build_task
    from afflux.sim.clients.flat_model import FlatModel, make_module, reproducible_libraries

    config = job.config or SimConfig()
    facts = {"state_bytes": result.state_bytes, "server_ms": round(result.server_ms, 3)}
    if config.part == "validation":
        return facts
    task = build_task(config)
    test: Any = task.evaluate
    with reproducible_libraries():
        model = FlatModel(make_module(task.model, job.seed), task.roles)
        model.load(result.params)
        with model.evaluated() as module:
            hits = torch.cat([module(part).argmax(1) for part in test.x.split(1000)]) == test.y
    right = {label: hits[test.y == label].double().mean().item() for label in test.y.unique().tolist()}
    shares = [np.mean([right[label] for label in y.tolist()]) for _, y in task.data_for_seed(job.seed) if len(y)]
    return facts | {"lowest_tenth": float(np.mean(sorted(shares)[: math.ceil(len(shares) / 10)]))}


def cells(rules: Mapping[str, tuple[str, tuple[str, ...]]] = RULES, **more: str) -> Iterator[Cell]:
    """Yield the cells of these rules, with these settings, condition by condition, FedBuff's first."""
    common = {"data": "mnist", "model": "lenet5", "num_clients": 100, "concurrency": 20, "arrivals": ARRIVALS}
    for condition, own in CONDITIONS.items():
        for label, (rule, ranges) in rules.items():
            settings = {**common, "examples": "batch", "eval_every": 20 if label in SYNCHRONOUS else 100, **own, **more}
            trials = settings | {"part": "validation", "arrivals": ARRIVALS // 2}
            name = f"{condition}: {label}"
            yield Cell(name, rule, settings, search=Search(name, rule, trials, (CLIENT_LR, *ranges), TRIALS))


def referee() -> Iterator[Table]:
    """Yield the table of all rules, and one for each attack of hostile clients."""
    reading = Reading("mean test accuracy over the last quarter of equal virtual time", late_in_time)
    needs = f"MNIST, LeNet-5, 100 clients, 20 at once, buffers of 10, {ARRIVALS:,} arrivals; {TRIALS} trials"
    shows = "every rule under four conditions, with equal tuning, compared with FedBuff"
    own: dict[str, Any] = {"page": referee_page, "facts": lowest_tenth}
    yield Table("rules", "afflux", shows, needs, 7.3, tuple(cells()), SEEDS, reading, note=NOTE, clock=REFERENCE, **own)
    for name, (attack, words) in ATTACKS.items():
        shows = f"eight rules under four conditions, with equal tuning, while 20 of 100 clients push {words}"
        of_attack = tuple(cells(ROBUST, attack=attack))
        yield Table(f"hostile-{name}", "afflux", shows, needs, 4.2, of_attack, SEEDS, reading, note=COMMON_NOTE, **own)


class _Run(NamedTuple):
    """The numbers of a run at full length."""

    late: float
    by_arrivals: float
    to_target: float
    facts: Mapping[str, float]


#: By condition, rule and seed.
_Runs = Mapping[str, Mapping[str, Mapping[int, _Run]]]
Rows = Callable[[Mapping[str, Any]], Sequence[Evaluation]]


def referee_page(table: Table, runs: Sequence[Any], lines: Mapping[int, Mapping[str, Any]], timed: Rows) -> "Page":
    """Return the page of the runs that have ended.

    Args:
        table: that of `referee`.
        runs: a `reproduction.Run` each.
        lines: those of the finished runs, by index into `runs`.
        timed: returns the evaluations of a line until the end of the equal time.
    """
    from afflux.lab.outcomes import Outcome
    from afflux.lab.publishing import Page, or_none

    content: dict[str, dict[str, dict[int, _Run]]] = {}
    trials: dict[str, list[float]] = {}
    chosen: dict[str, str] = {}
    for index, line in sorted(lines.items()):
        cell = runs[index].cell
        late = table.reading.of(timed(line)) if line["evaluations"] else GUESS
        if cell.search is None:
            trials.setdefault(cell.name.partition(", trial ")[0], []).append(late)
            continue
        condition, _, label = cell.search.name.partition(": ")
        outcome = Outcome.of_line(line)
        reached = [row.virtual_time for row in outcome.evaluations if row.accuracy >= TARGET]
        by_arrivals = outcome.late_score() if outcome.evaluations else GUESS
        own = _Run(late, by_arrivals, reached[0] if reached else math.nan, line)
        content.setdefault(condition, {}).setdefault(label, {})[outcome.seed] = own
        chosen[cell.search.name] = cell.name.removeprefix(f"{cell.search.name}, ")
    labels = [*dict.fromkeys(cell.name.rpartition(": ")[2] for cell in table.cells)]
    differences = {label: _differences(content, label) for label in labels if label != REFERENCE}
    compared = {label: values for label, values in differences.items() if values}
    p = holm({label: sign_flip(values) for label, values in compared.items()})
    overall = {label: (Difference.of(values), p[label]) for label, values in compared.items()}
    processors = sorted({line["machine"]["cpu"] for line in lines.values() if "machine" in line})
    markdown = "\n".join(
        [
            f"{table.shows[0].upper()}{table.shows[1:]}. {table.needs} for each rule and condition, on validation data "
            f"and half the length; {len(lines)} of {table.count} runs.\n\n- *accuracy*: {table.reading.name}, in per "
            f"cent, with its standard deviation over seeds.\n{table.note}- *ms a round*: a mean over runs on "
            f"{' and '.join(processors)}.\n",
            *_answer(content, labels),
            "### Over all conditions\n",
            _overall(overall, content),
            *(_of_condition(condition, content[condition], chosen) for condition in CONDITIONS if condition in content),
            "### The best trial after 1, 2, 4 and 8, mean over conditions\n",
            _of_trials(trials, labels),
        ]
    )
    numbers = {
        "runs": len(lines),
        "overall": {
            label: {"mean": one.mean, "half": or_none(one.half), "pairs": one.pairs, "p": p, "is": verdict(one.mean, p)}
            for label, (one, p) in overall.items()
        },
        "late": {c: {r: {s: run.late for s, run in own.items()} for r, own in of.items()} for c, of in content.items()},
        "trials": trials,
        "chosen": chosen,
    }
    return Page(table.name, markdown, numbers, partial(_draw, overall))


def _differences(content: _Runs, label: str) -> list[float]:
    """Return the differences from FedBuff, over the pairs of condition and seed that both rules have."""
    return [
        run.late - own[REFERENCE][seed].late
        for own in content.values()
        for seed, run in own.get(label, {}).items()
        if seed in own.get(REFERENCE, {})
    ]


def _answer(content: _Runs, labels: Sequence[str]) -> list[str]:
    """Return which rule to use, a line for each condition whose runs have all ended, and one for memory."""
    whole = {c: own for c, own in content.items() if all(len(own.get(label, {})) == SEEDS for label in labels)}
    means = {c: {label: _mean(own[label], "late") for label in labels} for c, own in whole.items()}
    lines = []
    for condition, values in means.items():
        best = max(values, key=lambda label: values[label])
        near = [label for label in labels if label != best and values[best] - values[label] <= BAND]
        with_it = f"; within .5 points: {', '.join(near)}" if near else ""
        lines.append(
            f"- **{condition}**: {best} ({100 * values[best]:.1f} %){with_it}; fedbuff {100 * values[REFERENCE]:.1f} %."
        )
    if len(whole) == len(CONDITIONS):
        first = next(iter(whole.values()))
        # A run in which a client has diverged has no facts.
        sizes = {
            label: min(run.facts.get("state_bytes", math.inf) for run in first[label].values()) for label in labels
        }
        small = [label for label in labels if sizes[label] <= sizes[REFERENCE] and label not in SYNCHRONOUS]
        total = {label: np.mean([values[label] for values in means.values()]) for label in small}
        best = max(total, key=lambda label: total[label])
        lines.append(f"- **As little memory as FedBuff**: {best} ({100 * total[best]:.1f} % over all conditions).")
    return ["### Which rule should I use?\n", *lines, ""] if lines else []


def _mean(runs: Mapping[int, _Run], name: str) -> float:
    """Return the mean of a number or fact over the runs that have it; nan if none has."""
    return seed_statistics([getattr(run, name, run.facts.get(name, math.nan)) for run in runs.values()]).mean


def _overall(overall: Mapping[str, tuple[Difference, float]], content: _Runs) -> str:
    from afflux.lab.publishing import markdown_table

    ranked = sorted(overall.items(), key=lambda item: -item[1][0].mean)
    units = {label: [_differences({c: own}, label) for c, own in content.items()] for label in overall}
    means = {label: Difference.of([float(np.mean(x)) for x in units[label] if x]) for label in overall}
    rows = [(x, str(one), str(means[x]), f"{one.pairs}", f"{p:.2g}", verdict(one.mean, p)) for x, (one, p) in ranked]
    return markdown_table(("rule", "minus FedBuff, points, 95 %", "by condition", "pairs", "p (Holm)", ""), rows)


def _of_condition(condition: str, runs: Mapping[str, Mapping[int, _Run]], chosen: Mapping[str, str]) -> str:
    from afflux.lab.publishing import markdown_table

    rows = []
    for label in sorted(runs, key=lambda label: -_mean(runs[label], "late")):
        own, reference = runs[label], runs.get(REFERENCE, {})
        late = seed_statistics([run.late for run in own.values()])
        pairs = [run.late - reference[seed].late for seed, run in own.items() if seed in reference]
        facts = {name: _mean(own, name) for name in ("lowest_tenth", "state_bytes", "server_ms")}
        reached = sum(not math.isnan(run.to_target) for run in own.values())
        to_target = f"{_mean(own, 'to_target'):.0f}" + ("" if reached == len(own) else f" ({reached} of {len(own)})")
        rows.append(
            (
                label,
                f"{100 * late.mean:.1f} ± {100 * late.std:.1f}",
                "" if label == REFERENCE else str(Difference.of(pairs)),
                f"{100 * _mean(own, 'by_arrivals'):.1f}",
                to_target if reached else "–",
                f"{100 * facts['lowest_tenth']:.1f}",
                f"{facts['state_bytes'] / 1e6:.1f}",
                f"{facts['server_ms']:.2f}",
                chosen[f"{condition}: {label}"].replace(":", ", "),
            )
        )
    cells = [["–" if text == "nan" else text for text in row] for row in rows]  # if all runs diverged
    header = ("rule", "accuracy", "minus FedBuff, 95 %", "by arrivals", f"time to {TARGET:.0%}", "lowest tenth")
    return f"### {condition}\n\n" + markdown_table((*header, "server, MB", "ms a round", "tuned"), cells)


def _of_trials(trials: Mapping[str, Sequence[float]], labels: Sequence[str]) -> str:
    from afflux.lab.publishing import markdown_table

    rows = []
    for label in labels:
        own = [values for name, values in trials.items() if name.partition(": ")[2] == label]
        best = [np.mean([max(values[:count]) for values in own]) if own else math.nan for count in (1, 2, 4, 8)]
        rows.append((label, *("" if math.isnan(value) else f"{100 * value:.1f}" for value in best)))
    return markdown_table(("rule", "1", "2", "4", "8"), rows)


def _draw(overall: Mapping[str, tuple[Difference, float]], path: Path) -> None:
    """Write a PNG: a row for each rule, its mean difference from FedBuff with the interval, and the band."""
    from afflux.lab.results.curves import COLOURS
    from bench.papers.comparison import draw_rows

    ranked = sorted(overall, key=lambda label: -overall[label][0].mean)

    def marks(axes: Any) -> None:
        axes.set_xscale("symlog", linthresh=2, linscale=1.5)  # most rules lie within two points
        axes.axvspan(-100 * BAND, 100 * BAND, color="#888888", alpha=0.15, linewidth=0, label="level")
        for place, label in enumerate(ranked):
            one = overall[label][0]
            style = {"fmt": "o", "color": COLOURS[0].picture, "capsize": 2}
            axes.errorbar([100 * one.mean], [place], xerr=[0 if math.isnan(one.half) else 100 * one.half], **style)
        (low, high), ends = axes.get_xlim(), (1, 2, 5, 10, 20, 40, 80)
        ticks = [tick for tick in (*(-end for end in ends), 0, *ends) if low <= tick <= high]
        axes.set_xticks(ticks, ticks)

    across = "accuracy minus FedBuff's, points (95 % interval; logarithmic beyond 2)"
    draw_rows(ranked, marks, across, "Every rule, compared with FedBuff", path)
