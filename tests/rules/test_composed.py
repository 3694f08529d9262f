"""Any weigh x any calibrate x any step: two rounds of each composition, equal bit for bit to the composed stages."""

from functools import partial
from itertools import cycle, product

import numpy as np
import pytest

import oracle
from afflux import Rule, Server
from afflux.rules import optimizers, schedules, staleness, weights
from afflux.rules.calibration import CACHED_DIFFERENCE, CACHED_MEAN, CACHED_MEAN_OF_SEEN, NONE
from afflux.rules.presets.aflguard import DistanceTest
from afflux.rules.presets.fltrust import TrustScores
from afflux.rules.presets.gsgm import GradientScheduling
from afflux.rules.presets.krum import Krum
from afflux.rules.presets.wkafl import CosineSelection
from afflux.rules.presets.zenopp import ScoreTest
from afflux.rules.rule import Needs, Weights
from conftest import bits, check_error, push_all, ready
from steps import STEPS, instance, numbers

SIZE, CLIENTS, BUFFER = 37, 6, 4


def decayed(arrivals):
    return Weights(weights.Examples()(arrivals), params=-0.03 if arrivals.version else np.float32(0.25))


WEIGH = {
    "decayed": decayed,
    "uniform": weights.Uniform(),
    "examples": weights.Examples(),
    "given": weights.Given("quality"),
    "staleness": weights.Staleness(staleness.Polynomial(0.5)),
    "exponential": weights.Staleness(staleness.Exponential(), "weights", by_examples=True),
    "hinge": weights.Staleness(staleness.Hinge(1.0, 0.0), None, scale=0.5),
    "inverse": weights.Staleness(staleness.Inverse()),
    "selection": CosineSelection(clip=5.0),
    "aggregate": CosineSelection(clip=5.0, memory="aggregate", stage_two_version=1),
    "scheduling": GradientScheduling(),
    "score": ScoreTest(rho=0.01),
    "distance": DistanceTest(5.0),
    "trust": TrustScores(),
    "krum": Krum(0, 2),
    "trimmed": weights.Trimmed(weights.Examples(), 0.2),
    "median": weights.Trimmed(CosineSelection(clip=5.0, memory="aggregate", stage_two_version=1), 0.5),
}
CALIBRATE = {"none": NONE, "difference": CACHED_DIFFERENCE, "mean": CACHED_MEAN, "seen": CACHED_MEAN_OF_SEEN}
LR = {"number": 0.25, "delay": schedules.DelayAdaptive(0.5, 0), "minimum": schedules.MinimumStaleness(0.25),
      "version": schedules.ByVersion({0: 0.5, 1: 0.125})}  # fmt: skip
STEP = {name: partial(instance, step, i=i) for i, (name, step) in enumerate(STEPS.items())}
STEP["nesterov"] = partial(optimizers.Momentum, beta=0.75, dampening=0.25, nesterov=True)


class Recorded:
    """A weigh part, and its last result."""

    def __init__(self, part):
        self.part, self.needs, self.said = part, getattr(part, "needs", Needs()), None

    def __call__(self, arrivals, /):
        said = self.part(arrivals)
        self.said = said if isinstance(said, Weights) else Weights(said)
        return said


def composed(rule, calibrate, stepper, before, buffer, report):
    """Params, rule vectors, rows and sum after a round, by the engine's stages; weights and lr are the report's."""
    said, names = rule.weigh.said, list(rule.needs.rule_vectors)
    held = [before["rule_vectors"][name] for name in names]
    ids, vectors = [client for client, _, _ in buffer], [vector for _, _, vector in buffer]
    accepted = [not why for why in report.rejected]
    rows, cache = before["rows"], None
    if calibrate != "none":
        rows = rows | {c: u for c, u, ok in zip(ids, vectors, accepted, strict=True) if ok}
        counted = len(rows) if calibrate == "seen" else CLIENTS
        kind = "difference" if calibrate == "difference" else "mean"
        cache = (kind, before["sum"], counted, [before["rows"].get(c) for c in ids], accepted, 1.0)
    against = said.params - (oracle.ordered_sum(report.weights.tolist()) if rule.kind == "model" else 0.0)
    mixed = np.array(said.rule_vectors or [0.0] * len(held))
    if calibrate != "none" and report.weights.tolist() != said.vectors.tolist():
        mixed = mixed / oracle.ordered_sum(said.vectors.tolist())  # normalised together with the arrivals' weights
    memory = (held, mixed)
    v, new_sum = oracle.direction(before["params"], vectors, report.weights, against, memory, cache, said.trim)
    lr = -report.server_lr if rule.kind == "gradient" else report.server_lr
    kept = [before["rule_vectors"][name] for name in rule.states]
    params, *moments = oracle.step(stepper, before["params"], v, kept, lr, *numbers(rule.step))
    renewed = held if said.next is None else oracle.next_memories(held, vectors, said.next)
    rule_vectors = dict(zip([*names, *rule.states], [*renewed, *moments], strict=True))
    return {"params": params, "rule_vectors": rule_vectors, "rows": rows, "sum": new_sum}


def now(server):
    """What a server holds."""
    rows = server.rows
    own = ({}, None) if rows is None else ({c: rows.row(c) for c in rows.client_ids}, rows.sum.copy())
    return {"params": server.params, "rule_vectors": server.rule_vectors, "rows": own[0], "sum": own[1]}


def same(left, right):
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    return left is right if left is None or right is None else bits(left) == bits(right)


def two_rounds(rng, kind, passes):
    """(client, staleness, vector) in canonical order; in the second one, clients of the first one too."""
    common = rng.standard_normal(SIZE)
    for clients, oldest in (([0, 1, 2, 3], 0), ([4, 5] if passes else [1, 3, 4, 5], 1)):
        yield [
            (c, oldest if c % 2 else 0, (sign * common + rng.standard_normal(SIZE)).astype(kind))
            for c, sign in zip(clients, (1, 1, -1, 1), strict=False)
        ]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("weigher", WEIGH)
def test_every_composition(weigher, dtype, rng):
    laws = cycle(LR)
    for kind, calibrate, stepper in product(("update", "gradient", "model"), CALIBRATE, STEP):
        needs = getattr(WEIGH[weigher], "needs", Needs())
        if kind == "model" and (calibrate != "none" or needs.products or needs.rule_vectors):
            continue  # refused: see test_models_have_no_memory
        if needs.trim and calibrate != "none":
            continue  # refused, too
        law = next(laws)
        rule = Rule("own", kind, BUFFER, Recorded(WEIGH[weigher]), CALIBRATE[calibrate], STEP[stepper](LR[law]))
        server = Server(rule, rng.standard_normal(SIZE).astype(dtype), num_clients=CLIENTS, dtype=dtype)
        what = (kind, calibrate, stepper, law)
        for buffer in two_rounds(rng, dtype, rule.needs.passes):
            ready(server, buffer[1][-1] + buffer[0][-1])
            before, version = now(server), server.version
            for client, age, vector in buffer:
                facts = {name: client + 0.5 for name in rule.needs.facts}
                arguments = {server.rule.kind: vector, "num_examples": client + 1, "facts": facts}
                pushed = server.push(client=client, version=version - age, **arguments)
            report = pushed.report
            assert report.stepped
            assert same(now(server), composed(rule, calibrate, stepper, before, buffer, report)), what
            accepted = [not why for why in report.rejected]
            assert accepted == [w != 0 for w in rule.weigh.said.vectors], what
            check_weights(report.weights, rule.weigh.said.vectors, calibrate)
            lr = {"number": 0.25, "minimum": 0.25, "delay": 0.5, "version": 0.5 - version * 0.375}[law]
            assert report.server_lr == lr * (1 - rule.step.dampening if stepper == "momentum" else 1)


@pytest.mark.parametrize("weigher", ["selection", "scheduling", "score"])
def test_models_have_no_memory(weigher):
    check_error("not of models", Rule, "own", "model", BUFFER, WEIGH[weigher], CALIBRATE["none"], optimizers.Sgd(1.0))


@pytest.mark.parametrize("decay", [np.nan, np.inf, "much", [0.1]])
def test_the_weight_of_params_is_a_finite_number(decay):
    weigh = lambda arrivals: Weights(np.ones(len(arrivals)), params=decay)  # noqa: E731
    rule = Rule("own", "update", 1, weigh, NONE, optimizers.Sgd(1.0))
    server = Server(rule, np.ones(3))
    check_error("weigh gave params", server.push, client=0, version=0, update=np.ones(3))
    assert (server.version, server.counts["joined"], server.params.tolist()) == (0, 0, [1, 1, 1])


def check_weights(used, said, calibrate):
    """With rows, weights are normalised to sum to 1; without rows, they are the result of weigh."""
    if calibrate == "none":
        assert used.tolist() == said.tolist()
        return
    assert abs(oracle.ordered_sum(used.tolist()) - 1) <= 4 * BUFFER * oracle.EPS
    assert np.all(np.abs(used - said / oracle.ordered_sum(said.tolist())) <= 2 * BUFFER * oracle.EPS * np.abs(used))


def test_a_rejected_arrival_leaves_its_row_and_the_sum_alone():
    """WKAFL's selection over CA2FL's rows: client 2 pushes the opposite of all other updates."""
    rule = Rule("own", "gradient", 3, CosineSelection(), CACHED_DIFFERENCE, optimizers.Sgd(0.5))
    server = Server(rule, np.zeros(2, np.float32), num_clients=3)
    push_all(server, range(3), np.array([(1, 0), (1, 0.5), (1, 0.25)]).__getitem__, version=0)
    row = server.rows.row(2)
    report = push_all(server, range(3), np.array([(2, 0), (2, 1), (-3, 0.5)]).__getitem__, version=1).report
    assert [bool(why) for why in report.rejected] == [False, False, True]
    assert bits(server.rows.row(2)) == bits(row)
    assert server.rows.sum.tolist() == [2 + 2 + 1, 0 + 1 + 0.25]
