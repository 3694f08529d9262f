"""`bench.papers run rules`: statistics beside brute force, equal time, and tiny runs from trials to the page."""

from dataclasses import replace
from itertools import product
from math import isnan, sqrt

import numpy as np
import pytest
from typer.testing import CliRunner

from afflux.lab.publishing import write_page
from afflux.lab.results.finished_runs import _identity
from afflux.lab.results.run_result import Evaluation
from afflux.lab.runs import compare as compare_module
from afflux.rules import RULES as PRESETS
from afflux.rules import SYNCHRONOUS
from afflux.rules.specs import parse_rule
from bench.papers import reproduction
from bench.papers.all_tables import TABLES
from bench.papers.command import app
from bench.papers.referee import (
    ATTACKS,
    CONDITIONS,
    REFERENCE,
    ROBUST,
    RULES,
    Difference,
    holm,
    late_in_time,
    sign_flip,
    verdict,
)
from bench.papers.reproduction import Budget, folder_page, reproduce, rows_of, runs_of


def brute_force(differences):
    flips = product((1, -1), repeat=len(differences))
    sums = [abs(sum(s * d for s, d in zip(signs, differences, strict=True))) for signs in flips]
    return sum(one >= abs(sum(differences)) - 1e-9 for one in sums) / len(sums)


@pytest.mark.parametrize("seed", range(6))
def test_the_sign_flip_test_is_all_signs(seed):
    rng = np.random.default_rng(seed)
    differences = [*rng.normal(0.3 * seed, 1, 9).tolist(), 0.0, 0.25, 0.25]
    assert sign_flip(differences) == pytest.approx(brute_force(differences))
    assert sign_flip([0.1] * 20) == 2 / 2**20, "the smallest p of 20 pairs"
    assert sign_flip([0.0, 0.0]) == 1
    assert sign_flip([0.1, 0.2, -0.3]) == 1


def test_holm_is_the_step_down_of_its_paper():
    """Rejected are the smallest p while p_(k) <= level / (m - k), k from 0: the adjusted p say so at each level."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        values = {str(k): float(p) for k, p in enumerate(rng.uniform(0, 0.2, 7) ** 2)}
        adjusted, ranked = holm(values), sorted(values, key=values.get)
        for level in (0.01, 0.05, 0.2):
            rejected = set()
            for k, name in enumerate(ranked):
                if values[name] > level / (len(values) - k):
                    break
                rejected.add(name)
            assert {name for name, p in adjusted.items() if p <= level} == rejected
    assert holm({"a": 0.5, "b": 0.5}) == {"a": 1.0, "b": 1.0}


def test_the_interval_and_what_it_says():
    one = Difference.of([0.01, 0.03])
    assert (one.mean, one.half) == (pytest.approx(0.02), pytest.approx(12.7062047 * sqrt(0.0002) / sqrt(2)))
    assert str(one) == "+2.0 ± 12.7"
    assert isnan(Difference.of([0.01]).half)
    assert str(Difference.of([0.01])) == "+1.0"
    said = [verdict(*pair) for pair in ((0.004, 0.001), (0.006, 0.04), (-0.006, 0.04), (0.006, 0.06), (-0.005, 1.0))]
    assert said == ["level", "better", "worse", "not decided", "level"]


def rows(*pairs):
    return [Evaluation(int(10 * time), 1, time, accuracy, 0.0) for time, accuracy in pairs]


def test_the_last_quarter_of_the_time_weighs_a_model_by_how_long_it_holds():
    """Beside a fine grid of moments."""
    evaluations = rows((0.0, 0.1), (5.0, 0.4), (7.0, 0.5), (9.5, 0.8), (10.0, 0.9))
    moments = np.linspace(7.5, 10, 100_001)[:-1]
    held = np.searchsorted([row.virtual_time for row in evaluations], moments, side="right") - 1
    assert late_in_time(evaluations) == pytest.approx(np.mean([evaluations[k].accuracy for k in held]), abs=1e-4)
    assert late_in_time(evaluations[:1]) == 0.1


def test_runs_are_read_until_the_end_of_fedbuffs():
    def line(rule, seed, *pairs, **config):
        facts = {"rule": rule, "seed": seed, "max_staleness": 0, "config": config}
        return facts | {"evaluations": [list(row) for row in rows(*pairs)]}

    lines = [
        line("fedbuff:server_lr=1", 0, (0.0, 0.1), (4.0, 0.5), delays="x", client_lr=1, eval_every=100),
        line("fedavg", 0, (0.0, 0.1), (3.0, 0.2), (7.0, 0.9), delays="x", client_lr=2, eval_every=20),
        line("fedavg", 1, (0.0, 0.1), (7.0, 0.9), delays="x", client_lr=2, eval_every=20),
    ]
    timed = rows_of(TABLES["rules"], lines)
    assert [(row.virtual_time, row.accuracy) for row in timed(lines[1])] == [(0.0, 0.1), (3.0, 0.2), (4.0, 0.2)]
    assert timed(lines[2])[-1].virtual_time == 7.0, "FedBuff has no run with this seed"
    assert len(rows_of(TABLES["afl-table2"], lines)(lines[1])) == 3, "other tables have no clock"


def test_every_asynchronous_preset_is_a_row_and_all_have_the_same_trials():
    """But for diloco, fedstale, and the rules against hostile clients, which have tables of their own."""
    names = [parse_rule(text).name for text, _ in RULES.values()]
    without_runs = {"diloco", "aflguard", "fltrust", "krum", "multi_krum", "fedmedian", "fedtrimmedavg", "fedstale"}
    without_runs.add("dp_fedbuff")
    assert sorted(names) == sorted({*PRESETS} - {*SYNCHRONOUS} - without_runs | {"fedavg", "fedams"})
    assert next(iter(RULES)) == REFERENCE
    table = TABLES["rules"]
    assert (table.count, len(table.cells)) == (728, len(RULES) * len(CONDITIONS))
    runs, waiting = runs_of(table, table.cells, range(table.seeds), [])
    assert waiting == 280
    rates = {run.job.config.client_lr for run in runs}
    assert len(rates) == 8, "one name has the same draws for all rules"
    assert {run.job.seed for run in runs}.isdisjoint(range(table.seeds))
    assert {(run.job.config.part, run.job.config.arrivals) for run in runs} == {("validation", 1200)}


@pytest.mark.parametrize("attack", ATTACKS)
def test_each_attack_is_a_table_of_the_robust_rules(attack):
    table = TABLES[f"hostile-{attack}"]
    assert (table.count, len(table.cells)) == (416, len(ROBUST) * len(CONDITIONS))
    runs, waiting = runs_of(table, table.cells, range(table.seeds), [])
    assert waiting == 160
    assert {run.job.config.attack for run in runs} == {ATTACKS[attack][0]}
    assert {parse_rule(text).name for text, _ in ROBUST.values()} == {*ROBUST}
    assert {"krum", "multi_krum", "fltrust", "aflguard", "fedmedian", "fedtrimmedavg"} < {*ROBUST}


CHOSEN = "Dir(0.1), large delays of classes 8 and 9: "
TINY = {"data": "digits", "model": "logreg", "num_clients": 12, "concurrency": 4, "arrivals": 40, "eval_every": 10}


def tiny(name="rules", labels=("fedbuff", "ca2fl", "fedavg"), **settings):
    """The table with three rules under one condition, two trials each, and runs of four rounds."""
    cells, settings = [], TINY | settings
    for cell in TABLES[name].cells:
        if cell.name in [CHOSEN + label for label in labels]:
            search = cell.search._replace(settings=cell.search.settings | settings | {"arrivals": 20}, trials=2)
            cells.append(cell._replace(settings=cell.settings | settings, search=search))
    return replace(TABLES[name], cells=tuple(cells), seeds=2)


def test_a_tiny_referee_with_hostile_clients(tmp_path):
    attack = {"attack": "copies:clients=3:factor=10", "partition": "iid", "arrivals": 200}
    table = tiny("hostile-copies", ("fedbuff", "multi_krum", "fedmedian"), **attack)
    page, left = reproduce(table, tmp_path, (0, 1), limits=Budget(processes=1))
    assert (left, page.content["overall"].keys()) == (0, {"multi_krum", "fedmedian"})
    assert "while 20 of 100 clients push one direction" in page.markdown
    late = page.content["late"][CHOSEN.removesuffix(": ")]
    assert max(late["fedbuff"].values()) < min(late["multi_krum"].values())


def test_a_tiny_referee_from_trials_to_the_page(tmp_path, monkeypatch):
    made, simulate = [], compare_module.simulate

    def counting(specs, seed, *arguments, **options):
        made.append((specs[0].name, seed))
        return simulate(specs, seed, *arguments, **options)

    monkeypatch.setattr(compare_module, "simulate", counting)
    table, one = tiny(), Budget(processes=1)
    _, left = reproduce(table, tmp_path, (0, 1), pattern="*ca2fl", limits=one)
    assert (left, len(made)) == (0, 8), "FedBuff's, which the others need, and its own"
    page, left = reproduce(table, tmp_path, (0, 1), limits=one)
    assert (left, len(made)) == (0, 12)
    assert {name for name, _ in made[8:]} == {"fedavg"}, "a rule that is added runs its cells only"
    monkeypatch.setattr(reproduction, "TABLES", {"rules": table})
    assert folder_page(table, tmp_path).content == page.content
    content = page.content
    assert content["overall"].keys() == {"ca2fl", "fedavg"}
    late = content["late"][CHOSEN.removesuffix(": ")]
    for label, values in content["overall"].items():
        pairs = [late[label][seed] - late["fedbuff"][seed] for seed in (0, 1)]
        assert (values["mean"], values["pairs"]) == (pytest.approx(np.mean(pairs)), 2)
    assert [len(values) for values in content["trials"].values()] == [2] * 3
    for label in ("ca2fl", "fedavg", "fedbuff"):
        assert "client_lr=" in content["chosen"][CHOSEN + label]
    assert f"### {CHOSEN.removesuffix(': ')}" in page.markdown
    assert "12 of 12 runs" in page.markdown
    page.draw(tmp_path / "picture.png")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_the_best_trial_of_a_synchronous_rule_is_that_of_the_equal_time(tmp_path):
    """Not of its own, longer time."""
    table = tiny()
    reproduce(table, tmp_path, (0,), limits=Budget(processes=1))
    lines = reproduction._lines_in(tmp_path)
    timed = rows_of(table, lines)
    trials = [line for line in lines if line["rule"].startswith("fedavg") and line["seed"] == 9]
    (end,) = {timed(line)[-1].virtual_time for line in trials}
    late = trials[0]["evaluations"][-1][2]
    assert end < late
    for best, other in (trials, trials[::-1]):
        best["evaluations"] = [[0, 0, 0.0, 0.1, 1.0], [20, 2, end / 2, 0.6, 1.0], [40, 4, late, 0.2, 1.0]]
        after = [[30, 3, end + (late - end) / 100, 0.9, 1.0], [40, 4, late, 0.9, 1.0]]
        other["evaluations"] = [[0, 0, 0.0, 0.1, 1.0], [20, 2, end / 2, 0.3, 1.0], *after]
        runs, _ = runs_of(table, table.cells, [0], lines)
        (run,) = [run for run in runs if run.cell.search is not None and run.job.spec.name == "fedavg"]
        assert run.job.spec.plain_options() == best["options"]
        assert run.job.config.client_lr == best["config"]["client_lr"]
    (run,) = [line for line in lines if line["rule"].startswith("fedavg") and line["seed"] == 0]
    assert 0 <= run["lowest_tenth"] <= 1
    assert run["state_bytes"] > 0


def test_the_page_of_all_runs_says_which_rule_to_use(tmp_path):
    """From made lines: CA2FL is two points above FedBuff, AFA-CS .3, FedAsync two below; Zeno++ holds least memory."""
    table = TABLES["rules"]
    shifts = {"ca2fl": 0.02, "afa_cs": 0.003, "fedasync": -0.02}

    def line(run):
        accuracy = 0.8 + shifts.get(run.job.spec.name, 0.0) + 0.001 * run.job.seed
        evaluations = [[0, 0, 0.0, 0.1, 2.0], [1200, 120, 50.0, accuracy, 1.0], [2400, 240, 100.0, accuracy, 1.0]]
        size = {"zenopp": 1.0, "fedbuff": 2.0}.get(run.job.spec.name, 3.0) * 1e6
        facts = {"state_bytes": size, "server_ms": 1.0, "lowest_tenth": 0.5, "max_staleness": 3, "seconds": 1.0}
        return _identity(run.job) | facts | {"table": "rules", "evaluations": evaluations}

    trials, _ = runs_of(table, table.cells, range(5), [])
    lines = [line(run) for run in trials]
    runs, waiting = runs_of(table, table.cells, range(5), lines)
    assert (len(runs), waiting) == (728, 0)
    ended = {index: line(run) for index, run in enumerate(runs)}
    page = reproduction.page_of(table, runs, ended, rows_of(table, [*ended.values()]))
    write_page(page, tmp_path)
    text = (tmp_path / "rules.md").read_text()
    assert "728 of 728 runs" in text
    for condition in CONDITIONS:
        assert f"- **{condition}**: ca2fl (82.2 %); fedbuff 80.2 %." in text
    assert "- **As little memory as FedBuff**: fedbuff (80.2 % over all conditions)." in text
    overall = page.content["overall"]
    assert [overall[label]["is"] for label in ("ca2fl", "afa_cs", "fedasync")] == ["better", "level", "worse"]
    assert overall["ca2fl"]["p"] == pytest.approx(13 * 2 / 2**20)
    assert {value["pairs"] for value in overall.values()} == {20}
    assert "| ca2fl | 82.2 ± 0.2 | +2.0 ± 0.0 | 82.2 | – | 50.0 | 3.0 | 1.00 |" in text

    first = next(index for index, run in enumerate(runs) if (run.job.spec.name, run.job.seed) == ("wkafl", 0))
    diverged = {"table": "rules", "evaluations": [], "max_staleness": 0}
    ended[first] = _identity(runs[first].job) | diverged
    page = reproduction.page_of(table, runs, ended, rows_of(table, [*ended.values()]))
    assert "| wkafl | 66.2 ± 31.4 |" in page.markdown
    assert "| 50.0 | 3.0 | 1.00 |" in next(
        row for row in page.markdown.splitlines() if row.startswith("| wkafl | 66.2")
    )


@pytest.fixture
def mnist(tmp_path):
    """A folder with a small file of MNIST's shape: each class is a bright row of its own."""
    rng = np.random.default_rng(3)

    def part(count):
        labels = np.arange(count) % 10
        images = rng.integers(0, 60, (count, 28, 28))
        images[np.arange(count), 2 * labels + 3] += 150
        return images.astype(np.uint8), labels.astype(np.uint8)

    (x_train, y_train), (x_test, y_test) = part(4000), part(50)
    np.savez(tmp_path / "mnist.npz", x_train=x_train, y_train=y_train, x_test=x_test, y_test=y_test)
    return tmp_path


@pytest.mark.soak
def test_a_short_referee_by_the_command(mnist, tmp_path):
    out = tmp_path / "out"
    command = ["run", "rules", "--cells", "Dir(0.5), mild*: ca2fl", "--rounds", "3", "--seeds", "0"]
    result = CliRunner().invoke(app, [*command, "--jobs", "1", "--data-dir", str(mnist), "--out", str(out)])
    assert result.exit_code == 0, result.output
    assert "all runs are in" in result.stdout
