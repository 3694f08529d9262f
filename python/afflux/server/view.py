"""What a server shows: params, versions, rows, counters. Nothing here changes it."""

from dataclasses import replace
from typing import Any, NoReturn, overload

from afflux import ops
from afflux.aggregation.admission import Admission
from afflux.aggregation.cache.rows import RowCache
from afflux.aggregation.reports import Entry, Params, Pulled, Quarantined
from afflux.aggregation.streaming import Streaming
from afflux.arrays.devices import HOST, Device
from afflux.arrays.layout import Layout, Tree
from afflux.arrays.pools import Slots, Vector, Versions
from afflux.ops.errors import AffluxError
from afflux.rules.rule import Rule
from afflux.server.aggregator import Rounds
from afflux.server.concurrency import Gate
from afflux.server.inputs import InputAdapter


class View:
    """The part of `Server` that only reads; its parts are made there."""

    rule: Rule
    _device: Device
    _dtype: str
    _gate: Gate
    _intake: InputAdapter
    _joins: Admission
    _rounds: Rounds
    _slots: Slots
    _streaming: Streaming | None
    _versions: Versions

    @property
    def version(self) -> int:
        """The number of server steps done so far."""
        return self._joins.book.current.version

    @property
    def params(self) -> Params:
        """The newest params, (d,), read-only; a copy if inplace."""
        return self.pull().params

    @property
    def layout(self) -> Layout | None:
        """Where the model's arrays lie in the flat vector; None for a server that was made with a flat vector."""
        return self._intake.layout

    @property
    def arrivals_waiting(self) -> int:
        """Arrivals in the buffer, fewer than M."""
        return self._joins.book.filled

    @property
    def joins(self) -> int:
        """Decisions about pushes so far: the number that the next one gets. After `open`: those in the commit."""
        return self._joins.book.number

    @property
    def counts(self) -> dict[str, int]:
        """How many pushes ended in each Status, and how many were `refused` with an error; each push counts once."""
        return dict(self._joins.book.counts)

    @property
    def quarantined(self) -> tuple[Quarantined, ...]:
        """The updates that were kept out, if the server was made with quarantine=True."""
        return tuple(self._joins.quarantined)

    @property
    def log(self) -> tuple[Entry, ...]:
        """All decisions so far, if the server was made with log=True."""
        log = self._joins.log
        if log is None:
            raise AffluxError("[log] this server keeps no log: make it with log=True")
        return tuple(log)

    @property
    def versions_held(self) -> int:
        """Distinct versions of params that exist now, the newest included."""
        return self._versions.held

    @property
    def rows(self) -> RowCache | None:
        """The cached rows, for rules that have them. Waits for a step that is being made."""
        self._gate.enter("rows")
        with self._gate.mutex:
            self._gate.settle()
            return self._joins.book.rows

    @property
    def memories(self) -> dict[str, Vector]:
        """Copies (d,) of the vectors that the rule keeps, by name: those of its weighing, then its optimizer's.

        Waits for a step that is being made.
        """
        self._enter("memories")
        with self._gate.mutex:
            self._gate.settle()
            return {name: self._device.copy(vector) for name, vector in self._joins.book.memories.items()}

    @property
    def scalars(self) -> dict[str, float]:
        """The rule's own numbers, such as WKAFL's stage, as the last finished step left them."""
        return dict(self._joins.book.scalars)

    @property
    def state_bytes(self) -> int:
        """Bytes of one version of params, M slots and those of deferred arrivals (one slot and the sum, if streaming),
        memories, and the rows and their sum so far (see the class).
        """
        book = self._joins.book
        slots = (self.rule.buffer_size + len(book.deferred())) * self._slots.slot_bytes
        if self._streaming is not None:
            slots = self._slots.slot_bytes + 8 * self._slots.size
        held = sum(vector.nbytes for vector in book.memories.values())
        return int(book.current.params.nbytes + slots + held) + (0 if book.rows is None else book.rows.nbytes)

    @overload
    def pull(self) -> Pulled: ...
    @overload
    def pull(self, *, out: "ops.Array | Tree") -> int: ...
    def pull(self, *, out: "ops.Array | Tree | None" = None) -> Pulled | int:
        """The newest params and their version; never waits for a step that is being made (unless inplace).

        Without `out` nothing is copied. With `out`, params (and buffers) are copied into it, a flat vector or a tree
        like the server's, and only the version is returned.

        >>> import numpy as np
        >>> from afflux import Server
        >>> from afflux.rules import fedbuff
        >>> model = {"weight": np.ones((2, 2), np.float32), "bias": np.zeros(2, np.float32)}
        >>> server = Server(fedbuff(), model)
        >>> mine = {"weight": np.empty((2, 2), np.float32), "bias": np.empty(2, np.float32)}
        >>> server.pull(out=mine), mine["weight"].tolist()
        (0, [[1.0, 1.0], [1.0, 1.0]])
        """
        if not self._versions.inplace:
            self._versions.refuse_damage("pull")
            now = self._joins.book.current
            if self._device.alone is not None:
                self._gate.enter_process("pull")
            if out is None:
                return now if self._device is HOST else replace(now, params=self._device.alias(now.params))
            self._gate.check()
            return self._intake.copy_out(now, out)
        self._enter("pull")
        with self._gate.mutex:
            self._gate.settle()
            now = self._joins.book.current
            if out is not None:
                return self._intake.copy_out(now, out)
            return Pulled(self._device.immutable_copy(now.params), now.version, now.buffers)

    def __repr__(self) -> str:
        return (
            f"Server({self.rule.name}, d={self._slots.size}, version={self.version}, "
            f"{self.arrivals_waiting} of {self.rule.buffer_size} arrivals)"
        )

    def __reduce__(self) -> NoReturn:
        raise AffluxError("[Server] a server is not pickled: save its state_dict(), which is plain arrays and JSON")

    def _facts(self) -> dict[str, Any]:
        """What a saved state must agree with."""
        layout, book = self.layout, self._joins.book
        return {
            "rule": self.rule.name,
            "kind": self.rule.kind,
            "d": self._slots.size,
            "dtype": self._dtype,
            "slot_dtype": self._slots.dtype,
            "num_clients": next((kept.num_clients for kept in (book.rows, book.passes) if kept is not None), None),
            "memories": list(self.rule.memories),
            "layout": None if layout is None else layout.to_json(),
        } | ({} if book.rows is None else book.rows.facts())

    def _enter(self, op: str) -> None:
        self._gate.enter(op)
        self._versions.refuse_damage(op)
