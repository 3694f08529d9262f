"""The server: pull a version of params, push what was learned from it, and every M arrivals it takes one step."""

from dataclasses import dataclass, replace
from time import perf_counter
from typing import Literal, TypeVar

import numpy as np
import numpy.typing as npt

from afflux import ops
from afflux.errors import AffluxError
from afflux.rule import Arrivals, ClientId, Float64, Int64, Rule
from afflux.store import MemoryRows

Float32 = npt.NDArray[np.float32]
_Number = TypeVar("_Number", np.int64, np.float64)


@dataclass(frozen=True, slots=True)
class Pulled:
    """One version of params. The array is read-only and never changes, however long it is held."""

    params: Float32
    version: int


@dataclass(frozen=True, slots=True)
class Report:
    """One server step: what went in and with which weight."""

    version: int  #: the version that the step made
    client_ids: tuple[ClientId, ...]
    staleness: Int64  #: (M,)
    weights: Float64  #: (M,)
    norms: Float64  #: (M,)
    server_lr: float
    seconds: float  #: weigh and apply


@dataclass(frozen=True, slots=True)
class Receipt:
    """What became of a push.

    joined      it is in the buffer, or in the round of `report`
    replaced    likewise, in the place of an earlier arrival of the same client (cached rules)
    superseded  the buffer already holds an arrival of this client from a newer version (cached rules)
    dropped     older than max_staleness
    """

    status: Literal["joined", "replaced", "superseded", "dropped"]
    staleness: int
    version: int  #: the server's version after this push
    report: Report | None  #: not None if this push completed a round


@dataclass(frozen=True, slots=True)
class _Waiting:
    """An arrival in the buffer."""

    client_id: ClientId
    version: int
    join: int
    staleness: int
    num_examples: int
    loss: float
    norm: float
    slot: int


class Server:
    """The main entry point: params, versions, and a rule applied to every M arrivals.

    Args:
        rule: an aggregation rule, for example `afflux.rules.fedbuff(buffer_size=10)`.
        params: (d,) float32, the initial model; copied.
        num_clients: N, needed by rules that cache rows.
        num_threads: threads of a server step; all CPUs of this process by default.
        max_staleness: arrivals older than this are dropped and counted; None keeps all.

    Memory: 8 d bytes for params while a step runs (and 4 d for each older version that a caller still holds),
    4 (M + 1) d for the buffer, and the rule's rows. For one thread at a time.

    >>> from afflux.rules import fedbuff
    >>> server = Server(fedbuff(buffer_size=2), np.zeros(3, np.float32))
    >>> pulled = server.pull()
    >>> server.push("ann", np.full(3, 1.0, np.float32), version=pulled.version).status
    'joined'
    >>> server.push("bob", np.full(3, 3.0, np.float32), version=pulled.version).report.version
    1
    >>> server.params.tolist()
    [2.0, 2.0, 2.0]
    """

    def __init__(
        self,
        rule: Rule,
        params: ops.Array,
        *,
        num_clients: int | None = None,
        num_threads: int | None = None,
        max_staleness: int | None = None,
    ) -> None:
        size = _length("Server", "params", params)
        self.rule = rule
        self.num_threads = num_threads or ops.default_threads()
        self.max_staleness = max_staleness
        self.dropped = 0
        self._params = np.empty(size, np.float32)
        self._version = 0
        self._joins = 0
        self._id_type: type | None = None
        self._waiting: tuple[_Waiting, ...] = ()
        # One slot more than the buffer holds: a push is read in full before anything waiting is given up.
        self._slots = np.empty((rule.buffer_size + 1, size), np.float32)
        self._rows: MemoryRows | None = None
        if rule.calibrate.cached:
            if num_clients is None:
                raise AffluxError(f"[Server] {rule.name} caches a row per client: give num_clients")
            if rule.buffer_size > num_clients:
                raise AffluxError(
                    f"[Server] buffer_size {rule.buffer_size} exceeds num_clients {num_clients}: {rule.name} takes "
                    "each client once per buffer, which would never fill"
                )
            self._rows = MemoryRows(size, num_clients)
        first = ops.ingest(params, self._params).first_nonfinite
        if first is not None:
            raise AffluxError(f"[Server] params has a non-finite value at index {first}")
        self._params.flags.writeable = False

    @property
    def version(self) -> int:
        """The number of server steps done so far."""
        return self._version

    @property
    def params(self) -> Float32:
        """The newest params, (d,) float32, read-only."""
        return self._params

    @property
    def arrivals_waiting(self) -> int:
        """Arrivals in the buffer, fewer than M."""
        return len(self._waiting)

    @property
    def rows(self) -> MemoryRows | None:
        """The cached rows, for rules that have them."""
        return self._rows

    @property
    def state_bytes(self) -> int:
        """Bytes held between pushes: params, buffer slots, cached rows and their sum."""
        return self._params.nbytes + self._slots.nbytes + (self._rows.nbytes if self._rows else 0)

    def pull(self) -> Pulled:
        """The newest params and their version, without a copy."""
        return Pulled(self._params, self._version)

    def push(
        self,
        client_id: ClientId,
        vector: ops.Array,
        *,
        version: int,
        num_examples: int = 1,
        loss: float = float("nan"),
    ) -> Receipt:
        """Hands in what a client learned; the M-th arrival makes the server step.

        Args:
            client_id: an int64 or a str, not mixed in one server.
            vector: (d,) float32 or float64: an update, a gradient or a model, as the rule's kind says.
            version: the version that the client pulled.
            num_examples: the client's number of training examples, at least 1.
            loss: its mean training loss, if known.

        Raises:
            AffluxError: a wrong id, version, length, dtype or layout, or a non-finite value; nothing has changed.
        """
        self._check(client_id, version, num_examples)
        length = _length("push", f"client {client_id!r}'s vector", vector)
        if length != self._params.size:
            raise AffluxError(
                f"[push] client {client_id!r}'s vector has {length} elements, params has {self._params.size}"
            )
        taken = {waiting.slot for waiting in self._waiting}
        slot = next(i for i in range(len(self._slots)) if i not in taken)
        try:
            facts = ops.ingest(vector, self._slots[slot])
        except AffluxError as error:
            raise AffluxError(f"[push] client {client_id!r}'s vector: {error}") from None
        if facts.first_nonfinite is not None:
            raise AffluxError(
                f"[push] client {client_id!r}'s {self.rule.kind} has a non-finite value at index "
                f"{facts.first_nonfinite}"
            )

        staleness = self._version - version
        if self.max_staleness is not None and staleness > self.max_staleness:
            self.dropped += 1
            return Receipt("dropped", staleness, self._version, None)
        arrival = _Waiting(client_id, version, self._joins, staleness, num_examples, float(loss), facts.norm, slot)
        waiting, status = self._join(arrival)
        report = None
        if len(waiting) == self.rule.buffer_size:
            report = self._round(waiting)
            waiting = ()
        self._waiting = waiting
        self._joins += 1
        self._id_type = type(client_id)
        return Receipt(status, staleness, self._version, report)

    def _check(self, client_id: ClientId, version: int, num_examples: int) -> None:
        """Everything about a push but its vector."""
        if isinstance(client_id, bool) or not isinstance(client_id, int | str):
            raise AffluxError(f"[push] client_id is {client_id!r}, must be an int or a str")
        if isinstance(client_id, int) and not -(2**63) <= client_id < 2**63:
            raise AffluxError(f"[push] client_id {client_id} does not fit into 64 bits")
        if self._id_type not in (None, type(client_id)):
            raise AffluxError(f"[push] client_id {client_id!r} is not of the same type as the earlier ones")
        if isinstance(version, bool) or not isinstance(version, int | np.integer):
            raise AffluxError(f"[push] version is {version!r}, must be an int")
        if not 0 <= version <= self._version:
            raise AffluxError(
                f"[push] client {client_id!r} says that it pulled version {version}; the server has made 0 to "
                f"{self._version}"
            )
        if isinstance(num_examples, bool) or not isinstance(num_examples, int | np.integer) or num_examples < 1:
            raise AffluxError(f"[push] num_examples is {num_examples!r}, must be an int of at least 1")
        if self._rows is not None and client_id not in self._rows:
            new = {w.client_id for w in self._waiting if w.client_id not in self._rows} | {client_id}
            if len(self._rows) + len(new) > self._rows.num_clients:
                raise AffluxError(
                    f"[push] client {client_id!r} would be number {len(self._rows) + len(new)}, but num_clients is "
                    f"{self._rows.num_clients}"
                )

    def _join(self, arrival: _Waiting) -> tuple[tuple[_Waiting, ...], Literal["joined", "replaced", "superseded"]]:
        """The buffer with the arrival in it. Rules that cache rows hold a client once, with its newest version."""
        if self._rows is not None:
            for i, other in enumerate(self._waiting):
                if other.client_id != arrival.client_id:
                    continue
                if other.version > arrival.version:
                    return self._waiting, "superseded"
                return (*self._waiting[:i], *self._waiting[i + 1 :], arrival), "replaced"
        return (*self._waiting, arrival), "joined"

    def _round(self, waiting: tuple[_Waiting, ...]) -> Report:
        """One server step. Raises before anything is written, or not at all."""
        start = perf_counter()
        rule = self.rule
        ordered = sorted(waiting, key=lambda w: (w.client_id, w.version, w.join))
        arrivals = _freeze(self._version, ordered)
        weights = np.ascontiguousarray(rule.weigh(arrivals), np.float64)
        if weights.shape != (len(ordered),):
            raise AffluxError(
                f"[{rule.name}] weigh gave shape {weights.shape}, the buffer holds {len(ordered)} arrivals"
            )
        step = rule.step(arrivals)
        params_weight = 0.0
        if rule.kind == "model":
            for weight in weights:
                params_weight = params_weight - float(weight)
        cache, rows = (None, {}) if self._rows is None else self._rows.stage(arrivals.client_ids)
        out = np.empty_like(self._params)
        combine = ops.Combine([self._slots[w.slot] for w in ordered], weights, params_weight)
        signed = replace(step, lr=-step.lr) if rule.kind == "gradient" else step
        ops.apply(ops.Pass(self._params, out, combine, cache, signed), num_threads=self.num_threads)
        if self._rows is not None:
            self._rows.commit(rows)
        out.flags.writeable = False
        self._params = out
        self._version += 1
        return Report(
            self._version,
            arrivals.client_ids,
            arrivals.staleness,
            weights,
            arrivals.norms,
            step.lr,
            perf_counter() - start,
        )


def _freeze(version: int, ordered: list[_Waiting]) -> Arrivals:
    """The rule's view of a buffer in canonical order."""
    return Arrivals(
        version,
        tuple(w.client_id for w in ordered),
        _frozen(np.array([w.version for w in ordered], np.int64)),
        _frozen(np.array([w.staleness for w in ordered], np.int64)),
        _frozen(np.array([w.num_examples for w in ordered], np.int64)),
        _frozen(np.array([w.loss for w in ordered], np.float64)),
        _frozen(np.array([w.norm for w in ordered], np.float64)),
    )


def _frozen(array: npt.NDArray[_Number]) -> npt.NDArray[_Number]:
    array.flags.writeable = False
    return array


def _length(op: str, name: str, array: ops.Array) -> int:
    shape = getattr(array, "shape", None)
    if shape is None:
        raise AffluxError(f"[{op}] {name} is a {type(array).__name__}, expected an array")
    if len(shape) != 1:
        raise AffluxError(f"[{op}] {name} has shape {tuple(shape)}, expected (d,)")
    return int(shape[0])
