"""FedBuff of other frameworks: numbers by hand, oracles over a random trace, errors, docs/reference/dialects.md."""

import numpy as np
import pytest

import oracle
from afflux import Server
from afflux.rules import fedbuff
from afflux.rules.presets.dialects import DIALECTS, appfl, flsim, nvflare
from afflux.rules.specs import parse_rule
from afflux.rules.staleness import Constant, Hinge, Polynomial
from conftest import ROOT, push_all

DOCS = ROOT / "docs" / "reference" / "dialects.md"
CHOICES = {
    **{name: name for name in DIALECTS},
    "flsim(avg_staleness=3)": flsim(avg_staleness=3),
    "appfl(num_clients=4)": appfl(num_clients=4),
    "nvflare(per_version=True)": nvflare(per_version=True),
}

#: Params are 10. Two fresh clients and one of staleness 3 each added 1 to what they pulled, which was 4 for the stale
#: one: the models are 11, 11, 5. They have 10, 10 and 20 examples; the learning rate is 1.
GOLDEN = {
    "paper": 10 + 5 / 6,  # (1 + 1 + 1/2) / 3, as (1 + 3)^-1/2 = 1/2
    "flsim": 10 + 3.5355339059327378,  # (1 + 1 + 1/2) sqrt(2), as the law at avg_staleness 1 is 1/sqrt(2)
    "flsim(avg_staleness=3)": 10 + 5,  # (1 + 1 + 1/2) / (1/2)
    "appfl": 10 - 0.5,  # 1 + 1 + 1/2 (5 - 10)
    "appfl(num_clients=4)": 10 - 0.125,  # the same over 4
    "nvflare": 10 + 4 / 9,  # (1/2 + 1/2 + 1/3) / 3, as 1 / (1 + sqrt(1 + 3)) = 1/3
    "nvflare(per_version=True)": 10 + 5 / 6,  # (1/2 + 1/2) / 2 + (1/3) / 1
    "fedscale": 9.8,  # (11 + 11 + 5/2) / (1 + 1 + 1/2) = 24.5 / 2.5
    "plato": 9.0,  # 10 + (1 + 1 + (5 - 10)) / 3: the mean of the models
    "federatedscope": 10 + 0.625,  # 10/40 + 10/40 + 20/40 * 1/4
    "afl-lib": 10 + 1 / 3,  # (1 + 1 + 1) / 3 / 3
    "flgo": 10 + 5 / 6,
}


def server_at_version_3(dialect, params):
    """A server of buffer size 3 that has made three rounds which changed nothing."""
    rule = fedbuff(buffer_size=3, dialect=dialect)
    server = Server(rule, np.array([params]))
    for version in range(3):
        push_all(server, range(3), np.array([params if rule.kind == "model" else 0.0]), version=version)
    assert (server.version, server.params.tolist()) == (3, [params])
    return server


@pytest.mark.parametrize("name", CHOICES)
def test_golden(name):
    server = server_at_version_3(CHOICES[name], 10.0)
    models = server.rule.kind == "model"
    for client, (model, version, examples) in enumerate([(11.0, 3, 10), (11.0, 3, 10), (5.0, 0, 20)]):
        vector = np.array([model if models else 1.0])
        report = push_all(server, [client], vector, version=version, num_examples=examples).report
    assert report.staleness.tolist() == [0, 0, 3]
    assert abs(server.params[0] - GOLDEN[name]) <= 16 * oracle.EPS * 10


def test_the_table_in_the_docs_has_the_golden_numbers():
    formulas, _, _ = DOCS.read_text().partition("## What the differences do")
    rows = [line.split("|") for line in formulas.splitlines() if line.startswith("| `")]
    found = {row[1].strip().strip("`"): row[-2].strip() for row in rows}
    assert found == {name: f"{value:.4f}" for name, value in GOLDEN.items()}


# One round in float64: x, then (staleness, examples, version, u, y) per arrival. Written from the frameworks' sources.
def mean(x, round_, law):
    return x + sum(law(t) * u for t, _, _, u, _ in round_) / len(round_)


def half(t):
    return (1 + t) ** -0.5


def flsim_oracle(x, round_, average):
    return x + sum(half(t) / half(average) * u for t, _, _, u, _ in round_)


def appfl_oracle(x, round_, clients):
    return x + sum(half(t) / clients * (y - x) for t, _, _, _, y in round_)


def nvflare_law(t):
    return 1 / (1 + (t + 1) ** 0.5)


def nvflare_2_8(x, round_):
    by_version = {}
    for t, _, version, u, _ in round_:
        by_version.setdefault(version, (t, []))[1].append(u)
    return x + sum(nvflare_law(t) * np.mean(updates, axis=0) for t, updates in by_version.values())


def fedscale_oracle(x, round_):
    return sum(half(t) * y for t, _, _, _, y in round_) / sum(half(t) for t, *_ in round_)


def plato_oracle(x, round_):
    return np.mean([y for *_, y in round_], axis=0)


def federatedscope_oracle(x, round_):
    return x + sum(n / (1 + t) * u for t, n, _, u, _ in round_) / sum(n for _, n, *_ in round_)


def afl_lib_oracle(x, round_):
    return x + np.mean([u for *_, u, _ in round_], axis=0) / len(round_)


ORACLES = {
    "paper": lambda x, r: mean(x, r, half),
    "flsim": lambda x, r: flsim_oracle(x, r, 1),
    "flsim(avg_staleness=3)": lambda x, r: flsim_oracle(x, r, 3),
    "appfl": lambda x, r: appfl_oracle(x, r, 1),
    "appfl(num_clients=4)": lambda x, r: appfl_oracle(x, r, 4),
    "nvflare": lambda x, r: mean(x, r, nvflare_law),
    "nvflare(per_version=True)": nvflare_2_8,
    "fedscale": fedscale_oracle,
    "plato": plato_oracle,
    "federatedscope": federatedscope_oracle,
    "afl-lib": afl_lib_oracle,
    "flgo": lambda x, r: mean(x, r, half),
}


@pytest.mark.parametrize("name", CHOICES)
def test_a_random_trace_against_the_oracle(name, rng):
    """Every round starts from the server's own params, so that it adds one rounding to float32."""
    size, buffer_size = 700, 4
    server = Server(fedbuff(buffer_size=buffer_size, dialect=CHOICES[name]), rng.standard_normal(size).astype("f4"))
    history = []
    for t in range(25):
        history.append(oracle.f64(server.params))
        round_ = []
        for client in rng.choice(20, buffer_size, replace=False):
            version = int(rng.integers(max(0, t - 6), t + 1))
            update = rng.standard_normal(size).astype(np.float32)
            model = (history[version] + update).astype(np.float32)
            examples = int(rng.integers(1, 50))
            vector = model if server.rule.kind == "model" else update
            server.push(client=int(client), **{server.rule.kind: vector}, version=version, num_examples=examples)
            round_.append((t - version, examples, version, oracle.f64(update), oracle.f64(model)))
        exact = ORACLES[name](history[-1], round_)
        terms = 10 * (np.abs(history[-1]) + sum(np.abs(u) + np.abs(y) for *_, u, y in round_))
        assert np.all(np.abs(server.params - exact) <= oracle.rounded_bound(exact, terms, 2 * buffer_size + 10))
    assert server.version == 25


@pytest.mark.parametrize("name", ["flsim", "appfl", "nvflare", "federatedscope", "flgo"])
def test_the_law_can_be_chosen_where_the_framework_leaves_the_choice(name):
    law = Hinge(2.0, 1.0)
    assert fedbuff(dialect=name, staleness=law).weigh.law == law
    assert fedbuff(dialect=name).weigh.law == DIALECTS[name]().law


def test_names_are_what_the_command_line_takes():
    for name in DIALECTS:
        assert parse_rule(f"fedbuff:dialect={name}").build() == fedbuff(dialect=name)
    assert parse_rule("fedbuff:dialect=appfl:staleness=constant").build() == fedbuff(
        dialect="appfl", staleness=Constant()
    )


def test_flgo_is_the_paper():
    assert fedbuff(dialect="flgo") == fedbuff() == fedbuff(dialect="paper", staleness=Polynomial(0.5))
