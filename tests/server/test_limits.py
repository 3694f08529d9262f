"""max_abs and max_norm: a finite vector does not damage params and moments; non-finite values are never published."""

from dataclasses import replace
from functools import partial
from itertools import product

import numpy as np
import pytest

import oracle
from afflux import AffluxError, Calibrate, Layout, Rule, Server, ServerOptions, ops, replay
from afflux._engine import STEP_KINDS
from afflux.aggregation import round as rounds
from afflux.aggregation.limits import MAX_ABS
from afflux.ops import Step
from afflux.rules import RULES, ca2fl, fadas, fedadam, fedasync, fedbuff, wkafl
from afflux.rules.optimizers import REACH, Adagrad
from conftest import bits, check_error, preset, push_all, ready
from inside import store_of, without_fast_path

D = 9


def vector(value, dtype=np.float32):
    return np.full(D, value, dtype)


def fresh(name, dtype="float32", **options):
    rule = preset(name, buffer_size=2) if "buffer_size" in RULES[name].__annotations__ else preset(name)
    server = Server(rule, vector(0.5, dtype), num_clients=6, dtype=dtype, **options)
    return ready(server, vector(0.25, dtype))


@pytest.mark.parametrize("name", sorted(RULES))
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_one_huge_vector_is_refused_and_the_next_rounds_move(name, dtype):
    server, twin = fresh(name, dtype), fresh(name, dtype)
    most = MAX_ABS[dtype]
    for turn in range(6):
        for bad in (most * 1.001, -most * 1.001, np.finfo(dtype).max):
            huge = vector(0.1, dtype)
            huge[3] = bad
            with pytest.raises(AffluxError, match=r"has an element of magnitude .*, max_abs is .*: at index 3"):
                server.push(client=turn, version=server.version, **{server.rule.kind: huge})
        for each in (server, twin):
            each.push(client=turn, version=each.version, loss=1.0, **{each.rule.kind: vector(0.1 * (turn + 1), dtype)})
    assert bits(server.params) == bits(twin.params)
    assert server.version == twin.version > 0
    assert server.counts["refused"] == 18


@pytest.mark.parametrize("name", sorted(RULES))
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_all_of_the_largest_size_stays_finite(name, dtype):
    """Params, moments and rows: 200 rounds of the worst that is let in, then honest ones still move."""
    server = fresh(name, dtype)
    most = MAX_ABS[dtype] * (1 - 1e-6)  # float32 rounds
    if dtype == "float64" and server.rule.needs.products:
        most /= 1e3  # a norm over 1e150 would overflow inner products, and is refused
    for turn in range(400):
        sign = 1 if turn % 5 else -1
        server.push(client=turn % 6, version=server.version, loss=1.0, **{server.rule.kind: vector(sign * most, dtype)})
    assert np.isfinite(server.params).all()
    assert all(np.isfinite(each).all() for each in server.rule_vectors.values())
    assert server.version > 0


def test_the_limit_is_of_what_the_rule_takes():
    server = Server(fedbuff(buffer_size=1), vector(0.0), max_abs=10.0)
    pulled = server.pull()
    assert server.push(client=1, version=pulled, model=vector(9.0)).version == 1
    server.push(client=1, version=server.pull(), model=vector(18.0))  # 9 more than the base
    check_error("client 1's model .* 17, max_abs is 10", server.push, client=1, version=pulled, model=vector(17.0))
    with pytest.raises(AffluxError, match="client 1's gradient has an element of magnitude 20, max_abs is 10"):
        server.push(client=1, version=pulled, gradient=vector(2.0), client_lr=2.0, local_steps=5)
    assert server.version == 2


@pytest.mark.parametrize("slot_dtype", ["float32", "bfloat16"])
def test_names_the_array(slot_dtype):
    model = {"a": np.zeros((2, 2), np.float32), "b": np.zeros(3, np.float32)}
    server = Server(fedbuff(), model, slot_dtype=slot_dtype)
    huge = {"a": np.zeros((2, 2), np.float32), "b": np.array([0, -1e20, 0], np.float32)}
    check_error(r"magnitude (1e\+20|9.97e\+19), .* at index 5 \(in b\)$", server.push, client=1, version=0, update=huge)


@pytest.mark.parametrize(
    ("slots", "max_abs"),
    [("float32", 1e30), ("float32", 0.3), ("float32", None), ("bfloat16", 1e30), ("bfloat16", 0.3), ("float64", 0.1)],
)
@pytest.mark.parametrize("fast", [True, False])
def test_a_value_of_max_abs_is_accepted(slots, max_abs, fast):
    """As a float64 and in the dtype of params, also if the slot rounds it up; a value beyond it in the slot is not."""
    dtype = "float64" if slots == "float64" else "float32"
    server = Server(fedbuff(buffer_size=9), np.zeros(1), dtype=dtype, slot_dtype=slots, max_abs=max_abs)
    if not fast:
        without_fast_path(server)
    most = max_abs or MAX_ABS[dtype]
    for sign in (1, -1):
        for update in (np.array([sign * most]), np.array([sign * most], dtype)):
            assert server.push(client=1, version=0, update=update).status == "joined"
        larger = sign * most * (1 + (2**-6 if slots == "bfloat16" else 2**-22))
        check_error("has an element of magnitude", server.push, client=1, version=0, update=np.array([larger]))


@pytest.mark.parametrize(("dtype", "lr"), [("float32", 1e17), ("float64", 1e151)])
def test_initial_params_leave_room_for_steps(dtype, lr):
    """Near the largest number, one push within the limits made a step that is not finite, which ended the server."""
    rule, most, push = fedbuff(buffer_size=1, server_lr=lr), float(np.finfo(dtype).max), vector(MAX_ABS[dtype], dtype)
    check_error(rf"params has .*, half of the largest {dtype}", Server, rule, vector(-0.51 * most, dtype), dtype=dtype)
    server = Server(rule, vector(0.5 * most, dtype), dtype=dtype)
    push_all(server, [1] * 3, push)
    assert server.version == 3


def test_max_norm_is_that_of_the_slot():
    """1.01 is 1.0078125 as a bfloat16."""
    server = Server(fedbuff(buffer_size=2), vector(0.0), max_norm=3.025, slot_dtype="bfloat16")
    assert server.push(client=1, version=0, update=vector(1.01)).status == "joined"
    check_error(r"has the norm 3.04688, max_norm is 3.025", server.push, client=1, version=0, update=vector(1.0119))


def test_max_norm():
    server = Server(fedbuff(buffer_size=1), vector(0.0), max_norm=3.0, faults="record")
    receipt = server.push(client=1, version=0, update=vector(1.01))
    assert (receipt.status, server.version) == ("faulty", 0)
    assert receipt.reason == "[push] client 1's update has the norm 3.03, max_norm is 3"
    assert server.push(client=1, version=0, update=vector(1.0)).version == 1


def test_rule_vectors_and_buffers_have_the_limit_too():
    server = fresh("zenopp")
    check_error(r"validation has an element of magnitude 2e\+15", server.set_rule_vector, "validation", vector(2e15))
    module = type("Module", (), {"named_parameters": lambda self: []})()
    check_error("validation is a module .* holds params", server.set_rule_vector, "validation", module)
    tree = {"w": np.zeros(2, np.float32), "running_var": np.ones(2)}
    server = Server(fedbuff(), tree)
    assert [each.name for each in Layout.of(tree).buffers] == ["running_var"]
    with pytest.raises(AffluxError, match=r"buffers has a value beyond 1e\+15 at index 1 \(in running_var\)"):
        server.push(client=1, version=0, update=tree, buffers=np.array([1, 1e16]))


@pytest.mark.parametrize(
    ("rule", "options"),
    [
        (fedbuff(server_lr=1e30), {}),
        (fedadam(server_lr=1e20), {}),
        (fadas(server_lr=1.0, epsilon=1e-30), {}),
        (fadas(server_lr=1.0), dict(max_abs=1e30)),
        (Rule("sums", "update", 2, lambda arrivals: np.full(2, 1e2), Calibrate(cached=False), Adagrad(0.1)), {}),
        (fedbuff(server_lr=1e200), dict(dtype="float64")),
    ],
)
def test_numbers_of_a_rule_with_which_the_limit_could_overflow(rule, options):
    """They raise in the first round, whatever is sent, and never because of what a client sends."""
    server = Server(rule, np.zeros(D), **options)
    dtype = options.get("dtype", "float32")
    push_all(server, range(rule.buffer_size - 1), vector(0, dtype), version=0)
    check_error("could overflow: make Server's max_abs or", server.push, client=99, version=0, update=vector(0, dtype))
    assert (server.version, server.arrivals_waiting) == (0, rule.buffer_size - 1)


def test_every_kind_of_step_has_a_bound_and_one_without_is_an_error():
    assert REACH.keys() == STEP_KINDS.keys()
    check_error("step gave the kind 'new'", ServerOptions().limits.check_step, fedbuff(), Step("new"), 1.0, [0.5])


@pytest.mark.parametrize("kind", STEP_KINDS)
def test_no_step_goes_farther_than_its_bound(kind):
    """The oracle's steps with directions of one magnitude, in an order of signs that drives means and squares far."""
    signs = np.random.default_rng(3).choice([-1.0, 1.0], (60, 40))
    signs[:, 0], signs[:, 1], signs[:30, 2], signs[30:, 2] = 1.0, (-1.0) ** np.arange(60), 1.0, -1.0
    signs[:, 3], signs[-1, 3] = 1.0, 0.0  # a second moment without memory is then 0
    for beta1, beta2, d in product((0.0, 0.5, 0.9, 0.99), (0.0, 0.1, 0.5, 0.9, 0.99), (0.25, 8.0)):
        step = Step(kind, 1.0, beta1, beta2, 1e-3)
        kept = [np.zeros(signs.shape[1])] * STEP_KINDS[kind]
        for count, each in enumerate(signs, 1):
            change, *kept = oracle.step(kind, np.zeros(signs.shape[1]), d * each, kept, 1.0, beta1, beta2, 1e-3)
            assert abs(change).max() <= REACH[kind].params(step, d) * (1 + 1e-12)
            assert np.max(np.abs(kept), initial=0) <= REACH[kind].states(step, d, count) * (1 + 1e-12)


class Grows:
    """A step whose lr overflows params; the check of its numbers is switched off below."""

    def __call__(self, arrivals):
        return Step("sgd", 1e30)


@pytest.fixture
def failed(monkeypatch, tmp_path):
    """Makes a server whose second round writes infinities."""
    monkeypatch.setattr(rounds.Limits, "check_step", lambda *_: None)

    def make(**options):
        if options.pop("stored", False):
            options["store"] = tmp_path / "store"
        rule = replace(fedbuff(buffer_size=1), step=Grows())
        server = Server(rule, vector(0.5), **options)
        server.push(client=1, version=0, update=vector(1e-30))
        saved = None if "store" in options else server.state_dict()
        check_error(r"\[push\] the step to version 2 wrote", server.push, client=1, version=1, update=vector(1e14))
        return server, saved

    return make


@pytest.mark.parametrize("options", [{}, dict(inplace=True), dict(accumulate=True), dict(log=True), dict(stored=True)])
def test_a_version_that_is_not_finite_is_not_published(failed, options):
    server, saved = failed(**options)
    calls = {
        "push": partial(server.push, client=1, version=1, update=vector(0)),
        "checkout": partial(server.checkout, 1),
        "flush": server.flush,
        "discard": server.discard,
        "poll": server.poll,
        "state_dict": server.state_dict,
        "rule_vectors": lambda: server.rule_vectors,
        "set_rule_vector": partial(server.set_rule_vector, "m", vector(0)),
        "replace_rule": partial(server.replace_rule, server.rule),
    }
    if "stored" in options:
        calls["checkpoint"] = server.checkpoint
    for name, call in calls.items():
        check_error(rf"^\[{name}\] the step to version 2 wrote", call)
    if "inplace" in options:
        for call in (server.pull, lambda: server.params, partial(server.pull, out=vector(0))):
            check_error(r"^\[pull\] .* Its params are overwritten \(inplace=True\); load_st", call)
    else:
        assert server.params.tolist() == server.pull().params.tolist() == [1.5] * D
    assert server.version == 1
    if saved is not None:
        server.load_state_dict(saved)
        assert server.push(client=1, version=1, update=vector(1e-30)).version == 2
        assert server.params.tolist() == [2.5] * D


def test_a_store_goes_on_from_its_last_commit(failed, monkeypatch):
    server, _ = failed(stored=True)
    path = store_of(server).path
    check_error(r"Server\.open\(.*\) continues from a saved state", server.push, client=1, version=1, update=vector(0))
    server.close()
    with Server.open(path, server.rule) as again:
        assert (again.version, again.params.tolist()) == (1, [1.5] * D)
        assert again.push(client=1, version=1, update=vector(1e-30)).version == 2


def test_a_state_that_is_not_finite_is_refused():
    server = fresh("fadas")
    push_all(server, range(2), vector(1.0), version=0)
    for name in ("params", "rule_vector.m", "rule_vector.v_hat"):
        state = server.state_dict()
        state["arrays"][name][4] = np.inf
        check_error(rf"{name} has a non-finite value at index \[4\]", server.load_state_dict, state)
    server.load_state_dict(server.state_dict())


@pytest.mark.parametrize("codec", ["affine-8", "rotated-4", "bfloat16", "affine-vector-4"])
def test_encoded_rows_of_a_state_are_decoded_and_checked(codec):
    """Byte 64 begins the pairs of blocks and the scales, byte 24 those of the vector; bfloat16 has no head."""
    server = Server(ca2fl(buffer_size=1, codec=codec), vector(0.0), num_clients=3)
    server.push(client="ann", version=0, update=vector(1.0))
    at = {"bfloat16": 0, "affine-vector-4": 24}.get(codec, 64)
    for bad in (b"\0\0\xc0\x7f", b"\0\0\x80\xff"):
        state = server.state_dict()
        state["arrays"]["rows"][0, at : at + 4] = np.frombuffer(bad, np.uint8)
        check_error(r"row of client 'ann' (has a non-finite|cannot be .* not finite$)", server.load_state_dict, state)
    if codec != "bfloat16":
        state = server.state_dict()
        state["arrays"]["rows"][0, 0] = 0
        check_error(r"the row of client 'ann' cannot be decoded: \[decode\] row", server.load_state_dict, state)
    server.load_state_dict(server.state_dict())


def test_a_sum_of_no_rows_is_refused():
    server = Server(ca2fl(buffer_size=1), vector(0.0), num_clients=3)
    state = server.state_dict()
    state["arrays"]["sum"][0] = 1e150
    check_error("the sum of no rows is not zero", server.load_state_dict, state)


def test_replay_has_the_limits_that_it_is_given():
    server = Server(fedasync(), vector(0.0), log=True, max_abs=1e20)
    server.push(client=1, version=0, model=vector(1e18))
    again = replay(server.log, Server(fedasync(), vector(0.0), max_abs=1e20), lambda join: vector(1e18))
    assert bits(again.params) == bits(server.params)
    check_error("max_abs", replay, server.log, Server(fedasync(), vector(0.0)), lambda join: vector(1e18))


def test_wkafl_takes_the_largest_values():
    server = Server(wkafl(buffer_size=3), vector(0.0))
    push_all(server, range(3), vector(1e15), version=0)
    assert server.version == 1
    assert np.isfinite(server.params).all()


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("threads", [1, 2])
def test_the_sweep_says_whether_all_is_sound(dtype, threads):
    """Params, every state, rule vectors and the direction, at each end and in the middle, on every instruction set."""
    size = 5000
    most = float(np.finfo(dtype).max)

    def sound(step, states=(), rule_vectors=None, update=1.0, **limits):
        params = np.ones(size, dtype)
        updates = np.ones(size, dtype)
        done = []
        for at in (0, 2499, size - 1):
            updates[:] = 1.0
            updates[at] = update
            mix = ops.Combine([updates], np.ones(1), most=limits.get("direction", np.inf))
            held = [np.zeros(size, dtype) for _ in states]
            for one, first in zip(held, states, strict=True):
                one[at] = first
            round_ = ops.Pass(params, params.copy(), mix, step=step, states=held, most=limits.get("most", np.inf))
            if rule_vectors is not None:
                kept = np.zeros(size, dtype)
                kept[at] = rule_vectors
                vectors = ops.RuleVectors([kept], np.zeros(1), np.array([[2.0, 0.0]]))
                round_ = ops.Pass(params, params.copy(), mix, step=step, rule_vectors=vectors)
            ops.apply(round_, num_threads=threads, done=done)
        assert len(set(done)) == 1
        return done[0]

    adam = partial(ops.Step, "adam", 1.0, 0.9, 0.99, 1e-8)
    assert sound(Step("sgd"))
    assert sound(adam(), (0.0, 0.0))
    for bad in (np.nan, np.inf, -np.inf):
        assert not sound(Step("sgd"), update=bad)
        assert not sound(ops.Step("momentum", 1e-3, 0.9), (bad,))
        assert not sound(adam(), (0.0, bad))
    assert sound(Step("sgd"), update=most / 2)
    assert not sound(Step("sgd", 3.0), update=most / 2)
    assert not sound(Step("sgd", 3.0), update=-most / 2)
    assert not sound(ops.Step("momentum", 1e-30, 0.9), (most,), update=most / 2)
    assert sound(Step("sgd"), rule_vectors=most / 4)
    assert not sound(Step("sgd"), rule_vectors=most)
    assert sound(Step("sgd"), update=6.0, most=7.0)
    assert not sound(Step("sgd"), update=6.5, most=7.0)
    assert not sound(Step("sgd"), update=-9.0, most=7.0)
    assert sound(Step("sgd", 0.0), update=6.0, direction=6.0)
    assert not sound(Step("sgd", 0.0), update=6.5, direction=6.0)
    for name in ("most", "combine.most"):
        for wrong in (0.0, -1.0, np.nan):
            key = "direction" if "." in name else "most"
            check_error(rf"\[apply\] {name} is .*, must be greater than 0", sound, Step("sgd"), **{key: wrong})
    check_error("epsilon is 0, must be greater than 0", sound, ops.Step("adam", 1.0, 0.9, 0.99, 0.0), (0.0, 0.0))
