"""The newest version for callers: the server's own memory, or a copy if a round may overwrite it."""

from collections.abc import Callable
from functools import partial

import numpy as np
from msgspec.structs import replace

from afflux._engine import uncopied
from afflux.aggregation.plane import DataPlane
from afflux.aggregation.reports import Pulled
from afflux.server.aggregator import Aggregator


def newest(aggregator: Aggregator) -> Pulled:
    """Return the newest version; a copy only if params are overwritten in place."""
    admission, plane = aggregator.admission, aggregator.plane
    if aggregator.inplace:
        return aggregator.when_idle("pull", lambda: read_only_copy(plane, admission.current))
    _check_pull(aggregator)
    return shared(aggregator, admission.current)


def read_only_copy(plane: DataPlane, version: Pulled) -> Pulled:
    """Return a copy of a version that rounds overwrite, read-only if its library supports that."""
    params = plane.shown(version.params, copy=True)
    if isinstance(params, np.ndarray):
        params.flags.writeable = False
    return replace(version, params=params)


def shared(aggregator: Aggregator, version: Pulled) -> Pulled:
    """Return a version for callers.

    Raises:
        UnavailableError: this process is a forked child that could not copy the versions of a store.
    """
    if uncopied[0]:
        aggregator.check_process("pull")
    params = aggregator.plane.shown(version.params)
    return version if params is version.params else replace(version, params=params)


class VersionReading:
    """A block that reads a version. A step that needs the version's memory waits for the block."""

    __slots__ = ("_aggregator",)

    def __init__(self, aggregator: Aggregator) -> None:
        self._aggregator = aggregator

    def __enter__(self) -> None:
        self._aggregator.reading.add(self)

    def __exit__(self, *error: object) -> None:
        self._aggregator.reading.discard(self)
        self._aggregator.notify_waiters()


def copied(aggregator: Aggregator, copy: Callable[[Pulled], None]) -> int:
    """Copy the newest version with `copy`. Return its number."""
    if aggregator.inplace:
        return aggregator.when_idle("pull", partial(_copied_newest, aggregator, copy))
    _check_pull(aggregator)
    aggregator.check_storage()
    with VersionReading(aggregator):
        return _copied_newest(aggregator, copy)


def _copied_newest(aggregator: Aggregator, copy: Callable[[Pulled], None]) -> int:
    now = aggregator.admission.current
    copy(shared(aggregator, now))
    return now.version


def _check_pull(aggregator: Aggregator) -> None:
    if aggregator.plane.alone is not None:
        aggregator.check_process("pull")
