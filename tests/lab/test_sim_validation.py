"""Rules that score updates by a validation gradient (Zeno++): its examples, and the times at which it is set."""

from dataclasses import replace

import numpy as np
import pytest

import own_tasks
from afflux import Server
from afflux.lab import Simulation
from afflux.rules.specs import parse_rule
from afflux.sim import partitioned
from afflux.sim.clients.training import Trainer
from afflux.sim.workload.config import SimConfig
from conftest import check_refused
from made_runs import run

SMALL = SimConfig(model="logreg", num_clients=20, concurrency=6, arrivals=40, local_steps=1, alpha=1.0)


@pytest.fixture
def handed(monkeypatch):
    """[examples, version, vector, params] of each gradient that was set; (version, memory) at each push."""
    told, versions = [], []
    gradient, set_rule_vector, push = Trainer.rule_vector, Server.set_rule_vector, Server.push

    def spy_gradient(self, name, model, examples):
        told.append([examples.tolist()])
        return gradient(self, name, model, examples)

    def spy_set(self, name, vector):
        assert name == "validation"
        told[-1] += [self.version, vector.copy(), np.array(self.params)]
        set_rule_vector(self, name, vector)

    def spy_push(self, *args, **options):
        versions.append((self.version, self.rule_vectors["validation"]))
        return push(self, *args, **options)

    monkeypatch.setattr(Trainer, "rule_vector", spy_gradient)
    monkeypatch.setattr(Server, "set_rule_vector", spy_set)
    monkeypatch.setattr(Server, "push", spy_push)
    return told, versions


@pytest.mark.parametrize("every", [1, 3])
def test_the_gradient_is_of_the_newest_params_every_so_many_versions(handed, every):
    told, versions = handed
    result = run(parse_rule("zenopp:server_lr=0.3"), 0, replace(SMALL, refresh_every=every))
    last = result.evaluations[-1].version
    assert last > 10, "most updates are accepted"
    assert [entry[1] for entry in told] == [*range(0, last + 1, every)]
    assert len({tuple(entry[0]) for entry in told}) == 1, "always the same examples"
    (examples,) = {tuple(entry[0]) for entry in told}
    assert len(set(examples)) == 64
    # What the server holds at a push is the gradient of the last refresh, and that was of the params of its version.
    for version, memory in versions:
        assert np.array_equal(memory, [entry[2] for entry in told if entry[1] <= version][-1])
    assert len({entry[3].tobytes() for entry in told}) == len(told)


def test_a_rejected_arrival_refreshes_nothing(handed):
    told, versions = handed
    result = run(parse_rule("zenopp:rho=1e9"), 0, SMALL)
    assert result.evaluations[-1].version == 0
    assert len(versions) == 40
    assert len(told) == 1


def test_the_examples_depend_on_the_seed_only(handed):
    told, _ = handed
    seen = []
    for seed, change in ((0, {}), (0, {"num_clients": 30}), (1, {}), (0, {"validation": 1198})):
        del told[:]
        run(parse_rule("zenopp"), seed, replace(SMALL, arrivals=1, **change))
        seen.append(told[0][0])
    assert seen[0] == seen[1] != seen[2]
    assert seen[3] == list(range(1198)), "all of them"


def test_more_examples_than_there_are_are_refused_and_by_default_all_are_taken(handed):
    check_refused("validation is 1199, but .* only 1198", run, parse_rule("zenopp"), 0, replace(SMALL, validation=1199))
    assert not handed[0]
    few = own_tasks.X[:9], own_tasks.Y[:9]
    clients = partitioned(own_tasks.X, own_tasks.Y, 12, "iid")
    own = Simulation(own_tasks.linear, clients, None, own_tasks.TEST, rules="zenopp", validation=few, arrivals=1)
    own.run()
    assert handed[0][0][0] == list(range(9))


def test_other_rules_are_handed_nothing():
    """Not even where they have rule vectors of their own: a server refuses it."""
    for rule in ("fedasync", "wkafl:buffer_size=4"):
        assert not parse_rule(rule).build().needs.handed_in
        assert run(parse_rule(rule), 0, replace(SMALL, arrivals=4)).evaluations[-1].version > 0


def test_runs_with_it_repeat_bit_for_bit():
    first, again, other = (run(parse_rule("zenopp"), 0, replace(SMALL, refresh_every=k)) for k in (2, 2, 7))
    assert first.digest == again.digest != other.digest


@pytest.mark.parametrize("name", ["validation", "refresh_every"])
def test_impossible_settings_are_refused(name):
    check_refused(f"{name} is 0", replace, SMALL, **{name: 0})
