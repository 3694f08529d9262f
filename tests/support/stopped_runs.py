"""Runs that end as if their process had been killed."""

import signal

from afflux.lab import interrupts
from afflux.lab.results.run_history import RunHistory


class Stopped(Exception):
    """The run ends here: nothing more is saved."""


def stop_at(count):
    """A `progress`, or a `watch` of several runs, that stops the run after this many arrivals."""

    def progress(*arguments):
        if arguments[-1].arrivals == count:
            raise Stopped

    return progress


def press_ctrl_c_at(count):
    """A `progress` that sends Ctrl-C to this process after this many arrivals."""

    def progress(run):
        if run.arrivals == count:
            signal.raise_signal(signal.SIGINT)

    return progress


def record_ctrl_c_at(count, patch):
    """Let every run note a Ctrl-C after this many arrivals, wherever it is made."""
    add = RunHistory.add_arrival

    def press(self, *facts):
        add(self, *facts)
        if len(self.staleness) == count:
            interrupts._record(2, None)

    patch.setattr(RunHistory, "add_arrival", press)
