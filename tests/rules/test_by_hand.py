"""Small cases worked out by hand, every line of arithmetic written down; the engine and the oracle must both agree."""

import numpy as np
import pytest

import oracle
import presets
from afflux import Rule, Server
from afflux.rules import RULES
from afflux.rules.calibration import NONE
from afflux.rules.optimizers import Sgd
from afflux.rules.presets.wkafl import CosineSelection
from afflux.rules.presets.zenopp import ScoreTest
from afflux.rules.staleness import Polynomial
from afflux.rules.weights import Given

#: Ten decimals are written.
HALF_A_DIGIT = 6e-11


def served(rule, params, rounds, validation=None):
    """Params and vectors after each round; rounds: lists of (client, staleness, examples, loss, vector)."""
    server = Server(rule, np.array(params, float), dtype="float64")
    if validation is not None:
        server.set_rule_vector("validation", np.array(validation, float))
    for buffer in rounds:
        version = server.version
        for client, staleness, examples, loss, vector in buffer:
            facts = {name: examples / 4 for name in rule.needs.facts}
            numbers = {"num_examples": examples, "loss": loss, "facts": facts}
            update = {server.rule.kind: np.array(vector, float)}
            server.push(client=client, version=version - staleness, **update, **numbers)
        yield {"params": server.params} | server.rule_vectors | server.scalars


def engine(name, params, rounds, initial_v=None, validation=None, **options):
    """As `served`, of a preset."""
    first = {} if initial_v is None else {"initial_v": initial_v}
    size = {} if name == "zenopp" else {"buffer_size": len(rounds[0])}
    return served(RULES[name](**size, **first, **options), params, rounds, validation)


def by_oracle(name, params, rounds, initial_v=0.0, validation=None, **options):
    state = presets.start(name, params, initial_v=initial_v)
    if validation is not None:
        state["validation"] = oracle.f64(validation)
    for buffer in rounds:
        state, _ = presets.ROUNDS[name](state, buffer, **options)
        yield state


def arrivals(*vectors, staleness=None, losses=None):
    """Clients 0, 1, ... with one example each."""
    staleness, losses = staleness or [0] * len(vectors), losses or [1.0] * len(vectors)
    return [(i, tau, 1, loss, v) for i, (tau, loss, v) in enumerate(zip(staleness, losses, vectors, strict=True))]


both = pytest.mark.parametrize("way", [engine, by_oracle])


def agree(states, expected):
    """states: what each round left; expected: {name: numbers} for each round."""
    for state, numbers in zip(states, expected, strict=True):
        for name, values in numbers.items():
            np.testing.assert_allclose(state[name], values, rtol=0, atol=HALF_A_DIGIT, err_msg=name)


@both
def test_fadas_with_bias_correction_and_delay_adaptation(way):
    """beta1 = 1/2, beta2 = 3/4, epsilon = 1/2, eta = 1, threshold 1, x = (1, -1)."""
    rounds = [
        # Round 1.  D = ((1 + 3)/2, (2 - 2)/2) = (2, 0);  tau_max = 0, so eta_t = 1
        #   m = 0/2 + (2, 0)/2 = (1, 0);  v = 0 + (4, 0)/4 = (1, 0);  v_hat = max(0, v) = (1, 0)
        #   t' = 1: eta_t / (1 - 1/2) = 2;  sqrt(1 - 3/4) = 1/2
        #   x_1 = 1 + 2 * 1 / (1 / (1/2) + 1/2) = 1 + 2/2.5 = 1.8;  x_2 = -1 + 2 * 0 / (0 + 1/2) = -1
        arrivals((1, 2), (3, -2)),
        # Round 2.  D = (-2, 2);  tau_max = 1, not above 1, so eta_t = 1
        #   m = (1/2, 0) + (-1, 1) = (-1/2, 1);  v = (3/4, 0) + (1, 1) = (1.75, 1);  v_hat = (1.75, 1)
        #   t' = 2: 1 / (1 - 1/4) = 4/3;  sqrt(1 - 9/16) = sqrt(.4375) = .6614378278
        #   sqrt(1.75)/sqrt(.4375) = sqrt(4) = 2;  1/.6614378278 = 1.5118578920
        #   x_1 = 1.8 - (4/3)(1/2) / 2.5 = 1.8 - .2666666667 = 1.5333333333
        #   x_2 = -1 + (4/3) / 2.0118578920 = -1 + .6627373328 = -.3372626672
        arrivals((-2, 4), (-2, 0), staleness=[0, 1]),
        # Round 3.  D = (0, 2);  tau_max = 2, above 1, so eta_t = 1/2
        #   m = (-1/4, 1/2) + (0, 1) = (-1/4, 1.5);  v = (1.3125, .75) + (0, 1) = (1.3125, 1.75)
        #   v_hat = (max(1.75, 1.3125), max(1, 1.75)) = (1.75, 1.75)
        #   t' = 3: (1/2) / (1 - 1/8) = .5714285714;  sqrt(1 - 27/64) = sqrt(.578125) = .7603453163
        #   sqrt(1.75)/.7603453163 + 1/2 = 1.3228756555/.7603453163 + 1/2 = 2.2398353448
        #   x_1 = 1.5333333333 - .5714285714 * .25 / 2.2398353448 = 1.5333333333 - .0637801985 = 1.4695531349
        #   x_2 = -.3372626672 + .5714285714 * 1.5 / 2.2398353448 = -.3372626672 + .3826811909 = .0454185237
        arrivals((1, 1), (-1, 3), staleness=[2, 1]),
    ]
    expected = [
        {"m": (1, 0), "v": (1, 0), "v_hat": (1, 0), "params": (1.8, -1)},
        {"m": (-0.5, 1), "v": (1.75, 1), "v_hat": (1.75, 1), "params": (1.5333333333, -0.3372626672)},
        {"m": (-0.25, 1.5), "v": (1.3125, 1.75), "v_hat": (1.75, 1.75), "params": (1.4695531349, 0.0454185237)},
    ]
    options = {"server_lr": 1.0, "beta1": 0.5, "beta2": 0.75, "epsilon": 0.5}
    options |= {"bias_correction": True, "delay_adaptive": "inverse", "threshold": 1}
    agree(way("fadas", (1, -1), rounds, **options), expected)


@both
def test_fedyogi(way):
    """beta1 = 1/2, beta2 = 3/4, epsilon = 1/2, eta = 1, v = 1 at first, x = 0: one element where v grows, one where it
    stays because v = D^2, one where it stays because D = 0.
    """
    rounds = [
        # Round 1.  D = (2, 1, 0), D^2 = (4, 1, 0), sign(v - D^2) = (-1, 0, 1)
        #   m = (1, .5, 0);  v = (1 + 4/4, 1 - 0, 1 - 0/4) = (2, 1, 1)
        #   x = (1 / (1.4142135624 + .5), .5 / 1.5, 0) = (.5224077499, .3333333333, 0)
        arrivals((3, 1, 1), (1, 1, -1)),
        # Round 2.  D = (1, -2, 2), D^2 = (1, 4, 4), sign(v - D^2) = (1, -1, -1)
        #   m = (.5, .25, 0) + (.5, -1, 1) = (1, -.75, 1);  v = (2 - 1/4, 1 + 4/4, 1 + 4/4) = (1.75, 2, 2)
        #   x_1 = .5224077499 + 1 / (1.3228756555 + .5) = .5224077499 + .5485837704 = 1.0709915203
        #   x_2 = .3333333333 - .75 / 1.9142135624 = .3333333333 - .3918058124 = -.0584724791
        #   x_3 = 0 + 1 / 1.9142135624 = .5224077499
        arrivals((0, -2, 5), (2, -2, -1)),
    ]
    expected = [
        {"m": (1, 0.5, 0), "v": (2, 1, 1), "params": (0.5224077499, 0.3333333333, 0)},
        {"m": (1, -0.75, 1), "v": (1.75, 2, 2), "params": (1.0709915203, -0.0584724791, 0.5224077499)},
    ]
    options = {"server_lr": 1.0, "beta1": 0.5, "beta2": 0.75, "epsilon": 0.5, "initial_v": 1.0}
    agree(way("fedyogi", (0, 0, 0), rounds, **options), expected)


#: alpha = 1/2, sim_min = .3, beta = 10, CB = 5, B = 1/2, gamma = 1/4, eta_0 = .1, x = 0.
WKAFL = {"server_lr": 0.1, "alpha": 0.5, "sim_min": 0.3, "beta": 10.0, "clip": 5.0, "stage_two_clip": 0.5,
         "gamma": 0.25, "stage_two_loss": 0.5}  # fmt: skip
# Round 1 of both cases: (5, 0), (4, 3), (-3, 0), all fresh, losses 1: stage one.
#   The estimate of the round before is 0; norms 5, 5, 3: none above CB
#   g = (5 + 4 - 3, 0 + 3 + 0)/3 = (2, 1);  |g| = sqrt(5) = 2.2360679775
#   cos = 10/(5 |g|), 11/(5 |g|), -6/(3 |g|) = .8944271910, .9838699101, -.8944271910: the third is rejected
#   p_2/p_1 = exp(10 (.9838699101 - .8944271910)) = exp(.8944271910) = 2.4459343349
#   p = (1/3.4459343349, 2.4459343349/3.4459343349) = (.2901970562, .7098029438)
#   step = (5 * .2901970562 + 4 * .7098029438, 3 * .7098029438) = (4.2901970562, 2.1294088313)
#   eta = .1;  x = (-.4290197056, -.2129408831)
FIRST = arrivals((5, 0), (4, 3), (-3, 0))
AFTER_FIRST = {"estimate": (2, 1), "stage": 1, "params": (-0.4290197056, -0.2129408831)}


@both
def test_wkafl_stage_one(way):
    rounds = [
        FIRST,
        # Round 2, stage one: (5, 7.5) of staleness 1; (1, -.5) and (-1, -1.5), fresh.
        #   + (2, 1)/2: (6, 8), (2, 0), (0, -1), of norms 10, 2, 1; the first is clipped to CB: (3, 4)
        #   a = (2/e, 1, 1) = (.7357588823, 1, 1), of sum 2.7357588823
        #   g = (3 * .7357588823 + 2, 4 * .7357588823 - 1) / 2.7357588823
        #     = (4.2072766470, 1.9430355294) / 2.7357588823 = (1.5378828427, .7102363962);  |g| = 1.6939655771
        #   cos = 7.4545941129/(5 |g|), 3.0757656855/(2 |g|), -.7102363962/|g|
        #       = .8801352535, .9078595596, -.4192743972: the third is rejected
        #   p_1/p_2 = exp(10 (.8801352535 - .9078595596)) = exp(-.2772430613) = .7578702661
        #   p = (.7578702661/1.7578702661, 1/1.7578702661) = (.4311298056, .5688701944)
        #   step = (3 * .4311298056 + 2 * .5688701944, 4 * .4311298056) = (2.4311298056, 1.7245192224)
        #   tau_min = 0: eta = .1;  x = (-.4290197056 - .2431129806, -.2129408831 - .1724519222)
        arrivals((5, 7.5), (1, -0.5), (-1, -1.5), staleness=[1, 0, 0]),
    ]
    second = {"estimate": (1.5378828427, 0.7102363962), "stage": 1, "params": (-0.6721326862, -0.3853928054)}
    agree(way("wkafl", (0, 0), rounds, **WKAFL), [AFTER_FIRST, second])


@both
def test_wkafl_stage_two(way):
    rounds = [
        FIRST,
        # Round 2: the same vectors, all of staleness 1, losses .75, .5, .25: mean .5, so stage two.
        #   Tilted and clipped to CB: (3, 4), (2, 0), (0, -1);  a is the same for all
        #   g = (5/3, 3/3) = (1.6666666667, 1);  |g| = 1.9436506316
        #   cos = 9/(5 |g|), 3.3333333333/(2 |g|), -1/|g| = .9260923598, .8574929257, -.5144957554: the last is rejected
        #   p_2/p_1 = exp(10 (.8574929257 - .9260923598)) = exp(-.6859943407) = .5035892413
        #   p = (1/1.5035892413, .5035892413/1.5035892413) = (.6650752563, .3349247437)
        #   B |g| = .9718253158: (3, 4) times .9718253158/5 = .1943650632, (2, 0) times .9718253158/2 = .4859126579
        #   step_1 = .6650752563 * 3 * .1943650632 + .3349247437 * 2 * .4859126579 = .3878021827 + .3254883448
        #          = .7132905274
        #   step_2 = .6650752563 * 4 * .1943650632 = .5170695768
        #   tau_min = 1: eta = .1/1.25 = .08;  x = (-.4290197056 - .0570632422, -.2129408831 - .0413655661)
        arrivals((5, 7.5), (1, -0.5), (-1, -1.5), staleness=[1, 1, 1], losses=[0.75, 0.5, 0.25]),
    ]
    second = {"estimate": (1.6666666667, 1), "stage": 2, "params": (-0.4860829478, -0.2543064493)}
    agree(way("wkafl", (0, 0), rounds, **WKAFL), [AFTER_FIRST, second])


@both
def test_wkafl_with_a_beta_that_overflows(way):
    """exp(1000 cos) is no float64; p_1/p_2 = exp(-1000 (.9838699101 - .8944271910)) = exp(-89.44) = 1.4e-39."""
    # The step is (4, 3) to forty digits;  x = -.1 (4, 3)
    options = WKAFL | {"beta": 1000.0}
    agree(way("wkafl", (0, 0), [FIRST], **options), [{"estimate": (2, 1), "params": (-0.4, -0.3)}])


def test_a_polynomial_law_counts_staleness_from_zero():
    """Three rounds of zeros, then staleness 1 and 3: a = (1/2, 1/4), not (1, 1/3) as from the freshest one on."""
    #   a_i / sum a = (2/3, 1/3);  g = (2/3) (3, 0) + (1/3) (0, 6) = (2, 2);  x = -g
    rule = Rule("own", "gradient", 2, CosineSelection(law=Polynomial(1.0), select=False), NONE, Sgd(1.0))
    zeros = arrivals((0, 0), (0, 0))
    rounds = [zeros, zeros, zeros, arrivals((3, 0), (0, 6), staleness=[1, 3])]
    still = {"estimate": (0, 0), "params": (0, 0)}
    agree(served(rule, (0, 0), rounds), [still, still, still, {"estimate": (2, 2), "params": (-2, -2)}])


def test_given_weights():
    """The facts are 1/4, 3/4 and 1: w = (1/8, 3/8, 1/2), and x = (1, 1) + w_0 (8, 0) + w_1 (0, 8) + w_2 (2, -4)."""
    rule = Rule("own", "update", 3, Given("quality"), NONE, Sgd(1.0))
    rounds = [[(0, 0, 1, 1.0, (8, 0)), (1, 0, 3, 1.0, (0, 8)), (2, 0, 4, 1.0, (2, -4))]]
    agree(served(rule, (1, 1), rounds), [{"params": (3, 2)}])


#: gamma = 1/2, rho = 1/4, epsilon = 1, eta = 1/2, v = (3, 4), so |v| = 5 and the bound is -1/2.
SCORE = {"gamma": 0.5, "rho": 0.25, "epsilon": 1.0}
# g          g^         <v, g^>/2   |g^|^2/4   |g|^2/4   score         unscaled
# (0, 2)     (0, 5)     10          6.25       1          3.75 accept    9    accept
# (.8, -.6)  (4, -3)    0           6.25       .25       -6.25 reject    -.25 accept
# (0, 20)    (0, 5)     10          6.25       100        3.75 accept  -90    reject
# (3, -4)    (3, -4)    -3.5        6.25       6.25      -9.75 reject   -9.75 reject
SCORED = [arrivals((0, 2)), arrivals((0.8, -0.6)), arrivals((0, 20)), arrivals((3, -4))]


@both
@pytest.mark.parametrize(
    ("scaled", "params"),
    [
        # x_0 = (1, -1);  x - (0, 2.5);  stays;  x - (0, 2.5);  stays
        (True, [(1, -3.5), (1, -3.5), (1, -6), (1, -6)]),
        # x_0 = (1, -1);  x - (0, 2.5);  x - (2, -1.5);  stays;  stays
        (False, [(1, -3.5), (-1, -2), (-1, -2), (-1, -2)]),
    ],
)
def test_zenopp(way, scaled, params):
    options = SCORE | {"server_lr": 0.5, "scaled": scaled, "validation": (3, 4)}
    agree(way("zenopp", (1, -1), SCORED, **options), [{"params": x} for x in params])


def test_the_score_of_two_at_once():
    """The direction is the mean over the accepted ones, and x = 0 at first."""
    rule = Rule("own", "gradient", 2, ScoreTest(**SCORE), NONE, Sgd(0.5))
    rounds = [
        # (1, 0): g^ = (5, 0), 7.5 - 6.25 = 1.25, accepted.  Mean ((0, 5) + (5, 0))/2 = (2.5, 2.5);  x = -(1.25, 1.25)
        arrivals((0, 2), (1, 0)),
        # (-3, 0): g^ = (-5, 0), -7.5 - 6.25 = -13.75, rejected.  Mean (0, 5);  x = (-1.25, -1.25 - 2.5)
        arrivals((0, 2), (-3, 0)),
        # Both rejected: x stays
        arrivals((3, -4), (-3, 0)),
    ]
    expected = [{"params": (-1.25, -1.25)}, {"params": (-1.25, -3.75)}, {"params": (-1.25, -3.75)}]
    agree(served(rule, (0, 0), rounds, (3, 4)), expected)
