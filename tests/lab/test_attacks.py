"""Hostile clients of a simulation, the rules against them, and vectors that a task hands to rules."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

import own_tasks
from afflux import Server
from afflux.lab import Simulation
from afflux.ops.errors import ConfigError
from afflux.rules.specs import parse_rule
from afflux.sim import Metric, Task, sgd
from afflux.sim.workload.config import SimConfig
from conftest import check_error, check_refused
from made_runs import CLIENTS, run

SMALL = SimConfig(
    model="logreg",
    num_clients=10,
    concurrency=10,
    refill=10,
    arrivals=20,
    partition="iid",
    local_steps=1,
    eval_every=20,
)
FEDBUFF = parse_rule("fedbuff:buffer_size=10")


@pytest.fixture
def pushed(monkeypatch):
    """(client, update) of each push."""
    pairs, push = [], Server.push

    def spy(self, *, client, update, **options):
        pairs.append((client, update.copy()))
        return push(self, client=client, update=update, **options)

    monkeypatch.setattr(Server, "push", spy)
    return pairs


def first_updates(pushed, attack):
    """Of each client, trained from the initial params, and the run's result."""
    del pushed[:]
    result = run(FEDBUFF, 3, replace(SMALL, attack=attack))
    return dict(pushed[:10]), result


@pytest.mark.parametrize(
    ("attack", "factor"), [("sign-flip:clients=3", -1), ("scaled:clients=3", 10), ("scaled:clients=3:factor=.5", 0.5)]
)
def test_hostile_clients_push_their_update_times_a_factor(attack, factor, pushed):
    honest, plain = first_updates(pushed, "none")
    hostile, attacked = first_updates(pushed, attack)
    assert {*honest} == {*hostile} == {*range(10)}
    assert all(np.array_equal(hostile[i], honest[i] * np.float32(factor if i < 3 else 1)) for i in range(10))
    assert attacked.digest != plain.digest


def test_copies_have_one_direction_and_the_length_of_the_update(pushed):
    honest, _ = first_updates(pushed, "none")
    hostile, _ = first_updates(pushed, "copies:clients=2:factor=3")
    units = [hostile[i].astype(float) / np.linalg.norm(hostile[i].astype(float)) for i in (0, 1)]
    assert np.abs(units[0] - units[1]).max() < 1e-6
    lengths = [np.linalg.norm(hostile[i].astype(float)) / np.linalg.norm(honest[i].astype(float)) for i in (0, 1)]
    assert lengths == pytest.approx([3, 3])
    assert all(np.array_equal(hostile[i], honest[i]) for i in range(2, 10))
    assert abs(np.mean(units[0])) < 0.2 < np.std(units[0]) * np.sqrt(len(units[0]))


@pytest.mark.parametrize("attack", ["scaled:clients=2", "copies:clients=2"])
def test_worker_processes_give_the_same_run(attack):
    config = replace(SMALL, attack=attack)
    assert run(FEDBUFF, 0, config).digest == run(FEDBUFF, 0, config, workers=2).digest


def test_it_is_recorded_if_it_is_set():
    assert "attack" not in SMALL.recorded()
    assert replace(SMALL, attack="copies:clients=2").recorded()["attack"] == "copies:clients=2"


@pytest.mark.parametrize(
    ("attack", "text"),
    [
        ("flip:clients=2", "unknown attack 'flip'"),
        ("scaled", r"attack scaled: needs clients=\.\.\."),
        ("scaled:clients=0", "attack scaled:clients=0: clients is 0, must be from 1"),
        ("scaled:clients=2:factor=inf", "factor is inf, must be from -1e"),
    ],
)
def test_attacks_that_are_impossible(attack, text):
    check_error(text, replace, SMALL, attack=attack, error=ConfigError)


def test_one_client_must_be_honest():
    check_refused("only 10 clients hold data", run, FEDBUFF, 0, replace(SMALL, attack="scaled:clients=10"))


def test_many_replaced_arrivals_are_said(caplog):
    few = replace(SMALL, refill=1, concurrency=5, num_clients=5, arrivals=40)
    results = [run(parse_rule(f"{rule}:buffer_size=5"), 0, few) for rule in ("fedmedian", "fedbuff")]
    replaced, none = [result.decisions.get("replaced", 0) for result in results]
    assert (replaced > 10, none) == (True, 0)
    said = [record.getMessage() for record in caplog.records if "replaced" in record.getMessage()]
    text = f"fedmedian:buffer_size=5, seed 0: {replaced} of 40 arrivals replaced an earlier one of their client"
    assert said == [f"{text}: compare rules at equal --rounds"]


# ---- rules against hostile clients ---------------------------------------------------------------------------------

ROBUST = [
    "krum:buffer_size=10:byzantine=2", "multi_krum:buffer_size=10:byzantine=2", "fedmedian:buffer_size=10",
    "fedtrimmedavg:buffer_size=10", "fltrust:buffer_size=10:server_lr=0.2", "aflguard:server_lr=0.05",
    "zenopp:server_lr=0.05",
]  # fmt: skip
ATTACKS = ["sign-flip:clients=2:factor=-4", "scaled:clients=2:factor=10", "copies:clients=2:factor=10"]


def heights(rng, slope, count):
    """Examples of a linear function with noise of deviation .3."""
    x = rng.standard_normal((count, 8))
    y = x @ slope + 0.3 * rng.standard_normal((count, 1))
    return torch.tensor(x, dtype=torch.float32), torch.tensor(y, dtype=torch.float32)


def error_after(rule, **attack):
    """The error on test data after 40 rounds; each buffer holds all ten clients."""
    rng = np.random.default_rng(0)
    slope = rng.standard_normal((8, 1))
    clients, (x, y), own = (
        [heights(rng, slope, 60) for _ in range(10)],
        heights(rng, slope, 400),
        heights(rng, slope, 64),
    )
    simulation = Simulation(
        lambda: nn.Linear(8, 1), clients, sgd(0.05, steps=3, batch_size=20),
        lambda model: {"rmse": (model(x) - y).square().mean().sqrt()},
        rules=rule, metrics=[Metric("rmse", lower_is_better=True)], loss=nn.functional.mse_loss, validation=own,
        delays="exponential", arrivals=400, concurrency=10, refill=10, eval_every=400, **attack,
    )  # fmt: skip
    return simulation.run()[0].evaluations[-1].rmse


@pytest.mark.parametrize("rule", ROBUST, ids=lambda text: text.partition(":")[0])
def test_two_hostile_clients_of_ten_do_not_raise_the_error_of_a_robust_rule(rule):
    """It ends within 1.2 times that without them, which is near the noise."""
    honest = error_after(rule)
    assert 0.25 < honest < 0.35
    assert all(error_after(rule, attack=attack) <= 1.2 * honest for attack in ATTACKS)


@pytest.mark.parametrize("attack", [ATTACKS[0], ATTACKS[2]])
def test_they_ruin_a_mean(attack):
    assert error_after("fedbuff:buffer_size=10", attack=attack) > 5


# ---- vectors that a task hands to rules ----------------------------------------------------------------------------

RULE = """
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from afflux import Needs, Rule
from afflux.rules.calibration import NONE
from afflux.rules.optimizers import Sgd


@dataclass(frozen=True)
class Trusting:
    needs: ClassVar[Needs] = Needs(inner=True, rule_vectors=("trusted",), handed_in=("trusted",))

    def __call__(self, arrivals, /):
        return np.where(arrivals.inner(rule_vector="trusted", own_weight=1.0).products > 0, 1.0, 0.0)


def trusting(buffer_size: int = 4):
    return Rule("trusting", "update", buffer_size, Trusting(), NONE, Sgd(0.1))
"""


@pytest.fixture
def trusting(tmp_path):
    (tmp_path / "trusting.py").write_text(RULE)
    return parse_rule(f"{tmp_path / 'trusting.py'}:trusting")


def task(**vectors):
    return Task(own_tasks.linear, CLIENTS, own_tasks.TEST, vectors=vectors)


def flat(model):
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


OF_TASK = replace(SMALL, task="python:mine", model="cnn", partition="dirichlet", num_clients=12, refresh_every=3)


def test_a_task_hands_in_vectors_of_any_name(trusting, monkeypatch):
    """At the start, and at each version that is a multiple of refresh_every; of the server's model."""
    handed, set_rule_vector = [], Server.set_rule_vector

    def spy(self, name, vector):
        handed.append((name, self.version, np.array_equal(vector, 2 * self.params)))
        set_rule_vector(self, name, vector)

    monkeypatch.setattr(Server, "set_rule_vector", spy)
    result = run(trusting, 0, replace(OF_TASK, arrivals=40), task=task(trusted=lambda model: 2 * flat(model)))
    assert result.evaluations[-1].version == 10
    assert handed == [("trusted", version, True) for version in (0, 3, 6, 9)]


def test_a_vector_of_a_task_replaces_the_gradient(monkeypatch):
    """Without validation data."""
    vectors = {"validation": lambda model: torch.zeros(len(flat(model)))}
    result = run(parse_rule("aflguard"), 0, OF_TASK, task=task(**vectors))
    assert result.evaluations[-1].version == 0, "all arrivals are too far from 0"


def test_a_simulation_hands_in_vectors():
    """Toward params, and away from them: other weights."""

    def digest(**vectors):
        own = {"evaluate": own_tasks.TEST, "rules": "fltrust", "arrivals": 20, "vectors": vectors}
        return Simulation(own_tasks.linear, CLIENTS, **own).run()[0].digest

    check_refused("fltrust scores updates on validation data", digest)
    assert digest(validation=flat) != digest(validation=lambda model: -flat(model))


@pytest.mark.parametrize("vectors", [3, {"trusted": 3}])
def test_vectors_that_are_no_functions(vectors):
    check_error(
        "vectors is .*3.*, must be functions of the model by name",
        Task,
        own_tasks.linear,
        CLIENTS,
        own_tasks.TEST,
        vectors=vectors,
        error=ConfigError,
    )


def test_vectors_that_are_missing_or_wrong(trusting):
    check_refused(
        r"trusting needs the vectors \['trusted'\]: give them by the task's vectors=",
        run,
        trusting,
        0,
        OF_TASK,
        task=task(),
    )
    wrong = task(trusted=lambda model: np.zeros(3))
    check_error("trusted", run, trusting, 0, OF_TASK, task=wrong)
