"""The audit log, and paired runs."""

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace

import msgspec
import numpy as np
import pytest

from afflux.lab.results import audit_log
from afflux.lab.results.finished_runs import split_runs
from afflux.lab.results.run_result import RoundTotals
from afflux.lab.runs.compare import compare, make_jobs
from afflux.lab.runs.recorder import RecordedServer, record_events
from afflux.lab.runs.setup import RunSetup
from afflux.rules import RULES
from afflux.rules.specs import parse_rule
from afflux.server.aggregator import Aggregator
from afflux.server.server import Server
from afflux.sim.clients.schedule import Arrival, Dispatch
from afflux.sim.clients.training import Training, TrainingResult
from afflux.sim.errors import DivergedError
from afflux.sim.loop import EventLoop
from afflux.sim.workload.config import SimConfig
from conftest import check_error, check_refused
from made_runs import run, run_paired
from pairwise import soak

SMALL = SimConfig(model="logreg", num_clients=20, concurrency=6, arrivals=40, eval_every=7, local_steps=2)
RULE = "fedbuff:buffer_size=3"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder and the result of a run."""
    folder = tmp_path_factory.mktemp("audit")
    return folder, run(parse_rule(RULE), 3, SMALL, output=folder)


@pytest.fixture
def log(made):
    return audit_log.read_audit_log(made[0] / "fedbuff_buffer_size=3-seed3.jsonl")


def small(name):
    return parse_rule(name, {"buffer_size": 4})


def test_the_log_says_what_happened(made, log):
    folder, result = made
    assert {path.name for path in folder.iterdir()} == {log.path.name}
    header = log.header
    assert (header.rule, header.label, header.leader) == ("fedbuff", RULE, RULE)
    assert (header.options, header.kind, header.seed, header.d) == ({"buffer_size": 3}, "update", 3, 650)
    assert log.header.settings(log.path) == SMALL
    assert [line.staleness for line in log.arrivals] == result.staleness.tolist()
    assert all(line.status == "joined" and line.steps == 2 and line.examples > 0 for line in log.arrivals)
    assert [line.version for line in log.rounds] == list(range(1, 14))
    rounds = [number for line in log.rounds for number in sorted(line.joins)]
    assert rounds == list(range(39)), "each arrival in one round, but for the last one"
    first = log.rounds[0]
    assert [log.arrivals[number].client for number in first.joins] == list(first.client_ids)
    assert log.end == audit_log.EndLine(40, 13, result.digest)


def test_a_client_pulls_the_version_after_so_many_arrivals(log):
    for line in log.arrivals:
        assert line.version == line.dispatched_after // 3
        assert line.staleness == line.number // 3 - line.version
    assert Counter(line.dispatched_after for line in log.arrivals)[0] == 6, "as many as train at once"


def test_the_same_run_writes_the_same_bytes(made, tmp_path):
    run(parse_rule(RULE), 3, SMALL, output=tmp_path)
    for path in made[0].iterdir():
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()


def test_every_line_is_json_without_nan(tmp_path):
    class Diverging(Training):
        def take(self, sequence, sent):
            return TrainingResult(np.ones(650, np.float32), 5, float("inf"), 2)

    setup, spec = RunSetup(replace(SMALL, faults="raise", arrivals=1), 0), parse_rule("fedasync")
    server = setup.new_server(spec)
    recorded = RecordedServer(spec, setup, server, "", None)
    events = [Dispatch(0.0, 0, 7, finish=1.0), Arrival(1.0, 0, 7)]
    loop = EventLoop([server], Diverging(), lambda: events, client_lr=0.1, num_clients=20)
    with ExitStack() as files:
        recorded.record.open(tmp_path, files)
        recorded.record.log.write(audit_log.ArrivalLine(0, 7, 0, 0, 0, 5, float("nan"), 2, "joined", 1.0))
        check_error("client 7 .*arrival 1", record_events, loop, [recorded], print, lambda: None, error=DivergedError)
    log = audit_log.read_audit_log(tmp_path / "fedasync-seed0.jsonl")
    assert (log.arrivals[0].loss, log.end) == (None, None)


def test_every_rule_gets_the_updates_of_another(log):
    specs = [parse_rule(RULE), *(small(name) for name in RULES if name != "gsgm")]
    _, *results = run_paired(specs, 3, SMALL)
    assert len({result.digest for result in results}) == len(results)
    for spec, result in zip(specs[1:], results, strict=True):
        rule, m = spec.build(), spec.build().buffer_size
        # Elsewhere an arrival may replace another one, or be turned down.
        if not (rule.calibrate.cached or rule.needs.once or rule.needs.handed_in):
            assert result.staleness.tolist() == [x.number // m - x.dispatched_after // m for x in log.arrivals], spec
        assert result.leader == RULE
        assert run_paired([specs[0], spec], 3, SMALL)[1].digest == result.digest, "other rules make no difference"


def test_clipped_weights_are_recorded(made, tmp_path):
    config = replace(SMALL, clip_norms=0.5)
    result = run(parse_rule(RULE), 3, config, output=tmp_path)
    assert result.params.tobytes() != made[1].params.tobytes()
    log = audit_log.read_audit_log(tmp_path / "fedbuff_buffer_size=3-seed3.jsonl")
    assert (log.header.settings(log.path), "clip_norms" in SMALL.recorded()) == (config, False)
    check_refused(r"clip_norms is 0\.5, but ca2fl caches rows", run, small("ca2fl"), 3, config)
    check_refused(r"clip_norms is -1, must be 0 or more and finite", replace, SMALL, clip_norms=-1)


@pytest.mark.parametrize(("rule", "kind"), [("fedavg", "update"), ("afa_cd", "gradient"), ("fedasync", "model")])
def test_updates_become_the_kind_that_a_rule_takes(rule, kind, monkeypatch):
    taken, pushed = [], []
    push, join = Server.push, Aggregator.join

    def spy(self, *, version, update, **facts):
        pushed.append((version.params.copy(), update.copy()))
        self._aggregator.fast = None  # so that every arrival passes through `join`
        return push(self, version=version, update=update, **facts)

    def spy_join(self, pushed, ticket):
        taken.append(np.array(ticket.slot))
        return join(self, pushed, ticket)

    monkeypatch.setattr(Server, "push", spy)
    monkeypatch.setattr(Aggregator, "join", spy_join)
    spec = small(rule)
    assert spec.build().kind == kind
    run(spec, 3, SMALL)
    for got, (start, update) in zip(taken, pushed, strict=True):
        gradient = (-update.astype(np.float64) / (0.1 * 2)).astype(np.float32)
        wanted = {"update": update, "gradient": gradient, "model": start + update}[kind]
        np.testing.assert_array_equal(got, wanted)


def test_paired_rules_get_the_updates_of_the_first(tmp_path, monkeypatch):
    specs, updates, push = [small("fedasync"), small("ca2fl"), small("fadas")], [], Server.push

    def spy(self, *, update, **facts):
        updates.append(update.tobytes())
        return push(self, update=update, **facts)

    monkeypatch.setattr(Server, "push", spy)
    paired = run_paired(specs, 2, SMALL, output=tmp_path)
    pushed = updates[:]
    alone = run(specs[0], 2, SMALL)
    assert [pushed[place::3] for place in range(3)] == [updates[len(pushed) :]] * 3
    assert paired[0].params.tobytes() == alone.params.tobytes()
    assert (paired[0].evaluations, paired[0].leader) == (alone.evaluations, "")
    follower = audit_log.read_audit_log(tmp_path / "ca2fl-seed2.jsonl")
    assert follower.header.leader == "fedasync"


def test_old_models_and_scaffold_are_followed_as_well(tmp_path):
    rounds = {"protocol": "rounds", "concurrency": SimConfig.concurrency, "stale_models": 3}
    config = replace(SMALL, **rounds, client_optimizer="scaffold", steps_law="uniform")
    specs = [small("fedbuff"), small("fedasync")]
    paired = run_paired(specs, 0, config, output=tmp_path)
    assert paired[0].digest == run(specs[0], 0, config).digest
    log = audit_log.read_audit_log(tmp_path / "fedbuff-seed0.jsonl")
    assert {line.number // 4 - line.dispatched_after // 4 for line in log.arrivals} == {0, 1, 2}
    assert {line.dispatched_after % 4 for line in log.arrivals} == {0}, "a round has four arrivals"
    assert len({line.steps for line in log.arrivals}) > 1
    assert paired[1].staleness.tolist() == [line.number - line.dispatched_after for line in log.arrivals]


@pytest.mark.parametrize("processes", [1, *soak(2)])
def test_what_is_finished_survives_an_interrupt(processes):
    jobs = make_jobs([small("fedbuff")], [0, 1, 2, 3])
    finished = {}

    def watch(index, run):
        if finished:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        compare(jobs, replace(SMALL, arrivals=100), processes=processes, watch=watch, finished=finished)
    results, failures = split_runs(finished)
    assert 1 <= len(results) < 4
    assert {run.status for run in failures} == {"interrupted"}
    for result in results:
        assert (finished[result.seed], len(result.staleness)) == ([result], 100)


def test_a_killed_run_leaves_what_had_arrived(tmp_path):
    code = (
        "from afflux.lab import Simulation\n"
        "settings = dict(model='logreg', num_clients=20, concurrency=6, arrivals=10**5, local_steps=2)\n"
        f"Simulation.of('images', '{RULE}', [3], **settings).run(out={str(tmp_path / 'out')!r})"
    )
    process = subprocess.Popen([sys.executable, "-c", code])
    path = tmp_path / "out" / "audit" / "fedbuff_buffer_size=3-seed3.jsonl"
    while process.poll() is None and not (path.exists() and path.stat().st_size > 10_000):
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    log = audit_log.read_audit_log(path)
    assert log.end is None
    assert len(log.arrivals) > 20
    run(parse_rule(RULE), 3, replace(SMALL, arrivals=len(log.arrivals), eval_every=40), output=tmp_path)
    assert audit_log.read_audit_log(tmp_path / path.name).arrivals == log.arrivals


def test_a_log_that_was_cut_off_is_read_up_to_there(log, tmp_path):
    lines = log.path.read_text().splitlines(keepends=True)
    cut = tmp_path / log.path.name
    cut.write_text("".join(lines[:12]) + lines[12][:30])
    short = audit_log.read_audit_log(cut)
    assert short.end is None
    assert short.arrivals == log.arrivals[: len(short.arrivals)]
    assert len(short.arrivals) in (8, 9)


def changed(line, **changes):
    return json.dumps(json.loads(line) | changes)


@pytest.mark.parametrize(
    ("number", "change", "message"),
    [
        (1, lambda line: "{", "line 1: Input data was truncated"),
        (1, lambda line: "[]", "line 1: Expected `object`, got `array`"),
        (1, lambda line: changed(line, format="x"), "line 1: format is x 1"),
        (1, lambda line: changed(line, format_version=2), "line 1: format is afflux-audit 2"),
        (1, lambda line: changed(line, seed=None), "line 1: Expected `int`, got `null` - at `.[.]seed`"),
        (2, lambda line: changed(line, number=5), "line 2: number is 5, must be 0"),
        (2, lambda line: changed(line, client="7"), "line 2: Expected `int`, got `str` - at `.[.]client`"),
        (2, lambda line: changed(line, steps=0), "line 2: examples is [0-9]+ and steps is 0, must be 1 or more"),
        (2, lambda line: changed(line, dispatched_after=1), "line 2: dispatched_after is 1"),
        (2, lambda line: changed(line, staleness=-1), "line 2: Expected `int` >= 0 - at `.[.]staleness`"),
        (2, lambda line: line.replace('"steps": ', '"step": '), "line 2: Object "),
        (2, lambda line: changed(line, more=1), "line 2: Object contains unknown field `more`"),
        (2, lambda line: line.replace('"loss": ', '"loss": NaN, "x": '), "line 2: JSON is malformed: invalid"),
        (2, lambda line: line[:40], "line 2: Input data was truncated"),
        (5, lambda line: changed(line, weights=["a"]), r"line 5: Expected `float.*, got `str` - at `.\.weights\[0\]`"),
        (5, lambda line: changed(line, scalars={"x": "y"}), r"line 5: Expected `float.* - at `.\.scalars"),
        (5, lambda line: changed(line, stepped=1), "line 5: Expected `bool`, got `int` - at `.[.]stepped`"),
        (-1, lambda line: changed(line, arrivals=7), "arrivals is 7, but 40 lines are above"),
        (-1, lambda line: line + "\n" + line, "something follows the end"),
    ],
)
def test_a_bad_line_is_named(log, tmp_path, number, change, message):
    lines = log.path.read_text().splitlines()
    place = number - 1 if number > 0 else number
    lines[place] = change(lines[place])
    path = tmp_path / "bad.jsonl"
    path.write_text("\n".join(lines) + "\n")
    assert str(path) in str(check_refused(message, audit_log.read_audit_log, path))


def test_what_is_no_log_is_refused(log, tmp_path):
    check_refused("cannot read", audit_log.read_audit_log, tmp_path / "absent.jsonl")
    for text in ("", "no newline", log.path.read_text().partition("\n")[2]):
        (tmp_path / "bad.jsonl").write_text(text)
        check_refused("line 1", audit_log.read_audit_log, tmp_path / "bad.jsonl")


def test_file_names_are_plain_and_tell_rules_apart():
    assert audit_log.file_stem("fedbuff:staleness=hinge(10,4)", 0) == "fedbuff_staleness=hinge_10_4-seed0"
    assert audit_log.file_stem("../my rules.py:f", 12) == "my_rules.py_f-seed12"
    long = [audit_log.file_stem("x" * 299 + end, 0) for end in "xy"]
    assert long[0] != long[1]
    assert max(map(len, long)) < 100


def test_sums_of_an_older_afflux_are_not_read():
    assert msgspec.convert({"skipped": 2, "weighted_rounds": 3}, RoundTotals).skipped == 2
