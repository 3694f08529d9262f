"""A push: its arguments are checked, its vector is taken in, and its arrival joins, or fails without a trace."""

from math import nan

import numpy as np

from afflux import ops
from afflux.aggregation.arrivals import Pushed
from afflux.aggregation.options import ServerOptions
from afflux.aggregation.reports import Receipt
from afflux.aggregation.streaming import MOST_SQUARES
from afflux.arrays.layout import Tree
from afflux.arrays.pools import Slot, Vector
from afflux.ops.errors import AffluxError
from afflux.ops.validation import NUMBERS, as_int, brief, plain_id
from afflux.rules.rule import ClientId
from afflux.server.aggregator import Aggregator, Ticket
from afflux.server.inputs import InputAdapter


def push(
    server: tuple[Aggregator, InputAdapter, ServerOptions],
    client_id: ClientId,
    vector: "ops.Array | Tree",
    version: int,
    num_examples: int,
    loss: float,
    buffers: "Tree | None",
    timeout: float | None,
    copy: bool,
) -> Receipt:
    """See `Server.push`."""
    aggregator, adapter, options = server
    ticket = Ticket()
    pushed: Pushed | None = None
    admission = aggregator.admission
    try:
        newest = admission.state.current.version
        client_id, version = _checked(client_id, version, num_examples, loss, timeout, copy, newest)
        what = f"[push] client {client_id!r}'s"
        parts = adapter.pushed(f"{what} vector", vector)
        own = adapter.buffers(what, vector, buffers)
        rows, fetch = admission.state.rows, None
        bad, norm, extremes = None, nan, (nan, nan)
        if copy:
            ticket.slot = aggregator.take_slot(timeout)
            fetch = None if rows is None else rows.prefetch(client_id)
            bad, norm, extremes = _copied(aggregator, adapter, options, what, parts, ticket.slot)
        elif admission.copies is None:
            ticket.slot = adapter.lent(f"{what} vector", parts, aggregator.slots.dtype)
        else:
            raise AffluxError(f"{what} vector cannot be read in place (copy=False): {admission.copies}")
        if fetch is not None:  # the disk was read while the vector was copied
            ticket.staged_row = fetch()
        pushed = (client_id, version, int(num_examples), float(loss), norm, ticket.slot, own, extremes)
        return aggregator.join(pushed, bad, ticket)
    except Exception:
        if ticket.decision is None:
            aggregator.locked(admission.refuse)
        raise
    finally:
        # The frame of a stored traceback must not hold the slot.
        pushed = ticket.slot = ticket.staged_row = ticket.decision = fetch = None
        aggregator.notify_waiters()


def rule_vector(
    aggregator: Aggregator, adapter: InputAdapter, options: ServerOptions, name: str, vector: "ops.Array | Tree"
) -> Vector:
    """The vector of `Server.set_rule_vector`, checked and copied."""
    needs, rule = aggregator.rule.needs, aggregator.rule.name
    if name not in needs.handed_in:
        known = ", ".join(needs.handed_in) or "none"
        raise AffluxError(f"[set_rule_vector] {name!r} is not handed in to {rule}; known: {known}")
    what = f"[set_rule_vector] {name}"
    new = aggregator.device.empty(adapter.size, options.dtype)
    facts = adapter.ingest(what, adapter.parts(what, vector), new)
    bad = facts.first_nonfinite
    if bad is not None:
        raise AffluxError(f"{what} has a non-finite value at index {bad}{adapter.place(bad)}")
    _refuse_overflow(what, facts, "inner products")
    return new


def _copied(
    aggregator: Aggregator,
    adapter: InputAdapter,
    options: ServerOptions,
    what: str,
    parts: "ops.Array | list[ops.Array]",
    slot: Slot,
) -> tuple[int | None, float, tuple[float, float]]:
    """The sweep that takes a vector in: the index of a non-finite value, if that is allowed; norm; min and max."""
    rule = aggregator.rule
    facts = adapter.ingest(f"{what} vector", parts, slot)
    bad = facts.first_nonfinite
    if bad is not None and not options.quarantine:
        raise AffluxError(f"{what} {rule.kind} has a non-finite value at index {bad}{adapter.place(bad)}")
    if bad is None and facts.sum_of_squares > MOST_SQUARES and (rule.needs.gram or options.accumulate):
        _refuse_overflow(f"{what} {rule.kind}", facts, "inner products" if rule.needs.gram else "sums")
    return bad, facts.norm, (facts.min, facts.max)


def _refuse_overflow(what: str, facts: ops.Ingested, which: str) -> None:
    """Rejects a vector whose norm is so large that `which`, "sums" or "inner products", could overflow."""
    if facts.sum_of_squares > MOST_SQUARES:
        raise AffluxError(f"{what} has norm {facts.norm:.3g}: {which} would overflow")


def _checked(
    client_id: object,
    version: object,
    num_examples: object,
    loss: object,
    timeout: object,
    copy: object,
    newest: int,
) -> tuple[ClientId, int]:
    """The client id and the version of a push as Python's; `newest` is the server's version.

    Raises:
        AffluxError: an argument has a wrong type or value.
    """
    client = plain_id(client_id)
    pulled, examples = as_int(version), as_int(num_examples)
    if pulled is None:
        raise AffluxError(f"[push] version is {brief(version)}, must be an int")
    if not 0 <= pulled <= newest:
        raise AffluxError(
            f"[push] client {client!r} says that it pulled version {brief(pulled)}; the server has made 0 to {newest}"
        )
    if examples is None or not 1 <= examples < 2**63:
        raise AffluxError(f"[push] num_examples is {brief(num_examples)}, must be an int of at least 1 in 64 bits")
    if not isinstance(loss, NUMBERS) or (isinstance(loss, int) and abs(loss) > 2**63):
        raise AffluxError(f"[push] loss is {loss!r}, must be a number (NaN if unknown)")
    if not (timeout is None or (isinstance(timeout, NUMBERS) and timeout >= 0)):
        raise AffluxError(f"[push] timeout is {timeout!r}, must be None or a number of seconds, at least 0")
    if not isinstance(copy, bool | np.bool_):
        raise AffluxError(f"[push] copy is {copy!r}, must be True or False")
    return client, pulled
