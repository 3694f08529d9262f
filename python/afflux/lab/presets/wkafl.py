"""WKAFL (Zhou, Li, Ren and Yang, IEEE TPDS 2022): Tables 2 and 3 and the authors' scripts."""

from collections.abc import Iterator
from typing import NamedTuple

from afflux.lab.presets.preset import DECIDED, Preset, Sourced, sourced, task_of

PAPER = "WKAFL, IEEE TC 2022"
CODE = "the authors' script"
_DELAYS = f"{DECIDED}: then any K of the P clients are first, as in {CODE}; no law in the paper"
_RULE = f"{CODE}; stage two begins at an iteration there, at a loss without value in the paper"


class Experiment(NamedTuple):
    """The settings of a data set."""

    data: str
    model: str
    levels: tuple[tuple[int, int], ...]  #: (P, K) of Table 2; the first has no number in its name
    inputs: str  #: their scale in the scripts, for which server_lr is
    rule: str
    server_lr: float
    batch_size: int
    rounds: int
    test_every: int


EXPERIMENTS = {
    "emnist": Experiment(
        "emnist-mnist",
        "wkafl-cnn",
        ((1000, 10), (3000, 20), (3000, 10)),
        "standardised",
        "wkafl:alpha=0.1:sim_min=0.3:beta=10:gamma=0.1:clip=100:stage_two_clip=10:stage_two_version=1000",
        0.005,
        4,
        5000,
        50,
    ),
    "cifar10": Experiment(
        "cifar10",
        "lenet5",
        ((1000, 20), (3000, 20), (3000, 10)),
        "raw",
        "wkafl:alpha=0.1:sim_min=0.3:beta=50:gamma=0.01:clip=70:stage_two_clip=5:stage_two_version=3500",
        0.0005,
        8,
        10000,
        100,
    ),
}


def presets() -> Iterator[Preset]:
    """Yield the presets: two data sets with three levels of staleness P/K."""
    for short, own in EXPERIMENTS.items():
        for place, (clients, arrivals) in enumerate(own.levels):
            settings = {
                **sourced("section 6.1.1", task=task_of(own.data, own.model, own.inputs)),
                **sourced("Table 2 and section 6.3.1: P", num_clients=clients),
                **sourced("section 3: all P clients compute at once", concurrency=clients),
                **sourced("section 3: K-async", refill=arrivals),
                **sourced("Algorithm 4", partition="wkafl"),
                **sourced("Tables 2 and 3: L_num, where their accuracies are the same", classes=1),
                **sourced(_DELAYS, delays="exponential"),
                **sourced("Algorithm 1: the gradient of one mini-batch", local_steps=1),
                **sourced(CODE, batch_size=own.batch_size),
                **sourced("section 6.1.2: m_i is the size of the mini-batch", examples="batch"),
                **sourced(f"{DECIDED}: any, as clients send gradients of one step", client_lr=0.1),
                **sourced(CODE, rounds=own.rounds),
                **sourced(f"{CODE}: every {own.test_every} iterations", eval_every=own.test_every * arrivals),
            }
            yield Preset(
                f"wkafl-{short}" + (f"-{clients // arrivals}" if place else ""),
                PAPER,
                f"{own.model} on {own.data}, P/K = {clients}/{arrivals}, 1 class a client",
                own.data,
                own.model,
                Sourced(own.rule, _RULE),
                settings,
                Sourced(arrivals, "Table 2 and section 6.3.1: K"),
                Sourced(own.server_lr, CODE),
                "Other levels of Table 3: --classes 5 and --classes 10.",
            )
