"""What a server gives to read: the newest version, and the size of its state."""

from collections.abc import Callable
from dataclasses import replace

from afflux.aggregation.reports import Pulled
from afflux.arrays.devices import HOST
from afflux.server.aggregator import Aggregator


def pull(aggregator: Aggregator) -> Pulled:
    """The newest version; nothing is copied unless params are overwritten in place."""
    admission, device = aggregator.admission, aggregator.device
    if aggregator.versions.inplace:

        def copied() -> Pulled:
            newest = admission.state.current
            return replace(newest, params=device.immutable_copy(newest.params))

        return aggregator.when_idle("pull", copied)
    _check_pull(aggregator)
    return shared(aggregator, admission.state.current)


def shared(aggregator: Aggregator, version: Pulled) -> Pulled:
    """A version as callers get it: on a GPU other objects than the server's own, of the same memory."""
    device = aggregator.device
    return version if device is HOST else replace(version, params=device.alias(version.params))


def pull_into(aggregator: Aggregator, copy: Callable[[Pulled], None]) -> int:
    """Copies the newest version with `copy`; returns its number."""

    def copied() -> int:
        newest = aggregator.admission.state.current
        copy(newest)
        return newest.version

    if aggregator.versions.inplace:
        return aggregator.when_idle("pull", copied)
    _check_pull(aggregator)
    aggregator.check_storage()
    return copied()


def _check_pull(aggregator: Aggregator) -> None:
    aggregator.versions.refuse_damage("pull")
    if aggregator.device.alone is not None:
        aggregator.check_process("pull")


def state_bytes(aggregator: Aggregator) -> int:
    """See `Server.state_bytes`."""
    state, slots = aggregator.admission.state, aggregator.slots
    if aggregator.streaming is not None:
        buffered = slots.slot_bytes + 8 * slots.size
    else:
        buffered = (aggregator.rule.buffer_size + len(state.deferred())) * slots.slot_bytes
    held = sum(vector.nbytes for vector in state.rule_vectors.values())
    return int(state.current.params.nbytes + buffered + held) + (0 if state.rows is None else state.rows.nbytes)
