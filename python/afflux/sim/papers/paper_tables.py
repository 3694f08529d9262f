"""The tables and figures of the four papers as data: a cell is one run with one number of the paper beside it.

Anarchic FL: Yang, Zhang, Khanduri and Liu, ICML 2022. WKAFL: Zhou, Li, Ren and Yang, IEEE Transactions on Computers
2022.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import nan
from typing import Any, NamedTuple

import numpy as np

from afflux.sim.papers.presets.registry import find_preset
from afflux.sim.papers.presets.wkafl import EXPERIMENTS
from afflux.sim.results.run_result import Evaluation


class Reading(NamedTuple):
    """One number of a run, computed from its evaluations; the first of these is at the start."""

    name: str
    of: Callable[[Sequence[Evaluation]], float]


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


def rounds_to(accuracy: float) -> Reading:
    """Return the first version whose accuracy reaches `accuracy`, as a reading; nan if none does."""

    def first(evaluations: Sequence[Evaluation]) -> float:
        return next((float(one.version) for one in evaluations if one.accuracy >= accuracy), nan)

    return Reading(f"rounds to an accuracy of {accuracy:g}", first)


class Cell(NamedTuple):
    """One run of a table, for each seed."""

    name: str
    """Different from those of the table's other cells."""
    rule: str
    """With all options, as text."""
    settings: Mapping[str, Any]
    """Those that differ from `SimConfig`'s defaults, without the folder of the data."""
    paper: float | None = None
    """The number that the paper prints; None: a figure's curve, or our own addition."""


@dataclass(frozen=True)
class Table:
    """One table or figure."""

    name: str
    """For the command line."""
    paper: str
    shows: str
    needs: str = ""
    """Data, model and length."""
    hours: float = 0.0
    """CPU hours of all cells and seeds, by a measurement of single runs."""
    cells: tuple[Cell, ...] = ()
    """Empty: it is not run here, and `open` says why."""
    seeds: int = 3
    reading: Reading = LAST
    """The number that is compared with the paper's, chosen for the paper before its runs were made."""
    others: tuple[Reading, ...] = ()
    """Other readings, which are shown beside it."""
    open: str = ""
    """Why it is not run here."""
    note: str = ""
    """Where the paper contradicts itself, or leaves something open."""
    memory: float = 0.6
    """GB that one run needs."""


AFL, WKAFL, CA2FL, FADAS = "Anarchic FL", "WKAFL", "CA2FL", "FADAS"

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


# WKAFL. Section 6.1.1 and the authors' scripts: K-async, one gradient of one batch; MNIST stands for EMNIST MNIST.


class WkaflNumbers(NamedTuple):
    """The printed numbers of a data set; its settings are those of the presets."""

    preset: str  #: the first of its presets
    data: str  #: in place of the preset's
    mixed: int  #: index of the level of Table 3
    table_2: tuple[tuple[float, float, float], ...]  #: of WKAFL, TWAFL and SASGD, by level
    #: By L_num: accuracy and stability of WKAFL, TWAFL, GSGM and SASGD.
    table_3: Mapping[int, tuple[tuple[float, ...], tuple[float, ...]]]


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
    ),
}
#: The paper counts the staleness from 1, so that SASGD's factor is 1 / (staleness + 1).
WKAFL_METHODS = {
    "WKAFL": "",
    "TWAFL": "twafl",
    "GSGM": "gsgm",
    "SASGD": "sasgd:staleness=polynomial(1)",
}
WKAFL_OTHERS = (LAST, BEST)


def _wkafl_cell(short: str, method: str, level: int, classes: int, number: float | None) -> Cell:
    """Return a cell with the settings of the preset of its level."""
    own = WKAFL_DATA[short]
    experiment = EXPERIMENTS[own.preset]
    clients, arrivals = experiment.levels[level]
    preset = find_preset(f"wkafl-{own.preset}" + (f"-{clients // arrivals}" if level else ""))
    rule = f"{WKAFL_METHODS[method] or experiment.rule}:buffer_size={arrivals}:server_lr={experiment.server_lr}"
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
        for method, number in zip(WKAFL_METHODS, numbers[column], strict=True):
            yield _wkafl_cell(short, method, own.mixed, classes, number)


_GPU = "its network needs a GPU: {:.0f} CPU hours"
_NO_CIFAR100 = "CIFAR-100 is not at hand"


def _later(name: str, paper: str, shows: str, needs: str, hours: float, why: str) -> Table:
    return Table(name, paper, shows, needs, hours, open=why)


def _tables() -> Iterator[Table]:
    mnist_150 = "MNIST, logistic regression, 150 rounds"
    logistic: dict[str, Any] = {"reading": BEST_OF_EVERY_FIFTH, "others": AFL_OTHERS}
    yield Table(
        "afl-table2", AFL, "Table 2, logistic regression", mnist_150, 0.25, tuple(_afl_table_2()), 5, **logistic
    )
    yield Table(
        "afl-table3",
        AFL,
        "Table 3, logistic regression: FedProx and SCAFFOLD",
        mnist_150,
        0.17,
        tuple(_afl_table_3()),
        5,
        **logistic,
    )
    yield Table(
        "afl-arrivals",
        AFL,
        "Figures 1 and 5: FedAvg, AFA-CD and AFA-CS with uniform and biased arrivals",
        mnist_150,
        0.1,
        tuple(_afl_arrivals()),
        5,
        **logistic,
    )
    yield Table(
        "afl-claim85",
        AFL,
        "Appendix E.1: rounds to 85 %",
        mnist_150,
        0.01,
        tuple(_afl_claim()),
        5,
        reading=rounds_to(0.85),
        note="The ratio of wall-clock times, 1/2.6, is not that of the rounds protocol, in which a round lasts until "
        "its slowest worker: with exponential times, the first five of ten in place of all five would give 1/2.67.",
    )
    cnn, lstm = "CIFAR-10, CNN, 10,000 rounds of batch 500", "Shakespeare, LSTM, 300 rounds"
    other = "another edition of the text has other roles: its numbers cannot be compared"
    yield _later("afl-table2-cnn", AFL, "Table 2, CNN (16 cells)", cnn, 840, _GPU.format(840))
    yield _later("afl-table2-lstm", AFL, "Table 2, LSTM (4 cells)", lstm, 23, other)
    yield _later("afl-table3-cnn", AFL, "Table 3, CNN (16 cells)", cnn, 840, _GPU.format(840))
    yield _later("afl-table3-lstm", AFL, "Table 3, LSTM (4 cells)", lstm, 23, other)
    yield _later("afl-figure6", AFL, "Figure 6: biased arrivals", cnn, 630, _GPU.format(630))
    for short, about, hours, memory in (
        ("mnist", "MNIST in place of EMNIST MNIST, CNN, 5,000 steps of batch 4", (2.0, 1.5), 5.0),
        ("cifar10", "CIFAR-10, LeNet, 10,000 steps of batch 8", (1.8, 2.1), 3.0),
    ):
        reading: dict[str, Any] = {"reading": MEAN_OF_TEN, "others": WKAFL_OTHERS, "memory": memory}
        yield Table(
            f"wkafl-table2-{short}",
            WKAFL,
            f"Table 2, {short}, at the scripts' values",
            about,
            hours[0],
            tuple(_wkafl_table_2(short)),
            note="Two cells of Table 2 equal cells of Table 3 with other settings."
            if short == "mnist"
            else "Table 2 has .4241 for TWAFL at 3000/20, Table 3 has .4141 for the same run.",
            **reading,
        )
        yield Table(
            f"wkafl-table3-{short}",
            WKAFL,
            f"Table 3, {short}, accuracy at the scripts' values",
            about,
            hours[1],
            tuple(_wkafl_table_3(short, 0)),
            note="The text gives GSGM 85.53 % at L_num = 1, which Table 3 gives SASGD." if short == "mnist" else "",
            **reading,
        )
        yield Table(
            f"wkafl-table3-{short}-stability",
            WKAFL,
            f"Table 3, {short}, stability: the same runs",
            about,
            0.0,
            tuple(_wkafl_table_3(short, 1)),
            reading=STABILITY,
            others=(LOG_STABILITY,),
            memory=memory,
        )
    absent = "the data sets are not at hand"
    yield _later(
        "wkafl-figures5-6", WKAFL, "Figures 5 and 6: ablations, four methods", "CelebA, EMNIST ByClass", 0, absent
    )
    yield _later(
        "wkafl-figure2", WKAFL, "Figure 2: staleness and arrivals of a round by weight", "MNIST, CNN", 0.3, PLANNED
    )
    yield _later(
        "wkafl-figure11", WKAFL, "Figure 11: Zeno++ with server data of 1 or 10 classes", "MNIST, CNN", 0.4, PLANNED
    )
    yield from _of_ca2fl()
    yield from _of_fadas()


PLANNED = "planned"


def _of_ca2fl() -> Iterator[Table]:
    cnn, resnet = "CIFAR-10, CNN, 500 rounds", "CIFAR-10, ResNet-18, 500 rounds"
    yield _later("ca2fl-table1", CA2FL, "Table 1: accuracy, rounds to 50 %", cnn, 8.3, PLANNED)
    yield _later("ca2fl-table2", CA2FL, "Table 2, Figure 2: Dir(.3), Dir(.1)", cnn, 6.6, PLANNED)
    yield _later("ca2fl-tables1-2-resnet", CA2FL, "Tables 1 and 2, ResNet-18 (13 cells)", resnet, 750, _GPU.format(750))
    yield _later(
        "ca2fl-table3",
        CA2FL,
        "Table 3: Dir(.1), Dir(.01)",
        "CIFAR-100, ResNet-18",
        670,
        _GPU.format(670) + "; " + _NO_CIFAR100,
    )
    yield _later("ca2fl-table4", CA2FL, "Table 4: staleness by concurrency and buffer", "no training", 0, PLANNED)
    yield _later("ca2fl-table5", CA2FL, "Table 5: staleness by law of delay", "no training", 0, PLANNED)
    yield _later("ca2fl-figure4", CA2FL, "Figure 4: concurrency and buffer", cnn, 13, PLANNED)
    yield _later("ca2fl-figure5", CA2FL, "Figure 5: laws of delay", cnn, 10, PLANNED)
    yield _later("ca2fl-figure6", CA2FL, "Figure 6: FedAsync", cnn, 3.3, PLANNED)


def _of_fadas() -> Iterator[Table]:
    cnn, resnet = "CIFAR-10, CNN, 500 rounds", "CIFAR-10, ResNet-18, 500 rounds"
    gpu = _GPU.format(670)
    yield _later("fadas-tables2-8", FADAS, "Tables 2 and 8: large delays", resnet, 670, gpu)
    yield _later(
        "fadas-tables2-8-cnn", FADAS, "Tables 2 and 8, the order of the rules on a CNN, Dir(.1)", cnn, 6.6, PLANNED
    )
    yield _later(
        "fadas-tables3-9", FADAS, "Tables 3 and 9: CIFAR-100", "CIFAR-100, ResNet-18", 670, f"{gpu}; {_NO_CIFAR100}"
    )
    yield _later("fadas-tables4-5", FADAS, "Tables 4 and 5: mild delays", resnet, 1340, _GPU.format(1340))
    yield _later(
        "fadas-table6", FADAS, "Table 6: LoRA on GLUE", "BERT base, GLUE", 0, "checkpoint and data are not at hand"
    )
    yield _later("fadas-table7", FADAS, "Table 7: time to a target, mild delays", cnn, 6.6, PLANNED)
    yield _later("fadas-figure1a", FADAS, "Figure 1 (a): tau_c 1, 4, 8, 10", cnn, 5, PLANNED)
    yield _later("fadas-figure1b-f", FADAS, "Figure 1 (b) to (f): concurrency and buffer", cnn, 18, PLANNED)
    yield _later("fadas-claims", FADAS, "Section 6.3: largest staleness", "no training", 0, PLANNED)


TABLES: dict[str, Table] = {table.name: table for table in _tables()}
