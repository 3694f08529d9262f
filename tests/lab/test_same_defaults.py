"""`Simulation` and the command line make the same runs, also where nothing is said; and laws of delays are checked."""

import re
from math import inf, nan

import numpy as np
import pytest
from matplotlib.figure import Figure
from typer.testing import CliRunner

import own_tasks
from afflux.cli.lab.app import app
from afflux.lab import Simulation
from afflux.lab.results.audit_log import read_audit_log
from afflux.lab.results.figures import draw_metric
from afflux.lab.results.run_folder import describe_setting
from afflux.ops.validation import brief
from afflux.rules.specs import parse_rule
from afflux.sim import ConfigError, classification, partitioned
from afflux.sim.workload.config import SimConfig
from afflux.sim.workload.evaluation import CLASSIFICATION
from conftest import check_refused

X, Y = own_tasks.X[:200], own_tasks.Y[:200]
SETTINGS = {"num_clients": 12, "concurrency": 4, "arrivals": 40, "eval_every": 40}
FILE = """
import own_tasks
from afflux.sim import Task, partitioned

def mine(num_clients):
    clients = partitioned(own_tasks.X[:200], own_tasks.Y[:200], num_clients, partition="iid")
    return Task(own_tasks.linear, clients, own_tasks.TEST, delays=slow)

def slow(num_clients, rng):
    return lambda client, times: 1.0 + client
"""


def slow(num_clients, rng):
    return lambda client, times: 1.0 + client


def simulation(rules=("fedbuff", "fadas"), **more):
    clients = partitioned(X, Y, 12, partition="iid")
    settings = {"arrivals": 40, "eval_every": 40} | ({} if "protocol" in more else {"concurrency": 4}) | more
    return Simulation(own_tasks.linear, clients, evaluate=own_tasks.TEST, rules=rules, **settings)


def last(results):
    return [run.evaluations[-1].version for run in results]


def test_rules_with_a_buffer_take_the_same_number_of_arrivals():
    """Whatever a preset's own default is: FADAS's is 5."""
    assert last(simulation().run()) == [4, 4]
    assert last(simulation(buffer_size=8).run()) == [5, 5]
    assert last(simulation(["fadas:buffer_size=4"], buffer_size=8).run()) == [10]
    config = SimConfig(task="python:own", delays="exponential", **SETTINGS)
    assert last(Simulation.of(config, ["fadas"], task=simulation().task).run()) == [4]


def test_the_command_takes_the_delays_of_the_task_and_gives_the_bits_of_the_library(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(FILE)
    options = [f"--{name.replace('_', '-')}={value}" for name, value in SETTINGS.items()]

    def log(name, *more):
        out = tmp_path / name
        done = CliRunner().invoke(
            app, ["run", "--task", f"{file}:mine", "--rule", "fadas", *options, *more, "--out", str(out)]
        )
        assert done.exit_code == 0, done.output
        return read_audit_log(out / "audit" / "fadas-seed0.jsonl")

    own, named, other = log("own"), log("named", "--delays", "task"), log("other", "--delays", "fadas-large")
    assert own.path.read_bytes() == named.path.read_bytes()
    assert [one.header.settings(one.path).delays for one in (own, other)] == ["task", "fadas-large"]
    (run,) = simulation(["fadas"], delays=slow).run()
    assert run.digest == own.end.params_sha256 != other.end.params_sha256


@pytest.mark.parametrize("drawn", [-1.0, nan, inf])
@pytest.mark.parametrize("own", [{}, {"protocol": "rounds"}])
def test_an_impossible_running_time(drawn, own):
    def law(num_clients, rng):
        return lambda client, times: drawn if client == 3 else 1.0

    message = f"delays: the running time of client 3 is {drawn}, must be 0 or more and finite"
    check_refused(message, simulation(["fedbuff"], delays=law, **own).run)


@pytest.mark.parametrize("drawn", ["slow", None, [1.0], np.zeros(2)], ids=str)
def test_a_running_time_that_is_no_number(drawn):
    message = re.escape(f"delays: the running time of client 3 is {brief(drawn)}, must be a number")
    with pytest.raises(ConfigError, match=message):
        simulation(["fedbuff"], delays=lambda num_clients, rng: lambda client, times: drawn if client == 3 else 1).run()


@pytest.mark.parametrize("bad", [nan, inf])
@pytest.mark.parametrize("kind", ["float32", "float64", "torch"])
def test_examples_that_are_not_finite(bad, kind):
    x = X.clone() if kind == "torch" else X.numpy().astype(kind)
    x[17, 2] = bad
    for make in (partitioned, classification):
        check_refused(f"{make.__name__}: example 17 of x has a value that is not finite", make, x, Y)


def test_examples_whose_sum_overflows():
    x = np.full((4, 2), np.finfo(np.float32).max, np.float32)
    assert partitioned(x, [0, 1, 0, 1], 2).num_clients == 2
    assert partitioned(np.zeros((4, 2), np.int64), [0, 1, 0, 1], 2).num_clients == 2


def test_the_line_of_settings_tells_how_many_clients_hold_data():
    """Dirichlet's shares leave some clients without data, another number with each seed."""
    clients = partitioned(X, Y, 30, alpha=0.1)
    results = Simulation(
        own_tasks.linear, clients, evaluate=own_tasks.TEST, rules="fedasync", seeds=[0, 1], arrivals=5, concurrency=2
    ).run()
    least, most = sorted(run.num_clients for run in results)
    assert least < most < 30
    assert f"{least} to {most} of 30 clients, " in describe_setting(results.config, results)
    assert f"{results[0].num_clients} of 30 clients, " in describe_setting(results.config, results[:1])


def test_names_of_rules(tmp_path):
    """The same name in Python and on the command line; the runs are those without it."""
    named = parse_rule("ours=fedbuff:server_lr=.5")
    assert (named.name, named.options, named.label) == ("fedbuff", (("server_lr", 0.5),), "ours")
    assert named.identity == "ours=fedbuff"  # finished runs of another rule with this name are not taken
    assert parse_rule("fedbuff:server_lr=.5").identity == "fedbuff:server_lr=.5"
    for text, error in (("server_lr=.5", "separated by ':'"), ("ours=fedbuff:lr=1", "lr"), ("ours=fedbuf", "fedbuf")):
        check_refused(error, parse_rule, text)
    rules = ["ours=fedbuff:server_lr=.5", "fedbuff:server_lr=.5"]
    settings = SETTINGS | {"evaluate": own_tasks.TEST, "rules": rules, "seeds": [0]}
    clients = partitioned(X, Y, settings.pop("num_clients"))
    results = Simulation(own_tasks.linear, clients, **settings).run()
    assert [run.spec.label for run in results] == ["ours", "fedbuff:server_lr=.5"]
    assert results[0].digest == results[1].digest
    out = tmp_path / "runs"
    small = "--data digits --seeds 0 --jobs 1 --num-clients 12 --concurrency 4 --arrivals 40"
    ran = CliRunner().invoke(app, ["compare", "--rules", ",".join(rules), "--out", str(out), *small.split()])
    assert ran.exit_code == 0, ran.output
    assert (out / "audit" / "ours-seed0.jsonl").exists()
    assert "ours" in ran.output


def test_the_axis_of_the_accuracy_fits_the_curves():
    figure = Figure()
    axes = figure.subplots()
    axes.plot([0, 10], [0.7, 0.9])
    draw_metric(axes, CLASSIFICATION[0], "arrivals", {}, 0.8)
    low, high = axes.get_ylim()
    assert 0.6 < low < 0.7 < 0.9 < high < 1
