"""Statistics of runs, against plain NumPy and loops over the audit log."""

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest

from afflux.lab.results import statistics
from afflux.lab.results.audit_log import read_audit_log
from afflux.lab.results.finished_runs import FailedRun
from afflux.lab.results.run_history import MOST_REASONS, OTHER_REASONS, RunHistory, add_weights
from afflux.lab.results.run_result import (
    Evaluation,
    RoundTotals,
    RunResult,
    arrivals_per_client,
    gini,
    summarise,
    time_statistics,
)
from afflux.lab.results.simulation_results import SimulationResults
from afflux.rules.specs import RuleSpec, parse_rule
from afflux.sim.workload.config import SimConfig
from afflux.sim.workload.evaluation import Metric
from conftest import check_refused
from made_runs import run

CONFIG = SimConfig(model="logreg", num_clients=20, concurrency=6, arrivals=60, eval_every=10, delays="fadas-mild")
RULES = {
    "fedasync": CONFIG,
    "fedbuff:buffer_size=4:staleness=polynomial(1)": CONFIG,
    "wkafl:buffer_size=5:sim_min=0.5": CONFIG,
    "gsgm:buffer_size=3": replace(CONFIG, selection="blocked-until-pass-ends"),
    "zenopp": CONFIG,
    "ca2fl:buffer_size=4": CONFIG,
}


def result_of(label, seed, accuracies, clients=(), num_clients=4):
    rows = tuple(Evaluation(10 * i, i, 2.5 * i, a, 1.0) for i, a in enumerate(accuracies))
    staleness = np.zeros(max(len(clients), 1), np.int64)
    facts = RuleSpec(label, (), label), seed, rows, staleness, staleness, np.array([1e-3]), 8, num_clients
    return RunResult(*facts, np.zeros(2, np.float32), clients=np.array(clients, np.int64))


@pytest.fixture(scope="module", params=RULES)
def made(request, tmp_path_factory):
    """A run and its audit log, which holds every arrival and every round."""
    folder = tmp_path_factory.mktemp("audit")
    result = run(parse_rule(request.param), 1, RULES[request.param], output=folder)
    (path,) = folder.glob("*.jsonl")
    return result, read_audit_log(path)


def test_the_history_is_that_of_the_log(made):
    result, log = made
    assert result.clients.tolist() == [line.client for line in log.arrivals]
    assert result.staleness.tolist() == [line.staleness for line in log.arrivals]
    assert result.round_staleness.tolist() == [max(line.staleness) for line in log.rounds]
    assert len(result.server_seconds) == len(log.rounds)
    statuses = [line.status for line in log.arrivals]
    assert result.decisions == {status: statuses.count(status) for status in statuses}
    assert result.totals.skipped == sum(not line.stepped for line in log.rounds)
    assert result.rejected_arrivals == sum(why != "" for line in log.rounds for why in line.rejected)


def test_the_mean_weight_by_staleness_is_that_of_the_log(made):
    result, log = made
    rounds, bins = 0, {}
    for line in log.rounds:
        weights = [Fraction(weight) for weight in line.weights]
        if sum(weights) == 0:
            continue
        shares = [weight / sum(weights) for weight in weights]
        rounds += 1
        for p, tau in zip(shares, line.staleness, strict=True):
            first = next(b for b in range(64) if tau < 2**b)
            count, total = bins.get(first, (0, Fraction(0)))
            bins[first] = count + 1, total + p * len(shares)
    assert rounds > 0
    # Sums of n positive terms with relative error n u each (Higham, section 4.2); 4 more for the products and ratios.
    u = 2.0**-53
    bound = (len(log.arrivals) + rounds + 4) * u
    for b, (count, total) in bins.items():
        assert result.totals.bin_counts[b] == count
        assert result.totals.bin_weights[b] == pytest.approx(float(total), rel=bound, abs=0)
    assert sum(result.totals.bin_counts) == sum(count for count, _ in bins.values())


def test_weights_that_are_no_shares_are_left_out():
    totals = RoundTotals()
    for weights in ([0.0, 0.0], [1.0, -1.0], [1e308, 1e308]):
        add_weights(totals, [3, 4], weights)
    assert totals == RoundTotals()
    add_weights(totals, [0, 5], [3.0, 1.0])
    assert (totals.bin_counts, totals.bin_weights) == ([1, 0, 0, 1], [1.5, 0.0, 0.0, 0.5])


def test_only_so_many_reasons_are_counted_apart():
    class Report:
        staleness, weights = np.array([0]), np.array([1.0])
        seconds, stepped = 0.5, True

    history = RunHistory([Evaluation(0, 0, 0.0, 0.1, 2.0)])
    for word in [chr(97 + i) for i in range(MOST_REASONS + 3)]:
        for number in ("0.25", "-1.5e-07", "12"):
            Report.rejected = (f"{word}: cosine {number} below 0.3",)
            history.add_round(Report)
    assert len(history.totals.rejected) == MOST_REASONS + 1
    assert history.totals.rejected["a: cosine # below #"] == 3
    assert history.totals.rejected[OTHER_REASONS] == 9


@pytest.mark.parametrize(("count", "late"), [(1, 1), (2, 2), (9, 2), (20, 2), (21, 3), (35, 4), (100, 10)])
def test_stability_is_the_deviation_of_the_last_tenth(count, late):
    accuracies = np.random.default_rng(count).random(count)
    result = result_of("a", 0, [0.5, *accuracies])  # the first evaluation is that of the initial params
    assert result.late_accuracy == np.mean(accuracies[-late:])
    if late == 1:
        assert math.isnan(result.stability)
    else:
        assert result.stability == np.std(accuracies[-late:], ddof=1)


def test_a_run_without_an_evaluation_after_the_start_has_no_stability():
    result = result_of("a", 0, [0.5])
    assert math.isnan(result.stability)
    assert math.isnan(result.late_accuracy)


@pytest.mark.parametrize("seed", range(5))
def test_participation_counts_arrivals(seed):
    chance = np.random.default_rng(seed)
    clients, n = chance.integers(0, 10, size=chance.integers(1, 40)) * 1000, 12
    counts = sorted([(clients == client * 1000).sum() for client in range(10)] + [0, 0])
    assert arrivals_per_client(clients, n).tolist() == counts
    # Gini's mean absolute difference over twice the mean, as exact fractions.
    differences = sum(abs(int(a) - int(b)) for a in counts for b in counts)
    assert gini(np.array(counts)) == float(Fraction(differences, 2 * n * len(clients)))


def test_extreme_participation():
    assert gini(arrivals_per_client(np.arange(50), 50)) == 0
    assert gini(arrivals_per_client(np.full(9, 3), 100)) == 99 / 100
    assert math.isnan(gini(arrivals_per_client(np.zeros(0, np.int64), 5)))


def test_targets_are_reached_at_the_first_evaluation_that_has_them():
    results = [
        result_of("a", 0, [0.1, 0.5, 0.4, 0.8]),
        result_of("a", 1, [0.1, 0.2, 0.6, 0.7]),
        result_of("b", 0, [0.1, 0.9, 0.2, 0.2]),
    ]
    halves, most = (summarise(results, target) for target in (0.5, 0.8))
    assert halves["a"]["rounds_to_target"] == (1.5, False, 2)
    assert halves["a"]["time_to_target"] == (3.75, False, 2)
    late = most["a"]["rounds_to_target"]
    assert late == (3.0, True, 1), "the second seed did not get there in 3 rounds"
    assert late.text(2, 0) == "> 3 (1 of 2)"
    assert most["b"]["time_to_target"] == (2.5, False, 1)


@pytest.mark.parametrize(
    ("degrees", "probability", "value"),
    [
        (1, 0.975, math.tan(math.pi * 0.475)),
        (1, 0.95, math.tan(math.pi * 0.45)),
        (2, 0.975, 0.95 * math.sqrt(2 / (4 * 0.975 * 0.025))),
        (4, 0.975, 2 * math.sqrt(math.cos(math.acos(math.sqrt(0.0975)) / 3) / math.sqrt(0.0975) - 1)),
    ],
)
def test_quantiles_of_students_distribution_that_have_a_closed_form(degrees, probability, value):
    assert statistics.t_quantile(degrees, probability) == pytest.approx(value, rel=1e-12)


def test_paired_differences_are_seed_by_seed():
    chance = np.random.default_rng(3)
    finals = {label: chance.random(3) for label in "ab"}
    results = [result_of(label, seed, [0.0, 0.3, finals[label][seed]]) for seed in range(3) for label in "ab"]
    results.append(result_of("c", 1, [0.0, 0.25]))
    first, second, third = statistics.paired_differences(results)
    assert [(row.first, row.second, row.seeds) for row in (first, second, third)] == [
        ("a", "b", 3),
        ("a", "c", 1),
        ("b", "c", 1),
    ]
    differences = finals["a"] - finals["b"]
    quantile = 0.95 * np.sqrt(2 / (4 * 0.975 * 0.025))  # of two degrees of freedom
    half = quantile * differences.std(ddof=1) / np.sqrt(3)
    assert first.mean == differences.mean()
    assert first.low == pytest.approx(differences.mean() - half, rel=1e-12)
    assert first.high == pytest.approx(differences.mean() + half, rel=1e-12)
    assert second.mean == finals["a"][1] - 0.25
    assert math.isnan(second.low)
    assert math.isnan(second.high)
    wider = statistics.paired_differences(results, level=0.99)[0]
    assert wider.low < first.low < first.high < wider.high
    best = statistics.paired_differences(results, "best_accuracy")[0]
    assert best.mean == pytest.approx(np.mean(np.maximum(finals["a"], 0.3) - np.maximum(finals["b"], 0.3)))
    check_refused("unknown number 'accuracy'", statistics.paired_differences, results, "accuracy")
    check_refused("level is 1", statistics.paired_differences, results, level=1)


def test_intervals_hold_as_often_as_they_say():
    """Of 2,000 intervals over four seeds at level 0.9, about 1,800: six standard deviations are 80."""
    chance = np.random.default_rng(0)
    held = 0
    for _ in range(2000):
        noise = 0.5 + 0.01 * chance.standard_normal((2, 4))
        results = [result_of(label, seed, [0.0, noise[i, seed]]) for i, label in enumerate("ab") for seed in range(4)]
        (row,) = statistics.paired_differences(results, level=0.9)
        held += row.low <= 0 <= row.high
    assert abs(held - 1800) < 6 * math.sqrt(2000 * 0.9 * 0.1)


@pytest.mark.parametrize(
    ("times", "horizons", "shown"),
    [
        ([5, 1, 3], [9, 9, 9], "3"),
        ([5, None, 3], [9, 9, 9], "5 (2 of 3)"),
        ([5, None, None], [9, 8, 7], "> 7 (1 of 3)"),
        ([5, None], [9, 9], "> 7 (1 of 2)"),
        ([None], [9], "> 9 (0 of 1)"),
        ([100, 200, None], [300, 300, 10], "> 100 (2 of 3)"),  # the short run may have ended before 100 or after 200
    ],
)
def test_a_run_that_never_reaches_a_target_counts_as_later_than_its_end(times, horizons, shown):
    """It was left out of a mean, so that a rule looked faster the more of its seeds failed."""
    values = [math.nan if time is None else time for time in times]
    assert time_statistics(values, horizons).text(len(times), 0) == shown


def paired(differences):
    zero = [result_of("b", seed, [0.0, 0.0]) for seed in range(len(differences))]
    return [result_of("a", seed, [0.0, gap]) for seed, gap in enumerate(differences)] + zero


def test_the_paired_t_test_has_its_p():
    gaps = [0.01, 0.03, 0.02]
    (row,) = statistics.paired_differences(paired(gaps))
    # With two degrees of freedom, P(|T| > t) = 1 - t / sqrt(2 + t^2), and t is sqrt(12).
    assert row.p == row.p_holm == pytest.approx(1 - math.sqrt(12 / 14), rel=1e-9)
    (other,) = statistics.paired_differences(paired([*gaps, math.nan]))
    assert other == row, "a seed without the number is left out"
    for equal in ([0.0, 0.0], [0.0] * 7, [0.25, 0.25], [0.5]):
        assert math.isnan(statistics.paired_differences(paired(equal))[0].p_holm)


def test_holm_adjusts_for_all_pairs():
    chance = np.random.default_rng(5)
    results = [result_of(label, seed, [0.0, chance.random()]) for seed in range(4) for label in "abc"]
    rows = sorted(statistics.paired_differences(results), key=lambda row: row.p)
    steps = [3 * rows[0].p, 2 * rows[1].p, rows[2].p]
    assert [row.p_holm for row in rows] == pytest.approx([min(1, max(steps[: k + 1])) for k in range(3)])


def test_one_seed_has_no_deviation():
    one, two = (result_of("a", seed, [0.1, 0.5 + seed / 4]) for seed in (0, 1))
    assert math.isnan(summarise([one], 0.9)["a"]["final_accuracy"].std)
    assert summarise([one, two], 0.9)["a"]["final_accuracy"].std == np.std([0.5, 0.75], ddof=1)


def test_a_table_in_latex():
    label = "x_%&#$~^{}"
    finals = {label: [0.5, 0.6], "b": [0.9, 0.8], "c": [0.1, 0.3]}
    results = [result_of(name, seed, [0.1, final]) for name, row in finals.items() for seed, final in enumerate(row)]
    table = statistics.data_frame(results, "table", 0.55)
    assert table["rule"].tolist() == [*finals]
    assert table["final accuracy, %"].tolist() == ["55.0 ± 7.1", "85.0 ± 7.1", "20.0 ± 14.1"]
    assert table["rounds to 55%"].tolist() == ["> 1 (1 of 2)", "1", "> 1 (0 of 2)"]
    lines = table[["rule", "final accuracy, %"]].to_latex(index=False, escape=True).splitlines()
    assert lines[2] == r"rule & final accuracy, \% \\"
    assert lines[4] == r"x\_\%\&\#\$\textasciitilde \textasciicircum \{\} & 55.0 ± 7.1 \\"


def test_a_target_that_one_seed_missed_has_no_difference():
    results = [result_of("a", 0, [0.1, 0.9]), result_of("b", 0, [0.1, 0.2])]
    assert statistics.paired_differences(results, "rounds_to_target", target=0.8) == []


def test_runs_without_a_result_are_named_and_their_seeds_count():
    """Also a rule that has no result at all; `relabel` gives all of them their new labels."""
    runs = [result_of(label, seed, [0.1, 0.5]) for seed in (0, 2) for label in "ab"]
    failures = [FailedRun("a + b", 1, "diverged", "why"), FailedRun("c", 0, "killed", "")]
    results = SimulationResults(runs, SimConfig(), failures)
    named = ["a + b, seed 1 diverged", "c, seed 0 was killed"]
    assert str(results).splitlines()[:2] == named
    assert repr(results).endswith("; ".join(["b, seed 2: 0.5000", *named]) + ")")
    table = results.to_dataframe("table")
    assert table["final accuracy, %"].tolist() == ["50.0 ± 0.0 (2 of 3)"] * 2
    renamed = [str(failure) for failure in results.relabel({"b": "x", "c": "y"}).failures]
    assert renamed == ["a + x, seed 1 diverged", "y, seed 0 was killed"]
    check_refused("two rules would have the same label: c", results.relabel, {"a": "c"})


def test_statistics_are_those_of_finite_values():
    """Without a warning of NumPy; an evaluation that is nan is not the best one."""
    inf, nan = math.inf, math.nan
    one, two = result_of("a", 0, [nan, 0.25, inf, -inf]), result_of("a", 1, [nan, 0.25, 0.5])
    summary = summarise([one, two], 0.9)["a"]
    assert summary["final_accuracy"][::2] == summary["best_accuracy"][::2] == (0.5, 1)
    assert one.best_score == inf
    assert summary["stability"].seeds == 1
    assert summary["final_accuracy"].text(2) == "0.5 (1 of 2)"
    assert [Metric("m", lower_is_better=lower).best([nan, 2.0, nan, 1.0]) for lower in (True, False)] == [1.0, 2.0]
    assert math.isnan(Metric("m").best([nan]))
