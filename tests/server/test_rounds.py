"""What a rule may give a round, and what becomes of the round if it gives something else: nothing is lost."""

import copy
import pickle
from functools import partial

import numpy as np
import pytest

from afflux import Rule, Server, Weights, ops
from afflux.rules import optimizers, twafl, wkafl
from afflux.rules.calibration import CACHED_DIFFERENCE, NONE
from afflux.rules.presets.wkafl import CosineSelection
from afflux.rules.weights import Uniform
from conftest import bits, check_error, push_all
from own_parts import Says
from surroundings import flushed_subnormals

HALVES = np.full(2, 0.5)


def server(weigh, stepper=optimizers.Sgd(1.0), calibrate=NONE):  # noqa: B008 - frozen
    return Server(Rule("own", "update", 2, weigh, calibrate, stepper), np.zeros(3), num_clients=4)


def says(said, **needs):
    """Makes a server whose rule gives these weights."""
    return partial(server, Says(said, **needs))


def steps(step):
    """Makes a server whose rule gives this step."""
    return partial(server, Uniform(), lambda arrivals: step)


WRONG = {
    "no numbers": (says("abc"), "weigh gave weights 'abc', must be numbers"),
    "ragged": (says([[1.0], [1.0, 2.0]]), "weigh gave weights .*, must be numbers"),
    "complex": (says(HALVES + 1j), "weigh gave weights .*, must be numbers .of complex128"),
    "texts": (says(["0.5", "0.5"]), "weigh gave weights .*, must be numbers"),
    "masked": (says(np.ma.array(HALVES, mask=[True, False])), "must be numbers .masked"),
    "who was rejected": (says(Weights(HALVES, rejected={7: "why"})), "rejects {7: 'why'}, must be by index of 2"),
    "rejected and used": (says(Weights(HALVES, rejected={0: "why"})), "rejects client 0, whose weight is 0.5, must"),
    "rejected without a reason": (says(Weights(HALVES * 0, rejected={1: None})), "rejects client 1 with None, must"),
    "rejected by a list": (says(Weights(HALVES, rejected=["why"])), r"weigh rejects \['why'\], must be by index"),
    "a number for skip": (says(Weights(HALVES, skip=2)), "skip 2, must be True or False"),
    "an array for trim": (says(Weights(HALVES, trim=np.zeros(2)), trim=True, once=True), r"trim of shape \(2,\)"),
    "None for rule_vectors": (says(Weights(HALVES, None), rule_vectors=("a",)), "rule_vectors None, must be numbers"),
    "rule_vectors": (says(Weights(HALVES, (1.0, 2.0)), rule_vectors=("a",)), r"rule_vectors of shape \(2,\)"),
    "next": (says(Weights(HALVES, next=np.ones((1, 2))), rule_vectors=("a",)), r"next of shape \(1, 2\)"),
    "nan in next": (
        says(Weights(HALVES, next=np.full((1, 3), np.nan)), rule_vectors=("a",)),
        "next .*, must be finite",
    ),
    "scalars": (says(Weights(HALVES, scalars={"b": 1.0}), scalars={"a": 1.0}), r"scalars {'b': 1.0}, must be of"),
    "a list of scalars": (says(Weights(HALVES, scalars=["a"]), scalars={"a": 1.0}), r"scalars \['a'\], must"),
    "infinite scalar": (says(Weights(HALVES, scalars={"a": np.inf}), scalars={"a": 1.0}), "scalars .*, must be finite"),
    "weights without a sum": (
        partial(server, Says(np.array([0.5, -0.5])), calibrate=CACHED_DIFFERENCE),
        "sum to 0.0, which is no divisor",
    ),
    "a part for a step": (steps(optimizers.Sgd(0.1)), "must be an afflux.ops.Step"),
    "a step that the engine refuses": (steps(ops.Step("momentum", 0.1, 1.5)), "beta1 is 1.5"),
    "a step whose bound divides by 0": (steps(ops.Step("momentum", 0.1, 1.0)), "beta1 is 1.0"),
    "a step without its states": (steps(ops.Step("adam", 0.1, 0.9, 0.99, 1e-8)), "states has 0 vectors, adam keeps 2"),
}


@pytest.mark.parametrize("which", WRONG)
def test_a_round_that_cannot_be_leaves_no_trace(which):
    make, message = WRONG[which]
    ours = make()
    before = ours.state_dict()
    ours.push(client=0, update=np.ones(3), version=0)
    for _ in range(2):
        check_error(message, ours.push, client=1, update=np.ones(3), version=0)
    assert (ours.version, ours.arrivals_waiting, ours.counts["joined"], ours.counts["refused"]) == (0, 1, 1, 2)
    assert ours.discard() == 1
    ours.load_state_dict(before)
    assert ours.push(client=1, update=np.ones(3), version=0).status == "joined"


def test_columns_first_is_as_good_as_rows_first():
    next_ = np.arange(8.0).reshape(2, 4)
    both = [
        server(Says(Weights(HALVES, (0.0, 1.0), array), rule_vectors=("a", "b")))
        for array in (next_, np.asfortranarray(next_))
    ]
    for ours in both:
        push_all(ours, (0, 1, 2, 3), lambda client: np.arange(3.0) + client, version=0)
    assert bits(both[0].params) == bits(both[1].params)
    assert both[0].rule_vectors["b"].any()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Rule("own", "update", 2, Says(HALVES, rule_vectors=tuple("abcde")), NONE, optimizers.Sgd()), "at mos"),
        (lambda: Rule("own", "update", 2, Says(HALVES, handed_in=("a",)), NONE, optimizers.Sgd()), "no others can be"),
        (lambda: Rule("own", "update", 2, Says(HALVES, rule_vectors=("m",)), NONE, optimizers.Adam()), "a vector of o"),
        (lambda: Rule("own", "update", 2, Says(HALVES, scalars={"a": np.nan}), NONE, optimizers.Sgd()), "a starts at"),
        (lambda: Rule("own", "update", 2, Uniform(), None, optimizers.Sgd()), "calibrate is None, must be a Calibrate"),
        (lambda: Rule("own", "update", 2, None, NONE, optimizers.Sgd()), "weigh is None, must be a part"),
    ],
)
def test_rules_that_cannot_be(make, message):
    check_error(message, make)


def test_a_report_can_be_copied_and_sent():
    ours = server(Says(Weights(HALVES, scalars={"a": 2.0}), scalars={"a": 1.0}))
    ours.push(client=0, update=np.ones(3), version=0)
    report = ours.push(client=1, update=np.ones(3), version=0).report
    for again in (pickle.loads(pickle.dumps(report)), copy.deepcopy(report)):
        assert again.scalars == {"a": 2.0}
        assert again.weights.tolist() == [0.5, 0.5]


def test_rows_of_rejected_arrivals_stay_when_all_are_rejected():
    """WKAFL's step is then its estimate, but no arrival was accepted."""
    rule = Rule("own", "gradient", 2, CosineSelection(sim_min=0.99), CACHED_DIFFERENCE, optimizers.Sgd(1.0))
    ours = Server(rule, np.zeros(2), num_clients=2)
    ours.push(client=0, gradient=np.array([1.0, 0.0]), version=0)
    report = ours.push(client=1, gradient=np.array([0.0, 1.0]), version=0).report
    assert all("the step is the estimate" in why for why in report.rejected)
    assert report.weights.tolist() == [0.5, 0.5]
    assert ours.params.tolist() == [-0.5, -0.5]
    assert ours.rows.client_ids == []
    assert not ours.rows.sum.any()


def test_a_vector_whose_inner_products_overflow_is_refused():
    ours = Server(wkafl(buffer_size=2), np.zeros(2), dtype="float64", max_abs=1e200)
    check_error("client 0's gradient has norm inf", ours.push, client=0, gradient=np.array([1e200, 0.0]), version=0)
    push_all(ours, (1, 2), np.array([1e140, 1.0]), version=0)
    assert ours.version == 1
    assert np.isfinite(ours.params).all()


def test_weights_do_not_depend_on_the_callers_floating_point_mode():
    with flushed_subnormals():
        ours = Server(twafl(buffer_size=1, server_lr=1.0), np.zeros(2))
        report = push_all(ours, [0] * 2391, np.ones(2), version=0).report
    assert report.staleness.tolist() == [2390]
    assert report.weights.view(np.int64)[0] > 0  # subnormal: 3.1e-319
    assert report.rejected == ("",)


def test_a_round_that_is_not_committed_spares_the_commit_in_any_floating_point_mode(tmp_path):
    weights = Weights(np.ones(1), (1.0,), np.array([[1.0, 2.0**-1060]]))  # the rule vector changes
    rule = Rule("own", "update", 1, Says(weights, rule_vectors=("own",)), NONE, optimizers.Sgd(1.0))
    ours = Server(rule, np.zeros(1), dtype="float64", store=tmp_path / "store", commit_every=None)
    for version in range(3):
        if version == 2:
            ours.checkpoint()
        with flushed_subnormals(version == 2):
            ours.push(client=0, update=np.full(1, 2.0**300), version=version)
    assert ours.rule_vectors["own"].tolist() == [3 * 2.0**-760]
    ours.close(checkpoint=False)
    with Server.open(tmp_path / "store", rule) as again:
        assert again.rule_vectors["own"].tolist() == [2 * 2.0**-760]


@pytest.mark.parametrize("store", [None, 1, 100], ids=["in memory", "each round committed", "rarely committed"])
def test_a_rejected_second_arrival_of_a_client(store, tmp_path):
    """The first one's row is not written where the second one's old row is read."""
    rule = Rule("own", "update", 2, Says(np.array([1.0, 0.0])), CACHED_DIFFERENCE, optimizers.Sgd(1.0))
    kept = {} if store is None else {"store": tmp_path / "store", "commit_every": store}
    with Server(rule, np.zeros(3), num_clients=4, duplicates="both", **kept) as ours:
        for accepted, params in [(8.0, 8.0), (2.0, 4.0), (4.0, 6.5), (6.0, 9.5)]:  # x += h / 4 + u - h
            for value in (accepted, 99.0):
                receipt = ours.push(client=7, update=np.full(3, value), version=ours.version)
            assert receipt.report.rejected == ("", "weight 0")
            assert ours.params.tolist() == [params] * 3
            assert ours.rows.row(7).tolist() == ours.rows.sum.tolist() == [accepted] * 3
        assert len(ours.rows) == 1
