"""A store keeps its rule as data, and is opened without the rule."""

import pickle
from copy import deepcopy
from dataclasses import replace

import numpy as np
import pytest

from afflux import Rule, Server, StoreError, store
from afflux.rules import RULES, fedbuff, from_config
from afflux.rules.calibration import NONE
from afflux.rules.optimizers import Sgd
from afflux.rules.schedules import ByVersion
from conftest import bits, check_error, ready
from variants import Mine

CLIENTS = 9


def own(weigh_part):
    return Rule("mine", "update", 2, weigh_part, NONE, Sgd(1.0))


def pushes(server, count):
    for _ in range(count):
        rng = np.random.default_rng(server.joins)
        vector = {server.rule.kind: rng.standard_normal(50)}
        server.push(client=int(rng.integers(CLIENTS)), **vector, version=server.version)


@pytest.mark.parametrize("name", RULES)
def test_a_preset_opens_without_being_told(name, tmp_path):
    def server(**where):
        return ready(Server(RULES[name](), np.ones(50), num_clients=CLIENTS + 1, **where))

    here = server()
    with server(store=tmp_path / "store") as there:
        for each in (here, there):
            pushes(each, 25)
    with Server.open(tmp_path / "store") as again:
        assert again.rule == here.rule == pickle.loads(pickle.dumps(here.rule)) == deepcopy(here.rule)
        for each in (here, again):
            pushes(each, 25)
        assert bits(again.params) == bits(here.params)


def test_the_rule_that_was_given_last_is_the_one_that_is_kept(tmp_path):
    path = tmp_path / "store"
    Server(fedbuff(buffer_size=2), np.zeros(3), store=path).close()
    with Server.open(path, fedbuff(buffer_size=3, server_lr=0.5)):
        assert store.info(path).rule_config["buffer_size"] == 2, "nothing was committed yet"
    with Server.open(path) as server:
        assert server.rule == fedbuff(buffer_size=3, server_lr=0.5)
    assert from_config(store.info(path).rule_config) == fedbuff(buffer_size=3, server_lr=0.5)


def test_a_law_by_version_is_kept(tmp_path):
    rule = replace(fedbuff(buffer_size=2), step=Sgd(ByVersion({0: 1.0, 1: 0.5})))
    Server(rule, np.zeros(3), store=tmp_path / "store").close()
    with Server.open(tmp_path / "store") as server:
        assert server.rule == rule


def test_a_rule_of_ones_own_must_be_given(tmp_path, caplog):
    """As the server says when it makes the store."""
    path = tmp_path / "store"
    Server(fedbuff(buffer_size=2), np.zeros(3), store=tmp_path / "known").close()
    assert caplog.messages == []
    with Server(own(Mine()), np.zeros(3), store=path) as server:
        server.push(client=1, update=np.ones(3), version=0)
    assert caplog.messages == [
        f"[Server] store: {path}: Server.open(path, rule) will need the rule: weigh is 'variants.Mine', a "
        "part that is not registered"
    ]
    text = r"\[open\] .* whose rule must be given: .*'variants.Mine', a part th"
    check_error(text, Server.open, path, error=StoreError)
    with Server.open(path, own(Mine())) as server:
        assert server.arrivals_waiting == 1
