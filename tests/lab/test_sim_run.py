"""Whole runs: staleness by hand, the same bits again and in other processes, paired streams."""

import gc
import subprocess
import sys
from collections import Counter
from dataclasses import dataclass, replace

import numpy as np
import pytest

from afflux.lab.results.finished_runs import Job
from afflux.lab.results.run_result import Evaluation, RunResult, group_by_rule, seed_statistics, summarise
from afflux.lab.runs.compare import compare, make_jobs
from afflux.rules.specs import RuleSpec, parse_rule
from afflux.rules.staleness import Constant, Hinge
from afflux.server.aggregator import Aggregator
from afflux.server.server import Server
from afflux.sim.clients.training import Trainer
from afflux.sim.errors import DivergedError, MissingExtraError
from afflux.sim.workload.config import SimConfig
from afflux.sim.workload.delays import DELAYS
from conftest import check_error, check_refused, reproducible
from made_runs import run

SMALL = SimConfig(model="logreg", num_clients=20, concurrency=6, arrivals=40, eval_every=7, local_steps=2)


@pytest.mark.parametrize("package", ["afflux.sim", "afflux.lab"])
def test_public_names_are_loaded_at_first_use(package):
    code = (
        f"import sys, {package} as package\n"
        "assert 'torch' not in sys.modules and 'afflux.lab.runs' not in sys.modules\n"
        "for name in package.__all__: assert getattr(package, name).__name__ == name\n"
        f"from {package} import *\n"
        "assert set(package.__all__) == {name for names in package._MODULES.values() for name in names}\n"
        f"assert {package == 'afflux.lab'} or not [name for name in sys.modules if name.startswith('afflux.lab')]\n"
        "try: package.ran\n"
        "except AttributeError as error: print(error)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"module '{package}' has no attribute 'ran'\n"


@dataclass
class TwoClients:
    def __call__(self, num_clients, rng):
        return lambda client, times: (1.0, 2.5)[client]


def test_staleness_of_a_schedule_done_by_hand(monkeypatch):
    # Client 0 takes 1, client 1 takes 2.5; each pulls again when it has pushed; M = 2.
    #   t    client  pulled  version  staleness  then
    #   1    0       0       0        0
    #   2    0       0       0        0          version 1
    #   2.5  1       0       1        1
    #   3    0       1       1        0          version 2
    #   4    0       2       2        0
    #   5    1       1       2        1          version 3 (dispatched first, at 2.5)
    #   5    0       2       3        1
    monkeypatch.setitem(DELAYS, "constant", (TwoClients, {}))
    config = replace(SMALL, num_clients=2, concurrency=2, arrivals=7, delays="constant", partition="iid", eval_every=3)
    result = run(parse_rule("fedbuff:buffer_size=2"), 0, config)
    assert result.staleness.tolist() == [0, 0, 1, 0, 0, 1, 1]
    assert result.round_staleness.tolist() == [0, 1, 1]
    assert result.max_staleness == 1
    assert result.mean_staleness == 3 / 7
    assert result.mean_max_staleness == 2 / 3
    # Arrival 3 is at 2.5 with one step done, arrival 6 at 5 with three, arrival 7 also at 5.
    assert [row[:3] for row in result.evaluations] == [(0, 0, 0.0), (3, 1, 2.5), (6, 3, 5.0), (7, 3, 5.0)]
    assert result.evaluations[2][3:] == result.evaluations[3][3:]
    assert len(result.server_seconds) == 3


def test_the_same_seed_gives_the_same_bits_and_progress_whatever_the_processes():
    """Also of jobs with followers; runs that fail end alone."""
    rules = [parse_rule("fedbuff:buffer_size=3"), parse_rule("fedasync")]
    jobs = [*make_jobs(rules, [0, 1]), *make_jobs(rules, [0, 1], paired=True)]
    assert jobs[4:] == [Job(rules[0], seed, (rules[1],)) for seed in (0, 1)]
    assert jobs[4].label == "fedbuff:buffer_size=3 + fedasync"
    again, here, there = compared(jobs, 1), compared(jobs, 1), compared(jobs, 2, failing=2)
    assert here == again
    assert here == there
    assert len({result[-1] for result in here[:4]}) == 4, "rules and seeds do differ"
    assert [result[-1] for result in here[4::2]] == [here[0][-1], here[2][-1]]


def compared(jobs, processes, failing=0):
    """The results of the jobs, beside others that fail; their last progress must be that of the end."""
    progress, finished = {}, {}
    others = [Job(jobs[0].spec, 7 + k, config=replace(SMALL, client_lr=1e38)) for k in range(failing)]
    results = compare([*jobs, *others], SMALL, processes=processes, watch=progress.__setitem__, finished=finished)
    failed = {index: (run.seed, run.status) for index, run in finished.items() if index >= len(jobs)}
    assert failed == {len(jobs) + k: (7 + k, "diverged") for k in range(failing)}
    leaders = [result for result in results if not result.leader]
    assert [(result.spec, result.seed) for result in leaders] == [(job.spec, job.seed) for job in jobs]
    for index, result in enumerate(leaders):
        last = result.evaluations[-1]
        expected = (40, last.version, last.virtual_time, last.accuracy, result.mean_staleness, 1.0, "accuracy", "%")
        assert progress[index] == expected
        assert [type(value) for value in progress[index]] == [int, int, float, float, float, float, str, str]
    return [reproducible(result) for result in results]


def test_a_result_does_not_depend_on_what_else_is_compared():
    alone = run(parse_rule("ca2fl:buffer_size=3"), 1, SMALL)
    among = compare(make_jobs([parse_rule("fedasync"), parse_rule("ca2fl:buffer_size=3")], [0, 1]), SMALL)
    assert reproducible(alone) == reproducible(among[3])


def test_a_run_is_freed_before_the_next_one():
    """Its versions of the params may be most of a machine's memory."""
    begun = {id(each) for each in gc.get_objects() if type(each) is Aggregator}
    left = []

    def enough():
        left.append(sum(type(each) is Aggregator and id(each) not in begun for each in gc.get_objects()))
        return False

    gc.disable()
    try:
        compare(make_jobs([parse_rule("fedasync")], [0, 1]), SMALL, enough=enough)
    finally:
        gc.enable()
    assert left == [0, 0]


def test_one_seed_pairs_the_rules(monkeypatch):
    seen = {}
    train = Trainer.train

    def spy(self, client, pulled, rng, *rest):
        seen[label].append((client, repr(rng.bit_generator.state)))
        return train(self, client, pulled, rng, *rest)

    monkeypatch.setattr(Trainer, "train", spy)
    times, starts = {}, {}
    for label in ("fedbuff:buffer_size=3", "fedasync", "ca2fl:buffer_size=5", "other seed"):
        seen[label] = []
        spec, seed = (parse_rule("fedasync"), 1) if label == "other seed" else (parse_rule(label), 0)
        result = run(spec, seed, SMALL)
        times[label] = [row.virtual_time for row in result.evaluations]
        starts[label] = result.evaluations[0]
    *paired, other = seen
    for facts in (seen, times, starts):
        assert facts[paired[0]] == facts[paired[1]] == facts[paired[2]]
        assert facts[paired[0]] != facts[other]


def test_clients_train_from_what_they_pulled_at_dispatch(monkeypatch):
    pulls, pushes = [], []
    pull, push, train = Server.pull, Server.push, Trainer.train

    def spy_pull(self):
        pulls.append(pull(self))
        pulls[-1] = (pulls[-1], pulls[-1].params.copy())
        return pulls[-1][0]

    def spy_train(self, client, pulled, rng, *rest):
        pushes.append([pulled.copy()])
        return train(self, client, pulled, rng, *rest)

    def spy_push(self, *, version, **facts):
        pushes[-1].append(version.version)
        return push(self, version=version, **facts)

    monkeypatch.setattr(Server, "pull", spy_pull)
    monkeypatch.setattr(Server, "push", spy_push)
    monkeypatch.setattr(Trainer, "train", spy_train)
    run(parse_rule("fedbuff:buffer_size=2"), 0, SMALL)
    at = {pulled.version: params.tobytes() for pulled, params in pulls}
    assert len(pushes) == 40
    assert len(at) > 10
    assert all(params.tobytes() == at[version] for params, version in pushes)


def test_clients_without_data_are_never_dispatched(monkeypatch):
    ids = set()
    push = Server.push

    def spy(self, **facts):
        assert facts["num_examples"] > 0
        ids.add(facts["client"])
        return push(self, **facts)

    monkeypatch.setattr(Server, "push", spy)
    config = replace(SMALL, num_clients=200, alpha=0.02, arrivals=600, local_steps=1, eval_every=600)
    result = run(parse_rule("fedasync"), 0, config)
    assert len(ids) > 0.9 * result.num_clients
    assert len(ids) <= result.num_clients < 200
    check_refused("hold data", run, parse_rule("fedasync"), 0, replace(config, concurrency=200))


def test_fedavg_is_synchronous():
    result = run(parse_rule("fedavg:buffer_size=5"), 0, SMALL)
    assert result.max_staleness == 0
    assert len(result.round_staleness) == 8


def test_training_learns_and_evaluates_as_asked():
    config = replace(SMALL, arrivals=200, alpha=1.0, eval_every=50)
    result = run(parse_rule("fedbuff:buffer_size=5"), 0, config)
    assert [row.arrivals for row in result.evaluations] == [0, 50, 100, 150, 200]
    assert result.evaluations[0].accuracy < 0.3
    assert result.final_accuracy > 0.8
    assert result.best_accuracy == max(row.accuracy for row in result.evaluations)


def test_divergence_is_reported_with_the_rule_the_seed_and_the_client():
    with pytest.raises(DivergedError, match=r"fedasync, seed 3: client .* lower client_lr"):
        run(parse_rule("fedasync"), 3, replace(SMALL, client_lr=1e38))


def test_a_missing_package_is_named_before_any_work(monkeypatch):
    monkeypatch.setattr("afflux.sim.errors.find_spec", lambda name: None)
    check_error(r"torch, scikit-learn: pip install 'afflux\[sim\]'", compare, [], SMALL, error=MissingExtraError)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"data": "x"}, "unknown data 'x'; known: cifar10, .*digits, .*mnist"),
        ({"model": "x"}, "unknown model"),
        ({"delays": "x"}, "unknown delays 'x'; known: ca2fl, .*constant, .*exp.*fadas-large"),
        ({"partition": "x"}, "unknown partition"),
        ({"arrivals": 0}, "arrivals is 0"),
        ({"concurrency": 21}, "concurrency is 21, but there are 20"),
        ({"refill": 7}, "refill is 7, but 6"),
        ({"client_lr": float("nan")}, "client_lr"),
        ({"weight_decay": -1.0}, "weight_decay"),
        ({"target": 90.0}, "target"),
    ],
)
def test_impossible_settings_are_refused(change, message):
    check_refused(message, replace, SMALL, **change)


def test_a_negative_seed_is_refused():
    check_refused("seed", run, parse_rule("fedasync"), -1, SMALL)


def test_rules_are_read_from_text():
    spec = parse_rule("fedbuff:server_lr=0.5:staleness=hinge(10,4):normalise=weights", {"buffer_size": 4})
    options = {"server_lr": 0.5, "staleness": Hinge(10, 4), "normalise": "weights", "buffer_size": 4}
    assert dict(spec.options) == options
    assert spec.build().buffer_size == 4
    assert dict(parse_rule("fedasync", {"buffer_size": 4}).options) == {}
    assert dict(parse_rule("fedasync:staleness=constant").options) == {"staleness": Constant()}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "fedbuf",
            "unknown rule 'fedbuf'; did you mean 'fedbuff' or 'dp_fedbuff'. known: afa_cd, afa_cs, aflguard",
        ),
        ("fedbuff:lr=1", "unknown option of fedbuff: 'lr'; known: buffer_size"),
        ("fedbuff:buffer_size", "is not option=value"),
        ("fedbuff:server_lr=1:server_lr=2", "rule fedbuff:server_lr=1:server_lr=2: server_lr is given twice"),
        ("fedbuff:staleness=polynomial(0.5", r"staleness: 'polynomial\(0.5' has no closing bracket"),
        ("fedbuff:staleness=polynomial0.5)", r"unknown staleness function 'polynomial0.5\)'"),
        ("fedbuff:staleness=hinge(10,4,3)", r"staleness: 'hinge\(10,4,3\)': hinge takes a, b$"),
        ("fedbuff:staleness=constant(1)", r"staleness: 'constant\(1\)': constant takes no arguments$"),
        ("fedbuff:staleness=hinge(10,,4)", "staleness: '' is not a number"),
        ("fedbuff:buffer_size=1.5", "buffer_size: '1.5' is not an int"),
        ("fedbuff:staleness=cubic", "unknown staleness function 'cubic'; known: constant, exponential, hinge"),
        ("fedbuff:normalise=sum", "'sum' is not one of count, weights"),
        ("mf_ca2fl:bits=2,codec=rotated", "options are separated by ':', as in mf_ca2fl:bits=2:codec=rotated"),
        ("fedbuff:staleness=hinge(10,4),server_lr=1", r"as in fedbuff:staleness=hinge\(10,4\):server_lr=1"),
        ("fedbuff,server_lr=1", "as in fedbuff:server_lr=1"),
        ("server_lr=1", "rule server_lr=1: options are separated by ':', as in NAME:server_lr=1"),
    ],
)
def test_rules_that_cannot_be_are_refused(text, message):
    check_refused(message, lambda: parse_rule(text).build())


def result_of(label, seed, accuracies):
    rows = tuple(Evaluation(10 * i, i, 2.0 * i, a, 1.0) for i, a in enumerate(accuracies))
    staleness = np.array([0, 4, 2])
    return RunResult(
        RuleSpec(label, (), label), seed, rows, staleness, staleness[1:], np.array([1e-3, 3e-3]), 8, 3, staleness
    )


def test_the_summary_is_of_the_rows():
    results = [result_of("a", 0, [0.1, 0.8, 0.9, 0.7]), result_of("b", 0, [0.1, 0.2]), result_of("a", 1, [0.1, 0.6])]
    assert {label: len(runs) for label, runs in group_by_rule(results).items()} == {"a": 2, "b": 1}
    table = summarise(results, 0.8)
    assert table["a"]["final_accuracy"] == pytest.approx((0.65, np.sqrt(0.005), 2))
    assert table["a"]["best_accuracy"].mean == pytest.approx(0.75)
    assert table["a"]["rounds_to_target"] == (1, True, 1), "the other seed has ended after one round"
    assert table["a"]["time_to_target"].median == 2
    assert table["b"]["rounds_to_target"].seeds == 0
    assert table["b"]["server_ms"].mean == pytest.approx(2)
    assert table["b"]["mean_staleness"].mean == 2
    assert table["b"]["mean_max_staleness"].mean == 3
    assert seed_statistics([1.0, 3.0]) == (2, pytest.approx(np.sqrt(2)), 2)


@pytest.mark.parametrize("rule", ["fedasync", "fedbuff:buffer_size=3"])
def test_memory_stays_at_the_versions_in_flight(monkeypatch, rule):
    """Those that clients train from, the newest one, and the one being written: hundreds are made."""
    flying, made, peaks = Counter(), [], [(0, 0)]
    pull, push = Server.pull, Server.push

    def spy_pull(self):
        pulled = pull(self)
        flying[pulled.version] += 1
        return pulled

    def spy_push(self, *args, version, **options):
        distinct = {v for v, clients in flying.items() if clients} | {self.version}
        receipt = push(self, *args, version=version, **options)
        flying[version] -= 1
        # Buffers that exist are used again, so their number is the highest that was ever needed at once.
        peaks.append((self._aggregator.plane.versions.allocated, max(peaks[-1][1], len(distinct))))
        made.append(self.version)
        return receipt

    monkeypatch.setattr(Server, "pull", spy_pull)
    monkeypatch.setattr(Server, "push", spy_push)
    run(parse_rule(rule), 0, replace(SMALL, arrivals=300))
    assert max(made) >= 100
    assert all(allocated <= distinct + 1 for allocated, distinct in peaks)
