"""A server's state as plain arrays and JSON-able facts, and back: what is read is data, checked before it is used."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from afflux._engine import ORDER_VERSION
from afflux.errors import AffluxError
from afflux.intake import is_int, plain_id
from afflux.joins import Joins
from afflux.receipts import STATUSES, Cut, Entry, Join, Pulled, Quarantined, frozen, no_counts
from afflux.round import Waiting
from afflux.rule import ClientId, Float64
from afflux.store import MemoryRows

FORMAT = 1
#: How the elements of a slot are saved; bfloat16, which NumPy lacks, as its 16 bits.
STORED = {"float32": "float32", "float64": "float64", "bfloat16": "uint16"}

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True, eq=False)
class Saved:
    """A state that has been checked."""

    current: Pulled  #: its params are the state's array
    waiting: list[Waiting]  #: their slots are rows of the state's array
    number: int
    counts: dict[str, int]
    quarantined: list[Quarantined]
    log: list[Entry] | None
    rows: dict[ClientId, Array]  #: rows of the state's array
    sum: Array | None


def save(facts: Mapping[str, Any], current: Pulled, joins: Joins, rows: MemoryRows | None) -> dict[str, Any]:
    """`facts` say what kind of server it is."""
    waiting, log, d = joins.waiting, joins.log, current.params.size
    meta = {
        **facts,
        "format": FORMAT,
        "order_version": ORDER_VERSION,
        "version": current.version,
        "joins": joins.number,
        "counts": dict(joins.counts),
        "waiting": [[w.client_id, w.version, w.num_examples, w.join, w.staleness] for w in waiting],
        "quarantined": [[q.join, q.client_id, q.version, q.index] for q in joins.quarantined],
        "log": None if log is None else [[e.kind] if isinstance(e, Cut) else list(e[:-1]) for e in log],
        "row_ids": [] if rows is None else rows.client_ids,
    }
    arrays = {
        "params": np.array(current.params),
        "slots": _stacked([np.asarray(w.slot) for w in waiting], STORED[facts["slot_dtype"]], d),
        "losses": np.array([w.loss for w in waiting], np.float64),
        "norms": np.array([w.norm for w in waiting], np.float64),
        "log_losses": np.array([e.loss for e in log or [] if isinstance(e, Join)], np.float64),
    }
    if current.buffers is not None:
        own = [w.buffers for w in waiting if w.buffers is not None]
        arrays["buffers"] = np.array(current.buffers)
        arrays["slot_buffers"] = _stacked(own, "float64", current.buffers.size)
    if rows is not None:
        arrays["rows"] = _stacked(list(rows.arrays.values()), facts["dtype"], d)
        arrays["sum"] = rows.sum.copy()
    return {"meta": meta, "arrays": arrays}


def load(state: Mapping[str, Any], facts: Mapping[str, Any], current: Pulled, joins: Joins) -> Saved:
    """Checks a state against the server that is to take it over, which stays as it is."""
    try:
        meta, arrays = state["meta"], state["arrays"]
        for name, ours in {"format": FORMAT, "order_version": ORDER_VERSION, **facts}.items():
            if meta[name] != ours:
                _fail(f"{name} is {meta[name]!r} in the state, {ours!r} here")
        return _load(meta, _Arrays(arrays), facts, current, joins)
    except (KeyError, TypeError, AttributeError, ValueError, IndexError) as error:
        if isinstance(error, AffluxError):
            raise
        raise AffluxError(f"[load_state_dict] the state is damaged: {type(error).__name__}: {error}") from None


def _load(meta: Mapping[str, Any], arrays: "_Arrays", facts: Mapping[str, Any], current: Pulled, joins: Joins) -> Saved:
    d, count = current.params.size, len(meta["waiting"])
    if count >= joins.rule.buffer_size:
        _fail(f"{count} arrivals wait in the state, the buffer holds {joins.rule.buffer_size}")
    buffers: Float64 | None = None
    own: Sequence[Float64 | None] = [None] * count
    if current.buffers is not None:
        buffers = frozen(arrays.get("buffers", "float64", (current.buffers.size,)), np.float64)
        own = [frozen(row, np.float64) for row in arrays.get("slot_buffers", "float64", (count, buffers.size))]
    slots = arrays.get("slots", STORED[facts["slot_dtype"]], (count, d))
    losses, norms = (arrays.get(name, "float64", (count,)) for name in ("losses", "norms"))
    waiting = [
        Waiting(
            _id(who),
            _int(version),
            _int(examples),
            float(losses[i]),
            float(norms[i]),
            slots[i],
            own[i],
            _int(join),
            _int(staleness),
        )
        for i, (who, version, examples, join, staleness) in enumerate(meta["waiting"])
    ]
    rows: dict[ClientId, Array] = {}
    total = None
    if facts["num_clients"] is not None:
        ids = [_id(who) for who in meta["row_ids"]]
        if len(set(ids)) < len(ids):
            _fail("a client has two rows")
        if len(ids) > facts["num_clients"]:
            _fail(f"the state has rows of {len(ids)} clients, num_clients is {facts['num_clients']}")
        rows = dict(zip(ids, arrays.get("rows", facts["dtype"], (len(ids), d)), strict=True))
        total = arrays.get("sum", "float64", (d,))
    counts = {name: _int(meta["counts"][name]) for name in no_counts()}
    quarantined = [
        Quarantined(_int(join), _id(who), _int(version), _int(index))
        for join, who, version, index in meta["quarantined"]
    ]
    now = Pulled(arrays.get("params", facts["dtype"], (d,)), _int(meta["version"]), buffers)
    return Saved(now, waiting, _int(meta["joins"]), counts, quarantined, _log(meta, arrays), rows, total)


def _log(meta: Mapping[str, Any], arrays: "_Arrays") -> list[Entry] | None:
    if meta["log"] is None:
        return None
    losses = iter(arrays.get("log_losses", "float64", (sum(len(entry) > 1 for entry in meta["log"]),)))
    log: list[Entry] = []
    for entry in meta["log"]:
        if len(entry) == 1:
            if entry[0] not in ("flush", "discard"):
                _fail(f"the log has an unknown entry {entry[0]!r}")
            log.append(Cut(entry[0]))
            continue
        number, status, who, version, staleness, examples = entry
        if status not in STATUSES:
            _fail(f"the log has an unknown status {status!r}")
        loss = float(next(losses))
        log.append(Join(_int(number), status, _id(who), _int(version), _int(staleness), _int(examples), loss))
    return log


class _Arrays:
    """Arrays by name, each with the dtype and shape that it must have."""

    def __init__(self, arrays: Mapping[str, Any]) -> None:
        self._arrays = arrays

    def get(self, name: str, dtype: str, shape: tuple[int, ...]) -> Array:
        array = np.asarray(self._arrays[name])
        if array.dtype != dtype or array.shape != shape:
            _fail(f"{name} is {array.dtype} of shape {array.shape}, expected {dtype} of shape {shape}")
        if not name.endswith("losses"):  # NaN where a client reported none
            finite = np.isfinite(array) if array.dtype != "uint16" else (array & 0x7F80) != 0x7F80
            if not finite.all():
                _fail(f"{name} has a non-finite value at index {np.argwhere(~finite)[0].tolist()}")
        return array


def _stacked(rows: Sequence[Array], dtype: str, size: int) -> Array:
    out = np.empty((len(rows), size), dtype)
    for i, row in enumerate(rows):
        out[i] = row
    return out


def _id(value: Any) -> ClientId:
    return plain_id(value, "load_state_dict")


def _int(value: Any) -> int:
    if not is_int(value) or value < 0:
        _fail(f"{value!r} stands where a count belongs")
    return int(value)


def _fail(what: str) -> NoReturn:
    raise AffluxError(f"[load_state_dict] {what}")
