"""Every preset, its options and every element type against the float64 oracle, round by round; and its decisions."""

import numpy as np
import pytest

import bounds
import oracle
import presets
from afflux import Server, ops
from afflux.rules import RULES, fadas, sasgd, twafl, wkafl, zenopp
from afflux.rules.rule import Arrivals, Weights
from afflux.rules.staleness import Exponential, Hinge, Polynomial
from conftest import push_all
from variants import CLIENTS, SIZE, TYPES, VARIANTS, push, round_options, serve, state, trace

ROUNDS = 60
#: Rules whose params are a fixed linear function of what was pushed: errors add up, and nothing else.
LINEAR = [v for v, (name, _) in VARIANTS.items() if name not in presets.VECTORS]


def play(variant, server, seed, kind="float32", rounds=ROUNDS):
    """Round after round: the state before, what was in the buffer in canonical order, the report."""
    rule, rng, entered = server.rule, np.random.default_rng(seed), 0
    for i, joins in enumerate(trace(variant, rounds, seed)):
        if rule.needs.handed_in and i % 3 == 0:
            common = sum(vector for *_, vector in joins) / len(joins)
            server.set_rule_vector("validation", (common + rng.standard_normal(SIZE)).astype(np.float32))
        before = state(server, entered)
        receipts, buffer = push(server, joins, kind)
        assert [r.report is not None for r in receipts] == [False] * (len(joins) - 1) + [True]
        yield before, buffer, receipts[-1].report
        entered = (entered + len(joins)) % CLIENTS


def test_the_oracle_knows_every_rule():
    assert set(presets.ROUNDS) == set(RULES) == {name for name, _ in VARIANTS.values()}


@pytest.mark.parametrize("types", TYPES)
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_round_against_the_oracle(variant, types):
    """From the engine's own state, every vector is within its bound and every decision is the oracle's."""
    name, options = VARIANTS[variant][0], round_options(variant)
    serving, dtype, kind = TYPES[types]
    rounds = ROUNDS if types == "float32" else ROUNDS // 3
    server = serve(variant, **serving)
    comparable, seen, written, largest = 0, {}, 0, 0.0
    kept = variant if variant in presets.VECTORS else name
    first = presets.start(kept, server.params, CLIENTS, VARIANTS[variant][1].get("initial_v", 0.0))
    assert server.rule_vectors.keys() == set(presets.VECTORS.get(kept, ()))
    assert all(np.array_equal(vector, first[key].astype(dtype)) for key, vector in server.rule_vectors.items())
    for before, buffer, report in play(variant, server, 7, kind, rounds):
        after, decisions = presets.ROUNDS[name](before, buffer, **options)
        written += len(buffer)
        largest = max(largest, *(np.abs(vector).max() for *_, vector in buffer))
        errors = bounds.decision_errors(name, before, buffer, decisions, options)
        margins = decisions["margins"]
        assert not any(np.any(np.isnan(margin)) for margin in margins.values())
        assert all(np.all(margins[what] > errors[what]) for what in ("accepted", "stage") if what in errors)
        comparable += 1
        check_decisions(name, report, before, buffer, after, decisions, options)
        for what, fired in ({k: decisions[k] for k in ("accepted", "stepped")} | decisions["fired"]).items():
            seen.setdefault(what, set()).update(np.atleast_1d(fired).tolist())
        allowed = bounds.allowed(name, before, buffer, after, decisions, dtype, written, largest, **options)
        now = state(server)
        assert allowed.keys() == {"params", *server.rule_vectors}
        for vector, bound in allowed.items():
            error = np.abs(now[vector] - after[vector])
            assert np.all(error <= bound), (vector, before["version"], (error / bound).max())
        assert now["version"] == after["version"]
        assert now["rows"].keys() == after["rows"].keys()
        assert all(np.array_equal(now["rows"][client], row) for client, row in after["rows"].items())
    assert comparable == rounds
    for what in presets.FIRES.get(variant, ()) if rounds == ROUNDS else ():
        assert seen[what] == {True, False}, what
    assert np.abs(server.params - np.linspace(-1, 1, SIZE)).max() > 1e-3  # it went somewhere


def check_decisions(name, report, before, buffer, after, decisions, options):
    accepted = decisions["accepted"]
    assert [not why for why in report.rejected] == accepted.tolist()
    assert report.stepped == decisions["stepped"]
    assert report.client_ids == tuple(client for client, *_ in buffer)
    assert report.staleness.tolist() == [tau for _, tau, *_ in buffer]
    assert report.version == after["version"]
    norms = np.array([np.linalg.norm(vector.astype(float)) for *_, vector in buffer])
    assert np.all(np.abs(report.norms - norms) <= 2 * oracle.DEPTH * oracle.EPS * norms)
    for scalar, value in report.scalars.items():
        assert value == after[scalar]
    corrected = options.get("bias_correction", False)
    slack = (2 * after["version"] + 20) * oracle.EPS / ((1 - 0.9 ** after["version"]) if corrected else 1)
    assert abs(report.server_lr - decisions["server_lr"]) <= slack * decisions["server_lr"]
    if name != "afa_cs":  # where the weights do not enter
        error = bounds.weights_error(name, before, buffer, decisions, options)
        assert np.all(np.abs(report.weights - decisions["weights"]) <= error * decisions["weights"])
    if name == "wkafl":
        error = bounds.decision_errors(name, before, buffer, decisions, options)["accepted"]
        assert (report.cosines is None) == (not options.get("selection", True))  # then nobody asks for them
        assert report.cosines is None or np.all(np.abs(report.cosines - decisions["cosines"]) <= error)
        every = all("as all" in why for why in report.rejected)
        assert every == decisions["fired"]["all rejected"]


@pytest.mark.parametrize("variant", LINEAR)
def test_whole_trajectories_of_linear_rules(variant):
    """Params enter with a factor of at most 1, so that the rounds' own bounds add up; the oracle is never reset."""
    name, options = VARIANTS[variant][0], round_options(variant)
    server = serve(variant)
    exact, allowed, written, largest = presets.start(name, server.params, CLIENTS), 0.0, 0, 0.0
    for _, buffer, _ in play(variant, server, 8):
        before = exact
        exact, decisions = presets.ROUNDS[name](before, buffer, **options)
        written += len(buffer)
        largest = max(largest, *(np.abs(vector).max() for *_, vector in buffer))
        allowed = allowed + bounds.allowed(name, before, buffer, exact, decisions, "float32", written, largest,
                                           **options)["params"] * (1 + 1e-5)  # fmt: skip
        assert np.all(np.abs(server.params - exact["params"]) <= allowed)
    assert server.version == exact["version"] == ROUNDS


def test_a_whole_trajectory_of_gsgm():
    """Linear, with rule vectors: an error of momentum enters the direction alpha times, and the params server_lr times
    that; pass_sum adds the directions' errors up, and momentum is their mean. Each round adds its own bounds."""
    server, alpha, server_lr = serve("gsgm"), 0.1, 0.005
    exact = presets.start("gsgm", server.params, CLIENTS)
    error, written, largest, ended = {"params": 0.0, "momentum": 0.0, "pass_sum": 0.0}, 0, 0.0, 0
    for _, buffer, _ in play("gsgm", server, 8):
        before = exact
        exact, decisions = presets.ROUNDS["gsgm"](before, buffer, alpha=alpha, server_lr=server_lr)
        written += len(buffer)
        largest = max(largest, *(np.abs(vector).max() for *_, vector in buffer))
        own = bounds.allowed("gsgm", before, buffer, exact, decisions, "float32", written, largest)
        own = {name: own[name] * (1 + 1e-5) for name in error}
        direction = alpha * error["momentum"]
        summed, mean = error["pass_sum"] + direction, error["momentum"]
        if exact["rounds_in_pass"] == 0:
            summed, mean, ended = 0.0, summed / (before["rounds_in_pass"] + 1), ended + 1
        now = {"params": error["params"] + server_lr * direction, "momentum": mean, "pass_sum": summed}
        error = {name: now[name] + own[name] for name in error}
        held = server.rule_vectors | {"params": server.params}
        for name in error:
            assert np.all(np.abs(held[name] - exact[name]) <= error[name]), name
    assert ended > 5
    assert np.max(error["params"]) < 1e-4 * np.abs(server.params).max()


# ---- ties: a threshold belongs to the side that the paper gives it to ----------------------------------------------


def one_round(rule, *joins, memory=None):
    """The report of one round, and params after it; joins: (vector, staleness, loss)."""
    server = Server(rule, np.zeros(2, np.float32), num_clients=9)
    oldest = max(staleness for _, staleness, _ in joins)
    if memory is not None:
        server.set_rule_vector("validation", np.array(memory, float))
    while server.version < oldest:
        push_all(server, range(rule.buffer_size), np.ones(2, np.float32))
    base = server.params.astype(float)
    for client, (vector, staleness, loss) in enumerate(joins):
        report = push_all(server, [client], np.float32(vector), version=server.version - staleness, loss=loss).report
    return report, server.params - base


@pytest.mark.parametrize(("sim_min", "accepted"), [(0.6, True), (np.nextafter(0.6, 1), False)])
def test_a_cosine_of_exactly_sim_min_is_accepted(sim_min, accepted):
    """The estimate of (6, 8) and (6, -8) is (6, 0): both cosines are 36/60."""
    report, _ = one_round(wkafl(buffer_size=2, sim_min=sim_min), ((6, 8), 0, 1.0), ((6, -8), 0, 1.0))
    assert report.cosines.tolist() == [0.6, 0.6]
    assert [not why for why in report.rejected] == [accepted] * 2


@pytest.mark.parametrize(("threshold", "stage"), [(0.5, 2.0), (np.nextafter(0.5, 0), 1.0)])
def test_a_mean_loss_of_exactly_the_threshold_begins_stage_two(threshold, stage):
    rule = wkafl(buffer_size=2, stage_two_loss=threshold)
    report, _ = one_round(rule, ((6, 8), 0, 0.25), ((6, -8), 0, 0.75))
    assert report.scalars == {"stage": stage}


@pytest.mark.parametrize(("version", "stages"), [(0, [2, 2, 2]), (1, [1, 2, 2]), (2, [1, 1, 2])])
def test_stage_two_begins_with_the_step_from_its_version(version, stages):
    server = Server(wkafl(buffer_size=1, stage_two_version=version), np.zeros(2, np.float32))
    reports = [server.push(client=0, gradient=np.ones(2), version=t).report for t in range(3)]
    assert [report.scalars["stage"] for report in reports] == stages


def test_stage_two_never_ends_and_unknown_losses_do_not_begin_it():
    server = Server(wkafl(buffer_size=1, stage_two_loss=0.5), np.zeros(2, np.float32))
    losses = [None, 0.4, 9.0, None]
    stages = [server.push(client=0, gradient=np.ones(2), version=0, loss=x).report.scalars["stage"] for x in losses]
    assert stages == [1, 2, 2, 2]


@pytest.mark.parametrize(
    ("options", "factor"),
    [
        ({"clip": 5.0}, 1.0),
        ({"clip": np.nextafter(5.0, 0)}, np.nextafter(5.0, 0) / 5.0),
        ({"stage_two_version": 0, "stage_two_clip": 1.0}, 1.0),  # the estimate is as long as the only gradient
        ({"stage_two_version": 0, "stage_two_clip": 0.5}, 0.5),
    ],
)
def test_a_norm_of_exactly_the_bound_is_not_clipped(options, factor):
    report, _ = one_round(wkafl(buffer_size=1, **options), ((3, 4), 0, 1.0))
    assert report.weights.tolist() == [factor]


@pytest.mark.parametrize("mode", ["inverse", "minimum"])
def test_a_delay_of_exactly_the_threshold_does_not_shorten_the_step(mode):
    rule = fadas(buffer_size=2, server_lr=0.5, delay_adaptive=mode, threshold=3)
    assert one_round(rule, ((1, 1), 3, 1.0), ((1, 1), 0, 1.0))[0].server_lr == 0.5
    report, _ = one_round(rule, ((1, 1), 4, 1.0), ((1, 1), 0, 1.0))
    assert report.server_lr == {"inverse": 0.5 / 4, "minimum": 0.25}[mode]


def test_delays_of_both_laws_below_the_rate():
    """min(eta, 1 / tau_max) is eta where eta is the smaller one."""
    rule = fadas(buffer_size=1, server_lr=0.125, delay_adaptive="minimum")
    assert one_round(rule, ((1, 1), 5, 1.0))[0].server_lr == 0.125


@pytest.mark.parametrize(("epsilon", "accepted"), [(32.0, True), (np.nextafter(32.0, 0), False)])
def test_a_score_of_exactly_the_acceptance_bound_is_accepted(epsilon, accepted):
    """v = (4, 0), g = (0, 2): g^ = (0, 4), <v, g^> = 0 and |g^|^2 = 16 = gamma epsilon."""
    rule = zenopp(gamma=0.5, rho=1.0, epsilon=epsilon, server_lr=1.0)
    report, moved = one_round(rule, ((0, 2), 0, 1.0), memory=(4, 0))
    assert report.stepped == accepted
    assert report.version == int(accepted)
    assert moved.tolist() == ([0, -4] if accepted else [0, 0])


def test_a_zero_gradient_is_rejected_and_has_cosine_0():
    report, moved = one_round(zenopp(), ((0, 0), 0, 1.0), memory=(4, 0))
    assert (report.stepped, bool(report.rejected[0]), moved.tolist()) == (False, True, [0, 0])
    report, _ = one_round(wkafl(buffer_size=2), ((0, 0), 0, 1.0), ((1, 1), 0, 1.0))
    assert (report.cosines[0], bool(report.rejected[0]), report.rejected[1]) == (0, True, "")


def test_all_zero_gradients_move_nothing():
    report, moved = one_round(wkafl(buffer_size=2), ((0, 0), 0, 1.0), ((0, 0), 0, 1.0))
    assert (report.stepped, report.version, moved.tolist()) == (True, 1, [0, 0])


def test_staleness_0_and_1_are_alike_in_sasgd():
    report, _ = one_round(sasgd(buffer_size=3), ((1, 1), 0, 1.0), ((1, 1), 1, 1.0), ((1, 1), 2, 1.0))
    assert report.weights.tolist() == [1 / 3, 1 / 3, 1 / 6]


@pytest.mark.parametrize("rule", [wkafl(buffer_size=2), twafl(buffer_size=2, normalise="weights")])
def test_weights_that_are_normalised_do_not_underflow(rule):
    """(e/2)^-3000 is 0 in float64; relative to the freshest arrival it is not."""
    staleness = np.array([3000, 3001])
    examples, losses, norms = np.array([1, 1]), np.array([1.0, 1.0]), np.array([1.0, 1.0])

    def alike(weights, *_):
        """Of two vectors that are one vector of length 1."""
        return ops.InnerProducts(np.ones(2), np.full(2, weights.sum()), weights.sum() ** 2)

    arrivals = Arrivals(
        3001, (0, 1), 3001 - staleness, staleness, examples, losses, norms, scalars={"stage": 1.0}, inner_sweep=alike
    )
    said = rule.weigh(arrivals)
    estimate = said.next[0, 1:] if isinstance(said, Weights) else said
    assert np.all(np.abs(estimate - [np.e / (np.e + 2), 2 / (np.e + 2)]) <= 16 * oracle.EPS)


# ---- the parts -----------------------------------------------------------------------------------------------------


STALENESS = np.arange(300)
#: Laws, what they are, and how many roundings they may be away.
LAWS = [(Polynomial(a), oracle.polynomial(STALENESS, a), 10) for a in (0, 0.3, 0.5, 1, 1.5, 2, 3.5)]
LAWS += [(Hinge(10, 4), oracle.hinge(STALENESS, 10, 4), 4), (Exponential(), (2 / np.e) ** STALENESS, 2 * STALENESS + 4)]


@pytest.mark.parametrize(("law", "exact", "roundings"), LAWS, ids=[str(law) for law, _, _ in LAWS])
def test_laws(law, exact, roundings):
    ours = np.array([law(int(t)) for t in STALENESS])
    assert np.all(np.abs(ours / exact - 1) <= roundings * oracle.EPS)
