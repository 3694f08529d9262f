"""A server's state as plain arrays and JSON-able facts, and back: what is read is data, checked before it is used."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import nan
from types import MappingProxyType
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from afflux._engine import ORDER_VERSION
from afflux.aggregation.admission import Admission, ServerState
from afflux.aggregation.arrivals import PendingArrival
from afflux.aggregation.cache.memory import MemoryRows
from afflux.aggregation.cache.rows import RowCache
from afflux.aggregation.participation import Participation
from afflux.aggregation.reports import STATUSES, Cut, Entry, Handed, Join, Pulled, Quarantined, no_counts
from afflux.aggregation.round import Memories
from afflux.aggregation.streaming import Term
from afflux.arrays.interop import finite, immutable_copy, on_host
from afflux.ops.errors import AffluxError
from afflux.ops.validation import is_int, plain_id
from afflux.rules.rule import ClientId, Float64, Rule, Scalars

FORMAT = 2
#: How the elements of a slot are saved; bfloat16, which NumPy lacks, as its 16 bits.
STORED = {"float32": "float32", "float64": "float64", "bfloat16": "uint16"}

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class Saved:
    """A state that has been checked."""

    version: int
    params: Array  #: the state's array
    buffers: Float64 | None
    arrivals: list[
        PendingArrival
    ]  #: those in the buffer, then those that wait for the next pass; slots are the state's rows
    filled: int  #: arrivals in the buffer
    added: int  #: arrivals in the total, the first ones in the buffer; they have no slots
    raw: list[float]  #: their raw weights
    total: Float64 | None  #: the state's array, if there are some
    rows: RowCache | None
    number: int
    counts: dict[str, int]
    id_type: type | None
    quarantined: list[Quarantined]
    log: list[Entry] | None
    memories: Memories
    handed: frozenset[str]
    scalars: Scalars
    passed: tuple[int, list[ClientId]] | None  #: N, and who has entered in this pass

    def book(self, current: Pulled, arrivals: list[PendingArrival]) -> ServerState:
        """The book that goes with it, once params and slots are in the server's own memory."""
        return ServerState(
            current=current,
            rows=self.rows,
            waiting=arrivals[: self.filled],
            filled=self.filled,
            number=self.number,
            counts=self.counts,
            quarantined=len(self.quarantined),
            logged=len(self.log or []),
            id_type=self.id_type,
            memories=self.memories,
            handed=self.handed,
            scalars=self.scalars,
            passes=None if self.passed is None else Participation.of(*self.passed, arrivals[self.filled :]),
        )


def short(facts: Mapping[str, Any], book: ServerState) -> dict[str, Any]:
    """The facts that do not grow with the number of clients or of joins."""
    total, arrivals = book.total, book.arrivals()
    added = 0 if total is None else total.added
    return {
        **facts,
        "format": FORMAT,
        "order_version": ORDER_VERSION,
        "version": book.current.version,
        "joins": book.number,
        "counts": dict(book.counts),
        "id_type": None if book.id_type is None else book.id_type.__name__,
        "filled": book.filled,
        "added": added,
        "raw": [w.slot.weight for w in arrivals[:added] if isinstance(w.slot, Term)],
        "scalars": dict(book.scalars),
        "handed": sorted(book.handed),
    }


def save(
    facts: Mapping[str, Any], book: ServerState, quarantined: Sequence[Quarantined], log: Sequence[Entry] | None
) -> dict[str, Any]:
    """`facts` say what kind of server it is. All that is decided has been made."""
    rows, current, d, total = book.rows, book.current, facts["d"], book.total
    waiting = [*book.arrivals(), *book.deferred()]
    added = 0 if total is None else total.added
    meta = {
        **short(facts, book),
        "passed": [] if book.passes is None else book.passes.order[: book.passes.entered],
        "waiting": [waiting_entry(w) for w in waiting],
        "quarantined": [quarantined_entry(q) for q in quarantined],
        "log": None if log is None else [log_entry(e) for e in log],
        "row_ids": [] if rows is None else rows.client_ids,
    }
    arrays = {
        "params": on_host(current.params, copy=True),
        "slots": _stacked([w.slot for w in waiting[added:]], STORED[facts["slot_dtype"]], d),
        "losses": np.array([w.loss for w in waiting], np.float64),
        "norms": np.array([w.norm for w in waiting], np.float64),
        "log_losses": np.array([e.loss for e in log or [] if isinstance(e, Join)], np.float64),
    }
    if current.buffers is not None:
        own = [w.buffers for w in waiting if w.buffers is not None]
        arrays["buffers"] = np.array(current.buffers)
        arrays["slot_buffers"] = _stacked(own, "float64", current.buffers.size)
    if rows is not None:
        arrays["rows"] = _stacked([*rows.values()], rows.codec.row_dtype, rows.row_size)
        arrays["sum"] = rows.saved_sum()
        if rows.codec.ranged:
            arrays["extremes"] = np.array([w.extremes for w in waiting], np.float64).reshape(len(waiting), 2)
    if total is not None:
        arrays["total"] = on_host(total.vectors[0], copy=True)
    arrays |= {f"memory.{name}": on_host(vector, copy=True) for name, vector in book.memories.items()}
    return {"meta": meta, "arrays": arrays}


def waiting_entry(w: PendingArrival) -> list[Any]:
    """An arrival without its arrays."""
    return [w.client_id, w.version, w.num_examples, w.join, w.staleness]


def quarantined_entry(q: Quarantined) -> list[Any]:
    """As JSON has it."""
    return [q.join, q.client_id, q.version, q.index]


def log_entry(entry: Entry) -> list[Any]:
    """Without the loss, which may be NaN."""
    if isinstance(entry, Join):
        return [*entry[:6], *([True] if entry.lent else [])]
    return [entry.kind] if isinstance(entry, Cut) else ["set_memory", entry.name]


def load(state: Mapping[str, Any], facts: Mapping[str, Any], joins: Admission) -> Saved:
    """Checks a state against the server that is to take it over, which stays as it is."""
    try:
        meta, arrays = state["meta"], state["arrays"]
        for name, ours in {"format": FORMAT, "order_version": ORDER_VERSION, **facts}.items():
            if meta[name] != ours:
                _fail(f"{name} is {meta[name]!r} in the state, {ours!r} here")
        return _load(meta, _Arrays(arrays), facts, joins)
    except (KeyError, TypeError, AttributeError, ValueError, IndexError, OverflowError) as error:
        if isinstance(error, AffluxError):
            raise
        raise AffluxError(f"[load_state_dict] the state is damaged: {type(error).__name__}: {error}") from None


def _load(meta: Mapping[str, Any], arrays: "_Arrays", facts: Mapping[str, Any], joins: Admission) -> Saved:
    current, d = joins.state.current, facts["d"]
    version, number, rule = _int(meta["version"]), _int(meta["joins"]), joins.rule
    ids = _Ids(meta["id_type"])
    buffers: Float64 | None = None
    own: Sequence[Float64 | None] = [None] * len(meta["waiting"])
    if current.buffers is not None:
        buffers = immutable_copy(arrays.get("buffers", "float64", (current.buffers.size,)))
        own = [immutable_copy(row) for row in arrays.get("slot_buffers", "float64", (len(own), buffers.size))]
    return Saved(
        version=version,
        params=arrays.get("params", facts["dtype"], (d,)),
        buffers=buffers,
        arrivals=_waiting(meta, arrays, facts, joins, ids, own),
        filled=_int(meta["filled"]),
        added=_added(meta),
        raw=_raw(meta),
        total=arrays.get("total", "float64", (d,)) if _added(meta) else None,
        rows=_rows(meta, arrays, d, joins, ids),
        number=number,
        counts={name: _int(meta["counts"][name]) for name in no_counts()},
        id_type=ids.type,
        quarantined=[
            Quarantined(_int(join), ids.any(who), _int(pulled), _int(index))
            for join, who, pulled, index in meta["quarantined"]
        ],
        log=_log(meta, arrays, ids),
        memories={name: arrays.get(f"memory.{name}", facts["dtype"], (d,)) for name in rule.memories},
        handed=frozenset(name for name in meta["handed"] if name in rule.needs.handed_in),
        scalars=_scalars(meta, rule),
        passed=_passed(meta, joins, ids),
    )


def _scalars(meta: Mapping[str, Any], rule: Rule) -> Scalars:
    scalars = {name: float(value) for name, value in meta["scalars"].items()}
    if set(scalars) != set(rule.needs.scalars):
        _fail(f"the rule's numbers are {sorted(scalars)} in the state, {sorted(rule.needs.scalars)} here")
    for name, value in scalars.items():
        if not np.isfinite(value):
            _fail(f"{name} is {value}")
    return MappingProxyType(scalars)


def _passed(meta: Mapping[str, Any], joins: Admission, ids: "_Ids") -> tuple[int, list[ClientId]] | None:
    """Who has entered in this pass, the buffer's clients last."""
    order, ours = [ids.joined(who) for who in meta["passed"]], joins.state.passes
    waiting = [ids.joined(who) for who, *_ in meta["waiting"][: _int(meta["filled"])]]
    most, last = (0, []) if ours is None else (ours.num_clients, order[len(order) - len(waiting) :])
    if len(set(order)) < len(order) or len(order) > most or (ours is not None and last != waiting):
        _fail(f"{len(order)} clients have entered in this pass, which cannot be")
    return None if ours is None else (ours.num_clients, order)


def _waiting(
    meta: Mapping[str, Any],
    arrays: "_Arrays",
    facts: Mapping[str, Any],
    joins: Admission,
    ids: "_Ids",
    own: Sequence[Float64 | None],
) -> list[PendingArrival]:
    count, filled = len(meta["waiting"]), _int(meta["filled"])
    if not filled <= count or (filled < count and not joins.rule.needs.passes):
        _fail(f"{filled} of {count} arrivals are in the buffer, which cannot be")
    if filled >= joins.rule.buffer_size + joins.rule.needs.passes:  # a pass may begin with a full buffer
        _fail(f"{filled} arrivals wait in the state, the buffer holds {joins.rule.buffer_size}")
    if (added := _added(meta)) > filled:
        _fail(f"{added} arrivals are in the total, {filled} in the buffer")
    slots: list[Any] = [None] * added
    losses, norms = (arrays.get(name, "float64", (count,)) for name in ("losses", "norms"))
    seen = ~np.isnan(norms[added:])
    slots += list(arrays.get("slots", STORED[facts["slot_dtype"]], (count - added, facts["d"]), seen))
    rows, extremes = joins.state.rows, [(nan, nan)] * count
    if rows is not None and rows.codec.ranged:
        extremes = [(low, high) for low, high in arrays.get("extremes", "float64", (count, 2)).tolist()]
    waiting = []
    for i, (who, version, examples, join, staleness) in enumerate(meta["waiting"]):
        if _int(version) > _int(meta["version"]) or _int(join) >= _int(meta["joins"]) or _int(examples) < 1:
            _fail(f"arrival {i} has version {version}, join {join} and {examples} examples, which cannot be")
        if i < filled and not joins.rule.needs.passes and _int(staleness) != _int(meta["version"]) - _int(version):
            _fail(f"arrival {i} has staleness {staleness} and version {version}, at version {meta['version']}")
        if np.isnan(norms[i]) and joins.copies is not None:
            _fail(f"arrival {i} was lent (copy=False), and here {joins.copies}: save after a flush() or discard()")
        if not (norms[i] >= 0 or np.isnan(norms[i])):
            _fail(f"arrival {i} has norm {norms[i]}")
        waiting.append(
            PendingArrival(
                ids.joined(who),
                _int(version),
                _int(examples),
                float(losses[i]),
                float(norms[i]),
                slots[i],
                own[i],
                extremes[i],
                _int(join),
                _int(staleness),
            )
        )
    if len({w.join for w in waiting}) < count:
        _fail("two arrivals have one join")
    if joins.duplicates != "both" and len({w.client_id for w in waiting[:filled]}) < filled:
        _fail("a client waits twice")
    return waiting


def _added(meta: Mapping[str, Any]) -> int:
    """Arrivals that have been added up; states from before there were such have none."""
    return _int(meta.get("added", 0))


def _raw(meta: Mapping[str, Any]) -> list[float]:
    raw = [float(weight) for weight in meta.get("raw", [])]
    if len(raw) != _added(meta):
        _fail(f"{len(raw)} raw weights belong to {_added(meta)} arrivals in the total")
    return raw


def _rows(meta: Mapping[str, Any], arrays: "_Arrays", d: int, joins: Admission, ids: "_Ids") -> RowCache | None:
    rows = joins.state.rows
    if not isinstance(rows, MemoryRows):  # none, or on disk, and not in the state
        return rows
    clients = [ids.joined(who) for who in meta["row_ids"]]
    if len(set(clients)) < len(clients):
        _fail("a client has two rows")
    if len(clients) > rows.num_clients:
        _fail(f"the state has rows of {len(clients)} clients, num_clients is {rows.num_clients}")
    values = arrays.get("rows", rows.codec.row_dtype, (len(clients), rows.row_size))
    return rows.loaded(dict(zip(clients, values, strict=True)), arrays.get("sum", "float64", (d,)))


def _log(meta: Mapping[str, Any], arrays: "_Arrays", ids: "_Ids") -> list[Entry] | None:
    if meta["log"] is None:
        return None
    losses = iter(arrays.get("log_losses", "float64", (sum(len(entry) > 2 for entry in meta["log"]),)))
    log: list[Entry] = []
    for entry in meta["log"]:
        if len(entry) == 1:
            if entry[0] not in ("flush", "discard"):
                _fail(f"the log has an unknown entry {entry[0]!r}")
            log.append(Cut(entry[0]))
            continue
        if len(entry) == 2:
            if entry[0] != "set_memory" or not isinstance(entry[1], str):
                _fail(f"the log has an unknown entry {entry!r}")
            log.append(Handed(entry[1]))
            continue
        number, status, who, version, staleness, examples, *lent = entry
        if status not in STATUSES:
            _fail(f"the log has an unknown status {status!r}")
        loss = float(next(losses))
        if lent not in ([], [True]):
            _fail(f"the log has an unknown entry {entry!r}")
        facts = (_int(version), _int(staleness), _int(examples), loss, bool(lent))
        log.append(Join(_int(number), status, ids.any(who), *facts))
    return log


class _Ids:
    """Client ids of one state: those that have joined are all of one type."""

    def __init__(self, name: str | None) -> None:
        self.type: type | None = {None: None, "int": int, "str": str}[name]

    def joined(self, value: Any) -> ClientId:
        if type(value) is not self.type:
            _fail(f"client_id {value!r} has joined, the others are {self.type and self.type.__name__}")
        return self.any(value)

    def any(self, value: Any) -> ClientId:
        return plain_id(value, "load_state_dict")


class _Arrays:
    """Arrays by name, each with the dtype and shape that it must have."""

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        self._arrays = arrays

    def get(self, name: str, dtype: str, shape: tuple[int, ...], seen: npt.NDArray[np.bool_] | None = None) -> Array:
        """Values must be finite, in the rows that `seen` marks if not all have been looked at."""
        array = np.asarray(self._arrays[name])
        if array.dtype != dtype or array.shape != shape:
            _fail(f"{name} is {array.dtype} of shape {array.shape}, expected {dtype} of shape {shape}")
        # A loss is NaN where a client reported none, a norm of float64 values may be infinite; so may params, memories.
        if name not in ("losses", "log_losses", "norms", "params") and not name.startswith("memory."):
            bad = ~finite(array)
            if seen is not None:
                bad &= seen[:, np.newaxis]
            if bad.any():
                _fail(f"{name} has a non-finite value at index {np.argwhere(bad)[0].tolist()}")
        return array


def _stacked(rows: Sequence[Any], dtype: str, size: int) -> Array:
    out = np.empty((len(rows), size), dtype)
    for i, row in enumerate(rows):
        out[i] = on_host(row)
    return out


def _int(value: Any) -> int:
    if not is_int(value) or not 0 <= value < 2**63:
        _fail(f"{value!r} stands where a count belongs")
    return int(value)


def _fail(what: str) -> NoReturn:
    raise AffluxError(f"[load_state_dict] {what}")
