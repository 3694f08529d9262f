"""Live progress: what it shows of each run, on a terminal and elsewhere."""

import io
import math
import re
from dataclasses import replace

import pytest
from rich.console import Console

from afflux.cli.lab.terminal import BAR_SECONDS, LINE_SECONDS, describe, show_progress
from afflux.lab.results.run_history import RunProgress
from afflux.rules.specs import parse_rule
from afflux.sim.workload.config import UNLIMITED, SimConfig
from made_runs import run

SMALL = SimConfig(model="logreg", num_clients=20, concurrency=5, arrivals=30, eval_every=7, local_steps=2)
RULE = "fedbuff:buffer_size=3"


class Clock:
    now = 100.0

    def __call__(self):
        return self.now


def progress_of(arrivals, done, accuracy=0.5, staleness=1.25):
    return RunProgress(arrivals, arrivals // 3, 2.0 * arrivals, accuracy, staleness, done)


def terminal():
    return Console(file=io.StringIO(), force_terminal=True, force_interactive=True, width=120, color_system=None)


def test_a_terminal_shows_a_bar_for_each_run_and_one_for_all():
    clock, console = Clock(), terminal()
    with show_progress(["fedbuff, seed 0", "[b]x[/b], seed 1"], 40, console, clock) as watch:
        watch(0, progress_of(10, 0.25))
        clock.now += 30
        watch(0, progress_of(20, 0.5, accuracy=0.912))
        clock.now += 1
        watch(1, progress_of(4, 0.1))
    shown = console.file.getvalue()
    assert "20/40 arrivals, accuracy 91.2%, staleness 1.2" in shown
    assert "01:00" in shown, "a quarter in 30 s: half in 60 s"
    assert "4/40 arrivals" in shown
    assert "[b]x[/b], seed 1" in shown, "a label is data, not markup"
    assert "0 of 2 finished" in shown


def test_one_run_has_no_bar_for_all():
    console = terminal()
    with show_progress(["fedbuff, seed 0"], 40, console) as watch:
        watch(0, progress_of(40, 1.0))
    assert "all runs" not in console.file.getvalue()
    assert "40/40" in console.file.getvalue()


def test_bars_are_not_updated_more_often_than_anybody_can_see():
    clock, console = Clock(), terminal()
    with show_progress(["a"], 1000, console, clock) as watch:
        watch(0, progress_of(1, 0.001))
        clock.now += BAR_SECONDS / 2
        watch(0, progress_of(999, 0.999))
    assert "999/" not in console.file.getvalue()
    with show_progress(["a"], 1000, console, clock) as watch:
        watch(0, progress_of(1, 0.001))
        watch(0, progress_of(1000, 1.0))
    assert "1000/1000" in console.file.getvalue(), "but the last one is shown"


def test_no_terminal_gets_lines_at_growing_intervals():
    clock, console = Clock(), Console(file=io.StringIO(), force_terminal=False, width=20)
    lines = []
    with show_progress(["fedbuff, seed 0", "b"], 40, console, clock) as watch:
        watch(1, RunProgress(0, 0, 0.0, 0.0, 0.0, 0.0))  # polled before it has begun
        for seconds, index, arrivals in [(0, 0, 10), (9, 0, 11), (1, 0, 20), (19, 0, 40), (1, 1, 10), (40, 1, 11)]:
            clock.now += seconds
            watch(index, progress_of(arrivals, arrivals / 40))
            lines.append(len(console.file.getvalue().splitlines()))
        for _ in range(120):
            clock.now += 1
            watch(1, progress_of(12, 0.3))
    assert lines == [0, 0, 1, 1, 2, 3]
    text = console.file.getvalue().splitlines()
    first = "fedbuff, seed 0: 20/40 arrivals, accuracy 50.0%, staleness 1.2"
    assert text[0] == f"0 of 2 runs finished, 01:00 left; {first}"
    assert text[1].startswith("1 of 2 runs finished, 00:")
    assert text[1].endswith(" left; b: 10/40 arrivals, accuracy 50.0%, staleness 1.2"), "the finished run is counted"
    assert len(text) == 3 + 120 // LINE_SECONDS


def test_a_line_has_all_runs_that_are_polled():
    """Runs of other processes are polled in turn: the first one had all lines, also when it had ended."""
    clock, console = Clock(), Console(file=io.StringIO(), width=20)
    with show_progress(["a", "b", "c[/b]:fire:"], 40, console, clock) as watch:
        for seconds, facts in [(0, (10, 10, 0)), (10, (40, 20, 0)), (20, (40, 20, 4)), (40, (40, 20, 8))]:
            clock.now += seconds
            for index, arrivals in enumerate(facts):
                watch(index, progress_of(arrivals, arrivals / 40))
    lines = [re.sub(r", accuracy[^;]*|, \d\S* left", "", line) for line in console.file.getvalue().splitlines()]
    # The line at 10 s is that of the moment when the first run is polled; the third one has news after that of 30 s.
    assert lines == [
        "1 of 3 runs finished; b: 10/40 arrivals",
        "1 of 3 runs finished; b: 20/40 arrivals",
        "1 of 3 runs finished; c[/b]:fire:: 4/40 arrivals",
    ]


def test_a_terminal_that_cannot_move_its_cursor_gets_lines():
    """It showed the bars when they had ended."""
    clock = Clock()
    console = Console(file=io.StringIO(), force_terminal=True, width=120, color_system=None, _environ={"TERM": "dumb"})
    with show_progress(["a"], 40, console, clock) as watch:
        clock.now += 10
        watch(0, progress_of(20, 0.5))
        assert console.file.getvalue().startswith("0 of 1 runs finished; a: 20/40 arrivals")


@pytest.mark.parametrize(("pace", "left"), [(0.25, "00:10"), (0.005, "16:30"), (0.001, "1:23:10")])
def test_the_time_left_is_that_of_the_pace_so_far(pace, left):
    clock, console = Clock(), terminal()
    with show_progress(["a"], 1000, console, clock) as watch:
        watch(0, progress_of(500, 0.5))  # resumed half-way
        assert "--:--" in console.file.getvalue()
        clock.now += 10
        watch(0, progress_of(500 + int(1000 * pace), 0.5 + pace))
    assert left in console.file.getvalue()


def test_what_is_not_known_is_not_shown():
    assert describe(progress_of(5, math.nan, math.nan, math.nan), UNLIMITED) == "5 arrivals"
    console = terminal()
    with show_progress(["a"], UNLIMITED, console) as watch:
        watch(0, progress_of(5, math.nan))
    assert "5 arrivals, accuracy 50.0%" in console.file.getvalue()


def told_by(**settings):
    seen = []
    result = run(parse_rule(RULE), 0, replace(SMALL, **settings), seen.append)
    return seen, result


def test_a_run_tells_how_far_it_is():
    seen, result = told_by()
    assert [one.arrivals for one in seen] == list(range(1, 31))
    assert [one.done for one in seen] == [count / 30 for count in range(1, 31)]
    assert [one.mean_staleness for one in seen] == [result.staleness[:count].mean() for count in range(1, 31)]
    by_arrivals = {row.arrivals: row for row in result.evaluations}
    for one in seen:
        last = by_arrivals[max(arrivals for arrivals in by_arrivals if arrivals <= one.arrivals)]
        assert one.score == last.accuracy
    assert [one.version for one in seen] == [count // 3 for count in range(1, 31)]


@pytest.mark.parametrize("limit", ["rounds", "virtual_time", "target"])
def test_a_run_with_another_limit_ends_with_all_of_it_done(limit):
    _, whole = told_by()
    middle = max(whole.evaluations[1:-1], key=lambda row: row.accuracy)
    settings = {
        "rounds": {"rounds": middle.version},
        "virtual_time": {"virtual_time": middle.virtual_time},
        "target": {"stop_at_target": True, "target": middle.accuracy},
    }
    seen, result = told_by(**settings[limit])
    assert middle.accuracy > whole.evaluations[0].accuracy
    assert 0 < len(result.staleness) < 30
    assert limit == "rounds" or len(result.staleness) == middle.arrivals  # an arrival at the limit counts
    assert [one.finished for one in seen] == [False] * (len(seen) - 1) + [True]
    assert seen[-1].arrivals == len(result.staleness)
    shares = [one.done for one in seen]
    assert shares == sorted(shares)
    assert 0 < shares[0] < 1
