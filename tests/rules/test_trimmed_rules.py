"""The word `trim`: what a part may say, what a server refuses beside it, and what a round then does."""

from functools import partial

import numpy as np
import pytest

from afflux import Needs, Rule, Server, Weights, replay, rules
from afflux.aggregation.sharded_plane import ShardedPlane
from afflux.rules.calibration import CACHED_DIFFERENCE, NONE
from afflux.rules.optimizers import Sgd
from afflux.rules.presets.dp_fedbuff import ClippedMean
from afflux.rules.weights import Examples, Given, Trimmed, Uniform
from conftest import bits, check_error, push_all
from own_parts import Says


def own(weigh, size=2, kind="update"):
    return Rule("mine", kind, size, weigh, NONE, Sgd(1.0))


def serve(rule, *updates, size=3, **options):
    server = Server(rule, np.zeros(size), dtype="float64", **options)
    push_all(server, range(len(updates)), updates.__getitem__, num_examples=lambda client: 1 + client)
    return server


needing = partial(Says, trim=True)


def halves(trim, *weights):
    return Weights(np.array(weights or (0.5, 0.5)), trim=trim)


@pytest.mark.parametrize(
    ("part", "text"),
    [
        (Says(halves(0.2)), r"\[mine\] weigh gave trim 0.2, but it has no needs = Needs\(trim=True\)"),
        (needing(halves(0.6)), r"\[mine\] weigh gave trim 0.6, must be from 0 to 0.5"),
        (needing(halves(-0.1)), r"\[mine\] weigh gave trim -0.1, must be from 0 to 0.5"),
        (needing(halves(np.nan)), r"\[mine\] weigh gave trim nan, must be finite"),
        (needing(halves("all")), r"\[mine\] weigh gave trim 'all', must be numbers"),
        (needing(halves(0.2, -0.5, -0.5)), r"\[mine\] weigh gave client 0 the weight -0.5, negative with trim"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_results_that_are_refused(part, text):
    server = serve(own(part), np.ones(3))
    check_error(text, server.push, client=1, version=0, update=np.ones(3))
    assert (server.version, server.arrivals_waiting) == (0, 1)


def test_a_trim_of_zero_needs_nothing():
    plain, zero = (serve(own(part), np.ones(3), np.arange(3.0)) for part in (Uniform(), Says(halves(0))))
    assert bits(plain.params) == bits(zero.params)
    assert bits(serve(own(Trimmed(Uniform(), 0.0)), np.ones(3), np.arange(3.0)).params) == bits(plain.params)


def test_what_does_not_go_with_it():
    rule = rules.fedmedian(buffer_size=2)
    check_error("cached rows", Rule, "mine", "update", 2, Trimmed(Uniform(), 0.1), CACHED_DIFFERENCE, Sgd(1.0))
    check_error("clip_norms: fedmedian cuts large and small values", Server, rule, np.zeros(3), clip_norms=2.0)
    check_error("fedmedian sorts the vectors of a full buffer", Server, rule, np.zeros(3), accumulate=True)
    check_error("fedmedian needs each client once", Server, rule, np.zeros(3), duplicates="both")
    check_error(r"\[Trimmed\] trim is 0.6, must be from 0 to 0.5", Trimmed, Uniform(), 0.6)
    clipped = Trimmed(ClippedMean(1.0, 10), 0.2)
    check_error("are votes, and do not scale values", Rule, "mine", "update", 2, clipped, NONE, Sgd(1.0))
    check_error(r"\[Trimmed\] trim is 'much'", Trimmed, Uniform(), "much")
    check_error(r"\[Trimmed\] weigh is 3, must be a part", Trimmed, 3, 0.2)
    check_error(r"\[Trimmed\] weigh is .*Uniform", Trimmed, Uniform, 0.2)
    check_error(r"\[Trimmed\] trim is -0.1", rules.fedtrimmedavg, trim=-0.1)


def test_a_negative_weight_of_one_arrival_rejects_it():
    class Signed:
        needs = Needs(trim=True)

        def __call__(self, arrivals, /):
            return Weights(1.5 - arrivals.num_examples / 2, trim=0.5)

    server = serve(own(Signed(), 4), *np.arange(1.0, 5)[:, None] * np.ones((4, 3)))
    assert server.version == 1
    assert server.params.tolist() == [1.5 * 1.0] * 3  # of weights 1 and .5; client 2 has weight 0, client 3 is rejected


def test_weights_of_another_part():
    """Of 1, 2, 3, 4 tenths a quarter is cut: all of the first and .15 of the second, .25 of the last."""
    updates = [np.full(3, value) for value in (8.0, -2.0, 1.0, 3.0)]  # in order: -2, 1, 3, 8 of .2, .3, .4, .1
    params = serve(own(Trimmed(Examples(), 0.25), 4), *updates).params
    assert np.allclose(params, (0.25 * 1 + 0.25 * 3) / 0.5, rtol=1e-7)
    assert Trimmed(Given("quality"), 0.25).needs == Needs(facts=("quality",), trim=True, once=True)


def test_models_and_their_buffers_are_trimmed():
    """The statistics of a hostile client's model are cut as its params are."""
    start = {"w": np.zeros(2), "running_var": np.full(3, 0.1), "num_batches_tracked": np.array(5)}
    server = Server(own(Trimmed(Uniform(), 0.25), 4, "model"), start)
    for client, value in enumerate((1.0, 1e14, 3.0, 2.0)):
        tree = {"w": np.full(2, value), "running_var": np.full(3, value), "num_batches_tracked": np.array(7)}
        server.push(client=client, version=0, model=tree, num_examples=1)
    assert server.params.tolist() == [2.5, 2.5]
    assert server.pull().buffers.tolist() == [2.5, 2.5, 2.5, 7.0]


def test_rule_vectors_are_renewed_by_untrimmed_updates():
    class Mean:
        needs = Needs(trim=True, rule_vectors=("mean",))

        def __call__(self, arrivals, /):
            return Weights(np.full(4, 0.25), (0.0,), np.array([[0.5, 0.25, 0.25, 0.25, 0.25]]), trim=0.5)

    updates = [np.full(3, value) for value in (1.0, 9.0, 3.0, 5.0)]
    server = serve(own(Mean(), 4), *updates)
    assert (server.params.tolist(), server.rule_vectors["mean"].tolist()) == ([4.0] * 3, [4.5] * 3)


@pytest.mark.parametrize("count", [63, 64, 65, 130])
def test_many_arrivals_take_a_slower_path(count, rng):
    updates = rng.standard_normal((count, 40))
    server = serve(rules.fedmedian(buffer_size=count), *updates, size=40)
    assert np.allclose(server.params, np.median(updates, axis=0), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("options", [{}, {"plane": True}, {"store": True}], ids=str)
def test_a_log_gives_the_rounds_again(options, tmp_path, rng):
    """In one piece, in shards and in a store: the same bits."""
    size, rule, updates = 140_001, rules.fedtrimmedavg(buffer_size=5, trim=0.3), rng.standard_normal((10, 140_001))
    first = Server(rule, np.zeros(size), num_clients=5, log=True)
    for number, update in enumerate(updates):
        first.push(client=number % 5, version=first.version, update=update)
    made = {"plane": ShardedPlane(3)} if "plane" in options else {}
    made |= {"store": tmp_path / "store"} if "store" in options else {}
    empty = Server(rule, np.zeros(size), num_clients=5, log=True, **made)
    again = replay(first.log, empty, lambda join: updates[join.number])
    assert (again.version, bits(again.params)) == (2, bits(first.params))
    if "store" in options:
        again.close()
        opened = Server.open(tmp_path / "store", rule)
        assert bits(opened.params) == bits(first.params)
        opened.close()
