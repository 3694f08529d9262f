"""The audit log, kept updates, and what is fed from them: replay and paired runs."""

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

from afflux.ops.errors import ConfigError
from afflux.rules import RULES
from afflux.rules.specs import RuleSpec, parse_rule
from afflux.server.aggregator import Aggregator
from afflux.sim import replay
from afflux.sim.clients.training import TrainingResult
from afflux.sim.errors import DivergedError
from afflux.sim.results import audit_log
from afflux.sim.results.audit_log import AuditOutput
from afflux.sim.results.finished_runs import split_runs
from afflux.sim.results.updates_file import UpdatesFile, read_updates
from afflux.sim.runs import event_loop
from afflux.sim.runs.compare import compare, make_jobs
from afflux.sim.runs.simulation import complete_arrivals, replay_config, replay_updates
from afflux.sim.workload.config import SimConfig
from made_runs import run, run_paired
from pairwise import soak

SMALL = SimConfig(model="logreg", num_clients=20, concurrency=6, arrivals=40, eval_every=7, local_steps=2)
RULE = "fedbuff:buffer_size=3"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """A run with kept updates: its folder and its result."""
    folder = tmp_path_factory.mktemp("audit")
    return folder, run(parse_rule(RULE), 3, SMALL, output=AuditOutput(folder, updates=True))


@pytest.fixture
def log(made):
    return audit_log.read_audit_log(made[0] / "fedbuff_buffer_size=3-seed3.jsonl")


def small(name):
    return parse_rule(name, {"buffer_size": 4})


def test_the_log_says_what_happened(made, log):
    folder, result = made
    assert {path.name for path in folder.iterdir()} == {log.path.name, log.header.updates}
    header = log.header
    assert (header.rule, header.label, header.leader) == ("fedbuff", RULE, RULE)
    assert (header.options, header.kind, header.seed, header.d) == ({"buffer_size": 3}, "update", 3, 650)
    assert log.header.sim_config(log.path) == SMALL
    assert log.spec() == result.spec
    assert [line.staleness for line in log.arrivals] == result.staleness.tolist()
    assert all(line.status == "joined" and line.steps == 2 and line.examples > 0 for line in log.arrivals)
    assert [line.version for line in log.rounds] == list(range(1, 14))
    rounds = [number for line in log.rounds for number in sorted(line.joins)]
    assert rounds == list(range(39)), "each arrival in one round, but for the last one"
    first = log.rounds[0]
    assert [log.arrivals[number].client for number in first.joins] == list(first.client_ids)
    norms = [float(np.linalg.norm(log.updates()[number].astype(np.float64))) for number in first.joins]
    np.testing.assert_allclose(norms, first.norms, rtol=1e-12)
    assert log.end == audit_log.EndLine(40, 13, result.digest)
    assert log.updates().shape == (40, 650)


def test_a_client_pulls_the_version_after_so_many_arrivals(log):
    for line in log.arrivals:
        assert line.version == line.dispatched_after // 3
        assert line.staleness == line.number // 3 - line.version
    assert Counter(line.dispatched_after for line in log.arrivals)[0] == 6, "as many as train at once"


def test_the_same_run_writes_the_same_bytes(made, tmp_path):
    run(parse_rule(RULE), 3, SMALL, output=AuditOutput(tmp_path, updates=True))
    for path in made[0].iterdir():
        assert (tmp_path / path.name).read_bytes() == path.read_bytes()


def test_every_line_is_json_without_nan(tmp_path):
    stream = [
        event_loop.PullEvent(0, 0, 0),
        event_loop.UpdateEvent(0, 0, 0, 7, 1.0, TrainingResult(np.ones(650, np.float32), 5, float("inf"), 2)),
    ]
    setup = event_loop.SimulationSetup(replace(SMALL, faults="raise", arrivals=1), 0)
    follower = event_loop.SimulatedServer(parse_rule("fedasync"), setup)
    with ExitStack() as files:
        follower.record.open(AuditOutput(tmp_path), files)
        follower.record.log.write(audit_log.ArrivalLine(0, 7, 0, 0, 0, 5, float("nan"), 2, "joined", 1.0, None))
        with pytest.raises(DivergedError, match="client 7 diverged at arrival 1"):
            event_loop.feed_servers(stream, [follower], print)
    log = audit_log.read_audit_log(tmp_path / "fedasync-seed0.jsonl")
    assert (log.arrivals[0].loss, log.end) == (None, None)


@pytest.mark.parametrize(
    "rule", [RULE, "fedasync", "afa_cs:buffer_size=3", "ca2fl:buffer_size=3", "fedavg:buffer_size=4"]
)
def test_a_log_fed_to_its_own_rule_gives_its_bits(rule, tmp_path):
    made = run(small(rule), 1, SMALL, output=AuditOutput(tmp_path, updates=True))
    (path,) = tmp_path.glob("*.jsonl")
    log = audit_log.read_audit_log(path)
    (tmp_path / "again").mkdir()
    (again,) = replay_updates(log, [log.spec()], replay_config(log), output=AuditOutput(tmp_path / "again"))
    assert again.params.tobytes() == made.params.tobytes()
    assert again.digest == log.end.params_sha256
    assert (again.evaluations, again.staleness.tolist()) == (made.evaluations, made.staleness.tolist())
    twin = audit_log.read_audit_log(tmp_path / "again" / path.name)
    assert (twin.rounds, twin.end) == (log.rounds, log.end)
    assert [msgspec.structs.replace(line, update=None) for line in log.arrivals] == list(twin.arrivals)


def test_a_log_can_be_fed_to_every_rule(log):
    with pytest.raises(ConfigError, match="gsgm takes each client once per pass"):  # the log's clients are not blocked
        replay(log, [small("gsgm")])
    specs = [small(name) for name in RULES if name != "gsgm"]
    results = replay(log, specs)
    assert len({result.digest for result in results}) == len(specs)
    for spec, result in zip(specs, results, strict=True):
        rule = spec.build()
        # Elsewhere an arrival may replace another one, or be turned down.
        if not rule.calibrate.cached and rule.name != "zenopp":
            m = rule.buffer_size
            assert result.staleness.tolist() == [x.number // m - x.dispatched_after // m for x in log.arrivals], spec
        assert result.leader == RULE
        alone = replay(log, [spec])[0]
        assert alone.digest == result.digest, "what else is fed makes no difference"


def test_clipped_weights_are_recorded_and_replayed(made, tmp_path):
    config = replace(SMALL, clip_norms=0.5)
    result = run(parse_rule(RULE), 3, config, output=AuditOutput(tmp_path, updates=True))
    assert result.params.tobytes() != made[1].params.tobytes()
    log = audit_log.read_audit_log(tmp_path / "fedbuff_buffer_size=3-seed3.jsonl")
    assert (log.header.sim_config(log.path), "clip_norms" in SMALL.recorded()) == (config, False)
    assert replay(log, [log.spec()])[0].digest == result.digest
    with pytest.raises(ConfigError, match=r"clip_norms is 0\.5, but ca2fl caches rows"):
        run(small("ca2fl"), 3, config)
    with pytest.raises(ConfigError, match=r"clip_norms is -1, must be 0 or more and finite"):
        replace(SMALL, clip_norms=-1)


@pytest.mark.parametrize(("rule", "kind"), [("fedavg", "update"), ("afa_cd", "gradient"), ("fedasync", "model")])
def test_kept_updates_become_the_kind_that_a_rule_takes(log, rule, kind, monkeypatch):
    taken, pulled = [], []
    push, join = event_loop.Server.push, Aggregator.join

    def spy(self, *, version, **facts):
        pulled.append(version.params.copy())
        self._aggregator.fast = None  # so that every arrival passes through `join`
        return push(self, version=version, **facts)

    def spy_join(self, pushed, ticket):
        taken.append(np.array(ticket.slot))
        return join(self, pushed, ticket)

    monkeypatch.setattr(event_loop.Server, "push", spy)
    monkeypatch.setattr(Aggregator, "join", spy_join)
    spec = small(rule)
    assert spec.build().kind == kind
    replay(log, [spec])
    for got, start, update in zip(taken, pulled, log.updates(), strict=True):
        gradient = (-update.astype(np.float64) / (0.1 * 2)).astype(np.float32)
        wanted = {"update": update, "gradient": gradient, "model": start + update}[kind]
        np.testing.assert_array_equal(got, wanted)


def test_paired_rules_get_the_updates_of_the_first(tmp_path):
    specs = [small("fedasync"), small("ca2fl"), small("fadas")]
    paired = run_paired(specs, 2, SMALL, output=AuditOutput(tmp_path, updates=True))
    alone = run(specs[0], 2, SMALL)
    assert paired[0].params.tobytes() == alone.params.tobytes()
    assert (paired[0].evaluations, paired[0].leader) == (alone.evaluations, "")
    assert len(list(tmp_path.glob("*.npy"))) == 1
    log = audit_log.read_audit_log(tmp_path / "fedasync-seed2.jsonl")
    for result, fed in zip(paired, replay(log, specs), strict=True):
        assert result.params.tobytes() == fed.params.tobytes()
        assert result.evaluations == fed.evaluations
    follower = audit_log.read_audit_log(tmp_path / "ca2fl-seed2.jsonl")
    assert (follower.header.leader, follower.header.updates) == ("fedasync", log.header.updates)
    (again,) = replay(follower, [follower.spec()])
    assert again.digest == follower.end.params_sha256, "a follower's log can be fed as well"


def test_old_models_and_scaffold_are_followed_as_well(tmp_path):
    rounds = {"protocol": "rounds", "concurrency": SimConfig.concurrency, "stale_models": 3}
    config = replace(SMALL, **rounds, client_optimizer="scaffold", steps_law="uniform")
    specs = [small("fedbuff"), small("fedasync")]
    paired = run_paired(specs, 0, config, output=AuditOutput(tmp_path, updates=True))
    assert paired[0].digest == run(specs[0], 0, config).digest
    log = audit_log.read_audit_log(tmp_path / "fedbuff-seed0.jsonl")
    assert {line.number // 4 - line.dispatched_after // 4 for line in log.arrivals} == {0, 1, 2}
    assert {line.dispatched_after % 4 for line in log.arrivals} == {0}, "a round has four arrivals"
    assert len({line.steps for line in log.arrivals}) > 1
    results = replay(log, specs)
    assert [result.digest for result in results] == [result.digest for result in paired]
    assert results[1].staleness.tolist() == [line.number - line.dispatched_after for line in log.arrivals]


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


def test_kept_updates_are_whole_after_every_row(tmp_path):
    rows = np.arange(15, dtype=np.float32).reshape(3, 5)
    path = tmp_path / "rows.npy"
    with UpdatesFile(path, 5) as updates:
        assert read_updates(path, 5).shape == (0, 5)
        for count, row in enumerate(rows, 1):
            updates.append(row)
            np.testing.assert_array_equal(np.load(path), rows[:count])
    with pytest.raises(FileExistsError):
        UpdatesFile(path, 5)
    # A row without its count, as after a kill in between; then a file that lost its end.
    path.write_bytes(path.read_bytes() + bytes(20))
    np.testing.assert_array_equal(np.load(path), rows)
    path.write_bytes(path.read_bytes()[:-21])
    np.testing.assert_array_equal(read_updates(path, 5), rows[:2])
    with pytest.raises(ConfigError, match=r"not float32 updates of shape \(n, 4\)"):
        read_updates(path, 4)
    path.write_bytes(b"text")
    with pytest.raises(ConfigError, match="no kept updates"):
        read_updates(path, 5)
    with pytest.raises(ConfigError, match="missing"):
        read_updates(tmp_path / "absent.npy", 5)


def test_a_killed_run_leaves_what_had_arrived(tmp_path):
    code = (
        "from afflux.sim import Simulation\n"
        "settings = dict(model='logreg', num_clients=20, concurrency=6, arrivals=10**5, local_steps=2)\n"
        f"Simulation.of('images', '{RULE}', [3], **settings).run(out={str(tmp_path / 'out')!r}, keep_updates=True)"
    )
    process = subprocess.Popen([sys.executable, "-c", code])
    path = tmp_path / "out" / "audit" / "fedbuff_buffer_size=3-seed3.jsonl"
    while process.poll() is None and not (path.exists() and path.stat().st_size > 10_000):
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    log = audit_log.read_audit_log(path)
    assert log.end is None
    assert len(complete_arrivals(log)) == len(log.arrivals) > 20
    config = replay_config(log)
    assert config.arrivals == len(log.arrivals)
    (again,) = replay(log, [log.spec()])
    whole = run(parse_rule(RULE), 3, replace(SMALL, arrivals=config.arrivals, eval_every=40))
    assert again.digest == whole.digest


def test_a_log_that_was_cut_off_is_read_up_to_there(log, tmp_path):
    lines = log.path.read_text().splitlines(keepends=True)
    cut = tmp_path / log.path.name
    cut.write_text("".join(lines[:12]) + lines[12][:30])
    (tmp_path / log.header.updates).write_bytes((log.path.parent / log.header.updates).read_bytes())
    short = audit_log.read_audit_log(cut)
    assert short.end is None
    assert short.arrivals == log.arrivals[: len(short.arrivals)]
    assert len(short.arrivals) in (8, 9)
    assert replay_config(short).arrivals == len(short.arrivals)
    (result,) = replay(short, [short.spec()])
    assert len(result.staleness) == len(short.arrivals)
    # The updates lost their end: what is there is fed.
    cut.write_text("".join(lines))
    whole = (log.path.parent / log.header.updates).read_bytes()
    (tmp_path / log.header.updates).write_bytes(whole[: len(whole) - 7 * 4 * 650 - 1])
    assert replay_config(audit_log.read_audit_log(cut)).arrivals == 32


def test_a_log_without_updates_says_how_to_keep_them(tmp_path):
    run(parse_rule("fedasync"), 0, SMALL, output=AuditOutput(tmp_path))
    log = audit_log.read_audit_log(tmp_path / "fedasync-seed0.jsonl")
    assert all(line.update is None for line in log.arrivals)
    with pytest.raises(ConfigError, match="has no updates: make the run with --keep-updates"):
        replay_config(log)


def changed(line, **changes):
    return json.dumps(json.loads(line) | changes)


@pytest.mark.parametrize(
    ("number", "change", "message"),
    [
        (1, lambda line: "{", "line 1: no JSON"),
        (1, lambda line: "[]", "line 1: no object whose type is one of header, arrival, dropout, round, end"),
        (1, lambda line: changed(line, format="x"), "line 1: format is x 1"),
        (1, lambda line: changed(line, format_version=2), "line 1: format is afflux-audit 2"),
        (1, lambda line: changed(line, seed=None), "line 1: seed is None: Expected `int`, got `null`"),
        (2, lambda line: changed(line, number=5), "line 2: number is 5, must be 0"),
        (2, lambda line: changed(line, client="7"), "line 2: client is '7': Expected `int`, got `str`"),
        (2, lambda line: changed(line, steps=0), "line 2: examples is [0-9]+ and steps is 0, must be 1 or more"),
        (2, lambda line: changed(line, dispatched_after=1), "line 2: dispatched_after is 1"),
        (2, lambda line: changed(line, staleness=-1), "line 2: staleness is -1: Expected `int` >= 0"),
        (2, lambda line: line.replace('"steps": ', '"step": '), "line 2: Object "),
        (2, lambda line: changed(line, more=1), "line 2: Object contains unknown field `more`"),
        (
            2,
            lambda line: line.replace('"loss": ', '"loss": NaN, "x": '),
            r"line 2: no JSON: JSON is malformed: invalid character \(byte [0-9]+\)",
        ),
        (2, lambda line: line[:40], "line 2: no JSON"),
        (
            5,
            lambda line: changed(line, weights=["a"]),
            r"line 5: weights\[0\] is 'a': Expected `float.*, got `str`",
        ),
        (
            5,
            lambda line: changed(line, scalars={"x": "y"}),
            r"line 5: scalars.* is {'x': 'y'}: Expected `float",
        ),
        (5, lambda line: changed(line, stepped=1), "line 5: stepped is 1: Expected `bool`, got `int`"),
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
    with pytest.raises(ConfigError, match=message) as caught:
        audit_log.read_audit_log(path)
    assert str(path) in str(caught.value)


def test_what_is_no_log_is_refused(log, tmp_path):
    with pytest.raises(ConfigError, match="cannot read"):
        audit_log.read_audit_log(tmp_path / "absent.jsonl")
    for text in ("", "no newline", log.path.read_text().partition("\n")[2]):
        (tmp_path / "bad.jsonl").write_text(text)
        with pytest.raises(ConfigError, match="line 1"):
            audit_log.read_audit_log(tmp_path / "bad.jsonl")


def test_a_log_from_another_world_is_refused(log):
    for header in ({"num_clients": 7}, {"first_params_sha256": "0" * 64}):
        other = replace(log, header=msgspec.structs.replace(log.header, **header))
        with pytest.raises(ConfigError, match="the run began with other inputs: "):
            replay(other, [log.spec()])
    newer = replace(log, header=msgspec.structs.replace(log.header, config=log.header.config | {"warp": 9}))
    with pytest.raises(ConfigError, match="made by afflux"):
        newer.header.sim_config(newer.path)


def test_file_names_are_plain_and_tell_rules_apart():
    assert audit_log.file_stem("fedbuff:staleness=hinge(10,4)", 0) == "fedbuff_staleness=hinge_10_4-seed0"
    assert audit_log.file_stem("../my rules.py:f", 12) == "my_rules.py_f-seed12"
    long = [audit_log.file_stem("x" * 299 + end, 0) for end in "xy"]
    assert long[0] != long[1]
    assert max(map(len, long)) < 100


@pytest.mark.parametrize(
    "text",
    [
        "fedbuff:staleness=hinge(10,4):normalise=none",
        "fedbuff:staleness=none",
        "wkafl:momentum=false:clip=inf:stage_two_loss=0.5",
        "fedasync",
    ],
)
def test_a_rule_is_rebuilt_from_its_header(text, tmp_path):
    result = run(parse_rule(text), 0, SMALL, output=AuditOutput(tmp_path))
    (path,) = tmp_path.iterdir()
    spec = audit_log.read_audit_log(path).spec()
    assert spec == RuleSpec(result.spec.name, result.spec.options, text)
    assert spec.build() == result.spec.build()
