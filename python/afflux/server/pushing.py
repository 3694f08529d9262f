"""`Server.push`: the check of a client's vector, its conversion to the rule's kind, and its join."""

from collections.abc import Callable, Mapping
from math import inf, nan
from typing import Any

import numpy as np
from msgspec import Struct

from afflux.aggregation.admission import Admission, ClientError
from afflux.aggregation.arrivals import Pushed
from afflux.aggregation.frames import clear_stored_frames
from afflux.aggregation.plane import Slot
from afflux.aggregation.reports import Opened, Pulled, Receipt
from afflux.aggregation.streaming import MOST_SQUARES
from afflux.arrays.modules import is_module, is_state_dict
from afflux.ops import Conversion, Kind
from afflux.ops.errors import AffluxError, BusyError, PlaneError, StoreError, UnavailableError
from afflux.ops.validation import (
    as_float,
    as_int,
    as_text,
    brief,
    count_of,
    integer,
    is_from_signal,
    loss_of,
    plain_id,
    positive,
    shortened,
)
from afflux.rules.rule import ClientId, Facts
from afflux.server import versions
from afflux.server.aggregator import Aggregator
from afflux.server.arrival_facts import facts_of
from afflux.server.checkout import Task
from afflux.server.decisions import count_without_arrival
from afflux.server.inputs import A_KIND, InputAdapter, overflow
from afflux.server.pending_push import NoArrival, TaskClosedError, Ticket, add_joined
from afflux.server.tracebacks import clear_tracebacks


class PushCall(Struct):
    """The arguments of a push."""

    task: "Task | str | None" = None
    client: ClientId | None = None
    version: "int | Pulled | None" = None
    update: Any = None
    gradient: Any = None
    model: Any = None
    num_examples: int = 1
    loss: float | None = None
    facts: Mapping[str, float] | None = None
    client_lr: float | None = None
    local_steps: int | None = None
    buffers: Any = None
    timeout: float | None = None
    staleness: int | None = None


def receive(aggregator: Aggregator, adapter: InputAdapter, ticket: Ticket) -> Receipt:
    """Take in the vector of a push, unless the ticket has the facts of the push, and let the arrival join."""
    pushed = ticket.pushed
    try:
        if pushed is None:
            pushed = take_in(aggregator, adapter, ticket)
        if isinstance(pushed, NoArrival):
            return _no_arrival(aggregator, ticket, pushed)
        return aggregator.join(pushed, ticket)
    except TaskClosedError as error:
        return _no_arrival(aggregator, ticket, NoArrival("expired", str(error), ticket.client_id, ticket.pulled))
    except Exception as error:
        clear_tracebacks(error)
        if isinstance(error, StoreError):
            add_joined(error, joined=bool(ticket.decided))
        if not ticket.decided:
            if aggregator.records_faults and (fault := fault_of(error, ticket)) is not None:
                return _no_arrival(aggregator, ticket, fault)
            aggregator.count_refused()
        raise
    except BaseException as error:
        clear_tracebacks(error)
        raise
    finally:
        # Neither on_step nor this frame, which a stored traceback keeps, may hold the slot, versions or the vector.
        pushed = ticket.call = ticket.pushed = ticket.slot = ticket.staged_row = ticket.completed = None
        ticket.decided = []
        clear_stored_frames()
        if ticket.reading:
            aggregator.reading.discard(ticket)
        aggregator.notify_waiters()
        if ticket.made_step:
            aggregator.report_steps()
            clear_stored_frames()
        del aggregator, adapter


class Request(Struct):
    """The facts of a push that were read from its arguments."""

    kind: Kind  #: of the vector
    vector: Any
    subject: str  #: describes the vector in messages
    client_id: ClientId
    pulled: int  #: the number of the version that the client pulled; -1 - s: it has the staleness s
    entry: Opened | None
    examples: int
    loss: float
    steps: int
    scale: float | None  #: client_lr * local_steps
    facts: Facts


#: A plain push whose vector the engine has taken: its facts, and the id of its task.
Taken = tuple[Pushed, str | None]
#: Makes a slot of arrays that are read in place: from what describes them, the arrays, and the conversion.
Lend = Callable[[str, Any, Conversion | None], Slot]


def take_in(
    aggregator: Aggregator, adapter: InputAdapter, ticket: Ticket, lend: Lend | None = None
) -> Pushed | NoArrival:
    """Check the arguments of a push, and take its vector into a slot: that of the ticket, or a new one.

    Args:
        aggregator: that of the server.
        adapter: that of the server.
        ticket: has the arguments, and gets the slot, the task, the client and the version as soon as they are known.
        lend: makes the slot from the caller's own arrays; None: they are copied.

    Returns:
        The facts of the arrival, which has not joined; or the reason why there is none.
    """
    call: PushCall = ticket.call
    request = _read(aggregator, adapter.kind, ticket, call)
    if isinstance(request, NoArrival):
        return request
    kind, vector, subject, client_id = request.kind, request.vector, request.subject, request.client_id
    parts, statistics = vector, None
    originals = list[Any]()  # the tree's own arrays
    if type(vector) is not np.ndarray or vector.shape != (adapter.size,):
        parts = adapter.parts(subject, vector, originals)
    if adapter.layout is not None and adapter.layout.apart:
        most, whose = aggregator.admission.limits.max_abs, subject.removesuffix(f" {kind}")
        statistics = adapter.buffers(whose, vector if kind == "model" else None, call.buffers, most, vector)
    if ticket.memory is not None:
        ticket.memory = adapter.memory(vector, originals, vector if kind == "model" else None, call.buffers)
    row = conversion = None
    ticket.checking = False  # until the vector is read, errors are those of the server
    if lend is None:
        if ticket.slot is None:
            ticket.slot = aggregator.take_slot(call.timeout)
        rows = aggregator.admission.rows
        row = None if rows is None or not rows.reads_ahead else rows.prefetch(client_id)
    if kind != adapter.kind:  # only after the push has a slot: a step may wait until the base is read
        ticket.reading = True
        aggregator.reading.add(ticket)
        conversion = _conversion(aggregator, adapter.kind, call, request)
        if conversion is None:
            return NoArrival("expired", _GONE, client_id, request.pulled, request.entry)
    norm, extremes = nan, (nan, nan)
    ticket.checking = True
    if lend is not None:
        ticket.slot = lend(subject, parts, conversion)
    else:
        assert ticket.slot is not None
        beside = None if row is None else row.check
        sweep, norm = adapter.take_in(subject, parts, ticket.slot, aggregator.admission.limits, conversion, beside)
        _, squares, low, high = sweep
        extremes = (low, high)
        if squares > MOST_SQUARES and (aggregator.accumulate or aggregator.rule.needs.products):
            raise overflow(subject, sweep, "sums" if aggregator.accumulate else "inner products")
    ticket.checking = False
    if conversion is not None:
        conversion = None  # the round that this push completes may need the memory
        aggregator.reading.discard(ticket)
    if row is not None:  # the row was read while the vector was copied
        ticket.staged_row = row.finish()
    facts = request.steps, request.facts
    return client_id, request.pulled, request.examples, request.loss, norm, ticket.slot, statistics, extremes, *facts


def _read(aggregator: Aggregator, kind: Kind, ticket: Ticket, call: PushCall) -> Request | NoArrival:
    """Return what the arguments of a push say; or the reason why it makes no arrival."""
    task, version, num_examples, loss = call.task, call.version, call.num_examples, call.loss
    argument: Kind = "update"
    vector = call.update
    if vector is None or call.gradient is not None or call.model is not None:
        argument, vector = _only_one(vector, call.gradient, call.model, num_examples, kind)
    seconds = 0.0 if call.timeout is None else as_float(call.timeout)
    if seconds is None or not seconds >= 0:
        raise AffluxError(f"[push] timeout is {brief(call.timeout)}, must be None or a number of seconds, at least 0")
    entry = None
    if task is not None:
        ticket.task = entry = _open_task(aggregator, task, call.client, version if call.staleness is None else 0)
        if entry is None:
            return NO_TASK._replace(client_id=task.client) if isinstance(task, Task) else NO_TASK
        client_id, pulled = entry.client_id, entry.version
        ticket.client_id, ticket.pulled = client_id, pulled
    elif call.client is None or (version is None) is (call.staleness is None):
        raise CallError("[push] give task=, or client= and version= (or staleness=)")
    if argument != "model" and type(vector) is not np.ndarray and is_module(vector):
        raise CallError(f"[push] {argument}= is a module, which holds the client's params: push it as model=")
    ticket.checking = True
    if argument != "model" and is_state_dict(vector):
        raise AffluxError(
            f"[push] {argument}= is a module's state_dict, which holds the client's params: push it as model=. If "
            f"its arrays were replaced by differences, push them as a plain dict: {argument}=dict(...)"
        )
    if entry is None:
        ticket.client_id = client_id = plain_id(call.client)
        pulled = _pulled(aggregator, ticket, call)
    examples = num_examples
    if type(num_examples) is not int or not 0 < num_examples < 2**63:
        examples = _EXAMPLES("push", f"client {brief(client_id)}'s num_examples", num_examples)
    if examples == 0:
        return NoArrival("empty", "num_examples is 0", client_id, pulled, entry)
    known_loss = nan
    if loss is not None:
        known_loss = loss if type(loss) is float and -inf < loss < inf else loss_of("push", client_id, loss)
    steps = 0 if call.local_steps is None else _local_steps(client_id, call.local_steps)
    facts: Facts = ()
    if call.facts is not None or aggregator.rule.needs.facts:
        facts = facts_of(client_id, call.facts, aggregator.admission.fact_names, aggregator.rule)
    subject = f"[push] client {client_id if type(client_id) is int else brief(client_id)}'s {argument}"
    scale = None if call.client_lr is None else _scale(client_id, call.client_lr, steps)
    return Request(argument, vector, subject, client_id, pulled, entry, examples, known_loss, steps, scale, facts)


_STALENESS, _EXAMPLES, _STEPS = count_of(0), integer(0, 2**63 - 1), integer(1, 2**53 - 1)
#: A push whose task is not open.
NO_TASK = NoArrival("expired", "the task is closed, or was never opened here")
_GONE = (
    "the params of the version that it trains from are no longer held: push the task of checkout(client), which holds "
    "them (max_staleness, max_versions, hold=False and a restart without a checkpoint() give them up), or give what "
    "pull() gave as version="
)


class CallError(AffluxError):
    """An error of the caller, not of a client."""


def fault_of(error: Exception, ticket: Ticket) -> NoArrival | None:
    """Return the fault of a client of which an error tells; None if the error is not about a client's arguments."""
    servers_errors = CallError | BusyError | PlaneError | StoreError | MemoryError | OSError
    of_client = isinstance(error, ClientError) or (ticket.checking and not isinstance(error, servers_errors))
    if is_from_signal(error) or not of_client:
        return None
    text = str(error) if isinstance(error, AffluxError | UnavailableError) else f"{type(error).__name__}: {error}"
    return NoArrival("faulty", shortened(text), ticket.client_id, ticket.pulled, ticket.task)


def ticket_of(admission: Admission, push: Taken) -> Ticket:
    """Return the ticket of a push that the engine has taken."""
    pushed, task_id = push
    client_id, pulled, *_ = pushed
    task = None if task_id is None else admission.opened(task_id)
    refused = task is None and task_id is not None  # another push has closed it meanwhile
    facts = NoArrival("expired", f"[push] task {task_id} is closed", client_id, pulled) if refused else pushed
    return Ticket(pushed=facts, slot=pushed[5], task=task, client_id=client_id, pulled=pulled)


def _no_arrival(aggregator: Aggregator, ticket: Ticket, push: NoArrival) -> Receipt:
    """Count a push that makes no arrival, close its task, and return its receipt."""
    receipt = aggregator.locked(lambda: count_without_arrival(aggregator.admission, push, ticket.decided))
    aggregator.drop_watch.see(receipt.status, push.client_id, receipt.reason)
    return receipt


def _only_one(update: object, gradient: object, model: object, num_examples: object, kind: Kind) -> tuple[Kind, object]:
    """Return the kind of the given vector, and the vector. With num_examples=0 no vector is needed."""
    if update is None and model is None and gradient is not None:
        return "gradient", gradient
    if update is None and gradient is None and model is not None:
        return "model", model
    if update is None and gradient is None and as_int(num_examples) == 0:
        return kind, None
    vectors = {"update=": update, "gradient=": gradient, "model=": model}
    names = " and ".join(name for name, vector in vectors.items() if vector is not None) or "none of them"
    raise CallError(f"[push] give one of update=, gradient= and model=, not {names}")


def _pulled(aggregator: Aggregator, ticket: Ticket, call: PushCall) -> int:
    """Return the number of the version that a client without a task has pulled: -1 - s if it has the staleness s."""
    client_id, version = ticket.client_id, call.version
    if call.staleness is None:
        ticket.pulled = pulled = version if type(version) is int else _number(client_id, version)
    else:
        staleness = _STALENESS("push", f"client {brief(client_id)}'s staleness", call.staleness)
        pulled = ~staleness  # `Admission.counted` replaces it at the join
    newest = aggregator.admission.version
    if pulled > newest or (pulled < 0 and call.staleness is None):
        raise AffluxError(
            f"[push] client {brief(client_id)} says that it pulled version {brief(pulled)}; "
            f"the server has made 0 to {newest}"
        )
    return pulled


def _number(client_id: ClientId, version: object) -> int:
    """Return the number of the version of a push."""
    number = as_int(version.version if isinstance(version, Pulled) else version)
    if number is None:
        raise AffluxError(
            f"[push] client {brief(client_id)}'s version is {brief(version)}, must be an int or what pull() gave"
        )
    return number


def _open_task(aggregator: Aggregator, task: object, client: object, version: object) -> Opened | None:
    """Return the open task of a push; None if the task is not open."""
    if client is not None or version is not None:
        raise CallError(
            "[push] task= says who pushes and from which version: give no client= and version= (or staleness=)"
        )
    task_id = task.id if isinstance(task, Task) else as_text(task)
    if task_id is None:
        raise ClientError(f"[push] task is {brief(task)}, must be what checkout() gave, or its id")
    opened: Opened | None = aggregator.admission.opened(task_id)
    return opened


def held_base(
    aggregator: Aggregator, task: "Task | str | None", version: "int | Pulled | None", number: int
) -> Pulled | None:
    """Return the version that the client pulled; None if it is not held."""
    if isinstance(version, Pulled):
        return version
    if isinstance(task, Task) and task.copied is not None:
        return task.copied
    newest = aggregator.admission.current
    if newest.version == number and aggregator.inplace:  # a round may overwrite it
        newest = versions.newest(aggregator)
    return newest if newest.version == number else aggregator.admission.base(number)


def _local_steps(client_id: ClientId | None, local_steps: object) -> int:
    """Return the number of local steps of a push."""
    if type(local_steps) is int and 0 < local_steps < 2**53:
        return local_steps
    return _STEPS("push", f"client {brief(client_id)}'s local_steps", local_steps)


def _scale(client_id: ClientId | None, client_lr: object, local_steps: int) -> float | None:
    """Return client_lr * local_steps, checked; None if local_steps is 0, which means that it is not given."""
    if type(client_lr) is float and 0 < client_lr < 1e100 and local_steps:
        return client_lr * local_steps
    subject = f"client {brief(client_id)}'s client_lr"
    rate = positive("push", subject, client_lr)
    if rate * local_steps == inf:
        raise AffluxError(f"[push] {subject} * local_steps is {rate} * {brief(local_steps)}, too large")
    return rate * local_steps or None


def _conversion(aggregator: Aggregator, target: Kind, call: PushCall, request: Request) -> Conversion | None:
    """Return the conversion to the rule's kind; None if its base is not held, so that the push makes no arrival."""
    subject, kind = request.subject, request.kind
    with_base = "model" in (kind, target)
    if call.staleness is not None and with_base:
        raise CallError(f"{subject} cannot become {A_KIND[target]} with staleness=: give version= or task=")
    base = held_base(aggregator, call.task, call.version, request.pulled)
    if base is None and with_base:
        if request.entry is None and not aggregator.records_faults:
            raise AffluxError(f"{subject} needs version {request.pulled}: {_GONE}")
        return None
    if "gradient" in (kind, target) and request.scale is None:
        raise CallError(f"{subject} cannot become {A_KIND[target]} without client_lr= and local_steps=")
    params = base.params if base is not None and with_base else None
    return Conversion(kind, target, params, request.scale or 1.0)
