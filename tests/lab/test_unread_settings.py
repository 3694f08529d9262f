"""A setting that no run reads is an error, and config.json holds only settings that a run has read."""

from dataclasses import replace

import pytest

from afflux.lab import Simulation
from afflux.lab.grid import parse_grid, points
from afflux.lab.results import run_folder
from afflux.rules.specs import parse_rule
from afflux.sim import sgd
from afflux.sim.workload.config import UNLIMITED, SimConfig
from commands import invoke
from conftest import check_refused
from made_runs import run, simulation

ATTACK = "sign-flip:clients=2"
SMALL = SimConfig(model="logreg", num_clients=20, concurrency=5, arrivals=12, local_steps=1)
#: Settings of which the last one is not read with the others, and what reads it.
UNREAD = [
    ({"classes": 3}, "partition classes or wkafl"),
    ({"partition": "iid", "alpha": 0.3}, "partition dirichlet"),
    ({"partition": "classes", "alpha": 0.3}, "partition dirichlet"),
    ({"mu": 4.0}, "client_optimizer fedprox or fedasync"),
    ({"client_optimizer": "scaffold", "mu": 4.0}, "client_optimizer fedprox or fedasync"),
    ({"client_optimizer": "fedprox", "control_codec": "affine-8"}, "client_optimizer scaffold"),
    ({"local_epochs": 1, "local_steps": 2}, "local_epochs 0"),
    ({"local_epochs": 1, "steps_law": "uniform"}, "local_epochs 0"),
    ({"stale_models": 2}, "protocol rounds"),
    ({"sampling": "biased"}, "protocol rounds"),
    ({"protocol": "rounds", "refill": 2}, "protocol events"),
    ({"protocol": "rounds", "concurrency": 5}, "protocol events"),
    ({"data_dir": "there"}, "data from files"),
]


@pytest.fixture(autouse=True)
def _elsewhere(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)  # for the folder of a run that is not refused


def flags(settings):
    return [text for name, value in settings.items() for text in (f"--{name.replace('_', '-')}", str(value))]


@pytest.mark.parametrize(("settings", "reader"), UNREAD)
def test_a_setting_that_no_run_reads_is_an_error(settings, reader):
    name = list(settings)[-1]
    message = f"{name} is {settings[name]}, which is read only with {reader}"
    check_refused(f"^{message}$", SimConfig, **settings)
    result = invoke("run", "--rule", "fedbuff", "--out", "nowhere", *flags(settings))
    assert (result.exit_code, result.stderr) == (2, f"error: {message}\n")


@pytest.mark.parametrize(("settings", "reader"), UNREAD[:5])
def test_also_if_it_is_given_with_its_default(settings, reader):
    name = list(settings)[-1]
    default = getattr(SimConfig, name)
    result = invoke("run", "--rule", "fedbuff", "--out", "nowhere", *flags(settings | {name: default}))
    assert (result.exit_code, result.stderr) == (2, f"error: {name} is {default}, which is read only with {reader}\n")


@pytest.mark.parametrize(
    ("rules", "settings", "reader"),
    [
        ("fedavg,fedadam", {"concurrency": 5}, "a rule that is not synchronous"),
        ("fedavg", {"protocol": "rounds", "stale_models": 2}, "a rule that is not synchronous"),
        ("fedbuff,ca2fl", {"refresh_every": 9}, "a rule that scores updates"),
    ],
)
def test_a_setting_that_none_of_the_rules_reads(rules, settings, reader):
    name = list(settings)[-1]
    message = f"{name} is {settings[name]}, which is read only with {reader}"
    result = invoke("compare", "--rules", rules, "--out", "nowhere", *flags(settings))
    assert (result.exit_code, result.stderr) == (2, f"error: {message}\n")
    check_refused(message, simulation, rules=rules.split(","), **settings)


def test_a_task_of_ones_own_with_built_in_training():
    text = "local_steps is 5, which is read only with local_epochs 0"
    check_refused(text, simulation, sgd(steps=5, epochs=1))
    check_refused("mu is 4.0, which is read only with client_optimizer fedprox", simulation, mu=4.0)
    simulation(protocol="rounds")


def test_a_setting_of_a_grid_that_no_run_reads():
    check_refused(r"mu is 1.0, which is read only with", points, [parse_rule("fedbuff")], parse_grid(["mu=1,2"]), SMALL)


def settings_of(rules, **settings):
    """The settings that config.json would hold, and the line that describes them."""
    config = SimConfig(model="logreg", num_clients=12, local_steps=1, partition="iid", **settings)
    results = list(Simulation.of(config, rules).run())
    return run_folder._configuration(results, config)["simulation"], run_folder.describe_setting(config, results)


def test_config_json_holds_what_a_run_has_read():
    both, text = settings_of(
        ["fedavg", "zenopp"], concurrency=10, arrivals=UNLIMITED, rounds=1, validation=8, attack=ATTACK
    )
    assert (both["concurrency"], both["validation"], both["rounds"]) == (10, 8, 1)
    assert not {"arrivals", "alpha", "classes", "mu", "control_codec", "stale_models", "sampling", "data_dir"} & {*both}
    heading = "12 clients, data digits, model logreg, concurrency 10, delays fadas-large"
    assert text.startswith(f"{heading}, attack {ATTACK}, partition iid, ")
    rounds, text = settings_of(["fedbuff:buffer_size=2"], protocol="rounds", arrivals=4)
    assert (rounds["arrivals"], rounds["stale_models"]) == (4, 5)
    assert not {"concurrency", "refill", "validation", "refresh_every"} & {*rounds}
    assert text.startswith("12 clients, data digits, model logreg, delays fadas-large, partition iid, ")


@pytest.mark.parametrize("rule", ["gsgm", "fedbuff"])
def test_rounds_ends_a_run_with_the_arrival_that_reaches_it(rule):
    config = replace(SMALL, num_clients=5, arrivals=UNLIMITED, partition="iid", rounds=6)
    config = replace(config, selection="blocked-until-pass-ends")
    reached = []
    result = run(parse_rule(f"{rule}:buffer_size=1"), 2, config, lambda progress: reached.append(progress.version))
    assert result.evaluations[-1].version == reached[-1] == 6
    assert all(earlier < 6 for earlier in reached[:-1])
