"""Hyper-parameters: what is refused when a part is made, in which words, and which numbers count as numbers."""

import re
from fractions import Fraction
from math import inf, nan, sqrt

import numpy as np
import pytest

import afflux
from afflux import Rule, Server
from afflux.rules import afa_cs, fadas, fedadagrad, fedadam, fedasync, fedbuff, gsgm, twafl, wkafl, zenopp
from afflux.rules.calibration import CACHED_DIFFERENCE, CACHED_MEAN, CACHED_MEAN_OF_SEEN
from afflux.rules.optimizers import Adagrad, Adam, AmsGrad, Momentum, Sgd, Yogi
from afflux.rules.presets.dialects import VersionMeans, appfl, flsim, nvflare, paper
from afflux.rules.presets.gsgm import GradientScheduling
from afflux.rules.presets.wkafl import CosineSelection
from afflux.rules.presets.zenopp import ScoreTest
from afflux.rules.schedules import ByVersion, DelayAdaptive, MinimumStaleness
from afflux.rules.staleness import Constant, Exponential, Hinge, Polynomial
from afflux.rules.weights import Given, Staleness
from conftest import check_error, push_all

NOT_NEGATIVE = "finite and not negative"
RATE = "a finite number or a law such as DelayAdaptive(0.1)"
HUGE = 10**400

REFUSED = [
    # the laws of staleness
    (lambda: Polynomial("1"), f"[Polynomial] a is '1', must be a number, {NOT_NEGATIVE}"),
    (lambda: Polynomial(True), f"[Polynomial] a is True, must be a number, {NOT_NEGATIVE}"),
    (lambda: Polynomial(np.bool_(True)), f"[Polynomial] a is {np.bool_(True)!r}, must be a number, {NOT_NEGATIVE}"),
    (lambda: Polynomial(np.zeros(2)), f"[Polynomial] a is array([0., 0.]), must be a number, {NOT_NEGATIVE}"),
    (lambda: Polynomial(-0.5), f"[Polynomial] a is -0.5, must be {NOT_NEGATIVE}"),
    (lambda: Polynomial(nan), f"[Polynomial] a is nan, must be {NOT_NEGATIVE}"),
    (lambda: Polynomial(np.float32(inf)), f"[Polynomial] a is {np.float32(inf)!r}, must be {NOT_NEGATIVE}"),
    (lambda: Polynomial(HUGE), f"[Polynomial] a is of type int, must be {NOT_NEGATIVE}"),
    (lambda: Hinge(-1, 0), f"[Hinge] a is -1, must be {NOT_NEGATIVE}"),
    (lambda: Hinge(1, "x"), f"[Hinge] b is 'x', must be a number, {NOT_NEGATIVE}"),
    (lambda: Exponential(0.5), "[Exponential] base is 0.5, must be at least 1 and finite"),
    (lambda: Exponential(inf), "[Exponential] base is inf, must be at least 1 and finite"),
    # weigh
    (lambda: Staleness("exp"), "[Staleness] the law is 'exp', must be one such as Polynomial(0.5)"),
    (lambda: Staleness(Constant), f"[Staleness] the law is {Constant!r}, must be one such as Polynomial(0.5)"),
    (lambda: Staleness(Constant(), ["count"]), "[Staleness] normalise is ['count'], must be 'count', 'weights' or Non"),
    (lambda: Staleness(Constant(), scale=-inf), "[Staleness] scale is -inf, must be finite"),
    (lambda: Staleness(Constant(), by_examples=1), "[Staleness] by_examples is 1, must be True or False"),
    (
        lambda: Given(""),
        "[Given] fact is ('',), must be at most 16 different names, each a str of 1 to 64 printable characters",
    ),
    (lambda: VersionMeans(0.5), "[VersionMeans] the law is 0.5, must be one such as Polynomial(0.5)"),
    (lambda: CosineSelection(law="exp"), "[CosineSelection] the law is 'exp', must be one such as Polynomial(0.5)"),
    (lambda: CosineSelection("x"), "[CosineSelection] alpha is 'x', must be a number, between 0 and 1"),
    (lambda: CosineSelection(sim_min=nan), "[CosineSelection] sim_min is nan, must be finite"),
    (lambda: CosineSelection(beta=inf), "[CosineSelection] beta is inf, must be finite"),
    (lambda: CosineSelection(clip=nan), "[CosineSelection] clip is nan, must be positive"),
    (lambda: CosineSelection(stage_two_clip=0), "[CosineSelection] stage_two_clip is 0, must be finite and positive"),
    (lambda: CosineSelection(stage_two_clip=inf), "[CosineSelection] stage_two_clip is inf, must be finite and positi"),
    (lambda: CosineSelection(select="no"), "[CosineSelection] select is 'no', must be True or False"),
    (lambda: CosineSelection(memory="both"), "[CosineSelection] memory is 'both', must be 'estimate' or 'aggregate'"),
    (lambda: ScoreTest(rho=-1.0), f"[ScoreTest] rho is -1.0, must be {NOT_NEGATIVE}"),
    (lambda: ScoreTest(epsilon=nan), f"[ScoreTest] epsilon is nan, must be {NOT_NEGATIVE}"),
    (lambda: ScoreTest(scaled=None), "[ScoreTest] scaled is None, must be True or False"),
    (lambda: GradientScheduling(inf), "[GradientScheduling] alpha is inf, must be between 0 and 1"),
    # rates
    (lambda: DelayAdaptive("1"), f"[DelayAdaptive] lr is '1', must be {RATE}"),
    (lambda: DelayAdaptive(0.1, 1.5), "[DelayAdaptive] threshold is 1.5, must be an int of at least 0"),
    (lambda: DelayAdaptive(0.1, mode=None), "[DelayAdaptive] mode is None, must be 'inverse' or 'minimum'"),
    (lambda: MinimumStaleness(None), f"[MinimumStaleness] lr is None, must be {RATE}"),
    (lambda: MinimumStaleness(0.1, -1), f"[MinimumStaleness] gamma is -1, must be {NOT_NEGATIVE}"),
    (lambda: ByVersion({0: DelayAdaptive(0.1)}), f"[ByVersion] rates[0] is {DelayAdaptive(0.1)!r}, must be a number,"),
    (lambda: ByVersion({0: 0.1, 5: inf}), "[ByVersion] rates[5] is inf, must be finite"),
    (lambda: ByVersion({0: 0.1, "5": 0.1}), "[ByVersion] a version is '5', must be an int of at least 0"),
    (lambda: ByVersion({-1: 0.1}), "[ByVersion] a version is -1, must be an int of at least 0"),
    (lambda: ByVersion({1: 0.1}), "[ByVersion] rates begins at version 1, must begin at 0"),
    (lambda: ByVersion({}), "[ByVersion] rates begins at version None, must begin at 0"),
    (lambda: ByVersion(0.1), "[ByVersion] rates is 0.1, must be a mapping such as {0: 0.1, 100: 0.01}"),
    # step
    (lambda: Sgd(True), f"[Sgd] lr is True, must be {RATE}"),
    (lambda: Sgd(nan), f"[Sgd] lr is nan, must be {RATE}"),
    (lambda: Sgd(DelayAdaptive), f"[Sgd] lr is {DelayAdaptive!r}, must be {RATE}"),
    (lambda: Momentum(beta=1.0), "[Momentum] beta is 1.0, must be at least 0 and less than 1"),
    (lambda: Adam(beta2=-0.1), "[Adam] beta2 is -0.1, must be at least 0 and less than 1"),
    (lambda: AmsGrad(epsilon=None), "[AmsGrad] epsilon is None, must be a number, finite and positive"),
    (lambda: Adam(epsilon=0, initial_v=1.0), "[Adam] epsilon is 0, must be finite and positive"),
    (lambda: Yogi(initial_v=-1), f"[Yogi] initial_v is -1, must be {NOT_NEGATIVE}"),
    (lambda: Adam(bias_correction="no"), "[Adam] bias_correction is 'no', must be True or False"),
    (
        lambda: Adagrad(bias_correction=True),
        "[Adagrad] bias_correction is True, must be False: v is no mean, beta2 has no meaning",
    ),
    # presets, by the name of the part or by their own
    (lambda: fedadam(beta1="x"), "[Adam] beta1 is 'x', must be a number, at least 0 and less than 1"),
    (lambda: gsgm(alpha=2), "[GradientScheduling] alpha is 2, must be between 0 and 1"),
    (lambda: wkafl(alpha=1.5), "[wkafl] alpha is 1.5, must be between 0 and 1"),
    (lambda: zenopp(gamma="x"), f"[ScoreTest] gamma is 'x', must be a number, {NOT_NEGATIVE}"),
    (lambda: fedasync(alpha=1.5), "[fedasync] alpha is 1.5, must be between 0 and 1"),
    (lambda: fadas(threshold=-5), "[fadas] threshold is -5, must be an int of at least 0"),
    (lambda: fadas(delay_adaptive="inverse", threshold="x"), "[fadas] threshold is 'x', must be an int of at least 0"),
    (lambda: twafl(normalise=None), "[twafl] normalise is None, must be 'count' or 'weights'"),
    (lambda: wkafl(stage_two_version="5"), "[CosineSelection] stage_two_version is '5', must be an int of at least 0"),
    (lambda: wkafl(stage_two_loss="5"), "[CosineSelection] stage_two_loss is '5', must be a number, finite"),
    (lambda: wkafl(staleness=Constant()), "[wkafl] staleness is Constant(), must be True or False"),
    (lambda: wkafl(momentum=False, alpha="x"), "[wkafl] alpha is 'x', must be a number, between 0 and 1"),
    (lambda: wkafl(momentum=False, clip=0), "[wkafl] clip is 0, must be positive"),
    (lambda: wkafl(momentum=0), "[wkafl] momentum is 0, must be True or False"),
    (lambda: wkafl(gamma=None, staleness=False), "[wkafl] gamma is None"),
    (lambda: fedbuff(dialect=["x"]), "[fedbuff] dialect is ['x'], must be one of paper, flsim, appfl, nvflare"),
    (lambda: nvflare(per_version="no"), "[nvflare] per_version is 'no', must be True or False"),
    (lambda: appfl(num_clients=True), "[appfl] num_clients is True, must be an int of at least 1"),
    (lambda: flsim(avg_staleness=-1), "[flsim] avg_staleness is -1, must be an int of at least 0"),
    (lambda: fedbuff(dialect="plato", staleness=Polynomial(1)), "[fedbuff] staleness is Polynomial(a=1.0), but this"),
    (lambda: fedbuff(dialect="fedscale", normalise="weights"), "[fedbuff] normalise is 'weights', but only the"),
    (lambda: fedbuff(dialect="flsim", staleness="constant"), "[Staleness] the law is 'constant', must be one such as"),
    (
        lambda: fedbuff(dialect=flsim(avg_staleness=7), staleness=Polynomial(2000.25)),
        "[flsim] the law Polynomial(a=2000.25) gives 0.0 at avg_staleness 7, must be positive",
    ),
]


@pytest.mark.parametrize(("wrong", "message"), REFUSED, ids=[message[:60] for _, message in REFUSED])
def test_refused(wrong, message):
    check_error("^" + re.escape(message), wrong)


ONE = [1, 1.0, np.float16(1), np.float32(1), np.float64(1), np.longdouble(1), np.int8(1), np.uint64(1), Fraction(1)]
NUMBERS = {
    Polynomial: ["a"],
    Hinge: ["a", "b"],
    Exponential: ["base"],
    CosineSelection: ["alpha", "sim_min", "beta", "clip", "stage_two_clip", "stage_two_loss"],
    ScoreTest: ["gamma", "rho", "epsilon"],
    GradientScheduling: ["alpha"],
    Sgd: ["lr"],
    Momentum: ["lr"],
    Adam: ["lr", "epsilon", "initial_v"],
}


@pytest.mark.parametrize("value", ONE, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize(("part", "names"), NUMBERS.items(), ids=lambda x: getattr(x, "__name__", ""))
def test_numbers_of_any_type_are_stored_as_float(part, names, value):
    made = part(**dict.fromkeys(names, value))
    assert made == part(**dict.fromkeys(names, 1.0))
    assert [type(getattr(made, name)) for name in names] == [float] * len(names)


@pytest.mark.parametrize("kind", [int, np.int8, np.uint64])
def test_ints_and_flags_of_any_type_are_stored_as_pythons(kind):
    made = DelayAdaptive(0.1, kind(3)), CosineSelection(stage_two_version=kind(3)), ByVersion({kind(0): 0.1})
    assert made == (DelayAdaptive(0.1, 3), CosineSelection(stage_two_version=3), ByVersion({0: 0.1}))
    assert {type(x) for x in (made[0].threshold, made[1].stage_two_version, *made[2].rates)} == {int}
    assert Adam(bias_correction=np.bool_(True)).bias_correction is True
    assert fedbuff(dialect=flsim(avg_staleness=kind(3))) == fedbuff(dialect=flsim(avg_staleness=3))


@pytest.mark.parametrize("preset", [fedbuff, fadas, fedadagrad, wkafl])
def test_a_rate_in_float32_is_that_number(preset):
    assert preset(server_lr=np.float32(0.1)) == preset(server_lr=0.10000000149011612)


def test_no_bound_may_be_infinite_or_none():
    assert wkafl(clip=inf).weigh.clip == inf
    assert wkafl(clip=None).weigh.clip is None


def test_a_schedule_is_the_parts_own():
    rates = {0: 0.1}
    law = ByVersion(rates)
    rates[0] = 0.2
    assert law.rates == {0: 0.1}


def test_parts_that_are_laws_may_be_any_function():
    assert Sgd(lambda arrivals: 0.5).lr(None) == 0.5
    assert Staleness(lambda tau: 1.0 / (1 + tau)).law(1) == 0.5


# ---- what the presets pass on ---------------------------------------------------------------------------------------


def test_what_the_mean_is_divided_by_is_passed_on():
    assert afa_cs().calibrate == CACHED_MEAN
    assert afa_cs(divide_by="seen").calibrate == CACHED_MEAN_OF_SEEN


def test_the_papers_dialect_by_any_name_may_normalise():
    assert fedbuff(dialect=paper(), normalise="weights") == fedbuff(normalise="weights")


# ---- the polynomial law ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("twice", range(17))
def test_halves_up_to_eight_are_products(twice):
    for tau in (0, 1, 2, 6, 50, 1023):
        power = sqrt(1.0 + tau) if twice % 2 else 1.0
        for _ in range(twice // 2):
            power *= 1.0 + tau
        assert Polynomial(twice / 2)(tau) == 1.0 / power


@pytest.mark.parametrize("a", [8.5, 9.0, 300.0, 3e6, 1e308])
def test_larger_exponents_are_one_call_of_pow(a):
    law = Polynomial(a)
    assert [law(tau) for tau in range(60)] == [afflux.pow(1.0 + tau, -a) for tau in range(60)]
    assert law(0) == 1.0


# ---- weights that underflow -----------------------------------------------------------------------------------------

STEEP = Polynomial(2000.25)
UNDERFLOW = re.escape("from staleness 1 on, the least in the buffer, Polynomial(a=2000.25) underflows")


@pytest.mark.parametrize(
    ("rule", "part"),
    [
        (fedbuff(buffer_size=2, staleness=STEEP, normalise="weights"), "Staleness"),
        (Rule("mine", "gradient", 2, CosineSelection(law=STEEP), CACHED_DIFFERENCE, Sgd()), "CosineSelection"),
    ],
    ids=["fedbuff", "selection"],
)
def test_weights_that_all_underflow_are_an_error_and_nothing_changes(rule, part):
    server = Server(rule, np.zeros(2, np.float32), num_clients=3)
    ones = np.ones(2, np.float32)
    push_all(server, (0, 1), ones, version=0)
    assert server.version == 1
    before = server.params.copy()
    server.push(client=0, **{server.rule.kind: ones}, version=0)
    check_error(rf"^\[{part}\] .*sum to 0 .*{UNDERFLOW}", server.push, client=1, **{server.rule.kind: ones}, version=0)
    assert (server.version, server.arrivals_waiting) == (1, 1)
    assert np.array_equal(server.params, before)
    server.push(client=1, **{server.rule.kind: ones}, version=1)  # one fresh arrival suffices
    assert server.version == 2
