"""Calls the user's function after each server step."""

import logging
from collections.abc import Callable
from os import getpid

from afflux.aggregation.reports import Report

#: What `Server(on_step=...)` takes.
OnStep = Callable[[Report], object]

_LOGGER = logging.getLogger("afflux")


class StepCalls:
    """Calls `on_step` with one report after the other, in the order of the steps; two calls never overlap.

    Args:
        on_step: the user's function. An exception that it raises is logged: the step is made, and the caller of `push`
            must get the receipt.
        take: takes the oldest report that waits; called with the mutex.
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
        #: Of the call of `run` that calls on_step now, and its process.
        self._running: tuple[int, object] | None = None

    def run(self) -> None:
        """Calls `on_step` until no report waits; not if a call of `run` does so already, in this or another thread."""
        # Made first, so that an interrupt at any moment leaves a token that `finally` knows.
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
        """The next report for the call of this token, which is the one that runs until there is none."""
        running = self._running
        # In a forked child the thread that ran may not exist.
        if running is not None and running is not token and running[0] == token[0]:
            return None
        report = self._take()
        self._running = None if report is None else token
        return report
