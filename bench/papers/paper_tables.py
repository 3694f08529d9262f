"""The tables and figures of papers as data: a cell is one run with one number of the paper beside it.

These are the types, and the tables of two papers; `cifar_tables` has those of CA2FL and FADAS.

Anarchic FL: Yang, Zhang, Khanduri and Liu, ICML 2022. WKAFL: Zhou, Li, Ren and Yang, IEEE Transactions on Parallel and
Distributed Systems 2022.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf, nan
from re import sub
from typing import Any, NamedTuple

import numpy as np

from afflux.lab.presets.registry import find_preset
from afflux.lab.presets.wkafl import EXPERIMENTS
from afflux.lab.results.run_result import Evaluation


class Reading(NamedTuple):
    """One number of a run, computed from its evaluations; the first of these is at the start."""

    name: str
    of: Callable[[Sequence[Evaluation]], float]
    digits: int = 4  #: after the point, in tables


def _every_fifth(evaluations: Sequence[Evaluation]) -> list[float]:
    return [one.accuracy for one in evaluations if one.version % 5 == 0]


def _last_ten(evaluations: Sequence[Evaluation]) -> list[float]:
    return [one.accuracy for one in evaluations[-10:]]


BEST_OF_EVERY_FIFTH = Reading("largest accuracy at every fifth version", lambda rows: max(_every_fifth(rows)))
MEAN_OF_SIX = Reading("mean of six", lambda rows: float(np.mean(_every_fifth(rows)[-6:])))
BEST = Reading("best of all", lambda rows: max(one.accuracy for one in rows))
LAST = Reading("last", lambda rows: rows[-1].accuracy)
MEAN_OF_TEN = Reading("mean accuracy of the last ten evaluations", lambda rows: float(np.mean(_last_ten(rows))))
#: Small is stable.
STABILITY = Reading("deviation of the last ten accuracies", lambda rows: float(np.std(_last_ten(rows), ddof=1)))
LOG_STABILITY = Reading("of log accuracy", lambda rows: float(np.std(np.log(_last_ten(rows)), ddof=1)))


def rounds_to(accuracy: float, every: int = 1) -> Reading:
    """Return the first version, of every `every`th, whose accuracy reaches `accuracy`, as a reading; nan: none does."""

    def first(evaluations: Sequence[Evaluation]) -> float:
        reached = (one.version for one in evaluations if one.version % every == 0 and one.accuracy >= accuracy)
        return float(next(reached, nan))

    return Reading(f"rounds to an accuracy of {accuracy:g}" + f", every {every}" * (every > 1), first, 1)


class Search(NamedTuple):
    """Random trials of a rule on the validation part; the options of the best one are those of the cells' rule.

    The best one has the largest `reading` of the table.
    """

    name: str  #: Different from those of the table's other searches.
    rule: str
    settings: Mapping[str, Any]  #: Of the trials.
    ranges: tuple[str, ...]  #: Of the options and settings that are tuned, as `afflux compare --grid` reads them.
    trials: int = 6


#: That of no table.
TRIALS_SEED = 9


class Cell(NamedTuple):
    """One run of a table, for each seed."""

    name: str  #: Different from those of the table's other cells.
    rule: str  #: With all options, as text.
    settings: Mapping[str, Any]  #: Those that differ from `SimConfig`'s defaults, without the folder of the data.
    #: The number that the paper prints; None: a figure's curve, or our own addition. In a figure, the name is that of
    #: the panel, a comma, and that of the curve.
    paper: float | None = None
    search: Search | None = None  #: Finds the options that the rule lacks.
    seeds: int = 0  #: If not 0: the cell has the seeds below it only, not all of its table.
    #: Arrivals and accuracy, of a figure's curve: the numbers that the paper prints. Infinitely many: the run's end.
    points: tuple[tuple[float, float], ...] = ()

    def curve(self, name: str, *points: tuple[float, float]) -> "Cell":
        """Return the cell as a curve of a figure, with the paper's number at its end, and more points."""
        end = () if self.paper is None else ((inf, self.paper),)
        return self._replace(name=name, paper=None, points=(*points, *end))


@dataclass(frozen=True)
class Table:
    """One table or figure."""

    name: str  #: For the command line.
    paper: str
    shows: str
    needs: str = ""  #: Data, model and length.
    hours: float = 0.0  #: CPU hours of all cells and seeds, by a measurement of single runs.
    cells: tuple[Cell, ...] = ()  #: Empty: it is not run here, and `open` says why.
    seeds: int = 3
    #: The number that is compared with the paper's, chosen for the paper before its runs were made.
    reading: Reading = LAST
    others: tuple[Reading, ...] = ()  #: Other readings, which are shown beside it.
    open: str = ""  #: Why it is not run here.
    note: str = ""  #: Where the paper contradicts itself, or leaves something open.
    memory: float = 0.6  #: GB that one run needs.
    mean_of: int = 1  #: Number of runs of which each of the paper's numbers is the mean.
    #: Whether a run is kept while it is made, so that the same command continues one that was interrupted.
    long: bool = False
    computed: bool = False  #: Whether it needs no training, and so has no cells.
    #: A rule: its runs, which are always made, end the virtual time in which all runs of their setting are read.
    clock: str = ""
    page: Callable[..., Any] | None = None  #: Makes the page, as `referee.referee_page`; None: `comparison.table_page`.
    facts: Callable[..., Mapping[str, float]] | None = None  #: Further facts of a line, from the job and its result.

    @property
    def count(self) -> int:
        """Number of runs."""
        searches = {cell.search.name: cell.search for cell in self.cells if cell.search}
        trials = sum(search.trials for search in searches.values())
        return trials + sum(min(cell.seeds or self.seeds, self.seeds) for cell in self.cells)


AFL, WKAFL = "Anarchic FL", "WKAFL"

# Anarchic FL. Appendix E.1: 150 rounds, batches of 64, eta = 1 and eta_L = .1. The rule's server_lr is eta * eta_L, the
# step of the paper's proofs; Algorithm 2 prints eta alone.

AFL_COLUMNS = {
    "sync, constant": (1, "constant"),
    "sync, dynamic": (1, "uniform"),
    "async, constant": (5, "constant"),
    "async, dynamic": (5, "uniform"),
}
#: Table 2 by workers, local steps and classes p of a worker, in the order of AFL_COLUMNS.
AFL_TABLE_2 = {
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
#: Table 3, 5 of 10 workers, by local steps and p: FedProx and SCAFFOLD under synchrony with constant steps, then under
#: asynchrony with dynamic steps.
AFL_TABLE_3 = {
    5: {
        1: (0.8893, 0.8928, 0.8775, 0.8946),
        2: (0.8868, 0.8970, 0.8832, 0.8954),
        5: (0.9036, 0.9032, 0.9004, 0.9019),
        10: (0.9075, 0.9057, 0.9054, 0.9022),
    },
    10: {
        1: (0.8752, 0.8789, 0.8669, 0.8838),
        2: (0.8685, 0.8967, 0.8789, 0.8978),
        5: (0.9019, 0.9047, 0.8998, 0.9029),
        10: (0.9072, 0.9071, 0.9052, 0.9038),
    },
}
AFL_OTHERS = (LAST, MEAN_OF_SIX, BEST)
#: Measured with seeds 0 to 4, or 0 to 2, in 10 CPU minutes.
AFL_DYNAMIC = (
    "One cell is out of its interval and beyond .005 (5/10, 5 steps, p = 1, sync, dynamic: -.0060). The attempt at "
    "an explanation found none. Nearest is one number of steps for all workers of a round, where the text has each "
    "worker draw its own: the cell is then -.0020, and async -.0006 in place of -.0083; but with 10 steps and p = 1 "
    "the two are +.0033 and +.0077 in place of -.0029 and -.0033, and the mean absolute difference of 13 dynamic "
    "cells is .0023 in place of .0028. Other readings, with three seeds, in which the cell is -.0052: steps from 1 "
    "to 2c - 1 -.0040; a worker's gradients divided by c -.0047; the best of all rounds -.0027; models averaged "
    "-.0027, with four times the deviation; eta alone as the step -.0029, but then -.0243 with constant steps; "
    "inputs from 0 to 1 -.0451. Table 2 keeps the reading of the text."
)
AFL_LOCAL = (
    "Ours are higher: by .0071 on average with SCAFFOLD, .0030 with FedProx, most of it from 2 classes a worker on. No "
    "reading explains it: with the mean of the last six evaluations the mean difference is .0001, but single ones are "
    "up to -.028 away, and SCAFFOLD stays .0044 higher. The mean absolute difference is .0066 with the last "
    "evaluation, .0063 with the best of all. The paper does not print how SCAFFOLD's control variates are kept."
)
AFL_CLAIM = (
    "The paper prints the ratio of rounds 61/46, AFL to FedAvg, and does not say which of AFL's settings that is: "
    "with dynamic steps ours are 62 to 87 over seeds, with constant steps 42 to 59. The difference is AFL's, in the "
    "interval of the seeds. If all workers of a round share one number of steps, AFL takes 69.4 on average. The "
    "ratio of wall-clock times, 1/2.6, is not one of the rounds protocol, in which a round lasts until its slowest "
    "worker: with exponential times, the first five of ten in place of all five would give 1/2.67."
)


def _afl_settings(workers: str, steps: int, classes: int, column: str, **more: Any) -> dict[str, Any]:
    """Return the settings of the preset with those of the cell, evaluated in each round."""
    stale_models, law = AFL_COLUMNS[column]
    own = {"local_steps": steps, "classes": classes, "stale_models": stale_models, "steps_law": law}
    preset = find_preset(f"afl-logreg-{workers.replace('/', 'of')}").values()
    return preset | own | {"eval_every": int(workers.partition("/")[0])} | more


def _afl_rule(workers: str, name: str = "afa_cd") -> str:
    return f"{name}:buffer_size={workers.partition('/')[0]}:server_lr=0.1"


def _afl_table_2() -> Iterator[Cell]:
    for (workers, steps), rows in AFL_TABLE_2.items():
        for p, numbers in rows.items():
            for column, number in zip(AFL_COLUMNS, numbers, strict=True):
                name = f"{workers}, {steps} steps, p = {p}, {column}"
                yield Cell(name, _afl_rule(workers), _afl_settings(workers, steps, p, column), number)


def _afl_table_3() -> Iterator[Cell]:
    for steps, rows in AFL_TABLE_3.items():
        for p, numbers in rows.items():
            places = [
                (column, way) for column in ("sync, constant", "async, dynamic") for way in ("fedprox", "scaffold")
            ]
            for (column, way), number in zip(places, numbers, strict=True):
                more = {"client_optimizer": way} | ({"mu": 0.1} if way == "fedprox" else {})
                settings = _afl_settings("5/10", steps, p, column, **more)
                yield Cell(f"{steps} steps, p = {p}, {way}, {column}", _afl_rule("5/10"), settings, number)


def _afl_arrivals() -> Iterator[Cell]:
    """Yield the cells of Figures 1 and 5: uniform and biased arrivals of workers."""
    for p in AFL_TABLE_2["5/10", 5]:
        yield Cell(
            f"p = {p}, FedAvg (sync, constant)", _afl_rule("5/10"), _afl_settings("5/10", 5, p, "sync, constant")
        )
        for sampling in ("uniform", "biased"):
            settings = _afl_settings("5/10", 5, p, "async, dynamic", sampling=sampling)
            for name in ("afa_cd", "afa_cs"):
                yield Cell(f"p = {p}, {name}, {sampling} arrivals", _afl_rule("5/10", name), settings)


def _afl_claim() -> Iterator[Cell]:
    for column, name, number in (("async, dynamic", "AFL", 61.0), ("sync, constant", "FedAvg", 46.0)):
        yield Cell(f"{name}, p = 1", _afl_rule("5/10"), _afl_settings("5/10", 5, 1, column), number)


def _afl_figure_2() -> Iterator[Cell]:
    """Yield the curves of Table 2 for 5 of 10 workers and 5 steps."""
    first = "5/10, 5 steps, "
    for cell in _afl_table_2():
        if cell.name.startswith(first):
            yield cell.curve(cell.name.removeprefix(first))


# WKAFL. Section 6.1.1 and the authors' scripts: K-async, one gradient of one batch; MNIST stands for EMNIST MNIST.


class WkaflNumbers(NamedTuple):
    """The printed numbers of a data set; its settings are those of the presets."""

    preset: str  #: the first of its presets
    data: str  #: in place of the preset's
    mixed: int  #: index of the level of Table 3
    table_2: tuple[tuple[float, float, float], ...]  #: of WKAFL, TWAFL and SASGD, by level
    #: By L_num: accuracy and stability of WKAFL, TWAFL, GSGM and SASGD.
    table_3: Mapping[int, tuple[tuple[float, ...], tuple[float, ...]]]
    rates: tuple[float, float]  #: of server_lr in the tuned rows: a fifth of the scripts' value to forty times
    note: str  #: where the paper contradicts itself


WKAFL_DATA = {
    "mnist": WkaflNumbers(
        "emnist",
        "mnist",
        2,
        ((0.9734, 0.9620, 0.9319), (0.9756, 0.9649, 0.8753), (0.9728, 0.9572, 0.8553)),
        {
            1: ((0.9728, 0.9572, 0.9057, 0.8553), (0.0060, 0.0107, 0.0032, 0.0834)),
            5: ((0.9754, 0.9649, 0.9080, 0.8753), (0.0068, 0.0095, 0.0027, 0.0237)),
            10: ((0.9658, 0.9623, 0.9075, 0.8619), (0.0036, 0.0060, 0.0018, 0.0206)),
        },
        (0.001, 0.2),
        "The paper contradicts itself: Table 2 has at P/K = 150 the numbers of TWAFL and SASGD that Table 3 has at "
        "P/K = 300 and L_num = 5; the text gives GSGM 85.53 % at L_num = 1, which is SASGD's number in Table 3 (GSGM: "
        "90.57 %).",
    ),
    "cifar10": WkaflNumbers(
        "cifar10",
        "cifar10",
        1,
        ((0.4433, 0.4246, 0.3308), (0.4368, 0.4241, 0.2560), (0.3970, 0.3468, 0.2029)),
        {
            1: ((0.4368, 0.4141, 0.3568, 0.2560), (0.0284, 0.0464, 0.0135, 0.0226)),
            5: ((0.4443, 0.4454, 0.3568, 0.2855), (0.0133, 0.0300, 0.0083, 0.0141)),
            10: ((0.4489, 0.4525, 0.3430, 0.2874), (0.0180, 0.0260, 0.0144, 0.0189)),
        },
        (0.0001, 0.02),
        "The paper contradicts itself: TWAFL at 3000/20 and L_num = 1 has .4241 in Table 2 and .4141 in Table 3.",
    ),
}
#: The paper counts the staleness from 1, so that SASGD's factor is 1 / (staleness + 1).
WKAFL_METHODS = {
    "WKAFL": "",
    "TWAFL": "twafl",
    "GSGM": "gsgm",
    "SASGD": "sasgd:staleness=polynomial(1)",
    "plain mean": "afa_cd",  # our addition, in the tuned rows
}
#: Of WKAFL's options, those that are tuned beside server_lr, and their ranges.
WKAFL_RANGES = {"beta": "1..50", "sim_min": "0..0.5"}
#: Their weights fall with the staleness and do not sum to one: in the common range, they took the largest rate drawn.
WKAFL_DAMPED = ("TWAFL", "SASGD")
WKAFL_OTHERS = (LAST, BEST)


def _wkafl_cell(short: str, method: str, level: int, classes: int, number: float | None, tuned: bool = False) -> Cell:
    """Return a cell with the settings of the preset of its level; `tuned`: the rule lacks the options to be tuned."""
    own = WKAFL_DATA[short]
    experiment = EXPERIMENTS[own.preset]
    clients, arrivals = experiment.levels[level]
    preset = find_preset(f"wkafl-{own.preset}" + (f"-{clients // arrivals}" if level else ""))
    rule = f"{WKAFL_METHODS[method] or experiment.rule}:buffer_size={arrivals}"
    if tuned:
        rule = sub(f":({'|'.join(WKAFL_RANGES)})=[^:]*", "", rule)
    else:
        rule += f":server_lr={experiment.server_lr}"
    task = preset.settings["task"].value.replace(f"dataset={experiment.data}:", f"dataset={own.data}:")
    end = {"rounds": 0, "arrivals": experiment.rounds * arrivals}
    settings = preset.values() | {"task": task, "classes": classes} | end
    if method == "GSGM":  # a client that has entered a pass waits for its end, section 6.1.2
        settings |= {"selection": "blocked-until-pass-ends"}
    return Cell(f"{method}, P/K = {clients}/{arrivals}, L_num = {classes}", rule, settings, number)


def _wkafl_table_2(short: str) -> Iterator[Cell]:
    own = WKAFL_DATA[short]
    for level, numbers in enumerate(own.table_2):
        for method, number in zip(("WKAFL", "TWAFL", "SASGD"), numbers, strict=True):
            yield _wkafl_cell(short, method, level, 1, number)


def _wkafl_table_3(short: str, column: int) -> Iterator[Cell]:
    own = WKAFL_DATA[short]
    for classes, numbers in own.table_3.items():
        for method, number in zip(("WKAFL", "TWAFL", "GSGM", "SASGD"), numbers[column], strict=True):
            yield _wkafl_cell(short, method, own.mixed, classes, number)


def _wkafl_rates(short: str, method: str) -> str:
    """Return the range of a method's rate in the tuned rows, ten times the common one for damped methods."""
    low, high = (rate * (10 if method in WKAFL_DAMPED else 1) for rate in WKAFL_DATA[short].rates)
    return f"server_lr={low:g}..{high:g}"


def _wkafl_tuned(short: str) -> Iterator[Cell]:
    """Yield the first and the last row of Table 2: methods tuned with the settings of the first, half the length."""
    own = WKAFL_DATA[short]
    for level in (0, 2):
        for method, number in zip(("WKAFL", "TWAFL", "SASGD", "plain mean"), (*own.table_2[level], None), strict=True):
            first = _wkafl_cell(short, method, 0, 1, None, tuned=True)
            half = {"part": "validation", "arrivals": first.settings["arrivals"] // 2}
            more = [f"{name}={values}" for name, values in WKAFL_RANGES.items()] if method == "WKAFL" else []
            search = Search(method, first.rule, {**first.settings, **half}, (_wkafl_rates(short, method), *more))
            yield _wkafl_cell(short, method, level, 1, number, tuned=True)._replace(search=search)


def _curves(cells: Iterable[Cell], panel: int) -> Iterator[Cell]:
    """Yield the cells of a table of WKAFL as the curves of a figure, with a part of their names as the panel."""
    for cell in cells:
        words = cell.name.split(", ")
        yield cell.curve(f"{words[panel]}, {words[0]}")


def _wkafl_figure_11() -> Iterator[Cell]:
    """Yield WKAFL and Zeno++ (Table 4), 1,500 iterations of one arrival, of which it may reject some."""
    wkafl = _wkafl_cell("mnist", "WKAFL", 1, 1, None)
    yield wkafl._replace(name="WKAFL, P/K = 3000/20", settings={**wkafl.settings, "arrivals": 1500 * 20})
    for classes in (1, 10):
        own: dict[str, Any] = {"num_clients": 100, "concurrency": 100, "refill": 1, "arrivals": 1500, "eval_every": 50}
        own |= {"task": f"{wkafl.settings['task']}:server_classes={classes}"}
        for every in (2, 5):
            settings = {**wkafl.settings, **own, "refresh_every": every}
            name = f"Zeno++ with {classes} class{'es' if classes > 1 else ''}, k = {every}"
            yield Cell(name, "zenopp:server_lr=0.005", settings)


PLANNED = "planned"


def later(paper: str, name: str, shows: str, needs: str, hours: float, why: str = "") -> Table:
    """Return a table that is not run here; `why`: in place of the hours on a CPU."""
    return Table(name, paper, shows, needs, hours, open=why or f"its network needs a GPU: {hours:.0f} CPU hours")


def afl_tables() -> Iterator[Table]:
    """Yield the tables of Anarchic FL."""

    def run(name: str, shows: str, hours: float, cells: Iterable[Cell], **more: Any) -> Table:
        more = {"reading": BEST_OF_EVERY_FIFTH, "others": AFL_OTHERS} | more
        needs = "MNIST, logistic regression, 150 rounds"
        return Table(f"afl-{name}", AFL, shows, needs, hours, tuple(cells), 5, **more)

    not_run = partial(later, AFL)
    cnn, lstm = "CIFAR-10, CNN, 10,000 rounds of batch 500", "Shakespeare, LSTM, 300 rounds"
    yield run("table2", "Table 2, logistic regression", 0.25, _afl_table_2(), note=AFL_DYNAMIC)
    yield run("table3", "Table 3, logistic regression: FedProx and SCAFFOLD", 0.17, _afl_table_3(), note=AFL_LOCAL)
    curves = "Figure 2: curves for 5/10 workers and 5 steps, the runs of Table 2"
    yield run("figure2", curves, 0.0, _afl_figure_2())
    arrivals = "Figures 1 and 5: FedAvg, AFA-CD and AFA-CS with uniform and biased arrivals"
    yield run("arrivals", arrivals, 0.1, _afl_arrivals())
    claim = {"reading": rounds_to(0.85), "others": (rounds_to(0.85, 5),), "note": AFL_CLAIM}
    yield run("claim85", "Appendix E.1: rounds to 85 %", 0.01, _afl_claim(), **claim)
    other = "another edition of the text has other roles: its numbers cannot be compared"
    yield not_run("afl-table2-cnn", "Table 2, CNN (16 cells)", cnn, 840)
    yield not_run("afl-table2-lstm", "Table 2, LSTM (4 cells)", lstm, 23, other)
    yield not_run("afl-table3-cnn", "Table 3, CNN (16 cells)", cnn, 840)
    yield not_run("afl-table3-lstm", "Table 3, LSTM (4 cells)", lstm, 23, other)
    yield not_run("afl-figure6", "Figure 6: biased arrivals", cnn, 630)


def wkafl_tables() -> Iterator[Table]:
    """Yield the tables of WKAFL."""

    def run(
        name: str, shows: str, needs: str, hours: float, cells: Iterable[Cell], memory: float, **more: Any
    ) -> Table:
        more = {"reading": MEAN_OF_TEN, "others": WKAFL_OTHERS} | more
        return Table(f"wkafl-{name}", WKAFL, shows, needs, hours, tuple(cells), memory=memory, **more)

    cnn = "MNIST in place of EMNIST MNIST, CNN, {} steps of batch 4"
    lenet = "CIFAR-10, LeNet, 10,000 steps of batch 8"
    for short, needs, hours, memory, figures in (
        ("mnist", cnn.format("5,000"), (2.0, 1.5, 2.7), 5.0, (7, 9)),
        ("cifar10", lenet, (1.8, 2.1, 2.5), 3.0, (8, 10)),
    ):
        own = WKAFL_DATA[short]
        scripts, notes = f"{short}, at the scripts' values", {"note": own.note}
        stability = {"reading": STABILITY, "others": (LOG_STABILITY,)}
        tables = _wkafl_table_2(short), _wkafl_table_3(short, 0)
        curves = [f"Figure {number}, {short}: curves of the runs of Table {2 + k}" for k, number in enumerate(figures)]
        yield run(f"table2-{short}", f"Table 2, {scripts}", needs, hours[0], tables[0], memory, **notes)
        yield run(f"table3-{short}", f"Table 3, {scripts}: accuracy", needs, hours[1], tables[1], memory, **notes)
        same = f"Table 3, {scripts}: stability, the same runs"
        yield run(f"table3-{short}-stability", same, needs, 0.0, _wkafl_table_3(short, 1), memory, **stability)
        yield run(f"figure{figures[0]}", curves[0], needs, 0.0, _curves(_wkafl_table_2(short), 1), memory)
        yield run(f"figure{figures[1]}", curves[1], needs, 0.0, _curves(_wkafl_table_3(short, 0), 2), memory)
        also = " and ".join(f"{name}={values}" for name, values in WKAFL_RANGES.items())
        trials = f"six trials of a method on validation data, half the length, seed {TRIALS_SEED}"
        rates = f"{_wkafl_rates(short, 'WKAFL')} ({' and '.join(WKAFL_DAMPED)} ten times these)"
        tuned = f"{needs}; {trials}: {rates}, WKAFL also {also}"
        rows = f"Table 2, {short}, first and last row, with tuned rates; the plain mean (afa_cd) is our addition"
        yield run(f"tuned-{short}", rows, tuned, hours[2], _wkafl_tuned(short), memory)
    zeno = "Figure 11: Zeno++ with server data of 1 or 10 classes"
    decided = "The classes of the clients and the rate of Zeno++ are not printed: 1 and .005, as in Table 2."
    yield run("figure11", zeno, cnn.format("1,500"), 0.4, _wkafl_figure_11(), 3.0, note=decided)
    weights, setting = (
        "Figure 2: staleness and arrivals of a round by weight",
        "no training: P/K = 1000/10, 5,000 steps",
    )
    decided = (
        "The paper gives neither mu nor the settings of its points: here mu is 10, and the base of the weights varies."
    )
    yield Table("wkafl-figure2", WKAFL, weights, setting, note=decided, computed=True)
    ablations, absent = "Figures 5 and 6: ablations, four methods", "the data sets are not at hand"
    yield later(WKAFL, "wkafl-figures5-6", ablations, "CelebA, EMNIST ByClass", 0, absent)
