"""A rule as data, and a store that is opened without being told its rule."""

import json
from dataclasses import dataclass, replace

import numpy as np
import pytest

from afflux import AffluxError, Rule, Server, StoreError, store
from afflux.rules import RULES, ca2fl, fadas, fedbuff, schedules, weights
from afflux.rules.calibration import NONE
from afflux.rules.optimizers import Sgd
from afflux.rules.presets.dialects import DIALECTS
from afflux.rules.serialization import MODULES, recipe_of, rule_of
from conftest import bits, ready
from variants import VARIANTS, make

CLIENTS = 9


@dataclass(frozen=True, slots=True)
class Mine:
    """A part of one's own, which has the name of none of afflux's."""

    clip: float = 1.0

    def __call__(self, arrivals, /):
        return np.full(len(arrivals), self.clip / len(arrivals))


class Uniform(weights.Uniform):
    """One that has."""


def own(weigh_part):
    return Rule("mine", "update", 2, weigh_part, NONE, Sgd(1.0))


@pytest.mark.parametrize("name", VARIANTS)
def test_every_preset_comes_back(name):
    rule = make(name)
    content = json.loads(json.dumps(recipe_of(rule)))
    assert rule_of(content) == rule
    assert "own" not in json.dumps(content)


@pytest.mark.parametrize("dialect", DIALECTS)
def test_so_does_every_dialect(dialect):
    rule = fedbuff(dialect=dialect)
    assert rule_of(json.loads(json.dumps(recipe_of(rule)))) == rule


def test_parts_may_be_put_together_anew():
    rule = replace(ca2fl(codec="rotated-2"), name="mine", step=fadas(server_lr=schedules.DelayAdaptive(0.5, 3)).step)
    assert rule_of(recipe_of(rule)) == rule


@pytest.mark.parametrize(("part", "name"), [(Mine(), "test_recipe.Mine"), (Uniform(), "test_recipe.Uniform")])
def test_a_part_of_ones_own_leaves_its_name(part, name):
    content = recipe_of(own(part))
    assert content["weigh"] == {"own": name}
    with pytest.raises(AffluxError, match=f"its part {name} is not afflux's own"):
        rule_of(content)


@pytest.mark.parametrize(
    "part",
    [
        "rules.weights.Nothing",
        "os.system",
        "server.Server",
        "rules.weights.np",
        "ops.exact.exp",
        "rules.rule.Arrivals.nothing",
    ],
)
def test_nothing_else_is_looked_up(part):
    content = recipe_of(fedbuff())
    with pytest.raises(AffluxError, match=f"its part {part} is unknown"):
        rule_of({**content, "weigh": {"part": part}})


def test_values_are_checked_as_ever():
    content = recipe_of(fedbuff())
    with pytest.raises(AffluxError, match="buffer_size is 0"):
        rule_of({**content, "buffer_size": 0})
    with pytest.raises(AffluxError, match=r"its part rules.weights.Staleness is another one in this afflux: .*'more'"):
        rule_of({**content, "weigh": {**content["weigh"], "more": 1}})
    with pytest.raises(AffluxError, match=r"makes Constant\(\), not a Rule"):
        rule_of({"part": "rules.staleness.Constant"})
    assert "server" not in MODULES


def pushes(server, count):
    for _ in range(count):
        rng = np.random.default_rng(server.joins)
        server.push(
            client=int(rng.integers(CLIENTS)), **{server.rule.kind: rng.standard_normal(50)}, version=server.version
        )


@pytest.mark.parametrize("name", RULES)
def test_a_preset_opens_without_being_told(name, tmp_path):
    def server(**where):
        return ready(Server(RULES[name](), np.ones(50), num_clients=CLIENTS + 1, **where))

    here = server()
    with server(store=tmp_path / "store") as there:
        for each in (here, there):
            pushes(each, 25)
    with Server.open(tmp_path / "store") as again:
        assert again.rule == here.rule
        for each in (here, again):
            pushes(each, 25)
        assert bits(again.params) == bits(here.params)


def test_the_rule_that_was_given_last_is_the_one_that_is_kept(tmp_path):
    path = tmp_path / "store"
    Server(fedbuff(buffer_size=2), np.zeros(3), store=path).close()
    with Server.open(path, fedbuff(buffer_size=3, server_lr=0.5)):
        assert store.info(path).recipe["buffer_size"] == 2, "nothing was committed yet"
    with Server.open(path) as server:
        assert server.rule == fedbuff(buffer_size=3, server_lr=0.5)
    assert store.info(path).recipe["buffer_size"] == 3


def test_a_rule_of_ones_own_must_be_given(tmp_path):
    path = tmp_path / "store"
    with Server(own(Mine()), np.zeros(3), store=path) as server:
        server.push(client=1, update=np.ones(3), version=0)
    with pytest.raises(StoreError, match=r"\[open\] .* whose rule must be given: its part test_recipe.Mine is not aff"):
        Server.open(path)
    with Server.open(path, own(Mine())) as server:
        assert server.arrivals_waiting == 1
