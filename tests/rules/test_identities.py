"""Where two rules are the same one: equal bits where every operation is the same one, else a bound that is derived.

Bounded identities run in float64. Both sides compute, of the same n terms in another order, x + lr sum w_i u_i per
round: sum_bound for the sum, and 8 eps of the terms for weights and the step.
"""

import numpy as np
import pytest

import oracle
from afflux import Server, rules
from afflux.rules.staleness import Constant, Hinge
from conftest import bits, push_all
from variants import CLIENTS, SIZE

M = 4
MEAN = {"buffer_size": M, "server_lr": 0.5}
WKAFL = MEAN | {"momentum": False}
#: Fresh, every client once, equal counts, unless the flags say otherwise. {id: (left, right, flags)}; flags:
#: "bits" equal, else bounded; "once": only the first round, from an empty cache; "whole": M = N; "stale": staleness
#: up to 1; "growing": every round's vectors are longer than all before; "loose": another number of examples each.
IDENTITIES = {
    "fedbuff is fedavg": (rules.fedbuff(**MEAN), rules.fedavg(**MEAN), "bits"),
    "fedbuff constant is fedavg": (rules.fedbuff(**MEAN, staleness=Constant()), rules.fedavg(**MEAN), "bits stale"),
    "both normalisations": (rules.fedbuff(**MEAN), rules.fedbuff(**MEAN, normalise="weights"), "bits"),
    "a hinge beyond all staleness": (
        rules.fedbuff(**MEAN, staleness=Hinge(10, 1)), rules.fedbuff(**MEAN, staleness=Constant()), "bits stale loose"),
    "fadas is fedams": (rules.fadas(**MEAN), rules.fedams(**MEAN), "bits stale loose"),
    "fadas without long delays": (
        rules.fadas(**MEAN, delay_adaptive="inverse"), rules.fadas(**MEAN), "bits stale loose"),
    "fedams is fedadam while v grows": (
        rules.fedams(**MEAN), rules.fedadam(**MEAN, epsilon=1e-8), "bits growing loose"),
    "ca2fl with an empty cache": (
        rules.ca2fl(**MEAN), rules.fedbuff(**MEAN, staleness=Constant()), "bits once loose"),
    "afa_cs of those seen with an empty cache": (
        rules.afa_cs(**MEAN, divide_by="seen"), rules.afa_cd(**MEAN), "bits once loose"),
    "ca2fl with M = N": (rules.ca2fl(**MEAN), rules.fedbuff(**MEAN, staleness=Constant()), "whole stale loose"),
    "fedstale with beta 1 is ca2fl": (rules.fedstale(**MEAN, beta=1.0), rules.ca2fl(**MEAN), "bits stale loose"),
    "fedstale with beta 0 is fedbuff": (
        rules.fedstale(**MEAN, beta=0.0), rules.fedbuff(**MEAN, staleness=Constant()), "bits stale loose"),
    "fedstale with beta 1 and codes": (
        rules.fedstale(**MEAN, beta=1.0, codec="affine-4"), rules.mf_ca2fl(**MEAN, bits=4), "bits stale loose"),
    "fedstale with beta 0 and codes": (
        rules.fedstale(**MEAN, beta=0.0, codec="rotated-2"), rules.fedbuff(**MEAN, staleness=Constant()),
        "bits stale loose"),
    "afa_cs with M = N": (rules.afa_cs(**MEAN), rules.afa_cd(**MEAN), "whole stale loose"),
    "afa_cs of all, all seen": (
        rules.afa_cs(**MEAN), rules.afa_cs(**MEAN, divide_by="seen"), "bits whole stale loose"),
    "twafl is the mean": (rules.twafl(**MEAN), rules.afa_cd(**MEAN), "bits"),
    "sasgd is the mean up to staleness 1": (rules.sasgd(**MEAN), rules.afa_cd(**MEAN), "bits stale loose"),
    "gsgm without momentum": (rules.gsgm(**MEAN, alpha=0.0), rules.afa_cd(**MEAN), "bits whole stale loose"),
    "wkafl without everything": (
        rules.wkafl(**WKAFL, selection=False, staleness=False), rules.afa_cd(**MEAN), "bits loose"),
    "wkafl that selects all alike": (
        rules.wkafl(**WKAFL, sim_min=-1.5, beta=0.0), rules.afa_cd(**MEAN), "bits loose"),
    "wkafl that rejects all is its estimate": (
        rules.wkafl(**MEAN, sim_min=1.5), rules.wkafl(**MEAN, selection=False), "bits stale loose"),
    "wkafl's rule vectors where it steps with the estimate": (
        rules.wkafl(**MEAN, selection=False), rules.wkafl(**MEAN, selection=False, memory="aggregate"), "bits stale"),
    "wkafl, one arrival": (
        rules.wkafl(buffer_size=1, momentum=False), rules.sasgd(buffer_size=1), "bits loose"),
}  # fmt: skip


def serve(rule, clients):
    return Server(rule, np.zeros(SIZE), num_clients=clients, dtype="float64")


def rounds_of(rng, flags, size, clients):
    """(client, staleness, examples, vector) of 8 rounds, or of one."""
    for number in range(1 if "once" in flags else 8):
        grown = 2.0**number if "growing" in flags else None
        yield [
            (int(c), int(rng.integers(2)) if "stale" in flags else 0,
             int(rng.integers(1, 9)) if "loose" in flags else 3,
             grown * (1 + rng.random(SIZE)) if grown else rng.standard_normal(SIZE))
            for c in rng.permutation(clients)[:size]
        ]  # fmt: skip


def play(server, joins):
    base = server.version
    for client, staleness, examples, vector in joins:
        push_all(server, [client], vector, version=max(0, base - staleness), num_examples=examples)


@pytest.mark.parametrize("name", IDENTITIES)
def test_identity(name, rng):
    left, right, flags = IDENTITIES[name]
    clients = M if "whole" in flags else CLIENTS
    one, other = serve(left, clients), serve(right, clients)
    bound, written = np.zeros(SIZE), 0
    for joins in rounds_of(rng, flags.split(), left.buffer_size, clients):
        play(one, joins)
        play(other, joins)
        if "bits" in flags:
            assert bits(one.params) == bits(other.params)
            continue
        written += len(joins)
        terms = sum(np.abs(vector) for *_, vector in joins) + np.abs(one.params)
        held = written * (clients + 2) * oracle.EPS * 10  # the sum of the rows, entries below 10: see bounds.py
        bound = bound + oracle.sum_bound(2 * terms, 3 * M) + 8 * oracle.EPS * terms + held
        assert np.all(np.abs(one.params - other.params) <= bound)
    assert np.abs(one.params).max() > 0.1 * (0.005 if left.buffer_size == 1 else 1)


#: Rules whose params are a linear function of what was pushed, from params 0.
LINEAR = ["fedavg", "fedbuff", "afa_cd", "afa_cs", "ca2fl", "twafl", "sasgd", "gsgm"]


def moved(name, rounds):
    server = serve(rules.RULES[name](buffer_size=M, server_lr=0.5), CLIENTS)
    for joins in rounds:
        play(server, joins)
    return server.params


@pytest.mark.parametrize("name", LINEAR)
def test_combine_is_linear(name, rng):
    """Twice the vectors: twice the params, to the bit. The sum of two traces: the sum of the params, to rounding."""
    plan = list(rounds_of(rng, ("stale", "loose"), M, CLIENTS))
    first = [[(*join[:3], np.round(join[3] * 64) / 64) for join in joins] for joins in plan]
    second = [[(*join[:3], np.round(rng.standard_normal(SIZE) * 64) / 64) for join in joins] for joins in plan]
    both = [[(*a[:3], a[3] + b[3]) for a, b in zip(x, y, strict=True)] for x, y in zip(first, second, strict=True)]
    twice = [[(*join[:3], 2 * join[3]) for join in joins] for joins in first]
    assert bits(moved(name, twice)) == bits(2 * moved(name, first))
    terms = sum(np.abs(join[3]) for joins in (*first, *second, *both) for join in joins)
    bound = oracle.sum_bound(4 * len(plan) * terms, 3 * M)
    assert np.all(np.abs(moved(name, both) - moved(name, first) - moved(name, second)) <= bound)


#: Rules whose weights sum to 1.
AVERAGES = {
    "fedavg": rules.fedavg(buffer_size=M),
    "fedbuff, by count": rules.fedbuff(buffer_size=M, staleness=Constant()),
    "fedbuff, by weights": rules.fedbuff(buffer_size=M, normalise="weights"),
    "afa_cd": rules.afa_cd(buffer_size=M, server_lr=1.0),
    "afa_cs, of those seen": rules.afa_cs(buffer_size=M, server_lr=1.0, divide_by="seen"),
    "ca2fl": rules.ca2fl(buffer_size=M),
    "twafl, by weights": rules.twafl(buffer_size=M, server_lr=1.0, normalise="weights"),
    "wkafl": rules.wkafl(buffer_size=M, server_lr=1.0, momentum=False),
}


@pytest.mark.parametrize("name", AVERAGES)
def test_the_average_of_equal_vectors_is_that_vector(name, rng):
    """Weights of M and of 10 roundings each, and a sum of M products; from params 0 nothing else is rounded."""
    rule, vector = AVERAGES[name], rng.standard_normal(SIZE)
    server = serve(rule, CLIENTS)
    play(server, [(client, 0, client + 1, vector) for client in range(M)])
    expected = -vector if rule.kind == "gradient" else vector
    assert np.all(np.abs(server.params - expected) <= (2 * M + 12) * oracle.EPS * np.abs(vector))


# ---- fedasync ------------------------------------------------------------------------------------------------------


def test_fedbuff_with_one_arrival_is_fedasync_when_params_are_current(rng):
    start = rng.standard_normal(SIZE).astype(np.float32)
    local = rng.standard_normal(SIZE).astype(np.float32)
    mixing = Server(rules.fedasync(alpha=0.25), start)
    mixing.push(client=0, model=local, version=0)
    adding = Server(rules.fedbuff(buffer_size=1, server_lr=0.25), start)
    adding.push(client=0, update=local.astype(np.float64) - start, version=0)  # ingest rounds the difference to float32
    bound = 2 * oracle.U32 * (np.abs(start) + np.abs(local))
    assert np.all(np.abs(mixing.params - adding.params) <= bound)


def test_fedasync_returning_the_pulled_model_changes_nothing(rng):
    start = rng.standard_normal(SIZE).astype(np.float32)
    server = Server(rules.fedasync(alpha=0.37), start)
    server.push(client=0, model=server.pull().params, version=0)
    assert bits(server.params) == bits(start)


# ---- zenopp --------------------------------------------------------------------------------------------------------


def test_zenopp_with_the_gradient_itself_as_validation_is_a_plain_step(rng):
    scored, plain = serve(rules.zenopp(), CLIENTS), serve(rules.sasgd(buffer_size=1), CLIENTS)
    for _ in range(4):
        gradient = rng.standard_normal(SIZE)
        scored.set_rule_vector("validation", gradient)
        for server in (scored, plain):
            server.push(client=0, gradient=gradient, version=server.version)
        assert bits(scored.params) == bits(plain.params)


def test_zenopp_sees_directions_and_not_lengths(rng):
    """Powers of two change no bit of a unit vector; unscaled, the authors' form, a long gradient is rejected."""
    validation = rng.standard_normal(SIZE)
    gradient = validation + 0.1 * rng.standard_normal(SIZE)
    for scaled in (True, False):
        results = []
        for factor in (1.0, 2.0**20):
            server = serve(rules.zenopp(scaled=scaled), CLIENTS)
            server.set_rule_vector("validation", validation)
            results.append(
                (server.push(client=0, gradient=factor * gradient, version=0).report.stepped, bits(server.params))
            )
        assert (results[0] == results[1]) == scaled
        assert results[0][0]
