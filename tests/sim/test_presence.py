"""Clients that come and go: availability, dropouts, timeouts, selection, and a concurrency that changes."""

import json
import math
import runpy
from copy import copy
from dataclasses import replace
from functools import partial

import msgspec
import numpy as np
import pytest
from typer.testing import CliRunner

from afflux.cli.lab.app import app
from afflux.lab.results.audit_log import read_audit_log
from afflux.lab.results.finished_runs import Job
from afflux.lab.results.run_folder import describe_setting
from afflux.lab.runs.recorder import RecordedServer
from afflux.lab.runs.run_checkpoint import interrupted_run
from afflux.lab.runs.setup import RunSetup
from afflux.rules.specs import parse_rule
from afflux.sim import ConfigError
from afflux.sim.clients import schedule
from afflux.sim.clients.schedule import Arrival, Dispatch, Draws, Dropout, schedule_events
from afflux.sim.clients.training import SerialTraining
from afflux.sim.workload.availability import Diurnal, Dropouts, ReadyTimes
from afflux.sim.workload.config import SimConfig
from afflux.sim.workload.random_streams import StreamPurpose, random_stream
from afflux.sim.workload.selection import ClientResult, Population, UniformSelection, selection_law
from conftest import ROOT, check_error, check_raises, check_refused, generator
from made_runs import paused_run, resume, run, run_in_store, run_paired
from stopped_runs import Stopped

SMALL = SimConfig(model="logreg", num_clients=12, concurrency=4, arrivals=40, eval_every=40, local_steps=1)
RULE = parse_rule("fedbuff:buffer_size=3")
OORT = f"{ROOT}/examples/oort_selection.py:oort"
LAW = """
class Law:
    def __init__(self, shift):
        self.shift, self.results = shift, []

    def pick(self, idle, now, stream):
        assert isinstance(idle, tuple) and len(set(idle)) == len(idle)
        worst = max(self.results, key=lambda result: result.loss, default=None)
        first = sorted(idle)[self.shift % len(idle)]
        return worst.client if worst is not None and worst.client in idle and stream.random() < 0.5 else first

    def observe(self, result):
        self.results.append(result)

def law(num_clients, stream, *, shift: int = 0):
    return Law(shift)

def nothing(num_clients, stream):
    return None

def busy(num_clients, stream):
    law = Law(0)
    law.pick = lambda idle, now, stream: -1
    return law

def deaf(num_clients, stream):
    law = Law(0)
    law.observe = "no"
    return law
"""


def events_of(clients, concurrency, arrivals, refill=1, delay=lambda client, times: 1.0, **draws):
    made = Draws(delay, generator(), generator(1), **draws)
    return list(schedule_events(range(clients), made, concurrency, arrivals, refill))


def fates(*fates):
    """The fates of the first dispatches, one after the other; those after them arrive."""
    left = iter(fates)
    return lambda duration: (duration, next(left, None))


@pytest.fixture
def ready(tmp_path):
    path = tmp_path / "ready.csv"
    lines = ["a,100,103", "a,110,111.5", "b,101,119", "c,118,120", "c,100,100.5"]
    path.write_text("\n".join(["device,start,end", *lines]))
    return path


@pytest.mark.parametrize("selection", ["uniform", f"{OORT}:epsilon=.3"])
def test_no_line_of_a_log_has_a_client_that_is_away(ready, tmp_path, selection):
    config = replace(SMALL, availability=f"devices:file={ready}", dropout="rates:never=.1:upload=.1:late=.2")
    config = replace(config, timeout=45.0, delays="fadas-mild", selection=selection)
    run(RULE, 3, config, output=tmp_path)
    log = read_audit_log(tmp_path / "fedbuff_buffer_size=3-seed3.jsonl")
    # The trace in words: virtual time 0 is 100, and all begin again at 120.
    intervals = [[(0, 3), (10, 11.5)], [(1, 19)], [(18, 20), (0, 0.5)]]
    devices = random_stream(3, StreamPurpose.AVAILABILITY).choice(3, 12, replace=True)

    def is_there(client, time):
        return any(start - 1e-9 <= time % 20 <= end + 1e-9 for start, end in intervals[devices[client]])

    dispatches = [(line.client, line.dispatched) for line in (*log.arrivals, *log.dropouts)]
    assert all(is_there(*dispatch) for dispatch in dispatches)
    assert all(is_there(line.client, line.time) for line in log.arrivals)
    assert {int(devices[client]) for client, _ in dispatches} == {0, 1, 2}
    assert {line.fate for line in log.dropouts} == {"never", "upload", "late"}
    assert all(line.freed == line.dispatched + 45 for line in log.dropouts)
    assert log.arrivals[-1].time > 100, "each trace has begun again"


def test_a_trace_by_small_steps():
    starts, ends = np.array([2.0, 7.0, 11.0]), np.array([3.0, 8.0, 16.0])
    trace = ReadyTimes(starts, ends, 20.0, 5.0)

    def is_ready(clock):
        return ((starts <= (clock - 5) % 20) & ((clock - 5) % 20 < ends)).any()

    for now in range(-20, 45):
        clock = now
        while not is_ready(clock):
            clock += 1
        assert trace.next_ready(now) == clock
        for work in range(4):
            later, left = clock, work
            while left:
                left -= is_ready(later)
                later += 1
            assert trace.finish(clock, work) == later


def test_the_day_of_each_client():
    law = Diurnal(24.0, 0.25, 0.5)
    trace, begins = law(50, generator(3)), generator(3).uniform(0, 12, 50)
    for client in range(50):
        there = [t for t in range(240) if trace(client).next_ready(t) == t]
        assert {(t - begins[client]) % 24 < 6 for t in there} == {True}
        assert len(there) == 60
    together = Diurnal(24.0, 0.25, 0.0)(5, generator())
    assert {together(client).next_ready(7.0) for client in range(5)} == {24.0}


def test_a_dropout_frees_its_place_after_the_timeout():
    events = events_of(2, 1, 3, fate=fates("never", None, "upload"), timeout=5.0)
    kinds = [(type(event), event.time) for event in events]
    first = [(Dropout, 0), (Dispatch, 5), (Arrival, 6), (Dropout, 6)]
    assert kinds == [*first, (Dispatch, 11), (Arrival, 12), (Dispatch, 12), (Arrival, 13)]
    dropouts = [(event.fate, event.freed) for event in events if isinstance(event, Dropout)]
    assert dropouts == [("never", 5), ("upload", 11)]
    # A round of three gets its third arrival from the client in the place that is free.
    events = events_of(6, 3, 6, refill=3, fate=fates(None, "never"), timeout=2.5)
    assert [event.time for event in events if isinstance(event, Arrival)] == [1, 1, 3.5, 4.5, 4.5, 4.5]


def test_a_client_that_is_slower_than_the_timeout_is_late():
    events = events_of(2, 2, 4, delay=lambda client, times: 1.0 + 2 * client, timeout=2.0)
    assert {event.client for event in events if isinstance(event, Arrival)} == {0}
    late = [event for event in events if isinstance(event, Dropout)]
    facts = [(event.time, event.client, event.fate, event.freed) for event in late]
    assert facts == [(time, 1, "late", time + 2) for time in (0, 2, 4)]
    slow = partial(Dropouts(late=1.0, slower=3.0).fate, rng=generator())
    assert [event.time for event in events_of(1, 1, 2, fate=slow) if isinstance(event, Arrival)] == [3, 6]


def test_the_shares_of_fates():
    fate = partial(Dropouts(never=0.1, upload=0.2, late=0.3, slower=7.0).fate, rng=generator())
    drawn = [fate(1.0) for _ in range(20_000)]
    for outcome, share in {(1.0, "never"): 0.1, (1.0, "upload"): 0.2, (7.0, None): 0.3, (1.0, None): 0.4}.items():
        assert abs(drawn.count(outcome) / 20_000 - share) < 5 * math.sqrt(share * (1 - share) / 20_000)


def test_nobody_can_arrive_any_more(monkeypatch):
    message = "after 2 arrivals, at time 2, no result can arrive any more: 2 clients dropped out .* give a timeout"
    check_refused(message, events_of, 5, 2, 9, fate=fates(None, "upload", None, "never"))
    monkeypatch.setattr(schedule, "MOST_LOST", 20)
    check_refused("no result can arrive any more: the last 21 dispatches were lost", events_of, 5, 2, 9, timeout=0.5)
    check_refused("no result can arrive any more", run, RULE, 0, replace(SMALL, dropout="rates:never=0.9"))


def test_a_dropout_frees_its_version_at_once():
    versions, held = {}, []

    class Watched(SerialTraining):
        def submit(self, sequence, finish, sent):
            versions[sequence] = sent.model.version

        def release(self, sequence):
            del versions[sequence]

    config = replace(SMALL, dropout="rates:upload=0.5", timeout=3.0, delays="exponential")
    setup = RunSetup(config, 0)
    server = setup.new_server(RULE)
    for event in setup.loop(RULE, [server], Watched(setup.trainer, 0)):
        if isinstance(event, Dropout):
            held.append(event.sequence in versions or not {*server.retained_versions} <= {*versions.values()})
    assert len(held) > 10
    assert not any(held)
    assert run(RULE, 0, config).decisions["lost"] == len(held)


def test_steps_of_concurrency():
    counts = {}
    training = 0
    for event in events_of(10, "2:5@3.5:1@6", 30):
        training += 1 if isinstance(event, Dispatch) else -1
        counts[event.time] = max(counts.get(event.time, 0), training)
    assert [counts[time] for time in (0, 1, 2, 3, 3.5)] == [2, 2, 2, 2, 5]
    assert max(count for time, count in counts.items() if time > 7.5) == 1
    with pytest.raises(ConfigError, match="concurrency is 7:30@2, but only"):
        config = replace(SMALL, num_clients=30, concurrency="7:30@2")
        schedule.make_schedule(RULE, 0, config, Population(30, range(9)))


def test_a_law_of_delays_may_take_the_time():
    def law(num_clients, rng):
        return lambda client, rng, now: 1.0 + now

    draws = Draws.of(law, 3, 0, UniformSelection(), SimConfig())
    events = list(schedule_events(range(3), draws, 1, 4))
    assert [event.time for event in events if isinstance(event, Arrival)] == [1, 3, 7, 15]


def test_selection_by_examples():
    law = selection_law("examples")
    law.begin(Population(4, (0, 2, 3), [1, 0, 3, 6]), generator())
    idle, stream = [3, 0, 2], generator()
    drawn = np.bincount([law.place(idle, 0.0, stream) for _ in range(20_000)]) / 20_000
    for share, expected in zip(drawn, (0.6, 0.1, 0.3), strict=True):
        assert abs(share - expected) < 5 * math.sqrt(expected * (1 - expected) / 20_000)
    check_refused("selection examples needs clients .* length", law.begin, Population(4, range(4)), generator())


def test_oort_against_its_equations():
    """Algorithm 1 for one client at a time, in plain NumPy."""
    law = selection_law(f"{OORT}:epsilon=.7:decay=.97:least=.1:quantile=.4")
    stream, again, facts = generator(1), generator(1), generator(2)
    law.begin(Population(15, range(15)), stream)
    loss, duration, last = {}, {}, {}
    for arrivals in range(300):
        idle = facts.permutation(15)[:9].tolist()
        place = law.place(idle, 0.0, stream)
        new = [client for client in idle if client not in last]
        if (again.random() < max(0.1, 0.7 * 0.97**arrivals) and new) or len(new) == len(idle):
            client = new[again.integers(len(new))]
        else:
            preferred = np.quantile(list(duration.values()), 0.4, method="lower")
            old = [client for client in idle if client in last]
            utility = np.array([loss[c] + np.sqrt(0.1 * np.log(arrivals) / last[c]) for c in old])
            utility *= [min(1.0, preferred / duration[c]) ** 2 for c in old]
            admitted = utility >= 0.95 * utility.max()
            shares = np.where(admitted, utility, 0) / utility[admitted].sum()
            client = old[int(np.searchsorted(np.cumsum(shares), again.random(), side="right"))]
        assert idle[place] == client
        result = ClientResult(client, 0.0, *facts.exponential(size=2), 1, int(facts.integers(1, 9)), False)
        if arrivals % 17 == 5:
            result = result._replace(loss=None)
        law.observe(result)
        loss[client], duration[client] = result.examples * (result.loss or 0), result.duration
        last[client] = arrivals + 1
    assert len(last) == 15


@pytest.mark.parametrize("option", [{"epsilon": 2}, {"least": -1}, {"alpha": float("nan")}])
def test_oort_refuses_options_out_of_range(option):
    oort = runpy.run_path(OORT.removesuffix(":oort"))["oort"]
    check_error("from 0 to 1", oort, 4, np.random.default_rng(0), **option, error=ValueError)


def test_oort_finds_the_fast_clients_of_high_loss():
    config = replace(SMALL, arrivals=200, num_clients=30, partition="iid", delays="fadas-large")
    picked, drawn = (run(RULE, 0, replace(config, selection=law), None) for law in (OORT, "uniform"))
    assert picked.evaluations[-1].virtual_time < 0.7 * drawn.evaluations[-1].virtual_time


@pytest.fixture
def laws(tmp_path):
    path = tmp_path / "my_laws.py"
    path.write_text(LAW)
    return path


def test_a_law_of_the_user(laws, tmp_path):
    config = replace(SMALL, selection=f"{laws}:law:shift=2", availability="diurnal:period=20:share=0.6")
    config = replace(config, delays="fadas-mild", arrivals=24)
    (tmp_path / "whole").mkdir()
    whole = run(RULE, 5, config, output=tmp_path / "whole")
    log = read_audit_log(tmp_path / "whole" / "fedbuff_buffer_size=3-seed5.jsonl")
    assert log.header.code.keys() == {"selection"}
    output, store = tmp_path / "run" / "audit", tmp_path / "store"
    output.mkdir(parents=True)

    def stop(count, progress):
        if progress.arrivals == count:
            raise Stopped

    check_raises(Stopped, run_in_store, store, RULE, 5, config, output, partial(stop, 9), 0.0)
    paused = interrupted_run(store, output, Job(RULE, 5), config)  # as the same command
    other = replace(config, selection="other.py:nothing")
    check_refused("holds a run with another selection:", interrupted_run, store, output, Job(RULE, 5), other)
    changed = copy(paused)
    stream = msgspec.structs.replace(paused.notes.stream, results=[])
    changed.notes = msgspec.structs.replace(paused.notes, stream=stream)
    check_refused("0 results of the selection, but 8 arrivals", resume, changed)
    result = resume(paused)
    assert result.digest == whole.digest
    name = "fedbuff_buffer_size=3-seed5.jsonl"
    assert (output / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


@pytest.mark.parametrize(
    ("law", "message"),
    [
        ("nothing", "the law is None, must have a method pick"),
        ("deaf", "observe of the law is 'no', must be a method"),
        ("busy", "picked -1, which is not one of the idle clients"),
        ("other", "has no function 'other'"),
        ("law:shift=x", "shift: 'x' is not an int"),
        ("law:other=1", "unknown option of .*: 'other'"),
        ("", "is a file: write"),
    ],
)
def test_wrong_laws_of_the_user(laws, law, message):
    check_refused(message, run, RULE, 0, replace(SMALL, selection=f"{laws}:{law}".rstrip(":")))


EVERYTHING = {"availability": "diurnal:period=30:share=0.5", "dropout": "rates:never=0.1:late=0.2", "timeout": 20.0}
EVERYTHING |= {"selection": OORT, "concurrency": "4:6@10", "delays": "fadas-mild"}


def test_the_log_has_its_fields_only_where_they_are_used(tmp_path):
    for folder, settings in (("plain", {}), ("all", EVERYTHING)):
        (tmp_path / folder).mkdir()
        run(RULE, 0, replace(SMALL, **settings), output=tmp_path / folder)
    plain, everything = (
        [json.loads(line) for line in next((tmp_path / folder).glob("*.jsonl")).read_text().splitlines()]
        for folder in ("plain", "all")
    )
    assert not {"availability", "dropout", "timeout", "selection"} & plain[0]["config"].keys()
    assert EVERYTHING.items() <= everything[0]["config"].items()
    assert {line["type"] for line in plain} == {"header", "arrival", "round", "end"}
    assert "dropout" in {line["type"] for line in everything}
    assert not any("dispatched" in line for line in plain)
    assert all("dispatched" in line for line in everything if line["type"] in ("arrival", "dropout"))


def test_a_run_that_is_killed_before_its_first_arrival_keeps_its_dropouts(tmp_path, monkeypatch):
    config = replace(SMALL, dropout="rates:upload=.7", timeout=3.0, arrivals=6)
    outputs = [tmp_path / name / "audit" for name in ("whole", "killed")]
    for output in outputs:
        output.mkdir(parents=True)
    whole = run(RULE, 1, config, output=outputs[0])
    add_event, events = RecordedServer.add_event, []

    def killed(server, event, place):
        add_event(server, event, place)
        events.append(event)
        if len(events) == 4:
            raise Stopped

    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(RecordedServer, "add_event", killed)
        run_in_store(tmp_path / "store", RULE, 1, config, outputs[1], None, 0.0)
    assert any(isinstance(event, Dropout) for event in events[:-1])
    result = resume(paused_run(tmp_path / "store"))
    assert result.decisions == whole.decisions
    assert len({next(output.glob("*.jsonl")).read_bytes() for output in outputs}) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"availability": "nightly"}, "unknown availability 'nightly'.*always"),
        ({"availability": "always:period=3"}, "availability always:period=3: always has no options"),
        ({"availability": "diurnal"}, "needs period=..."),
        ({"availability": "diurnal:period=0"}, "period is 0.0, must be from 1e-12"),
        ({"availability": "diurnal:period=nan"}, "period is nan"),
        ({"availability": "diurnal:period=3:share=0"}, "share is 0.0, must be from"),
        ({"availability": "diurnal:period=3:spread=2"}, "spread is 2.0, must be from 0 to 1"),
        ({"availability": "devices"}, "needs file="),
        ({"dropout": "some"}, "unknown dropout 'some'"),
        ({"dropout": "rates:never=-1"}, "never is -1.0, must be from 0 to 1"),
        ({"dropout": "rates:never=.6:late=.6"}, "1.2 together, must be at most 1"),
        ({"dropout": "rates:late=.6:slower=.5"}, "slower is 0.5, must be from 1"),
        ({"timeout": -1.0}, "timeout is -1.0, must be at least 0"),
        ({"timeout": float("inf")}, "timeout is inf, must be 0 or more and finite"),
        ({"selection": "best"}, "unknown selection 'best'.*blocked-until-pass-ends"),
        ({"selection": "uniform:epsilon=1"}, "uniform has no options"),
        ({"concurrency": 0}, "concurrency is 0, must be at least 1"),
        ({"concurrency": "4:x@3"}, "concurrency is '4:x@3', must be a whole number, or steps such as"),
        ({"concurrency": "4:0@3"}, "concurrency is 0, must be at least 1"),
        ({"concurrency": "4:5@3:6@3"}, "its times must be finite and ascend"),
        ({"concurrency": "4:30@3"}, "concurrency is 4:30@3, but there are 12 clients"),
        ({"concurrency": "4:2@3", "refill": 3}, "refill is 3, but 4:2@3 train at once"),
        ({"concurrency": 2.5}, "concurrency is 2.5, must be a whole number"),
        ({"protocol": "rounds", "concurrency": 20, "timeout": 2.0}, "timeout is 2.0, which is read only with protocol"),
    ],
)
def test_wrong_settings(settings, message):
    check_refused(message, replace, SMALL, **settings)


def test_on_the_command_line():
    def error(*options):
        result = CliRunner().invoke(app, ["run", "--rule", "fedasync", *options])
        assert result.exit_code == 2
        return result.output

    assert "concurrency is '4:x@3', must be" in error("--concurrency", "4:x@3")
    assert "refill is 5, but 4:3@9 train at once" in error("--concurrency", "4:3@9", "--refill", "5")
    assert "unknown availability 'night'" in error("--availability", "night")
    assert SimConfig(concurrency="12").concurrency == 12


def test_tables_say_that_each_rule_has_its_own_dispatches(tmp_path):
    config = replace(SMALL, **EVERYTHING)
    specs = [RULE, parse_rule("fedasync")]
    results = [run(spec, 0, config, output=tmp_path) for spec in specs]
    text = describe_setting(config, results)
    assert "oort_selection.py:oort, availability diurnal:period=30:share=0.5, dropout rates:never=0.1:late=0.2" in text
    assert text.endswith(", 1 seed, each rule with dispatches of its own")
    own = [[(line.client, line.time) for line in read_audit_log(path).arrivals] for path in tmp_path.glob("*.jsonl")]
    assert own[0] != own[1]
    paired = describe_setting(config, run_paired(specs, 0, config))
    assert paired.endswith(", all on the updates of fedbuff:buffer_size=3")
    others = [replace(result, settings={**result.settings, "selection": "examples"}) for result in results]
    assert "dispatches" not in describe_setting(config, others)
