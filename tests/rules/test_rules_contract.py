"""What every preset keeps, whatever it computes: the same bits in any order, on any machine, over a save; shapes; and
that it finds the minimum of a bowl.
"""

import json

import numpy as np
import pytest

from afflux import Server
from afflux.ops import Step
from afflux.rules import RULES
from afflux.rules.optimizers import REACH
from conftest import THREADS, awkward, bits, push_all, ready
from steps import adaptive
from variants import BUFFER, CLIENTS, VARIANTS, make, push, serve, trace, twice

NAMES = [variant for variant, (_, options) in VARIANTS.items() if not options]


def everything(server):
    """The bits of all that a server keeps for its rule."""
    rows = server.rows
    kept = [bits(server.params), *map(bits, server.rule_vectors.values()), json.dumps(server.scalars).encode()]
    if rows is not None:
        kept += [bits(rows.sum), *(bits(rows.row(client)) for client in sorted(rows.client_ids))]
    return b"".join(kept)


def hand_in(server, joins):
    """What the rule has to be given before a round."""
    ready(server, joins[0][-1].astype(np.float32))


def distinct(rng, variant, rounds):
    """The suite's trace with every client once in a buffer or, where both count, one of them twice: first with the
    newest version, then with the one before. The version 0 has none before it.
    """
    for version, joins in enumerate(trace(variant, rounds, 9)):
        clients, staleness = [c for c, *_ in joins], [tau for _, tau, *_ in joins]
        if len(set(clients)) < len(clients):
            clients = rng.choice(CLIENTS, len(joins), replace=False).tolist()
        if twice(variant) and version > 0 and len(joins) > 1:
            clients[1], staleness[:2] = clients[0], (0, 1)
        yield [(c, tau, *join[2:]) for c, tau, join in zip(clients, staleness, joins, strict=True)]


@pytest.mark.parametrize("variant", VARIANTS)
def test_permuted_joins_give_the_same_bits(variant, rng):
    """In float64, where the order of a sum shows: rounding to float32 would hide it."""
    results = set()
    rounds = list(distinct(rng, variant, 12))
    for _ in range(3 if make(variant).buffer_size > 1 else 1):
        server = serve(variant, dtype="float64")
        for joins in rounds:
            hand_in(server, joins)
            push(server, [joins[i] for i in rng.permutation(len(joins))])
        results.add(everything(server))
    assert len(results) == 1


@pytest.mark.parametrize("variant", NAMES)
def test_threads_and_instruction_sets_give_the_same_bits(variant, rng, isa_after):
    """Over several superblocks, so that threads share the sums; subnormals and huge values included."""
    from afflux import ops
    from conftest import ISAS

    size = 140_001
    pool = [awkward(rng, size) for _ in range(6)]
    results = set()
    for isa in ISAS:
        ops.choose_isa(isa)
        for threads in THREADS:
            server = serve(variant, pool[0], num_threads=threads)
            for i in range(3 * BUFFER):
                if i % BUFFER == 0:
                    hand_in(server, [(pool[i % 6],)])
                facts = {"version": max(0, server.version - i % 3), "num_examples": i + 1, "loss": 1 / (i + 1)}
                server.push(client=i % CLIENTS, **{server.rule.kind: pool[i % 6]}, **facts)
            results.add(everything(server))
    assert len(results) == 1


@pytest.mark.parametrize("stale", [0, 2])
@pytest.mark.parametrize("name", NAMES)
def test_it_finds_the_minimum_of_a_bowl(name, stale):
    """Clients with the gradient x - x* of the params that they pulled, up to `stale` versions ago, 400 rounds.

    A plain step contracts by at most 1 - lr s per round, with s >= 0.4 for the staleness weights here and all lr s
    below the bound 1 / (2 tau + 1) of delayed gradient descent: 400 rounds are far beyond 1e-4 of the way. Momentum
    adds up 1 / (1 - beta) directions. An adaptive step is about lr long for each element, whatever the gradient: it
    ends within a few of them.
    """
    rate = (0.3 if make(name).kind == "update" else 0.1) * (1 - getattr(make(name).step, "beta", 0.0))
    if adaptive(make(name)):
        reach, step = REACH[make(name).step.kind].states, Step("", epsilon=1.0)
        rate = 0.1 if reach(step, 1.0, 2.0) > reach(step, 1.0, 1.0) else 0.01  # a second moment that grows
    rule = make(name, **({"server_lr": rate} if "server_lr" in RULES[name].__annotations__ else {}))
    minimum = np.linspace(-1, 1, 40)
    start = minimum + np.where(np.arange(40) % 2, 1.0, -1.0)
    server, history = Server(rule, start, num_clients=CLIENTS), [start]
    for joins in trace(name, 400, 11, size=1):
        for name_ in rule.needs.handed_in:
            server.set_rule_vector(name_, server.params - minimum)
        for client, tau, *_ in joins:
            tau = min(tau % (stale + 1), server.version)
            pulled = history[-1 - tau].astype(np.float64)
            gradient = pulled - minimum
            vector = {"gradient": gradient, "update": -0.5 * gradient, "model": pulled - 0.5 * gradient}[rule.kind]
            push_all(server, [client], vector, version=server.version - tau, loss=float(gradient @ gradient))
        history.append(server.params)
    away = np.abs(server.params - minimum).max()
    assert away <= (4 * rate if adaptive(rule) else 1e-4)
