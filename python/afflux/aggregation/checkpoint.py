"""The conversion of a server's state to plain arrays and JSON-able facts, and back. Data is checked before use."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, isfinite, nan
from string import hexdigits
from sys import float_info
from types import MappingProxyType
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from afflux._engine import ORDER_VERSION
from afflux.aggregation.admission import Admission
from afflux.aggregation.arrivals import PendingArrival
from afflux.aggregation.cache.rows import RowCache, with_rows
from afflux.aggregation.clipping import WINDOW
from afflux.aggregation.options import ABSENT
from afflux.aggregation.plane import Vector
from afflux.aggregation.reports import (
    DECISIONS,
    Closed,
    Cut,
    Entry,
    Handed,
    Join,
    NewParams,
    NoiseNonce,
    Opened,
    Pulled,
    Replaced,
    no_counts,
)
from afflux.aggregation.state import Participation, ServerState
from afflux.arrays.interop import finite, immutable_copy, is_masked, on_host
from afflux.arrays.trees import comparable
from afflux.ops.errors import AffluxError
from afflux.ops.validation import MOST_COUNT, NUMBERS, brief, is_int, plain_id
from afflux.rules.rule import EXAMPLES, ClientId, Facts, Float64, Rule, Scalars, names_of_facts
from afflux.rules.serialization import from_config
from afflux.rules.weights import LEAST_GIVEN, MOST_GIVEN

FORMAT = 5
#: The types in which elements of a slot are saved; bfloat16, which NumPy lacks, as its 16 bits.
STORED = {"float32": "float32", "float64": "float64", "bfloat16": "uint16"}

HostArray = npt.NDArray[Any]
#: The largest number of examples of a push.
_MOST_EXAMPLES = 2**63 - 1


@dataclass(frozen=True, slots=True, eq=False)
class Saved:
    """A checked state."""

    state: ServerState  #: the saved arrays are in the place of its vectors
    raw: list[float]  #: the raw weights of arrivals in the total: the first ones of the buffer, which have no slots
    total: Float64 | None  #: the state's array, if arrivals are in it


def scalar_facts(facts: Mapping[str, Any], state: ServerState) -> dict[str, Any]:
    """Return `facts`, and the facts of the state whose size does not grow with the number of clients or joins."""
    raw = [term.weight for term in state.terms]
    return {
        **facts,
        "format": FORMAT,
        "order_version": ORDER_VERSION,
        "version": state.current.version,
        "joins": state.number,
        "counts": dict(state.counts),
        "filled": state.filled,
        "added": len(raw),
        "raw": raw,
        "scalars": dict(state.scalars),
        "norms": list(state.norms),
        "handed": sorted(state.handed),
        "next_rule": None if state.next_rule is None else state.next_rule.to_config(),
    }


def arrival_record(w: PendingArrival) -> list[Any]:
    """Return [client_id, version, num_examples, loss, norm, min, max, join, staleness], JSON-able.

    The record of an arrival with local_steps or facts ends with these: local_steps, {name: value}. The largest float
    stands for the norm of a vector whose squares overflow: JSON has no infinity.
    """
    numbers = w.loss, min(w.norm, float_info.max), *w.extremes
    return [*w[:3], *map(_without_nan, numbers), w.join, w.staleness, *_reported(w)]


def log_record(entry: Entry) -> list[Any]:
    """Return the fields of a Join, or the kind and the fields of another entry, JSON-able.

    The eighth field of a Join, here False, is True in logs of afflux 0.1.0 for vectors that were not copied.
    """
    if isinstance(entry, Join):
        return [*entry[:6], _without_nan(entry.loss), False, *_reported(entry)]
    if isinstance(entry, Opened):
        return ["open", entry.task, entry.client_id, entry.version, entry.hold, entry.until, entry.lease]
    if isinstance(entry, Closed):
        return ["close", entry.task, entry.why]
    if isinstance(entry, Replaced):
        return ["replace_rule", entry.config]
    if isinstance(entry, Handed):
        return ["set_rule_vector", entry.name]
    if isinstance(entry, NewParams):
        return ["set_params"]
    if isinstance(entry, NoiseNonce):
        return ["noise", entry.nonce]
    return [entry.kind, 0, entry.joins] if entry.joins else [entry.kind]


def _reported(arrival: PendingArrival | Join) -> list[Any]:
    return [arrival.local_steps, dict(arrival.facts)] if arrival.local_steps or arrival.facts else []


def _without_nan(number: float) -> float | None:
    """Return None for NaN, else the number: JSON has no NaN, and a NaN does not equal itself."""
    return None if number != number else number


def save(facts: Mapping[str, Any], state: ServerState, read: Callable[..., HostArray]) -> dict[str, Any]:
    """Return the state as {"meta": facts, "arrays": {name: array}}.

    `facts` identify the kind of server. All decided rounds must be complete. `read` is that of the plane.
    """
    rows, current, d, terms = state.rows, state.current, facts["d"], state.terms
    slots = [read(arrival.slot, copy=False) for arrival in state.waiting[len(terms) :]]
    meta = {
        **scalar_facts(facts, state),
        "passed": [] if (entered := state.participation) is None else entered.order[: entered.entered],
        "waiting": [arrival_record(w) for w in state.waiting],
        "log": None if state.log is None else [log_record(entry) for entry in state.log[: state.logged]],
        "row_ids": [] if rows is None else rows.client_ids,
    }
    arrays = {
        "params": read(current.params),
        "slots": _stacked(slots, STORED[facts["slot_dtype"]], d),
    }
    if current.buffers is not None:
        buffer_rows = [w.buffers for w in state.waiting if w.buffers is not None]
        arrays["buffers"] = np.array(current.buffers)
        arrays["slot_buffers"] = _stacked(buffer_rows, "float64", current.buffers.size)
    if rows is not None:
        arrays["rows"] = _stacked([on_host(row) for row in rows.values()], rows.codec.row_dtype, rows.codec.row_size(d))
        arrays["sum"] = on_host(rows.memory.sum, copy=True)
    if terms:
        arrays["total"] = read(terms[0].total[0])
    arrays |= {f"rule_vector.{name}": read(vector) for name, vector in state.rule_vectors.items()}
    return {"meta": meta, "arrays": arrays}


def _stacked(rows: Sequence[Any], dtype: str, size: int) -> HostArray:
    out = np.empty((len(rows), size), dtype)
    for i, row in enumerate(rows):
        out[i] = row
    return out


def load(state: Mapping[str, Any], facts: Mapping[str, Any], admission: Admission) -> Saved:
    """Check a state against the server that will load it; the server does not change.

    Raises:
        AffluxError: the state is damaged, or of another kind of server.
    """
    try:
        return _Loader(state, facts, admission).saved()
    except (AffluxError, MemoryError):
        raise
    except Exception as error:  # a state may be any object
        raise AffluxError(f"[load_state_dict] the state is damaged: {type(error).__name__}: {error}") from error


class _Loader:
    """A reader of the parts of one state. Each part is checked against the others and against the server."""

    def __init__(self, state: Mapping[str, Any], facts: Mapping[str, Any], admission: Admission) -> None:
        meta, self._arrays = {**ABSENT, **state["meta"]}, state["arrays"]
        for name, expected in {"format": FORMAT, "order_version": ORDER_VERSION, **ABSENT, **facts}.items():
            saved = meta[name]
            if (comparable(saved) != comparable(expected)) if name == "layout" else saved != expected:
                _fail(f"{name} is {brief(saved)} in the state, {expected!r} here")
        self._meta, self._facts, self._admission = meta, facts, admission
        self._rule, self._d = admission.rule, facts["d"]
        self._version, self._number = _count(meta["version"]), _count(meta["joins"])
        self._filled, self._added = _count(meta["filled"]), _count(meta["added"])

    def saved(self) -> Saved:
        """Return the whole state."""
        meta, rule = self._meta, self._rule
        buffers: Float64 | None = None
        rows: Sequence[Float64 | None] = [None] * len(self._list("waiting"))
        before = self._admission.current.buffers
        if before is not None:
            buffers = immutable_copy(self._array("buffers", "float64", (before.size,)))
            rows = [immutable_copy(row) for row in self._array("slot_buffers", "float64", (len(rows), buffers.size))]
        log = None if meta["log"] is None else [_log_entry(record) for record in self._list("log")]
        dtype, shape = self._facts["dtype"], (self._d,)
        state = ServerState(
            current=Pulled(self._array("params", dtype, shape), self._version, buffers),
            rule=rule,
            rows=self._rows(),
            waiting=self._waiting(rows),
            number=self._number,
            counts={name: _count(meta["counts"][name]) for name in no_counts()},
            log=log,
            logged=len(log or []),
            rule_vectors={name: Vector(self._array(f"rule_vector.{name}", dtype, shape)) for name in rule.rule_vectors},
            handed=frozenset(name for name in self._list("handed") if name in rule.needs.handed_in),
            scalars=self._scalars(),
            participation=self._passed(),
            next_rule=self._next_rule(),
            norms=self._norms(),
        )
        total = self._array("total", "float64", shape) if self._added else None
        return Saved(state, self._raw(), total)

    def _array(self, name: str, dtype: str, shape: tuple[int, ...]) -> HostArray:
        """Return the array of this name. Its values must be finite."""
        if is_masked(self._arrays[name]):
            _fail(f"{name} is a masked array")
        array = np.asarray(self._arrays[name])
        if array.dtype != dtype or array.shape != shape:
            _fail(f"{name} is {array.dtype} of shape {array.shape}, expected {dtype} of shape {shape}")
        bad = ~finite(array)
        if bad.any():
            _fail(f"{name} has a non-finite value at index {np.argwhere(bad)[0].tolist()}")
        return array

    def _list(self, name: str) -> Sequence[Any]:
        """Return the list of this name. Other sequences are refused, because they may not be in memory."""
        entries = self._meta[name]
        if not isinstance(entries, list | tuple):
            _fail(f"{name} is {brief(entries)}, must be a list")
        return entries

    def _waiting(self, buffers: Sequence[Float64 | None]) -> list[PendingArrival]:
        records, filled, added = self._list("waiting"), self._filled, self._added
        count = len(records)
        if filled < count and self._rule.needs.passes:
            _fail(f"{count - filled} arrivals wait for the next pass, as in afflux 0.1.0: discard() them there")
        if filled != count:
            _fail(f"{filled} of {count} arrivals are in the buffer, which is impossible")
        if filled >= self._rule.buffer_size and not self._admission.by_flush:
            _fail(
                f"{filled} arrivals wait in the state, and the rule's buffer_size is {self._rule.buffer_size}: use the "
                "rule with which they joined, and then replace_rule() or flush()"
            )
        if added > filled:
            _fail(f"{added} arrivals are in the total, {filled} in the buffer")
        waiting = [self._arrival(i, record, row) for i, (record, row) in enumerate(zip(records, buffers, strict=True))]
        if len({w.join for w in waiting}) < count:
            _fail("two arrivals have one join")
        if self._admission.duplicates != "both" and len({w.client_id for w in waiting}) < filled:
            _fail("a client waits twice")
        slots = self._array("slots", STORED[self._facts["slot_dtype"]], (count - added, self._d))
        return [*waiting[:added], *(w._replace(slot=slot) for w, slot in zip(waiting[added:], slots, strict=True))]

    def _arrival(self, i: int, record: Sequence[Any], buffers: Float64 | None) -> PendingArrival:
        """Return an arrival without its slot."""
        client_id, version, examples, loss, norm, low, high, join, staleness, *reported = record
        version, join, staleness = map(_count, (version, join, staleness))
        examples = _count(examples, _MOST_EXAMPLES)
        if version > self._version or join >= self._number or examples < 1:
            _fail(f"arrival {i} has version {version}, join {join} and {examples} examples, which is impossible")
        if staleness != self._version - version:
            _fail(f"arrival {i} has staleness {staleness} and version {version}, at version {self._version}")
        norm = _number(norm)
        if not norm >= 0:  # NaN: of push(copy=False) of afflux 0.1.0, whose vector no push has checked
            _fail(f"arrival {i} has norm {norm}")
        extremes, slot = (_number(low), _number(high)), None
        rows = self._admission.rows
        if rows is not None and rows.codec.ranged and not all(map(isfinite, extremes)):
            _fail(f"arrival {i} has least and largest elements {low} and {high}")
        steps, facts = _steps_and_facts(reported)
        if lacking := set(self._rule.needs.facts).difference(name for name, _ in facts):
            _fail(f"arrival {i} lacks the fact {brief(min(lacking))}, by which {self._rule.name} weighs")
        most = self._rule.needs.max_staleness
        if most is not None and staleness > most:
            _fail(f"arrival {i} has staleness {staleness}, {self._rule.name} needs at most {most}")
        numbers = version, examples, _number(loss), inf if norm == float_info.max else norm
        fields: Any = *numbers, slot, buffers, extremes, steps, facts, join, staleness
        return PendingArrival(_id(client_id), *fields)

    def _raw(self) -> list[float]:
        raw = [_number(weight) for weight in self._list("raw")]
        if len(raw) != self._added:
            _fail(f"{len(raw)} raw weights belong to {self._added} arrivals in the total")
        return raw

    def _rows(self) -> RowCache | None:
        rows = self._admission.rows
        if rows is None or not rows.memory.in_state:
            return rows
        clients = [_id(client_id) for client_id in self._list("row_ids")]
        if len(set(clients)) < len(clients):
            _fail("a client has two rows")
        if len(clients) > rows.num_clients:
            _fail(f"the state has rows of {len(clients)} clients, num_clients is {rows.num_clients}")
        values = self._array("rows", rows.codec.row_dtype, (len(clients), rows.codec.row_size(self._d)))
        total = self._array("sum", "float64", (self._d,))
        if not clients and total.any():
            _fail("the sum of no rows is not zero")
        return with_rows(rows, clients, values, total)

    def _scalars(self) -> Scalars:
        scalars = {name: float(value) for name, value in self._meta["scalars"].items()}
        names = self._rule.needs.scalars
        if set(scalars) != set(names):
            _fail(f"the rule's numbers are {sorted(scalars)} in the state, {sorted(names)} here")
        for name, value in scalars.items():
            if not isfinite(value):
                _fail(f"{name} is {value}")
        return MappingProxyType(scalars)

    def _norms(self) -> tuple[float, ...]:
        norms = tuple(map(_number, self._list("norms")))
        if len(norms) > WINDOW or not all(0 <= norm < inf for norm in norms):
            _fail(f"norms are {brief(self._meta['norms'])}, must be at most {WINDOW} norms")
        return norms

    def _next_rule(self) -> Rule | None:
        config = self._meta["next_rule"]
        try:
            return None if config is None else from_config(config)
        except AffluxError as error:
            _fail(
                f"the rule that waits to replace this one cannot be made: {error}; give the rule to Server.open, or "
                "save the state after a flush() or discard()"
            )

    def _passed(self) -> Participation | None:
        """Return the clients that have entered, those of a pass with the buffer's last; None: none is counted."""
        order: list[ClientId] = [_id(client_id) for client_id in self._list("passed")]
        if self._rule.needs.participations is not None:
            return Participation(None, order, len(order))
        num_clients = self._admission.pass_clients
        waiting = [_id(client_id) for client_id, *_ in self._meta["waiting"]]
        most, last = (0, []) if num_clients is None else (num_clients, order[len(order) - len(waiting) :])
        if len(set(order)) < len(order) or len(order) > most or (num_clients is not None and last != waiting):
            _fail(f"{len(order)} clients have entered in this pass, which is impossible")
        if len(order) == num_clients and not self._admission.by_flush:
            _fail("all clients have entered in this pass, and their last round is not made: flush() before")
        return None if num_clients is None else Participation(num_clients, order, len(order))


def open_tasks(records: Iterable[Sequence[Any]]) -> list[Opened]:
    """Return the tasks that these records open and do not close."""
    tasks: dict[str, Opened] = {}
    for entry in (_log_entry(record) for record in records):
        if isinstance(entry, Opened):
            tasks[entry.task] = entry
        elif isinstance(entry, Closed):
            tasks.pop(entry.task, None)
    return [*tasks.values()]


def _log_entry(record: Sequence[Any]) -> Entry:
    match record:
        case ["flush" | "discard" | "end_pass" as kind]:
            return Cut(kind)
        case ["flush", 0, joins]:
            return Cut("flush", _count(joins))
        case ["set_rule_vector", str(name)]:
            return Handed(name)
        case ["set_params"]:
            return NewParams()
        case ["noise", str(nonce)] if len(nonce) == 24 and all(digit in hexdigits for digit in nonce):
            return NoiseNonce(nonce)
        case ["replace_rule", dict(config)]:
            return Replaced(config)
        case ["open", str(task), client_id, version, bool(hold), *times] if len(times) == 2:
            until, lease = (None if time is None else _number(time) for time in times)
            return Opened(task, _id(client_id), _count(version), hold, until, lease)
        case ["close", str(task), "pushed" | "expired" | "cancelled" as why]:
            return Closed(task, why)
        case [number, status, client_id, version, staleness, examples, loss, bool(), *reported] if status in DECISIONS:
            counts = _count(version), _count(staleness), _count(examples, _MOST_EXAMPLES)
            steps, facts = _steps_and_facts(reported)
            return Join(_count(number), status, _id(client_id), *counts, _number(loss), steps, facts)
    raise AffluxError(f"[load_state_dict] the log has an unknown entry {brief(record)}")


def _steps_and_facts(reported: Sequence[Any]) -> tuple[int, Facts]:
    """Return the end of a record, see `arrival_record`, checked."""
    if not reported:
        return 0, ()
    steps, facts = reported
    if not isinstance(facts, dict):
        _fail(f"facts are {brief(facts)}, must be numbers by name")
    names = names_of_facts("load_state_dict", "the names of facts", [*facts])
    values = [_number(facts[name]) for name in names]
    if not all(map(isfinite, values)):
        _fail(f"facts are {brief(facts)}, must be finite")
    if EXAMPLES in facts and not LEAST_GIVEN <= facts[EXAMPLES] <= MOST_GIVEN:
        _fail(f"{EXAMPLES} is {facts[EXAMPLES]}, must be from {LEAST_GIVEN:g} to {MOST_GIVEN:g}")
    return _count(steps), tuple(sorted(zip(names, values, strict=True)))


def _id(value: Any) -> ClientId:
    return plain_id(value, "load_state_dict")


def _count(value: Any, most: int = MOST_COUNT) -> int:
    if not is_int(value) or not 0 <= value <= most:
        _fail(f"{brief(value)} is not a count from 0 to {most}")
    return int(value)


def _number(value: Any) -> float:
    """Return the number as a float; NaN for None, because JSON has no NaN."""
    if value is not None and not (isinstance(value, NUMBERS) and -inf < value < inf):
        _fail(f"{brief(value)} is not a finite number")
    return nan if value is None else float(value)


def _fail(problem: str) -> NoReturn:
    raise AffluxError(f"[load_state_dict] {problem}")
