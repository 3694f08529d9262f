"""Runs that end as if their process had been killed."""


class Stopped(Exception):
    """The run ends here: nothing more is saved."""


def stop_at(count):
    """A `progress`, or a `watch` of several runs, that stops the run after this many arrivals."""

    def progress(*arguments):
        if arguments[-1].arrivals == count:
            raise Stopped

    return progress
