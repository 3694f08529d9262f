"""Ctrl-C is recorded, and handled when the work checks for it."""

import signal
import threading

import pytest

from afflux.lab import interrupts
from afflux.lab.runs.compare import compare, make_jobs
from afflux.rules.specs import parse_rule
from afflux.sim.workload.config import SimConfig
from conftest import check_raises
from pairwise import soak


def press():
    signal.raise_signal(signal.SIGINT)


def test_a_press_is_raised_once_where_it_is_asked_for():
    with interrupts.deferred():
        press()
        press()
        check_raises(KeyboardInterrupt, interrupts.raise_if_pending)
        interrupts.raise_if_pending()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_press_that_nobody_asks_for_is_raised_at_the_end_of_the_outer_block():
    reached = False
    with pytest.raises(KeyboardInterrupt), interrupts.deferred():
        with interrupts.deferred():
            press()
        reached = True
    assert reached
    interrupts.raise_if_pending()


def test_sigterm_says_that_it_was_that():
    """Once: what is pressed later is Ctrl-C again."""
    with interrupts.deferred(), interrupts.sigterm_as_interrupt():
        signal.raise_signal(signal.SIGTERM)
        check_raises(interrupts.Terminated, interrupts.raise_if_pending)
        press()
        with pytest.raises(KeyboardInterrupt) as caught:
            interrupts.raise_if_pending()
        assert caught.type is KeyboardInterrupt
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_sigterm_that_nobody_asks_for():
    with pytest.raises(interrupts.Terminated), interrupts.deferred(), interrupts.sigterm_as_interrupt():
        signal.raise_signal(signal.SIGTERM)


def test_sigterm_where_nobody_would_ask_is_raised_at_once():
    with interrupts.sigterm_as_interrupt(), pytest.raises(interrupts.Terminated):
        signal.raise_signal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt) as caught, interrupts.deferred():
        press()
    assert caught.type is KeyboardInterrupt


def test_a_second_sigterm_says_what_it_was_too(monkeypatch):
    with pytest.raises(interrupts.Terminated), interrupts.deferred(), interrupts.sigterm_as_interrupt():
        signal.raise_signal(signal.SIGTERM)
        monkeypatch.setattr(interrupts, "PATIENCE_SECONDS", 0.0)
        check_raises(interrupts.Terminated, signal.raise_signal, signal.SIGTERM)


def test_another_error_comes_first():
    with pytest.raises(ValueError, match="mine"), interrupts.deferred():
        press()
        raise ValueError("mine")
    interrupts.raise_if_pending()


def test_a_second_press_raises_at_once_when_the_first_has_waited(monkeypatch):
    with interrupts.deferred():
        press()
        monkeypatch.setattr(interrupts, "PATIENCE_SECONDS", 0.0)
        check_raises(KeyboardInterrupt, press)
        check_raises(KeyboardInterrupt, interrupts.raise_if_pending)


def test_the_handler_afterwards_may_be_given():
    try:
        with interrupts.deferred(then=signal.SIG_IGN):
            pass
        press()
    finally:
        assert signal.signal(signal.SIGINT, signal.default_int_handler) is signal.SIG_IGN


@pytest.mark.parametrize("handler", [signal.SIG_IGN, lambda number, frame: None])
def test_a_handler_of_the_caller_stays(handler):
    before = signal.signal(signal.SIGINT, handler)
    try:
        with interrupts.deferred():
            assert signal.getsignal(signal.SIGINT) is handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_another_thread_may_hold_it_to_no_effect():
    seen = []

    def hold():
        with interrupts.deferred():
            seen.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=hold)
    thread.start()
    thread.join()
    assert seen == [signal.default_int_handler]


@pytest.mark.parametrize("processes", [1, *soak(2)])
def test_compare_stops_after_the_arrival_at_hand(processes):
    config = SimConfig(model="logreg", num_clients=20, concurrency=6, arrivals=10**6, local_steps=2)
    seen = []

    def watch(index, run):
        if run.arrivals and not seen:
            seen.append(run)
            press()

    with pytest.raises(KeyboardInterrupt):
        compare(make_jobs([parse_rule("fedbuff")], [0, 1]), config, processes=processes, watch=watch)
    assert len(seen) == 1
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
