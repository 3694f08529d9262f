"""The calls of the user's function after each server step."""

import logging
from collections.abc import Callable
from os import getpid

from afflux.aggregation.admission import Admission
from afflux.aggregation.frames import note_stored_frames
from afflux.aggregation.reports import Report

#: The type of `Server(on_step=...)`.
OnStep = Callable[[Report], object]

_LOGGER = logging.getLogger("afflux")


class StepCalls:
    """The calls of `on_step` with the reports, in the order of the steps. Calls never overlap.

    Args:
        on_step: the user's function. An exception that it raises is logged, because the step is made, and the caller
            of `push` must get the receipt.
        admission: has the waiting reports.
    """

    def __init__(self, on_step: OnStep, admission: Admission) -> None:
        self._on_step = on_step
        self._admission = admission
        #: The token of the call of `run` that currently calls on_step, and its process.
        self._running: tuple[int, object] | None = None

    def run(self) -> None:
        """Call `on_step` until no report waits. Return at once if another call of `run`, in any thread, does this."""
        # Made first, so that after an interrupt at any moment `finally` has the token.
        token = getpid(), object()
        try:
            while (report := self._next(token)) is not None:
                try:
                    self._on_step(report)
                except Exception:
                    _LOGGER.exception("[on_step] raised for version %d; the step was taken", report.version)
                note_stored_frames()
        finally:
            if self._running is token:
                self._running = None

    def _next(self, token: tuple[int, object]) -> Report | None:
        """Return the next report for this token; None if no report waits, or another call of `run` is active."""
        with self._admission.mutex:
            running = self._running
            # In a forked child the running thread of the parent may not exist.
            if running is not None and running is not token and running[0] == token[0]:
                return None
            report: Report | None = self._admission.next_report()
            self._running = None if report is None else token
            return report
