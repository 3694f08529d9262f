"""The server: pull a version of params, push what was learned from it, and every M arrivals it takes one step."""

import sys
from dataclasses import dataclass, replace
from threading import Lock
from time import perf_counter
from typing import Literal, TypeVar

import numpy as np
import numpy.typing as npt

from afflux import ops
from afflux.errors import AffluxError, UnavailableError
from afflux.rule import Arrivals, ClientId, Float64, Int64, Rule
from afflux.store import MemoryRows
from afflux.versions import Versions

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
        max_versions: at most so many versions of params exist at once, held by clients or being written; a step that
            would need one more raises, and loses nothing. At least 2; None: no limit.

    Memory: 8 d bytes for params and the version being written (and 4 d for each older version that a caller still
    holds; the memory of those that nobody holds is used again), 4 (M + 1) d for the buffer, and the rule's rows.

    Threads may push and pull as they like; pushes take turns.

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
        max_versions: int | None = None,
    ) -> None:
        if not isinstance(rule, Rule):
            raise AffluxError(f"[Server] rule is {rule!r}, must be a Rule such as afflux.rules.fedbuff()")
        size = _length("Server", "params", params)
        for name, value, least in (
            ("num_clients", num_clients, 1),
            ("num_threads", num_threads, 1),
            ("max_staleness", max_staleness, 0),
            ("max_versions", max_versions, 2),
        ):
            if value is not None and not (_is_int(value) and value >= least):
                raise AffluxError(f"[Server] {name} is {value!r}, must be an int of at least {least}")
        self.rule = rule
        self.num_threads = ops.threads(num_threads)
        self.max_staleness = max_staleness
        self.dropped = 0
        self._versions = Versions(size, max_versions)
        self._joins = 0
        self._id_type: type | None = None
        self._lock = Lock()
        self._waiting: list[_Waiting] = []
        # One slot more than the buffer holds: a push is read in full before anything waiting is given up.
        self._slots = np.empty((rule.buffer_size + 1, size), np.float32)
        self._free = list(range(rule.buffer_size + 1))
        # Cached rules hold a client once: where it waits.
        self._place: dict[ClientId, int] = {}
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
        start = self._versions.take()
        try:
            first = ops.ingest(params, start.array).first_nonfinite
        except (AffluxError, UnavailableError) as error:
            raise type(error)(f"[Server] params: {error}") from None
        if first is not None:
            raise AffluxError(f"[Server] params has a non-finite value at index {first}")
        self._current = Pulled(start.publish(), 0)

    @property
    def version(self) -> int:
        """The number of server steps done so far."""
        return self._current.version

    @property
    def params(self) -> Float32:
        """The newest params, (d,) float32, read-only."""
        return self._current.params

    @property
    def arrivals_waiting(self) -> int:
        """Arrivals in the buffer, fewer than M."""
        return len(self._waiting)

    @property
    def versions_held(self) -> int:
        """Distinct versions of params that exist now, the newest included."""
        return self._versions.held

    @property
    def rows(self) -> MemoryRows | None:
        """The cached rows, for rules that have them."""
        return self._rows

    @property
    def state_bytes(self) -> int:
        """Bytes held between pushes: params, buffer slots, cached rows and their sum."""
        return self.params.nbytes + self._slots.nbytes + (0 if self._rows is None else self._rows.nbytes)

    def pull(self) -> Pulled:
        """The newest params and their version, without a copy; never waits for a step that is being made."""
        return self._current

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
            client_id: an int64 (NumPy's or Python's) or a str, not mixed in one server.
            vector: (d,) float32 or float64: an update, a gradient or a model, as the rule's kind says.
            version: the version that the client pulled.
            num_examples: the client's number of training examples, at least 1.
            loss: its mean training loss, if known.

        Raises:
            AffluxError: a wrong id, version, length, dtype or layout, or a non-finite value; nothing has changed.
            UnavailableError: a vector on a device that this build does not serve; nothing has changed.
        """
        client_id = _plain_id(client_id)
        if not _is_int(version):
            raise AffluxError(f"[push] version is {version!r}, must be an int")
        if not (_is_int(num_examples) and 1 <= num_examples < 2**63):
            raise AffluxError(f"[push] num_examples is {num_examples!r}, must be an int of at least 1 in 64 bits")
        if not isinstance(loss, float | int | np.floating):
            raise AffluxError(f"[push] loss is {loss!r}, must be a number (NaN if unknown)")
        version, num_examples = int(version), int(num_examples)
        length = _length("push", f"client {client_id!r}'s vector", vector)
        if length != self.params.size:
            raise AffluxError(
                f"[push] client {client_id!r}'s vector has {length} elements, params has {self.params.size}"
            )
        with self._lock:
            return self._push(client_id, vector, version, num_examples, float(loss))

    def _push(self, client_id: ClientId, vector: ops.Array, version: int, num_examples: int, loss: float) -> Receipt:
        """A checked push, under the lock."""
        self._check_version(client_id, version)
        self._check_clients(client_id)
        slot = self._free[-1]
        try:
            facts = ops.ingest(vector, self._slots[slot])
        except (AffluxError, UnavailableError) as error:
            raise type(error)(f"[push] client {client_id!r}'s vector: {error}") from None
        if facts.first_nonfinite is not None:
            raise AffluxError(
                f"[push] client {client_id!r}'s {self.rule.kind} has a non-finite value at index "
                f"{facts.first_nonfinite}"
            )
        staleness = self.version - version
        if self.max_staleness is not None and staleness > self.max_staleness:
            self.dropped += 1
            return Receipt("dropped", staleness, self.version, None)

        arrival = _Waiting(client_id, version, self._joins, staleness, num_examples, loss, facts.norm, slot)
        place = self._place.get(client_id)
        report = None
        if place is not None:
            if self._waiting[place].version > version:
                return Receipt("superseded", staleness, self.version, None)
            # The count does not change, so no round can follow.
            self._free[-1] = self._waiting[place].slot
            self._waiting[place] = arrival
        elif len(self._waiting) + 1 < self.rule.buffer_size:
            self._free.pop()
            if self._rows is not None:
                self._place[client_id] = len(self._waiting)
            self._waiting.append(arrival)
        else:
            report = self._round([*self._waiting, arrival])
            self._free = list(range(len(self._slots)))
            self._waiting = []
            self._place = {}
        self._joins += 1
        self._id_type = type(client_id)
        return Receipt("joined" if place is None else "replaced", staleness, self.version, report)

    def _check_version(self, client_id: ClientId, version: int) -> None:
        if not 0 <= version <= self.version:
            raise AffluxError(
                f"[push] client {client_id!r} says that it pulled version {version}; the server has made 0 to "
                f"{self.version}"
            )

    def _check_clients(self, client_id: ClientId) -> None:
        if self._id_type not in (None, type(client_id)):
            raise AffluxError(f"[push] client_id {client_id!r} is not of the same type as the earlier ones")
        if self._rows is None or client_id in self._rows or client_id in self._place:
            return
        if len(self._rows) + len(self._place) < self._rows.num_clients:
            return  # even if all that wait are new; counting them at each push would be quadratic in M
        seen = len(self._rows) + 1
        for waiting in self._place:
            seen += waiting not in self._rows
        if seen > self._rows.num_clients:
            raise AffluxError(
                f"[push] client {client_id!r} would be number {seen}, but num_clients is {self._rows.num_clients}"
            )

    def _weights(self, arrivals: Arrivals) -> Float64:
        """The rule's weights, checked; for cached rules their sum is 1 over the arrivals that are not rejected."""
        name = self.rule.name
        weights = np.array(self.rule.weigh(arrivals), np.float64)
        if weights.shape != (len(arrivals),):
            raise AffluxError(f"[{name}] weigh gave shape {weights.shape}, the buffer holds {len(arrivals)} arrivals")
        if self.rule.calibrate.cached:
            total = 0.0
            for weight in weights:
                total = total + float(weight)
            # Weights that were divided by their sum already are one to rounding, and stay as they are.
            if total != 0 and abs(total - 1.0) > len(weights) * sys.float_info.epsilon:
                weights = weights / total
        weights.flags.writeable = False
        return weights

    def _round(self, waiting: list[_Waiting]) -> Report:
        """One server step. Raises before anything is written, or not at all."""
        start = perf_counter()
        rule = self.rule
        ordered = sorted(waiting, key=lambda w: (w.client_id, w.version, w.join))
        arrivals = _freeze(self.version, ordered)
        weights = self._weights(arrivals)
        step = rule.step(arrivals)
        params_weight = 0.0
        if rule.kind == "model":
            for weight in weights:
                params_weight = params_weight - float(weight)
        cache, rows = (
            (None, {}) if self._rows is None else self._rows.stage(arrivals.client_ids, [w != 0 for w in weights])
        )
        draft = self._versions.take()
        combine = ops.Combine([self._slots[w.slot] for w in ordered], weights, params_weight)
        signed = replace(step, lr=-step.lr) if rule.kind == "gradient" else step
        ops.apply(ops.Pass(self.params, draft.array, combine, cache, signed), num_threads=self.num_threads)
        if self._rows is not None:
            self._rows.commit(rows)
        self._current = Pulled(draft.publish(), self.version + 1)
        return Report(
            self.version,
            arrivals.client_ids,
            arrivals.staleness,
            weights,
            arrivals.norms,
            step.lr,
            perf_counter() - start,
        )


def _is_int(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


def _plain_id(client_id: object) -> ClientId:
    """A Python int or str, also from NumPy's."""
    if isinstance(client_id, str):
        return str(client_id)
    if isinstance(client_id, int | np.integer) and not isinstance(client_id, bool):
        if not -(2**63) <= client_id < 2**63:
            raise AffluxError(f"[push] client_id {client_id} does not fit into 64 bits")
        return int(client_id)
    raise AffluxError(f"[push] client_id is {client_id!r}, must be an int or a str")


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
