"""Calls the user's function after each server step."""

import logging
from collections.abc import Callable
from os import getpid

from afflux.aggregation.reports import Report

#: The type of `Server(on_step=...)`.
OnStep = Callable[[Report], object]

_LOGGER = logging.getLogger("afflux")


class StepCalls:
    """Calls `on_step` with one report after the other, in the order of the steps. Calls never overlap.

    Args:
        on_step: the user's function. An exception that it raises is logged, because the step is made, and the caller
            of `push` must get the receipt.
        take: removes and returns the oldest waiting report; called with the mutex.
        locked: calls a function with the mutex.
    """

    def __init__(
        self,
        on_step: OnStep,
        take: Callable[[], Report | None],
        locked: Callable[[Callable[[], Report | None]], Report | None],
    ) -> None:
        self._on_step = on_step
        self._take = take
        self._locked = locked
        #: The token of the call of `run` that currently calls on_step, and its process.
        self._running: tuple[int, object] | None = None

    def run(self) -> None:
        """Calls `on_step` until no report waits; returns at once if another call of `run` does so, in any thread."""
        # Made first, so that after an interrupt at any moment `finally` has the token.
        token = getpid(), object()
        try:
            while (report := self._locked(lambda: self._next(token))) is not None:
                try:
                    self._on_step(report)
                except Exception:
                    _LOGGER.exception("[on_step] raised for version %d; the step is made", report.version)
        finally:
            if self._running is token:
                self._running = None

    def _next(self, token: tuple[int, object]) -> Report | None:
        """The next report for the call with this token; the call with the token runs until there is none."""
        running = self._running
        # In a forked child the thread that ran may not exist.
        if running is not None and running is not token and running[0] == token[0]:
            return None
        report = self._take()
        self._running = None if report is None else token
        return report
