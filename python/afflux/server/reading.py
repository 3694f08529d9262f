"""Reading of a server: the newest version, and the size of the state."""

from collections.abc import Callable
from dataclasses import replace
from typing import Protocol, overload

from afflux import ops
from afflux.aggregation.options import ServerOptions
from afflux.aggregation.reports import Pulled
from afflux.arrays.layout import Tree
from afflux.ops.units import ITEM_BYTES
from afflux.server.aggregator import Aggregator
from afflux.server.inputs import InputAdapter
from afflux.server.late import flush_late
from afflux.server.tracebacks import clear_tracebacks


class PullSource(Protocol):
    """The parts of a server that a pull needs."""

    options: ServerOptions
    _aggregator: Aggregator
    _adapter: InputAdapter

    def _enter(self, op: str) -> None: ...


@overload
def pull(self: PullSource) -> Pulled: ...
@overload
def pull(self: PullSource, *, out: "ops.Array | Tree") -> int: ...
def pull(self: PullSource, *, out: "ops.Array | Tree | None" = None) -> Pulled | int:
    """Return the newest params and their version.

    A pull never waits for a step or a weigh part of another thread, unless inplace. With `flush_after` it may make a
    step itself, and then call on_step.

    Without `out` nothing is copied, unless inplace. With `out`, a flat vector or a tree like the server's, params (and
    buffers) are copied into `out`, and only the version is returned.

    >>> import numpy as np
    >>> from afflux import Server, rules
    >>> server = Server(rules.fedbuff(), {"weight": np.ones((2, 2), np.float32), "bias": np.zeros(2, np.float32)})
    >>> mine = {"weight": np.empty((2, 2), np.float32), "bias": np.empty(2, np.float32)}
    >>> server.pull(out=mine), mine["weight"].tolist()
    (0, [[1.0, 1.0], [1.0, 1.0]])
    """
    aggregator, adapter = self._aggregator, self._adapter
    try:
        if self.options.inplace:
            self._enter("pull")
        if self.options.flush_after is not None:
            flush_late(aggregator)
        if out is None:
            return newest(aggregator)
        return _copied(aggregator, lambda now: adapter.copy_out("pull", now, out))
    except BaseException as error:
        clear_tracebacks(error)
        raise


def newest(aggregator: Aggregator) -> Pulled:
    """Return the newest version; a copy only if params are overwritten in place."""
    admission, plane = aggregator.admission, aggregator.plane
    if plane.inplace:

        def copied() -> Pulled:
            now = admission.state.current
            return replace(now, params=plane.copy(now.params, read_only=True))

        return aggregator.when_idle("pull", copied)
    _check_pull(aggregator)
    return shared(aggregator, admission.state.current)


def shared(aggregator: Aggregator, version: Pulled) -> Pulled:
    """Return a version for callers."""
    params = aggregator.plane.shown(version.params)
    return version if params is version.params else replace(version, params=params)


def _copied(aggregator: Aggregator, copy: Callable[[Pulled], None]) -> int:
    """Copy the newest version with `copy`. Return its number."""

    def copied() -> int:
        now = aggregator.admission.state.current
        copy(shared(aggregator, now))
        return now.version

    if aggregator.plane.inplace:
        return aggregator.when_idle("pull", copied)
    _check_pull(aggregator)
    aggregator.check_storage()
    return copied()


def _check_pull(aggregator: Aggregator) -> None:
    aggregator.plane.refuse_damage("pull")
    if aggregator.plane.alone is not None:
        aggregator.check_process("pull")


def state_bytes(aggregator: Aggregator, options: ServerOptions) -> int:
    """Return the number of bytes of `Server.state_bytes`."""
    state, slot, size = aggregator.admission.state, aggregator.slot_bytes, aggregator.plane.size
    buffered = slot + 8 * size if options.accumulate else (state.rule.buffer_size + len(state.deferred())) * slot
    vectors = (1 + len(state.rule_vectors)) * ITEM_BYTES[options.dtype] * size
    return vectors + buffered + (0 if state.rows is None else state.rows.nbytes)
