"""Server.replace_rule: in force from the next empty buffer on, with what the server has kept so far."""

import copy
import threading
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from afflux import Replaced, Rule, Server, StoreError, codecs, ops, replay, store
from afflux.rules import ca2fl, fadas, fedasync, fedavg, fedbuff, gsgm, wkafl, zenopp
from afflux.rules.calibration import NONE
from afflux.rules.optimizers import Adam, Sgd
from afflux.rules.staleness import Constant, Inverse
from afflux.rules.weights import Uniform
from checked_out import D, push, vector
from conftest import bits, check_error, push_all, ready, same_state
from held_up import start
from inside import slots_limit, slots_taken
from own_parts import Says

CLIENTS = 9


# When it is in force


def test_at_once_if_the_buffer_is_empty():
    server = Server(fedavg(buffer_size=2), vector(0.0))
    rule = fedavg(buffer_size=1, server_lr=0.5)
    assert server.replace_rule(rule) is True
    assert server.rule is rule
    assert push(server, value=4.0).report.server_lr == 0.5
    assert server.params.tolist() == [2.0] * D
    assert repr(server).endswith("0 of 1 arrivals)")


@pytest.mark.parametrize("end", ["push", "flush", "discard"])
def test_else_when_the_buffer_is_emptied(end):
    """x = mean(1, 3) by the rule before, if there is a step; then x += 0.5 * 8."""
    server = Server(fedavg(buffer_size=2), vector(0.0))
    push(server, 1, 1.0)
    rule = fedavg(buffer_size=1, server_lr=0.5)
    assert server.replace_rule(rule) is False
    assert server.rule == fedavg(buffer_size=2)
    expected = {"push": 2.0, "flush": 1.0, "discard": 0.0}[end]
    if end == "push":
        assert push(server, 2, 3.0).report.server_lr == 1.0
    else:
        getattr(server, end)()
    assert server.rule is rule
    assert push(server, 3, 8.0).report.version == server.version
    assert server.params.tolist() == [expected + 4.0] * D


def test_the_last_one_that_waits_counts():
    server = Server(fedavg(buffer_size=2), vector(0.0), log=True)
    push(server)
    first, second = fedavg(buffer_size=3), fedavg(buffer_size=4)
    assert [server.replace_rule(rule) for rule in (first, second)] == [False, False]
    push(server)
    assert server.rule is second
    assert [entry.config["buffer_size"] for entry in server.log if isinstance(entry, Replaced)] == [3, 4]


def test_arrivals_in_a_sum_keep_their_rule():
    """By hand: (2 * 4 + 1 * 1) / (2 + 1) = 3 with weights by examples; then the plain mean of 1 and 3."""
    weighted = Rule("own", "update", 2, fedavg().weigh, NONE, Sgd(1.0))
    server = Server(weighted, vector(0.0), accumulate=True)
    server.push(client=0, update=vector(4.0), version=0, num_examples=2)
    assert server.replace_rule(replace(weighted, weigh=Uniform(), buffer_size=3)) is False
    server.push(client=1, update=vector(1.0), version=0, num_examples=1)
    assert server.params.tolist() == [3.0] * D
    push_all(server, (1, 2, 3), vector, version=1, num_examples=lambda client: client)
    assert server.params.tolist() == [5.0] * D


@pytest.mark.parametrize("at_once", [True, False])
def test_a_pass_goes_on_under_the_new_rule(at_once):
    server = Server(gsgm(buffer_size=3), vector(0.0), num_clients=6)
    push_all(server, (0, 1, 2) if at_once else (0, 1, 2, 3, 4), vector())
    assert server.replace_rule(gsgm(buffer_size=2)) is at_once
    assert push(server, 0).status == "rejected"
    push_all(server, (3, 4, 5) if at_once else (5,), vector())
    assert (server.rule.buffer_size, server.version) == (2, 3 if at_once else 2)
    assert server.clients == set()


@pytest.mark.parametrize("make", [fadas, wkafl, ca2fl, gsgm], ids=["fadas", "wkafl", "ca2fl", "gsgm"])
def test_what_the_server_keeps_carries_over(make):
    """The bits of a server that was made with the new rule, and loads the state."""
    server = Server(make(buffer_size=2), vector(0.5), num_clients=CLIENTS)
    new = make(buffer_size=3, server_lr=0.25)
    push_all(server, range(4), lambda client: vector(1.0 + client))
    other = Server(new, vector(0.5), num_clients=CLIENTS)
    other.load_state_dict(server.state_dict())
    server.replace_rule(new)
    for each in (server, other):
        push_all(each, range(8), lambda client: vector(2.0 + client))
    same_state(server.state_dict(), other.state_dict())
    assert server.rule is new


def test_moments_carry_over_by_hand():
    """Adam's by plain NumPy, with another learning rate from the second step on; float64 throughout."""
    rates, beta1, beta2, eps = (0.5, 0.125), 0.9, 0.99, 1e-3
    rules = [Rule("own", "update", 1, Uniform(), NONE, Adam(lr, beta1, beta2, eps)) for lr in rates]
    server = Server(rules[0], np.zeros(D), dtype="float64")
    x, m, v = np.zeros(D), np.zeros(D), np.zeros(D)
    rng = np.random.default_rng(3)
    for step in range(4):
        if step == 1:
            server.replace_rule(rules[1])
        u = rng.standard_normal(D)
        lr = server.push(client=0, update=u, version=step).report.server_lr
        m = beta1 * m + (1 - beta1) * u
        v = beta2 * v + (1 - beta2) * u * u
        x = x + lr * m / (np.sqrt(v) + eps)
        assert np.allclose(server.params, x, rtol=1e-12)


def test_more_slots_for_a_larger_buffer():
    server = Server(fedbuff(buffer_size=1), vector(0.0))
    before = slots_limit(server)
    assert before == 2 + ops.default_threads()
    size = 2 * before
    server.replace_rule(fedbuff(buffer_size=size))
    receipt = push_all(server, range(size), vector(), version=0, timeout=0)
    assert receipt.report.weights.size == size
    limit = slots_limit(server)
    assert limit == 2 * size + before - 2
    server.replace_rule(fedbuff(buffer_size=1))
    assert slots_limit(server) == limit
    assert slots_taken(server) == 0


def test_from_within_on_step():
    """A schedule by hand: each step halves the learning rate of the next one."""
    server = Server(
        fedavg(buffer_size=1),
        vector(0.0),
        on_step=lambda report: server.replace_rule(fedavg(buffer_size=1, server_lr=report.server_lr / 2)),
    )
    push_all(server, [0] * 4, vector())
    assert server.params.tolist() == [1.0 + 0.5 + 0.25 + 0.125] * D


# Rules that do not go with the server


def own(weigh=None, step=None, **facts):
    weigh, step = weigh or Uniform(), step or Sgd(1.0)
    return Rule(
        **{"name": "own", "kind": "update", "buffer_size": 2, "calibrate": NONE, **facts}, weigh=weigh, step=step
    )


def deep():
    """More parts within parts than a configuration may have."""
    inner = Sgd(1.0)
    for _ in range(40):
        object.__setattr__(outer := Sgd(1.0), "lr", inner)
        inner = outer
    return inner


ASK = {"rule_vectors": ("a",), "handed_in": ("a",)}
WRONG = {
    "no rule": (fedbuff(), "fedbuff", {}, "rule is 'fedbuff', must be a Rule"),
    "name": (fedbuff(), fedavg(), {}, "name is 'fedbuff' of the rule in force, 'fedavg' of the new one"),
    "kind": (own(), own(kind="gradient"), {}, "kind is 'update' of the rule in force, 'gradient' of"),
    "moments": (own(), own(step=Adam()), {}, r"rule_vectors is \[\] of the rule in force, \['m', 'v'\] of"),
    "rows": (own(), replace(ca2fl(), name="own"), {"num_clients": 9}, "codec is None of the rule in force, 'float32'"),
    "codec": (
        ca2fl(buffer_size=2),
        ca2fl(buffer_size=2, codec=codecs.affine(4)),
        {"num_clients": 9},
        "codec is 'float32' .*, 'affine-4' of",
    ),
    "scalars": (own(), own(Says(None, scalars={"b": 1.0})), {}, r"scalars is \[\] of .*, \['b'\] of the new one"),
    "handed in": (
        own(Says(None, **ASK)),
        own(Says(None, rule_vectors=("a",))),
        {},
        r"handed_in is \['a'\] of .*, \[\] of",
    ),
    "passes": (own(), own(Says(None, passes=True)), {"num_clients": 9}, "passes is False of .*, True of the new one"),
    "inner products": (own(), own(Says(None, gram=True)), {}, "inner products is False of .*, True of the new one"),
    "norms": (own(), own(Says(None, norms=True)), {}, "norms is False of .*, True of the new one"),
    "num_clients": (
        ca2fl(buffer_size=2),
        ca2fl(buffer_size=10),
        {"num_clients": 9},
        "buffer_size 10 exceeds num_clients 9",
    ),
    "max_slots": (fedbuff(), fedbuff(buffer_size=12), {"max_slots": 11}, "max_slots is 11, must be an int of at least"),
    "memory_budget": (
        fedbuff(buffer_size=2),
        fedbuff(buffer_size=20),
        {"memory_budget": 200},
        "max_slots is .*, must be an int of at least 20",
    ),
    "on arrival": (own(), own(Says(None)), {"accumulate": True}, "accumulate=True needs weights that are known on"),
    "nested too deeply": (own(), own(step=deep()), {}, "the rule has more than 32 levels of parts"),
}


@pytest.mark.parametrize("which", WRONG)
@pytest.mark.parametrize("waiting", [0, 1])
def test_a_rule_that_does_not_go_with_the_server_changes_nothing(which, waiting):
    rule, new, options, message = WRONG[which]
    server = Server(rule, vector(0.0), log=True, **options)
    push_all(server, range(waiting), vector())
    before, limit, log = server.state_dict(), slots_limit(server), server.log
    check_error(r"\[(replace_rule|to_config)\] .*" + message, server.replace_rule, new)
    assert (server.rule, server.log, slots_limit(server)) == (rule, log, limit)
    assert server.state_dict()["meta"] == before["meta"]


def test_a_closed_server(tmp_path):
    server = Server(fedbuff(), vector(), store=tmp_path / "store")
    server.close()
    check_error(r"\[replace_rule\] .* is closed", server.replace_rule, fedbuff(buffer_size=2), error=StoreError)


# The log and its replay


class Halves:
    """A part of one's own, which is not registered."""

    def __init__(self, factor=0.5):
        self.factor = factor

    def __call__(self, arrivals):
        return np.full(len(arrivals), self.factor / len(arrivals))


def test_rules_with_parts_of_ones_own_are_given_to_a_replay():
    rules = [own(Halves(factor)) for factor in (0.5, 0.25)]
    server = Server(rules[0], vector(0.0), log=True)
    push(server)
    server.replace_rule(rules[1])
    push_all(server, range(4), vector())
    fresh = [Server(rules[0], vector(0.0)) for _ in range(2)]
    check_error(r"replace_rule\(\), and its rule must be given", replay, server.log, fresh[0], lambda join: vector())
    entries = []
    again = replay(server.log, fresh[1], lambda join: vector(), rule=lambda entry: entries.append(entry) or rules[1])
    assert bits(again.params) == bits(server.params)
    assert [entry.config["weigh"] for entry in entries] == [{"own": "test_replace_rule.Halves"}]


def changed(name, size, rate):
    """The rule of that name, with other numbers."""
    made = {
        "fedbuff": lambda: fedbuff(buffer_size=size, server_lr=rate),
        "streaming": lambda: fedbuff(buffer_size=size, staleness=Constant() if size == 2 else Inverse()),
        "fedasync": lambda: replace(fedasync(alpha=rate), buffer_size=size),
        "ca2fl": lambda: ca2fl(buffer_size=size, server_lr=rate),
        "fadas": lambda: fadas(buffer_size=size, server_lr=rate),
        "wkafl": lambda: wkafl(buffer_size=size, server_lr=rate),
        "gsgm": lambda: gsgm(buffer_size=size, server_lr=rate),
        "zenopp": lambda: zenopp(server_lr=rate),
    }
    return made[name]()


NAMES = ("fedbuff", "streaming", "fedasync", "ca2fl", "fadas", "wkafl", "gsgm", "zenopp")
MOVES = st.one_of(
    *[st.tuples(st.just("push"), st.integers(0, CLIENTS - 1), st.integers(0, 2))] * 5,
    st.tuples(st.just("replace"), st.integers(1, 4), st.sampled_from([0.25, 0.5, 1.0])),
    st.tuples(st.sampled_from(["flush", "discard", "reload"])),
)


@given(moves=st.lists(MOVES, max_size=40), name=st.sampled_from(NAMES))
@settings(max_examples=200, deadline=None)
def test_a_replay_and_a_reloaded_server_give_the_same_bits(moves, name):
    def fresh(rule):
        options = {"num_clients": CLIENTS, "max_staleness": 3, "log": True, "accumulate": name == "streaming"}
        return Server(rule, vector(0.5), **options)

    first = changed(name, 3, 0.75)
    server, vectors = ready(fresh(first)), {}
    for move, *facts in moves:
        if move == "push":
            client, back = facts
            value = np.random.default_rng([client, server.joins]).standard_normal(D).astype(np.float32)
            version = max(0, server.version - back)
            receipt = server.push(client=client, **{server.rule.kind: value}, version=version, loss=1.0)
            vectors[receipt.join] = value
            assert server.arrivals_waiting < max(2, server.rule.buffer_size)
        elif move == "replace":
            rule, empty = changed(name, *facts), server.arrivals_waiting == 0
            assert server.replace_rule(rule) == empty == (server.rule is rule)
        elif move == "reload":
            state = server.state_dict()
            server = fresh(server.rule)
            server.load_state_dict(state)
        else:
            getattr(server, move)()
    again = fresh(first)
    handed = server.rule_vectors.get("validation")
    replay(server.log, again, lambda join: vectors[join.number], rule_vector=lambda _: handed)
    same_state(again.state_dict(), server.state_dict())
    assert (again.rule, again.log) == (server.rule, server.log)


def test_threads_push_meanwhile():
    server = Server(fedbuff(buffer_size=3), vector(0.0), log=True)
    pushed, stop = {}, threading.Event()

    def client(number):
        for turn in range(100):
            value = number + turn % 7
            pushed[push(server, number, value).join] = value

    def replaces():
        size = 1
        while not stop.is_set():
            size = size % 5 + 1
            server.replace_rule(fedbuff(buffer_size=size, server_lr=1 / size))

    other, *clients = start(replaces), *(start(partial(client, number)) for number in range(4))
    assert [each.result(600) for each in clients] == [None] * 4
    stop.set()
    other.result(600)
    assert server.counts["joined"] == 400
    again = replay(
        server.log, Server(fedbuff(buffer_size=3), vector(0.0), log=True), lambda j: vector(pushed[j.number])
    )
    same_state(again.state_dict(), server.state_dict())


# States and stores


def waiting_for(rule, **options):
    """A server with an arrival in the buffer, and a rule that waits to replace its own."""
    server = Server(own(), vector(0.0), log=True, **options)
    push(server)
    server.replace_rule(rule)
    return server


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"part": "rule"}, "the rule that waits to replace this one cannot be made: .*is missing"),
        ("own", "the rule that waits to replace this one cannot be made"),
        (own(step=Adam()).to_config(), r"the rule that waits to replace this one: rule_vectors is \[\] of the rule in"),
        (own(buffer_size=50).to_config(), "the rule that waits to replace this one: max_slots is 9, must be"),
    ],
)
def test_a_state_with_a_wrong_rule_changes_nothing(change, message):
    state = copy.deepcopy(waiting_for(own(buffer_size=4)).state_dict())
    state["meta"]["next_rule"] = change
    server = Server(own(), vector(3.0), max_slots=9, log=True)
    push(server)
    before = server.state_dict()
    check_error(r"\[load_state_dict\] " + message, server.load_state_dict, state)
    assert server.state_dict()["meta"] == before["meta"]


def test_a_state_whose_next_rule_is_ones_own():
    state = waiting_for(own(Halves())).state_dict()
    check_error(r"cannot be made: .*Halves.*; give .* flush\(\)", Server(own(), vector(0.0)).load_state_dict, state)


def test_a_store_keeps_the_rule_in_force_and_the_one_that_waits(tmp_path):
    path, size = tmp_path / "store", 60
    server = waiting_for(own(buffer_size=size), store=path)
    server.close()
    assert store.info(path).rule_config == own().to_config()
    with Server.open(path) as server:
        assert (server.rule.buffer_size, server.arrivals_waiting) == (2, 1)
        push(server)
        assert server.rule == own(buffer_size=size)
        push_all(server, range(size), vector(), version=1, timeout=0)
        log = server.log
    assert store.info(path).rule_config == own(buffer_size=size).to_config()
    with Server.open(path) as server:
        assert server.rule == own(buffer_size=size)
        assert (server.version, server.log) == (2, log)


def test_a_rule_that_is_given_takes_the_place_of_both(tmp_path):
    path = tmp_path / "store"
    waiting_for(own(Halves()), store=path).close()
    check_error(r"\[open\] .* rule that waits to replace this one cannot be made", Server.open, path, error=StoreError)
    given = own(Halves(0.25), buffer_size=3)
    with Server.open(path, given) as server:
        push(server)
        push(server)
        assert (server.rule, server.version) == (given, 1)
        server.checkpoint()
    check_error("whose rule must be given", Server.open, path, error=StoreError)
    with Server.open(path, own(buffer_size=1)) as server:
        assert push(server).report.version == 2


@pytest.mark.parametrize("commit_every", [1, 2])
def test_a_replacement_is_committed_with_the_next_round(tmp_path, commit_every):
    """What a process leaves that ends at once."""
    path = tmp_path / "store"
    rule = own(buffer_size=1)
    server = Server(own(), vector(0.0), log=True, store=path, commit_every=commit_every)
    server.replace_rule(rule)
    assert store.info(path).rule_config == own().to_config()
    push_all(server, [0] * commit_every, vector())
    server.close(checkpoint=False)
    with Server.open(path) as server:
        assert (server.rule, server.version) == (rule, commit_every)
        assert server.log[0] == Replaced(rule.to_config())
