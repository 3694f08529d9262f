"""Grids: which settings are tried, on which examples, which one is best, and that a stopped grid goes on."""

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

import afflux.lab.runs.compare
import own_tasks
from afflux.cli.lab.app import app
from afflux.lab import Simulation, read_results, tune
from afflux.lab.grid import parse_grid, points
from afflux.lab.runs.setup import RunSetup
from afflux.lab.tasks.registry import image_task
from afflux.rules.specs import parse_rule
from afflux.sim import ConfigError, Task, partitioned, sgd
from afflux.sim.workload.config import SimConfig
from afflux.sim.workload.task import tuned_on_validation
from conftest import check_refused
from made_runs import run

CONFIG = SimConfig(model="logreg", num_clients=20, concurrency=5, arrivals=20, eval_every=5)
WITHOUT_BUFFER = "--model logreg --num-clients 20 --concurrency 5 --arrivals 20 --eval-every 5 --jobs 1"
SETTINGS = f"{WITHOUT_BUFFER} --buffer-size 4"


def tried(rules, *grid):
    specs = [parse_rule(rule) for rule in rules]
    return [(point.spec.text, point.config.client_lr) for point in points(specs, parse_grid(grid), CONFIG)]


def test_each_rule_has_the_settings_and_options_that_it_takes():
    assert tried(["fedbuff", "fedasync"], "client_lr=.5,.25", "server_lr=1,2", "fedasync.alpha=.1,.2") == [
        ("fedbuff:server_lr=1.0", 0.5),
        ("fedbuff:server_lr=2.0", 0.5),
        ("fedbuff:server_lr=1.0", 0.25),
        ("fedbuff:server_lr=2.0", 0.25),
        ("fedasync:alpha=0.1", 0.5),
        ("fedasync:alpha=0.2", 0.5),
        ("fedasync:alpha=0.1", 0.25),
        ("fedasync:alpha=0.2", 0.25),
    ]
    assert [text for text, _ in tried(["fedbuff"], "staleness=none,hinge(10,4)")] == [
        "fedbuff:staleness=none",
        "fedbuff:staleness=hinge(10.0,4.0)",
    ]
    labels = [point.spec.label for point in points([parse_rule("fedbuff")], parse_grid(["server_lr=.1,1"]), CONFIG)]
    assert labels == ["fedbuff:server_lr=0.1", "fedbuff:server_lr=1.0"]


def test_the_option_of_a_rule_replaces_that_of_all():
    grid = ("server_lr=.1,1,10", "fadas.server_lr=.01,.1", "fedasync.client_lr=.5")
    assert tried(["fedbuff", "fadas", "fedasync"], *grid) == [
        ("fedbuff:server_lr=0.1", 0.1),
        ("fedbuff:server_lr=1.0", 0.1),
        ("fedbuff:server_lr=10.0", 0.1),
        ("fadas:server_lr=0.01", 0.1),
        ("fadas:server_lr=0.1", 0.1),
        ("fedasync", 0.5),
    ]


def test_a_rule_that_sets_an_option_of_the_grid_itself_is_an_error():
    """The grid would run other values under its label."""
    check_refused("fedbuff:.* has server_lr=3.0 already", tried, ["fedbuff:server_lr=3", "ca2fl"], "server_lr=.1,1")
    check_refused("fast has server_lr=3.0 already", tried, ["fast=fedbuff:server_lr=3"], "fedbuff.server_lr=.1,1")
    check_refused("has buffer_size=4 already", tried, ["fedbuff:buffer_size=4"], "buffer_size=3")
    default = parse_rule("fedbuff", {"buffer_size": 10})
    assert points([default], parse_grid(["buffer_size=3"]), CONFIG)[0].spec.label == "fedbuff:buffer_size=3"


def test_names_of_rules_in_files(tmp_path):
    for name in ("one-file.py", "two.py"):
        function = "(server_lr: float = 1.0): return rules.fedbuff(server_lr=server_lr)"
        text = f"from afflux import rules\ndef fedbuff{function}\ndef mine{function}\n"
        (tmp_path / name).write_text(text)
    one, two = f"{tmp_path}/one-file.py", f"{tmp_path}/two.py"
    # A preset's name does not mean the user's function of the same name.
    assert tried(["fedbuff", f"{one}:fedbuff"], "fedbuff.server_lr=.5") == [
        ("fedbuff:server_lr=0.5", 0.1),
        (f"{one}:fedbuff", 0.1),
    ]
    assert tried([f"{one}:fedbuff"], "fedbuff.server-lr=.5") == [(f"{one}:fedbuff:server_lr=0.5", 0.1)]
    both = [f"{one}:mine", f"{two}:mine"]
    assert tried(both, f"{one}:mine.server_lr=.5")[1] == (f"{two}:mine", 0.1)
    check_refused(r"mine is one of .*one-file.py:mine, .*two.py:mine; write", tried, both, "mine.server_lr=.5")


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        (["client_lr"], "'client_lr' is not NAME=VALUE"),
        (["client_lr=.1,,1"], "is not NAME=VALUE"),
        (["client_lr=1,1"], "different values"),
        (["client_lr=.1", "client-lr=1"], "given twice"),
        (["client_lr=x"], "grid client_lr: 'x' is not a number"),
        (["client_lr=-1"], "client_lr is -1.0, must be positive"),
        (["beta1=.9"], "grid beta1: no rule has this option, nor is it one of the settings client_lr, "),
        (["ca2fl.server_lr=.9"], "grid ca2fl.server_lr: there is no rule ca2fl; the rules are fedbuff"),
        (["fedbuff.beta1=.9"], "grid fedbuff.beta1: fedbuff has no option beta1; its options are buffer_size, "),
        (["buffer_size=0"], "buffer_size is 0"),
        (["server_lr=1", "fedbuff.server_lr=.5"], "grid server_lr: RULE.server_lr replaces it for every rule"),
    ],
)
def test_impossible_grids(grid, message):
    check_refused(message, tried, ["fedbuff"], *grid)


def drawn(trials, *grid, rules=("fedbuff", "fedasync"), seed=0):
    specs = [parse_rule(rule) for rule in rules]
    return [(point.rule, dict(point.chosen)) for point in points(specs, parse_grid(grid), CONFIG, trials, seed)]


def test_trials_are_drawn_from_a_stream_of_their_own():
    """Which depends on the seed, the option and the number of the trial, and on no rule."""
    grid = ("client_lr=.001..1", "fedbuff.server_lr=.1..10", "fedasync.alpha=.1..1")
    tried_first = drawn(3, *grid)
    assert drawn(3, *grid) == tried_first
    assert [chosen for rule, chosen in drawn(5, *grid)[:3]] == [chosen for rule, chosen in tried_first[:3]], "more"
    assert drawn(3, *grid, seed=1) != tried_first
    first, second = ([c["client_lr"] for r, c in tried_first if r == rule] for rule in ("fedbuff", "fedasync"))
    assert first == second
    assert len(set(first)) == 3
    assert [chosen["client_lr"] for _, chosen in drawn(3, "client_lr=.001..1", rules=["fedbuff"])] == first
    same = drawn(3, "fedbuff.server_lr=.1..10", "ca2fl.server_lr=.1..10", rules=["fedbuff", "ca2fl"])
    assert [chosen["fedbuff.server_lr"] for _, chosen in same[:3]] == [c["ca2fl.server_lr"] for _, c in same[3:]]


def test_a_float_is_log_uniform_any_other_number_uniform_and_a_value_has_its_share():
    grid = ("client_lr=.001..1", "weight_decay=0..1", "local_steps=1..3", "staleness=none,hinge(10,4)")
    rows = [chosen for _, chosen in drawn(300, *grid, rules=["fedbuff"])]
    rates = np.array([float(row["client_lr"]) for row in rows])
    assert ((rates >= 0.001) & (rates <= 1)).all()
    decades = np.histogram(rates, bins=[0.001, 0.01, 0.1, 1])[0]
    assert decades.sum() == 300
    assert (abs(decades - 100) < 35).all(), "four standard deviations"
    halves = np.histogram([float(row["weight_decay"]) for row in rows], bins=[0, 0.5, 1])[0]
    assert (abs(halves - 150) < 35).all()
    for name, values in (("local_steps", {"1", "2", "3"}), ("staleness", {"none", "hinge(10,4)"})):
        counts = [sum(row[name] == value for row in rows) for value in values]
        assert sum(counts) == 300
        assert all(abs(count - 300 / len(values)) < 35 for count in counts)
    assert len(drawn(50, "local_steps=1..3", rules=["fedbuff"])) == 3, "equal settings are one"


@pytest.mark.parametrize(
    ("grid", "message"),
    [
        ("client_lr=1...1", "grid client_lr: 1...1 is no range LOW..HIGH of numbers"),
        ("client_lr=.1..1,2", "grid client_lr: .1..1,2 is no range"),
        ("client_lr=.1..inf", "is no range"),
        ("client_lr=..1", "is no range"),
        ("local_steps=1.5..3", "is no range LOW..HIGH of whole numbers"),
        ("staleness=1..2", "grid staleness: "),
        ("client_lr=-1..1", "client_lr is -"),
    ],
)
def test_impossible_ranges(grid, message):
    check_refused(re.escape(message), drawn, 8, grid)


def test_a_range_needs_trials(tmp_path):
    check_refused(r"is not a number.*; a range LOW..HIGH needs trials", tried, ["fedbuff"], "client_lr=.1..1")
    check_refused("trials is -1", tune, Simulation.of(CONFIG, "fedasync"), {"client_lr": [0.1]}, trials=-1)
    result = CliRunner().invoke(app, ["compare", "--trials", "2", *SETTINGS.split(), "--out", str(tmp_path / "out")])
    assert (result.exit_code, "give --grid" in result.stderr) == (2, True)


def test_trials_continue(made, tmp_path):
    """More trials run what is new; another range is another command."""
    simulation = Simulation.of(replace(CONFIG, arrivals=5), "fedasync")
    grid = {"client_lr": "0.01..0.1", "alpha": [0.5]}
    two = tune(simulation, grid, trials=2, out=tmp_path / "out")
    assert len(made) == 3
    again = tune(simulation, grid, trials=2, out=tmp_path / "out")
    assert (len(made), again.trials) == (3, two.trials)
    three = tune(simulation, grid, trials=3, out=tmp_path / "out")
    assert (three.trials[:2], made[3][2]) == (two.trials, "validation")
    assert len([part for _, _, part, _ in made if part == "validation"]) == 3
    assert three.trials == tune(simulation, grid, trials=3).trials, "those that nothing has stopped"
    for other in ({"client_lr": "0.01..0.2", "alpha": [0.5]}, {"client_lr": "0.01..0.1", "alpha": [0.5, 0.6]}):
        check_refused("the results of another command", tune, simulation, other, trials=3, out=tmp_path / "out")


def test_the_validation_part_is_a_fifth_of_the_training_part_that_no_client_has():
    task = image_task(CONFIG)
    held = tuned_on_validation(task)

    def rows(*parts):
        return {bytes(row) for part in parts for row in torch.flatten(part, 1).numpy()}

    shards = held.data_for_seed(3)
    kept, evaluated, test = rows(*(x for x, _ in shards)), rows(held.evaluate.x), rows(task.evaluate.x)
    assert kept | evaluated == rows(task.clients.x)
    assert not kept & evaluated
    assert not test & evaluated
    assert rows(held.validation[0]) == kept, "nor has the server"
    before, after = (np.bincount(y.numpy()) for y in (task.clients.y, held.evaluate.y))
    assert np.abs(after - before / 5).max() <= 0.5
    again = tuned_on_validation(image_task(CONFIG))
    assert torch.equal(again.evaluate.x, held.evaluate.x), "whatever the seed"
    setup = RunSetup(replace(CONFIG, part="validation"), 3)
    assert setup.num_validation == len(held.clients.y)


def test_a_task_without_a_validation_part():
    task = Task(own_tasks.linear, own_tasks.lazy, own_tasks.TEST, num_clients=9)
    check_refused("no validation part: give tuning=", tuned_on_validation, task)
    own = replace(task, tuning=lambda model: (0.25, 1.0))
    config = SimConfig(task="python:own", concurrency=3, arrivals=6, part="validation")
    assert run(parse_rule("fedasync"), 0, config, task=own).final_accuracy == 0.25


def count_runs(patch):
    """Seeds, rules, parts and learning rates of the runs that are made."""
    runs, run_paired = [], afflux.lab.runs.compare.simulate

    def counted(specs, seed, config, **options):
        runs.append((seed, specs[0].label, config.part, config.client_lr))
        return run_paired(specs, seed, config, **options)

    patch.setattr(afflux.lab.runs.compare, "simulate", counted)
    return runs


@pytest.fixture
def made(monkeypatch):
    return count_runs(monkeypatch)


class Command(NamedTuple):
    """A grid that nothing has stopped."""

    folder: Path
    stdout: str
    runs: list


@pytest.fixture(scope="module")
def straight(tmp_path_factory):
    folder = tmp_path_factory.mktemp("straight") / "out"
    with pytest.MonkeyPatch.context() as patch:
        runs = count_runs(patch)
        result = invoke(folder)
    assert result.exit_code == 0, result.output
    return Command(folder, result.stdout, runs)


def invoke(out, *more, rules="fedbuff,fedasync", seeds="2,5", settings=SETTINGS):
    grid = ["--grid", "client_lr=.01,.3,1e37", "--grid", "server_lr=.5,1", *more]
    command = ["compare", "--rules", rules, "--seeds", seeds, "--out", str(out)]
    return CliRunner().invoke(app, [*command, *settings.split(), *grid])


def test_the_best_on_the_validation_part_is_run_on_the_test_part(straight):
    content = json.loads((straight.folder / "grid.json").read_text())
    assert len(straight.runs) == 6 + 3 + 4
    assert {entry[0] for entry in straight.runs[:9]} == {2}
    assert [entry[2] for entry in straight.runs] == ["validation"] * 9 + ["test"] * 4
    for rule in ("fedbuff", "fedasync"):
        (best,) = (entry for entry in content["best"] if entry["rule"] == rule)
        lines = [entry for entry in content["grid"] if entry["rule"] == rule]
        assert best["validation"] == max(entry["accuracy"] or 0 for entry in lines)
        assert [entry["accuracy"] for entry in lines if entry["client_lr"] == "1e37"] == [None] * (len(lines) // 3)
        tuned = parse_rule(best["label"], {"buffer_size": 4})
        config = replace(CONFIG, client_lr=float(best["client_lr"]))
        finals = [run(tuned, seed, config).final_accuracy for seed in (2, 5)]
        assert best["accuracies"] == finals
        assert best["test"]["mean"] == pytest.approx(np.mean(finals))
        late = [row.accuracy for row in run(tuned, 2, replace(config, part="validation")).evaluations][-1]
        assert best["validation"] == late
    assert "| `fedasync` | 1e37 |  | diverged |" in straight.stdout


def test_a_grid_goes_on(straight, made, tmp_path, monkeypatch):
    out = tmp_path / "out"
    original = afflux.lab.runs.compare.simulate

    def stopped(*arguments, **options):
        if len(made) == 5:
            raise KeyboardInterrupt
        return original(*arguments, **options)

    with monkeypatch.context() as patched:
        patched.setattr(afflux.lab.runs.compare, "simulate", stopped)
        assert invoke(out).exit_code == 130
    assert invoke(out).exit_code == 0
    assert made == straight.runs, "none twice"
    for name in ("grid.json", "grid.md"):
        assert (out / name).read_bytes() == (straight.folder / name).read_bytes()
    made.clear()
    again = invoke(out)
    assert (again.exit_code, made) == (0, [])
    assert again.stdout.replace(str(out), "") == straight.stdout.replace(str(straight.folder), "")


def test_the_runs_of_the_test_part_are_a_run_folder(straight):
    """With the settings of each rule."""
    test, content = straight.folder / "test", json.loads((straight.folder / "grid.json").read_text())
    rules = json.loads((test / "config.json").read_text())["rules"]
    best = {one["label"]: float(one["client_lr"]) for one in content["best"]}
    rates = {rule["label"]: rule.get("settings", {}).get("client_lr") for rule in rules}
    assert rates == (best if len({*best.values()}) > 1 else dict.fromkeys(best))
    results = read_results(test)
    assert {run.spec.label: run.settings["client_lr"] for run in results} == best
    scores = {(run.spec.label, run.seed): run.final_score for run in results}
    finals = [scores[one["label"], seed] for one in content["best"] for seed in (2, 5)]
    assert finals == [score for one in content["best"] for score in one["accuracies"]]
    assert (test / "models").is_dir()


def test_a_best_value_at_the_edge_of_the_grid_is_marked(straight):
    lines = (straight.folder / "grid.md").read_text().splitlines()
    assert "† The best value is at the edge of the grid: try values beyond it." in lines
    for one in json.loads((straight.folder / "grid.json").read_text())["best"]:
        (line,) = (line for line in lines[:6] if line.startswith(f"| `{one['rule']}`"))
        assert (f"| {one['client_lr']} † |" in line) == (one["client_lr"] != ".3")
        if "server_lr" in one:
            assert f"| {one['server_lr']} † |" in line, "one of two values"
    assert not any("†" in line for line in lines[lines.index("The grid:") :])


def test_another_grid_does_not_overwrite_the_page(straight, made, tmp_path):
    out = shutil.copytree(straight.folder, tmp_path / "out")
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    for more, runs in (
        (["--grid", "weight_decay=.1"], {}),
        (["--target", "0.5"], {}),
        ([], {"seeds": "2,6"}),
        ([], {"seeds": "5,2"}),  # the first one is that of the grid
        ([], {"rules": "fedbuff"}),
        ([], {"settings": SETTINGS.replace("--buffer-size 4", "--buffer-size 5")}),
    ):
        result = invoke(out, *more, **runs)
        assert (result.exit_code, result.stdout, made) == (2, "", [])
        assert result.stderr == f"error: {out} holds the results of another command; choose another --out\n"
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    for content in ('["another"]', "no JSON"):
        (out / "command.json").write_text(content)
        assert invoke(out).exit_code == 2
    (out / "command.json").write_text("{}")  # of an older afflux
    assert invoke(out).exit_code == 0


def test_more_rules_and_seeds_continue_a_grid(straight, made, tmp_path):
    out = tmp_path / "out"
    assert invoke(out, rules="fedbuff", seeds="2").exit_code == 0
    made.clear()
    assert invoke(out).exit_code == 0
    assert {(seed, part) for seed, rule, part, _ in made if rule.startswith("fedbuff")} == {(5, "test")}
    assert (out / "grid.md").read_bytes() == (straight.folder / "grid.md").read_bytes()


def test_a_command_that_fails_does_not_stop_the_next_one(made, tmp_path):
    """Its values are not those of the page."""
    out = tmp_path / "out"
    one = ["compare", "--rules", "fedbuff", "--out", str(out), *SETTINGS.split(), "--grid"]
    assert CliRunner().invoke(app, [*one, "client_lr=1e37"]).exit_code == 2
    for values, code in ((".1", 0), (".1,-1", 2), (".1", 0), (".1,.3", 0)):
        result = CliRunner().invoke(app, [*one, f"client_lr={values}"])
        assert result.exit_code == code, result.output
    assert "the results of another command" in CliRunner().invoke(app, [*one, "client_lr=.1"]).stderr


def test_an_accuracy_that_is_no_number(made, tmp_path):
    """On the validation part the setting is not the best; on the test part it is null."""

    def evaluate(model):
        return float("nan"), 1.0

    data = [(own_tasks.X[k::6], own_tasks.Y[k::6]) for k in range(6)]
    task = Task(own_tasks.linear, data, evaluate, tuning=own_tasks.TEST)
    config = SimConfig(task="python:own", num_clients=6, concurrency=3, arrivals=6, eval_every=3)
    tune(Simulation.of(config, ["fedasync"], [0, 1], task=task), {"client_lr": [0.1]}, out=tmp_path / "out")
    content = json.loads((tmp_path / "out" / "grid.json").read_text())
    assert (content["best"][0]["test"], content["best"][0]["accuracies"]) == (None, [None, None])
    task = replace(task, evaluate=own_tasks.TEST, tuning=evaluate)
    with pytest.raises(ConfigError, match="fedasync: accuracy is nan with every setting of the grid"):
        tune(Simulation.of(config, ["fedasync"], task=task), {"client_lr": [0.1]})


def test_one_value_is_no_sequence():
    simulation = Simulation.of(CONFIG, "fedbuff:buffer_size=4")
    for name, value, shown in (("client_lr", 0.1, "0.1"), ("staleness", "none", "'none'")):
        message = re.escape(f"grid {name}: {shown} is no sequence of values, such as [{shown}]")
        check_refused(message, tune, simulation, {name: value})


def test_runs_that_end_before_the_first_arrival(tmp_path):
    """The initial params reach the target."""
    ends = [*SETTINGS.split(), "--stop-at-target", "--target", "0.01", "--rules", "fedbuff"]
    for number, more in enumerate(([], ["--grid", "client_lr=.1"])):
        result = CliRunner().invoke(app, ["compare", *ends, *more, "--out", str(tmp_path / str(number))])
        assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "1" / "grid.json").read_text())["grid"][0]["accuracy"] > 0
    found = run(parse_rule("fedbuff"), 0, replace(CONFIG, stop_at_target=True, target=0.01))
    assert (len(found.staleness), found.max_staleness) == (0, 0)
    assert np.isnan(found.mean_staleness)


def test_a_grid_of_the_validation_part_is_refused(made, tmp_path):
    """The page says that the best settings were run on the test part."""
    result = invoke(tmp_path / "out", "--part", "validation")
    assert (result.exit_code, made, (tmp_path / "out").exists()) == (2, [], False)
    assert "part is validation, but a grid runs each rule's best setting on the test part" in result.stderr


def test_the_function_gives_the_results_of_the_command(straight, made, tmp_path, capsys):
    capsys.readouterr()
    rules = [parse_rule(name, {"buffer_size": 4}) for name in ("fedbuff", "fedasync")]
    simulation = Simulation.of(CONFIG, rules, [2, 5])
    grid = {"client_lr": [0.01, 0.3, 1e37], "server_lr": [0.5, 1]}
    found = tune(simulation, grid, out=tmp_path / "out")
    assert made == straight.runs
    content = json.loads((straight.folder / "grid.json").read_text())
    assert [None if trial.score != trial.score else trial.score for trial in found.trials] == [
        entry["accuracy"] for entry in content["grid"]
    ]
    assert [one.scores for one in found.best] == [entry["accuracies"] for entry in content["best"]]
    assert [one.test.mean for one in found.best] == [entry["test"]["mean"] for entry in content["best"]]
    assert [len(trial.evaluations) for trial in found.trials[:2]] == [5, 5]
    assert str(found) == (tmp_path / "out" / "grid.md").read_text()
    made.clear()
    assert str(tune(simulation, grid, out=tmp_path / "out")) == str(found)
    assert made == [], "they were finished"
    check_refused("the results of another command", tune, simulation, {"client_lr": [0.01]}, out=tmp_path / "out")
    assert capsys.readouterr() == ("", "")


def test_a_grid_of_a_simulation_in_python(made, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    clients = partitioned(own_tasks.X, own_tasks.Y, 12, "iid")
    settings = {"rules": "fedbuff:buffer_size=3", "concurrency": 4, "arrivals": 24, "eval_every": 8}
    simulation = Simulation(own_tasks.linear, clients, None, own_tasks.TEST, seeds=[1, 2], **settings)
    found = tune(simulation, {"client_lr": [0.001, 0.3], "fedbuff.server_lr": [1.0]})
    assert [entry[2] for entry in made] == ["validation"] * 2 + ["test"] * 2
    (best,) = found.best
    assert best.trial.chosen == {"client_lr": "0.3", "fedbuff.server_lr": "1.0"}
    assert best.config.client_lr == 0.3
    again = Simulation(
        own_tasks.linear, clients, sgd(0.3), own_tasks.TEST, seeds=[1, 2], **settings | {"rules": best.trial.label}
    )
    assert [run.final_accuracy for run in again.run()] == best.scores
    assert not list(tmp_path.iterdir())
    paired = Simulation(own_tasks.linear, clients, None, own_tasks.TEST, rules=["fedasync", "fedbuff"], paired=True)
    check_refused("must not have paired=True", tune, paired, {"client_lr": [0.1]})


@pytest.mark.soak
def test_workers_give_the_page_of_one_process(tmp_path):
    """They are those of all runs, also after one that has diverged with trainings in flight."""
    command = f"compare --rules fedasync {WITHOUT_BUFFER} --grid client_lr=1e37,.3,.1".split()
    pages = {}
    for count in ("1", "2"):
        result = CliRunner().invoke(app, [*command, "--workers", count, "--out", str(tmp_path / count)])
        assert result.exit_code == 0, result.output
        pages[count] = [(tmp_path / count / name).read_bytes() for name in ("grid.md", "grid.json")]
    assert pages["1"] == pages["2"]
    assert b"diverged" in pages["1"][0]


def test_mistakes(tmp_path):
    for more, message in [(["--paired"], "--grid makes runs of its own"), (["--grid", "beta=1"], "grid beta: no rule")]:
        result = invoke(tmp_path / "out", *more)
        assert (result.exit_code, result.stdout) == (2, "")
        assert message in result.stderr
        assert not (tmp_path / "out").exists()
    command = f"compare --rules fedasync {WITHOUT_BUFFER} --grid client_lr=1e37"
    result = CliRunner().invoke(app, [*command.split(), "--out", str(tmp_path / "none")])
    assert result.exit_code == 2
    assert "fedasync: no run of the grid has a result, the first because fedasync, seed 0: client" in result.stderr
