"""The simulator as a library: own modules, data and training functions; the ends of a run; results."""

import copy
import json
import re
import sys
from dataclasses import replace
from math import inf, nan
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import made_runs
import own_tasks
from afflux import AffluxError
from afflux.lab import Simulation, read_results
from afflux.lab.results.run_result import SeedStatistics
from afflux.lab.runs.setup import RunSetup
from afflux.lab.tasks import registry
from afflux.rules.specs import RuleSpec, parse_rule
from afflux.sim import (
    ConfigError,
    DivergedError,
    Task,
    classification,
    fedprox,
    partitioned,
    scaffold,
    sgd,
)
from afflux.sim.clients.flat_model import FlatModel, make_module, reproducible_libraries
from afflux.sim.clients.schedule import Arrival
from afflux.sim.clients.training import Trainer
from afflux.sim.data import read_data_set
from afflux.sim.models import build_model
from afflux.sim.workload.config import SimConfig
from afflux.sim.workload.random_streams import StreamPurpose, random_stream
from conftest import ROOT, check_error, check_raises, check_refused, raising, reproducible
from made_runs import CLIENTS, paused_run, resume, run, run_in_store
from stopped_runs import Stopped, stop_at

RULE = "fedbuff:buffer_size=3"


def simulation(model=own_tasks.Net, clients=CLIENTS, training=None, **more):
    settings = {"rules": [RULE], "arrivals": 30, "eval_every": 10, "concurrency": 5} | more
    return made_runs.simulation(training, clients, model, **settings)


def bits(results):
    return [reproducible(result) for result in results]


def test_the_library_gives_the_bits_of_the_settings():
    """Images by name, and the same images and model as objects."""
    config = SimConfig(model="logreg", num_clients=20, concurrency=5, arrivals=40, delays="fadas-mild", local_steps=2)
    data = read_data_set("digits")
    x_train, x_test = map(torch.tensor, data.scaled())
    ours = Simulation(
        lambda rng: build_model("logreg", data.shape, 10, rng),
        partitioned(x_train, torch.tensor(data.y_train), 20),
        sgd(0.1, steps=2),
        classification(x_test, data.y_test),
        rules=[RULE],
        seeds=[3],
        delays="fadas-mild",
        concurrency=5,
        arrivals=40,
    )
    ours.task = replace(ours.task, seeds_torch=False)  # which takes a number of each client's stream
    (here,), there = ours.run(), run(parse_rule(RULE), 3, config)
    assert reproducible(here) == reproducible(there)


def test_the_same_simulation_gives_the_same_bits_and_leaves_torch_as_it_was():
    torch.manual_seed(1)
    before = torch.rand(3).tolist()
    made = simulation(training=own_tasks.momentum, seeds=[0, 1])
    torch.manual_seed(1)
    first = bits(made.run())
    assert torch.rand(3).tolist() == before
    assert bits(made.run()) == first, "another state of torch's random numbers"
    assert len({result[-1] for result in first}) == 2


@pytest.mark.soak
def test_other_processes_give_the_same_bits():
    made = simulation(training=own_tasks.momentum, seeds=[0, 1])
    assert bits(made.run(processes=2)) == bits(made.run())


def test_a_module_is_copied():
    torch.manual_seed(3)
    module = own_tasks.Net()
    before = copy.deepcopy(module.state_dict())
    first, second = (simulation(module).run() for _ in range(2))
    assert bits(first) == bits(second)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())


def test_roles_of_a_simulation():
    """spectral_norm's vectors are copied, whole, unless roles say more; no array is a client's own."""
    module = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)))
    made = simulation(module, arrivals=2, rules="fedbuff:buffer_size=2")
    made.task = replace(made.task, roles={"1.running_mean": "constant"})
    seen = []
    evaluate = made.task.evaluate
    made.task = replace(made.task, evaluate=lambda model: (seen.append(copy.deepcopy(model)), evaluate(model))[1])
    made.run()
    last = seen[-1].state_dict()
    for name in ("_u", "_v"):
        assert abs(last[f"2.parametrizations.weight.0.{name}"].norm().item() - 1) < 1e-6
    assert not last["1.running_mean"].any()
    assert last["1.running_var"].ne(1).all()
    made.task = replace(made.task, roles={"1.*": "local"})
    check_refused(r"1\.weight is local, and a simulation keeps no arrays of single clients", made.run)


def test_buffers_are_averaged_and_frozen_parts_stay_as_they_are():
    made = simulation(arrivals=3, rules="fedbuff:buffer_size=3:staleness=constant")
    seen = []
    evaluate = made.task.evaluate
    made.task = replace(made.task, evaluate=lambda model: (seen.append(copy.deepcopy(model)), evaluate(model))[1])
    made.run()
    first, last = (each.state_dict() for each in seen)
    assert not any(part.training for part in seen[1].modules())
    for name, value in last.items():
        frozen = name.startswith("frozen.")
        assert torch.equal(value, first[name]) == frozen, name
    assert last["norm.num_batches_tracked"] == 3, "three local steps of each client"

    # The statistics are the mean of those that the three clients, trained alone, come to.
    setup = RunSetup(made.config, 0, made.task)
    events = [event for event in setup.schedule(made.jobs[0].spec) if isinstance(event, Arrival)]
    model, found = setup.model, []
    with reproducible_libraries():
        for event in events:
            rng = random_stream(0, StreamPurpose.BATCHES, event.sequence)
            start = model.initial_params, rng, None, model.initial_buffers
            found.append(setup.trainer.train(event.client, *start).buffers)
    names = [field.name for field in model.layout.buffers]
    assert names == ["norm.running_mean", "norm.running_var", "norm.num_batches_tracked"]
    mean = np.mean(found, axis=0)
    ours = torch.cat([last[name].flatten().double() for name in names]).numpy()
    # Rounded to float32 once by the module; a mean of three in float64 before.
    np.testing.assert_allclose(ours, mean, rtol=2**-23, atol=0)


def test_a_trained_part_is_trained_as_torch_would():
    """The clients' momentum training against the same function on a module of its own."""
    made = simulation(own_tasks.linear, training=own_tasks.momentum, client_lr=0.2, local_steps=4)
    setup = RunSetup(made.config, 7, made.task)
    with reproducible_libraries():
        trained = setup.trainer.train(2, setup.model.initial_params, random_stream(7, StreamPurpose.BATCHES, 0))
        rng = random_stream(7, StreamPurpose.BATCHES, 0)
        rng.integers(2**63)  # seeds torch
        module = make_module(own_tasks.linear, 7)
        data = CLIENTS.for_seed(7)[2]
        loss, steps, count = own_tasks.momentum(module, data, rng, client_lr=0.2, local_steps=4)
    flat = torch.cat([part.detach().flatten() for part in module.parameters()]).numpy()
    assert (trained.update == flat - setup.model.initial_params).all()
    assert (trained.loss, trained.steps, trained.num_examples) == (loss, steps, count)


def test_lazy_clients_are_made_on_demand_and_not_kept():
    asked, alive = [], []

    class Data(tuple):
        """Counts how many exist."""

        def __new__(cls, pair):
            alive.append(1)
            return super().__new__(cls, pair)

        def __del__(self):
            alive.pop()

    def lazy(client, rng):
        asked.append(client)
        assert len(alive) == 0, "the one before is gone"
        return Data(own_tasks.lazy(client, rng))

    (result,) = simulation(clients=lazy, num_clients=1_000_000, arrivals=50, rules="ca2fl:buffer_size=5").run()
    assert len(asked) == 50
    assert max(asked) > 100_000
    assert result.num_clients == 1_000_000
    assert [client for client, _ in zip(asked, range(50), strict=True)] == result.clients.tolist()


def test_lazy_data_depend_on_the_seed_and_the_client_alone():
    task = Task(own_tasks.Net, own_tasks.lazy, own_tasks.TEST, num_clients=5)
    first, again, other = (task.data_for_seed(seed)[3][1].tolist() for seed in (0, 0, 1))
    assert first == again != other
    assert task.data_for_seed(0)[2][1].tolist() != first


class Pairs(torch.utils.data.Dataset):
    def __init__(self, pair):
        self.pair = pair

    def __len__(self):
        return len(self.pair[1])

    def __getitem__(self, place):
        return self.pair[0][place], self.pair[1][place]


class Named(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(own_tasks.FEATURES, own_tasks.CLASSES)

    def forward(self, features, scale):
        return SimpleNamespace(logits=self.layer(features * scale))


def test_data_sets_of_several_kinds_give_the_same_bits():
    pairs = CLIENTS.for_seed(0)
    kinds = [pairs, [(x.numpy(), y.numpy()) for x, y in pairs], [Pairs(pair) for pair in pairs]]
    kinds += [[(x.double(), y) for x, y in pairs], [(x.double().numpy(), y.numpy()) for x, y in pairs]]
    digests = {simulation(own_tasks.linear, clients).run()[0].digest for clients in kinds}
    assert len(digests) == 1


def test_inputs_may_be_several_and_the_loss_ones_own():
    def loss(output, y):
        return nn.functional.cross_entropy(output.logits, y)

    def evaluate(model):
        logits = model(own_tasks.X, torch.ones(len(own_tasks.Y), 1)).logits
        return (logits.argmax(1) == own_tasks.Y).float().mean(), loss(SimpleNamespace(logits=logits), own_tasks.Y)

    for kind in (dict, tuple):
        clients = []
        for x, y in CLIENTS.for_seed(0):
            inputs = {"features": x, "scale": torch.ones(len(y), 1)}
            clients.append((inputs if kind is dict else tuple(inputs.values()), y))
        made = Simulation(Named, clients, sgd(0.5), evaluate, loss=loss, rules=RULE, arrivals=60, concurrency=5)
        assert made.run()[0].final_accuracy > 0.8


@pytest.mark.parametrize("training", [fedprox(0.1, mu=1.0), scaffold(0.1)])
def test_other_optimizers(training):
    plain, other = simulation(own_tasks.linear).run(), simulation(own_tasks.linear, training=training).run()
    assert plain[0].digest != other[0].digest
    assert plain[0].staleness.tolist() == other[0].staleness.tolist()


def test_rules_that_need_facts_are_refused(tmp_path):
    file = tmp_path / "rule.py"
    file.write_text(
        "from dataclasses import replace\nfrom afflux.rules import fedbuff\nfrom afflux.rules.weights import Given\n"
        "def by_tokens(buffer_size: int = 2):\n"
        "    return replace(fedbuff(buffer_size=buffer_size), weigh=Given('tokens'))\n"
    )
    text = r"fedbuff needs facts of arrivals \(tokens\), which simulated clients do not"
    check_refused(text, simulation(own_tasks.linear, rules=f"{file}:by_tokens").run)


def test_rules_that_score_updates_need_validation_data():
    check_refused("zenopp scores updates on validation data", simulation(rules="zenopp").run)
    limited = simulation(rules="dp_fedbuff:participations=1", rounds=2)
    check_refused("dp_fedbuff has participations, so that rounds=2 may never come", limited.run)
    made = simulation(rules="zenopp:server_lr=0.3", validation=(own_tasks.X, own_tasks.Y))
    assert made.run()[0].evaluations[-1].version > 0


class Steep(nn.Module):
    """Its gradients grow with the eighth power of its params."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(own_tasks.FEATURES, own_tasks.CLASSES)

    def forward(self, x):
        return self.layer(x) ** 9


def test_a_server_whose_own_gradient_is_too_large_has_diverged():
    settings = {"rules": "zenopp:server_lr=1000", "validation": (own_tasks.X, own_tasks.Y)}
    check_error(r"diverged at version [1-9].*max_abs is 1e.15", simulation(Steep, **settings).run, error=DivergedError)
    with pytest.raises(AffluxError, match="validation has a non-finite value"):  # of the data, at the start
        simulation(own_tasks.linear, **settings | {"validation": (own_tasks.X * inf, own_tasks.Y)}).run()


WHOLE = {"arrivals": 60, "eval_every": 4, "delays": "fadas-mild"}


def whole():
    return simulation(own_tasks.linear, **WHOLE).run()[0]


@pytest.mark.parametrize(
    "end",
    [{"arrivals": 22}, {"rounds": 7}, {"virtual_time": 9.0}, {"stop_at_target": True, "target": 0.6}],
    ids=lambda end: next(iter(end)),
)
def test_a_run_that_ends_earlier_is_the_beginning_of_the_longer_one(end):
    settings = {name: value for name, value in WHOLE.items() if name != "arrivals"}
    long = whole()
    made = Simulation(own_tasks.linear, CLIENTS, None, own_tasks.TEST, rules=RULE, concurrency=5, **settings, **end)
    (short,) = made.run()
    count = len(short.staleness)
    assert 0 < count < 60
    assert short.staleness.tolist() == long.staleness[:count].tolist()
    assert short.clients.tolist() == long.clients[:count].tolist()
    *before, last = short.evaluations
    assert tuple(before) == long.evaluations[: len(before)]
    assert last.arrivals == count
    if "arrivals" in end:
        assert count == 22
    elif "rounds" in end:
        assert (last.version, count) == (7, 21)
    elif "virtual_time" in end:
        assert last.virtual_time <= 9.0
        later = simulation(own_tasks.linear, **WHOLE | {"arrivals": count + 1}).run()[0]
        assert later.evaluations[-1].virtual_time > 9.0
    else:
        assert last.accuracy >= 0.6 > max(row.accuracy for row in before)


def test_the_first_of_several_ends_counts():
    (result,) = simulation(own_tasks.linear, **WHOLE | {"arrivals": 10}, rounds=7, virtual_time=1e9).run()
    assert len(result.staleness) == 10
    check_refused("the run has no end", replace, simulation().config, arrivals=2**62)


def test_paired_rules_end_with_the_first():
    made = simulation(own_tasks.linear, rules=[RULE, "fedasync"], paired=True, rounds=4)
    first, second = made.run()
    assert len(first.staleness) == len(second.staleness) == 12
    assert (first.evaluations[-1].version, second.evaluations[-1].version) == (4, 12)
    assert second.evaluations[-1].arrivals == 12


def test_own_delays():
    def law(num_clients, rng):
        slow = rng.permutation(num_clients)
        return lambda client, times: 1.0 + slow[client]

    (result,) = simulation(own_tasks.linear, delays=law).run()
    assert result.digest != simulation(own_tasks.linear).run()[0].digest
    assert {row.virtual_time for row in result.evaluations} <= set(np.arange(0.0, 400.0))


def test_results(tmp_path, monkeypatch):
    made = simulation(own_tasks.linear, rules=[RULE, "fedasync"], seeds=[0, 1], target=0.5)
    results = made.run(out=tmp_path / "run")
    assert [(run.spec.label, run.seed) for run in results] == [(RULE, 0), ("fedasync", 0), (RULE, 1), ("fedasync", 1)]
    statistics = results.summary()["fedasync"]["final_accuracy"]
    assert statistics.seeds == 2
    head, *lines = str(results).split("\n")
    assert head.split() == ["rule", RULE, "fedasync"]
    (line,) = (line for line in lines if line.startswith("final accuracy, %"))
    assert line.endswith(f" {100 * statistics.mean:.1f} ± {100 * statistics.std:.1f}")
    assert len({len(line) for line in (head, *lines)}) == 1, "aligned"
    assert SeedStatistics(nan, nan, 0).text(2) == "-"
    assert SeedStatistics(2e4, 0, 1).text(2) == "20000 (1 of 2)"
    assert SeedStatistics(9999.7, 99.6, 2).text(2) == "10000 ± 100"
    assert SeedStatistics(99.94, 9.96, 2).text(2) == "99.94 ± 10"
    assert "±" not in str(simulation(own_tasks.linear, arrivals=6).run())
    results.draw(tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert {path.suffix for path in (tmp_path / "run" / "audit").iterdir()} == {".jsonl"}
    assert (tmp_path / "run" / "metrics.csv").read_text().count("\n") == 1 + 4 * 4
    assert bits(made.run()) == bits(results), "what is written changes no bit"
    monkeypatch.setitem(sys.modules, "pandas", None)
    assert f"{RULE}, seed 1: {results[2].final_score:.4f}" in str(results)


def test_a_call_that_was_stopped_keeps_finished_runs_and_the_same_call_goes_on(tmp_path):
    made = simulation(own_tasks.linear, rules=[RULE, "fedasync"])

    def stop_at(run):
        def watch(index, progress):
            if (index, progress.arrivals) == (run, 3):
                raise KeyboardInterrupt

        return watch

    out = tmp_path / "out"
    check_raises(KeyboardInterrupt, made.run, out=out, watch=stop_at(0))
    assert sorted(path.name for path in out.iterdir()) == ["audit", "finished.jsonl"]
    check_raises(KeyboardInterrupt, made.run, out=out, watch=stop_at(1))
    assert (out / "summary.csv").read_text().count("\n") == 2
    first = read_results(out)
    results = made.run(out=out)
    assert [run.digest for run in results] == [run.digest for run in made.run()]
    assert results[0].server_ms == first[0].server_ms, "it was not made again"


@pytest.mark.parametrize(
    ("division", "shown"),
    [
        ({"partition": "iid"}, ", partition iid, 6 arrivals"),
        ({"partition": "dirichlet", "alpha": 5.0}, ", partition dirichlet, alpha 5.0, 6 arrivals"),
        ({"partition": "classes", "classes": 2}, ", partition classes, classes 2, 6 arrivals"),
        ({}, "12 clients, task python:own, concurrency 5, "),
    ],
)
def test_the_partition_is_recorded(division, shown, tmp_path):
    own = [(own_tasks.X[i::12], own_tasks.Y[i::12]) for i in range(12)]
    clients = partitioned(own_tasks.X, own_tasks.Y, 12, **division) if division else own
    simulation(own_tasks.linear, clients, arrivals=6).run(out=tmp_path / "out")
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert written["division"] == {"num_clients": 12} | division
    assert shown in (tmp_path / "out" / "report.html").read_text()


def test_a_task_with_options(monkeypatch):
    own = {"own-linear": own_tasks.own_task, "wrong": own_tasks.wrong_task}
    monkeypatch.setattr(registry, "TASKS", {**registry.TASKS, **own})
    config = SimConfig(task="own-linear:shift=0.5", num_clients=15, alpha=1.0, concurrency=4, arrivals=20)
    task = registry.build_task(config)
    assert len(task.clients) == 15
    assert torch.equal(task.clients[2][0], own_tasks.X[2::15] + 0.5)
    result = run(parse_rule(RULE), 0, config)
    assert result.num_clients == 15
    for text, message in [
        ("wrong", "task wrong: it returns 1, not an afflux.sim.Task"),
        ("own-linear:shift", "'shift' is not option=value"),
        ("own-linear:shift=x", "task own-linear:shift=x: shift: 'x' is not a number"),
        ("own-linear:shift=1:shift=2", "task own-linear:shift=1:shift=2: shift is given twice"),
        ("own-linear:shaft=1", "unknown option of own-linear: 'shaft'; did you mean 'shift'"),
        ("own-liner", "unknown task 'own-liner'; did you mean 'own-linear'"),
        ("python:own", "the task python:own was made in Python"),
    ]:
        check_refused(message, run, parse_rule(RULE), 0, replace(config, task=text))
    check_refused("model is logreg, which is read only with task images", replace, config, model="logreg")


def misspelled(model, data, rng, *, lr):
    return 0.0, 1, 1


def returns(value):
    return lambda *_: value


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"training": returns(3)}, "training returns 3, must return loss, steps, examples"),
        ({"training": returns((0.5, 0, 4))}, "training returns 0 steps and 4 examples"),
        ({"training": returns((0.5, 1, 10**30))}, "training returns 1 steps and 10{30} examples, .* fewer than 2"),
        ({"evaluate": returns(0.5)}, "evaluate returns 0.5, must return accuracy, loss"),
        ({"model": returns(3)}, "model returns int, must return a torch.nn.Module"),
        ({"model": nn.Linear(6, 3).double()}, "parameter weight is torch.float64 on cpu, must be float32"),
        ({"model": nn.Linear(6, 3).requires_grad_(False)}, "select chooses no parameter"),
        ({"clients": lambda client: None}, "clients is a function: give num_clients"),
        ({"num_clients": 7}, "num_clients is given, but clients is no function"),
        ({"clients": {1: (own_tasks.X, own_tasks.Y)}}, "clients is a mapping, must be a list"),
        ({"clients": [3] * 12}, "a client's data set is 3: it has no examples"),
        ({"clients": [(own_tasks.X[:30], own_tasks.Y[:3])] * 12}, "data set has 30 examples, but 3 labels"),
        ({"clients": [((own_tasks.X[:3], own_tasks.X[:2]), own_tasks.Y[:3])] * 12}, "has 2 examples, but 3 labels"),
        ({"target": inf}, "target is inf, must be finite"),
        ({"concurrency": 13}, "concurrency is 13, but only 12 of 12 clients hold data"),
        ({"delays": "task"}, "has no delays of its own"),
        ({"seed": 3}, "unknown setting 'seed'"),
        ({"alpha": 3}, "unknown setting 'alpha'"),
        ({"client_lr": 3}, "client_lr is given twice"),
        ({"rules": []}, "at least one rule"),
        ({"training": misspelled}, "unknown setting of the training function: 'lr'.* client_lr"),
        ({"rules": ["fedasync", RuleSpec("fedasync", (), "fedasync")]}, "is given twice"),
        ({"seeds": [1, 1]}, "is given twice"),
        ({"training": own_tasks.momentum, "client_optimizer": "scaffold"}, "function momentum .* does not take it"),
        ({"training": own_tasks.momentum, "batch_size": 16}, "batch_size is 16, .*; it takes client_lr, local_steps$"),
        ({"training": returns(1), "local_steps": 5}, "local_steps is 5, .*; it takes no settings$"),
        ({"evaluate": None}, "give evaluate="),
        ({"loss": lambda output, y: 1.0}, r"loss returns 1\.0, must return a tensor, the mean loss of a batch"),
    ],
    ids=lambda value: str(list(value)) if isinstance(value, dict) else "",
)
def test_mistakes(change, message):
    settings = {"model": own_tasks.linear, "clients": CLIENTS, "training": sgd(), "evaluate": own_tasks.TEST}
    with pytest.raises((ConfigError, Exception), match=message):
        Simulation(**{"rules": RULE, "arrivals": 6, "concurrency": 3} | settings | change).run()


def test_the_target_may_be_any_number_as_the_accuracy():
    """For example minus a loss, or a score of a game."""
    ends = {"stop_at_target": True, "eval_every": 3, "arrivals": 12, "rules": RULE}
    scores = iter([-9.0, -5.0, -2.5, -1.0])
    own = Simulation(own_tasks.linear, CLIENTS, sgd(), lambda model: (next(scores), 0.0), target=-3.0, **ends)
    assert own.run()[0].evaluations[-1].accuracy == -2.5
    check_refused(r"target is -3.0, must be in \(0, 1\]", SimConfig, target=-3.0)


def test_a_parameter_that_is_replaced_is_named():
    def replaces(model, data, rng):
        model.weight.data = torch.zeros(3, 6)
        return 1.0, 1, 1

    error = check_refused("the training replaced parameter weight", simulation(own_tasks.linear, training=replaces).run)
    assert error.__notes__[0].startswith("while client ")


raises = raising(OSError, "mine")


def law_that_raises_later(num_clients, rng):
    return raises


@pytest.mark.parametrize(
    ("change", "note"),
    [
        ({"evaluate": raises}, "while the model was evaluated, without gradients"),
        ({"training": raises}, "while client [0-9]+ trained"),
        ({"model": raises}, "while the model was made"),
        ({"clients": lambda client: raises(), "num_clients": 12}, "while client [0-9]+ trained"),
        ({"delays": raises}, "while the function of delays was called"),
        ({"delays": law_that_raises_later}, "while the running time of client [0-9]+ was drawn"),
    ],
)
def test_an_error_of_a_users_function_says_what_called_it(change, note):
    settings = {"model": own_tasks.linear, "clients": CLIENTS, "training": sgd(), "evaluate": own_tasks.TEST}
    with pytest.raises(OSError, match="mine") as caught:
        Simulation(**{"rules": RULE, "arrivals": 6, "concurrency": 3, "faults": "raise"} | settings | change).run()
    (text,) = caught.value.__notes__
    assert re.fullmatch(note, text)


@pytest.mark.parametrize(
    ("outputs", "labels"), [(1, own_tasks.Y), (2, own_tasks.Y), (3, own_tasks.Y + 1), (3, own_tasks.Y - 1)]
)
def test_a_classifier_whose_outputs_do_not_fit_the_labels(outputs, labels):
    evaluate = classification(own_tasks.X, labels)
    low, high = int(labels.min()), int(labels.max())
    message = rf"outputs are of shape \({len(labels)}, {outputs}\) for labels from {low} to {high}: "
    with pytest.raises(ConfigError, match=message):
        Simulation(nn.Linear(6, outputs), CLIENTS, sgd(), evaluate, rules=[RULE], arrivals=6, concurrency=3).run()


def test_what_cannot_be_sent_to_other_processes_is_refused():
    check_refused("the task cannot be sent to", simulation(lambda: own_tasks.Net(), seeds=[0, 1]).run, processes=2)


def test_modes_of_parts_are_put_back_after_an_evaluation():
    module = own_tasks.Net()
    module.frozen.eval()
    model = FlatModel(module)
    task = Task(module, [], own_tasks.TEST)
    Trainer(model, [], task, SimConfig(task="python:own")).evaluate(model.initial_params, model.initial_buffers)
    training = [part.training for part in (module, module.norm, module.frozen, module.frozen[1])]
    assert training == [True, True, False, False]


def test_the_example(monkeypatch, capsys):
    """The whole program, with fewer arrivals."""
    source = (ROOT / "examples" / "own_simulation.py").read_text()
    assert len([line for line in source.splitlines() if line]) <= 32
    monkeypatch.setattr(sys, "argv", ["own_simulation.py"])
    exec(compile(source.replace("arrivals=1000", "arrivals=200"), "own.py", "exec"), {"__name__": "__main__"})
    lines = capsys.readouterr().out.splitlines()
    found = [re.fullmatch(r"(\S+), seed ([01]): accuracy (0\.\d+), staleness (\d+\.\d)", one).groups() for one in lines]
    assert [(rule.partition(":")[0], seed) for rule, seed, *_ in found] == [
        (rule, seed) for seed in "01" for rule in ("fedbuff", "ca2fl", "fedasync")
    ]
    assert all(float(accuracy) > 0.5 for *_, accuracy, _ in found)


def test_a_simulation_on_a_store_is_resumed_with_its_task(tmp_path):
    made = simulation(own_tasks.Net, training=own_tasks.momentum)
    (tmp_path / "whole").mkdir()
    (tmp_path / "run" / "audit").mkdir(parents=True)
    whole = run(made.jobs[0].spec, 0, made.config, output=tmp_path / "whole", task=made.task)
    output = tmp_path / "run" / "audit"
    arguments = tmp_path / "store", made.jobs[0].spec, 0, made.config, output, stop_at(13), 0.0
    check_raises(Stopped, run_in_store, *arguments, task=made.task)
    paused = paused_run(tmp_path / "store")
    assert paused.arrivals == 12
    result = resume(paused, task=made.task)
    assert reproducible(result) == reproducible(whole), "buffers of the model included"
    (log,) = (tmp_path / "whole").iterdir()
    assert (tmp_path / "run" / "audit" / log.name).read_bytes() == log.read_bytes()
