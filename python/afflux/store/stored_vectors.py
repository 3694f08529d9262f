"""A server's vectors on disk: the segments of a store's arrays, and which slots its last commit refers to.

They know no client, and commit nothing: a sweep and `save` write slots to which the last commit does not refer. After
the one transaction of `Store`, `set_committed` frees the slots that the transaction does not name.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from weakref import proxy

import numpy as np

from afflux.aggregation.local_plane import LocalPlane, LocalRound
from afflux.aggregation.plane import DataPlane
from afflux.arrays.devices import HOST, Device
from afflux.arrays.interop import bring, on_gpu
from afflux.arrays.pools import Draft, Vector, Versions, as_array
from afflux.ops.codecs import Codec
from afflux.store.checksums import NO_CHECKSUMS, SweepChecksums, crc, raise_if_damaged, sweep_checksums
from afflux.store.disk_cache import DiskRows
from afflux.store.index import CommittedState
from afflux.store.lock import promises_space
from afflux.store.segments import Place, Row, open_arrays
from afflux.store.vector_slots import ArrivalSlots, ParamsSlots, VectorSlots


class SavedPlaces(NamedTuple):
    """The places of the vectors of a commit."""

    params: Place
    vectors: Mapping[str, Place]  #: the rule's vectors, the sum of the rows, the total
    arrivals: Mapping[int, Place]  #: by the number of the join


class SweptVectors(NamedTuple):
    """The vectors that the sweep of a round has written."""

    params: Vector
    rule_vectors: Mapping[str, Vector]
    rest: Any  #: for `save`: the new rows, and the checksums that the sweep has computed

    def rule_vector(self, name: str) -> Vector:
        """Return a rule vector."""
        return self.rule_vectors[name]


def retained_places(places: Mapping[str, Place]) -> dict[int, Place]:
    """Return the places of the older versions of a commit, by number, from those of all its vectors."""
    return dict(sorted((int(name[7:]), place) for name, place in places.items() if name.startswith("params:")))


class StoredVectors:
    """The slots of one store, and the vectors of its last commit, for a server on one device."""

    def __init__(
        self,
        path: Path,
        facts: Mapping[str, Any],
        committed: CommittedState | None,
        device: Device,
        num_threads: int,
    ) -> None:
        """Open the arrays, and verify the vectors of the last commit, but not the rows.

        Raises:
            StoreError: a vector is missing or damaged.
        """
        self.device = device
        self._num_threads = num_threads
        places, slots, arrivals = {}, {}, []
        if committed is not None:
            places, slots, arrivals = committed.vectors, committed.last_slots, committed.arrivals
        arrays = self.arrays = open_arrays(path, facts, slots, mapped=promises_space(path))
        for name, place in places.items():
            raise_if_damaged(arrays[name.partition(":")[0]], place, num_threads)
        newest, retained = [places["params"]] if "params" in places else [], retained_places(places).values()
        self._params = ParamsSlots(arrays["params"], dict.fromkeys(place.slot for place in (*newest, *retained)))
        vectors = {name: array for name, array in arrays.items() if name not in ("params", "rows", "arrivals")}
        self._named = VectorSlots(vectors, {name: places[name] for name in vectors if name in places}, num_threads)
        waiting = {stored.join: stored.place for stored in arrivals if stored.place is not None}
        self._arrivals = ArrivalSlots(arrays["arrivals"], waiting, num_threads)
        self._committed_params: list[Row] = []  # of the last commit; no draft overwrites them while in use
        self._plane: LocalPlane
        self._versions: Versions  # those of the server; of one on a GPU copies of some of them, in slots of params
        self._spare_draft: Draft = None  # the next one of these copies
        self._rows: DiskRows | None = None

    def rows(self, codec: Codec) -> DiskRows:
        """Return the rows and their sum."""
        total, size = self.committed_vector("sum"), self.arrays["sum"].size
        threads = self._num_threads
        self._rows = DiskRows(
            self.arrays["rows"], self._named, total, size=size, codec=codec, device=self.device, num_threads=threads
        )
        return self._rows

    def committed_vector(self, name: str) -> Vector:
        """Return a vector of the last commit, on the server's device."""
        vector = self._named.committed_vector(name)
        return vector if self.device is HOST else self.device.moved(vector)

    def committed_vectors(self, params: Place) -> dict[str, Row]:
        """Return the vectors of the last commit, for a state; `params` is the place of its params."""
        names = [name for name in self.arrays if name.startswith(("rule_vector.", "total"))]
        vectors = {name: self._named.committed_vector(name) for name in names}
        return {**vectors, "params": self.arrays["params"].array(params.slot)}

    def stacked(self, places: Iterable[Place]) -> np.ndarray:
        """Return a copy of the vectors of arrivals, (n, d)."""
        return self._arrivals.stacked([*places])

    def use(self, plane: DataPlane) -> None:
        """Let a plane keep its versions, and the new values of its rule vectors, in these slots."""
        assert isinstance(plane, LocalPlane)  # see `open_vectors`
        self._plane = proxy(plane)  # which has methods of this object
        self._versions = plane.keep_in(self._params.allocate, self._outputs)

    def committed_version(self) -> Vector:
        """Return the next version of the last commit: the newest first, then the older ones."""
        return self._versions.finished(self._versions.take())

    def used_slots(self) -> set[int]:
        """Return the slots of the versions that are in use."""
        return self._params.used(self._versions.free)

    def draft_in(self, slot: int, op: str) -> Draft:
        """Return memory for a version in this slot, which is free, and after which no lower one is to be allocated."""
        drafts = list[Draft]()
        while self._params.slot_of(as_array(draft := self._versions.take(op))) != slot:
            drafts.append(draft)
        return draft

    def _outputs(self, rule_vectors: Mapping[str, Vector]) -> Mapping[str, Vector]:
        """Return the spare slots of these rule vectors.

        For a server on a GPU, return the rule vectors themselves, which the sweep updates in place.
        """
        if self.device is not HOST:
            spare = self._spare_draft  # a new one fails before the round is decided
            self._spare_draft = self._versions.take() if spare is None else spare
            return rule_vectors
        return {name: self._named.output(f"rule_vector.{name}", vector) for name, vector in rule_vectors.items()}

    def owns(self, params: Vector) -> bool:
        """Return whether these params, which a caller may have made, are a version of the server."""
        if self.device is not HOST:
            return self._plane.owns(params)
        return isinstance(params, np.ndarray) and self._params.owns(params)

    def in_slot(self, params: Vector) -> Any:
        """Return the params themselves if they are in a slot; of params on a GPU, return a copy in a slot."""
        if self.device is HOST or not on_gpu(params):
            return params
        draft = self._versions.take() if self._spare_draft is None else self._spare_draft
        self._spare_draft = None
        bring(params, as_array(draft))
        return self._versions.finished(draft)

    def prepare_sweep(self, prepared: Any) -> None:
        """Map the pages that the sweep of a round writes. May be repeated."""
        self._named.populate()
        if self._rows is not None:
            self._rows.populate(prepared.rows)

    def record_sweep(self, prepared: Any) -> SweptVectors:
        """Record the rows that a sweep has written. Return all vectors that it has written. May be repeated."""
        assert isinstance(prepared, LocalRound)
        checksums = NO_CHECKSUMS
        if prepared.checksums:
            checksums = sweep_checksums(prepared.sweep, prepared.checksums[-1])
        if self._rows is not None:
            self._rows.record_sweep(prepared.rows, checksums)
        return SweptVectors(as_array(prepared.draft), prepared.rule_vectors, (prepared.rows, checksums))

    def params_place(self, params: Row, checksums: SweepChecksums = NO_CHECKSUMS) -> Place:
        """Write a version to its slot, if it is not there yet, and return its place for a commit."""
        return Place(self._params.write(params), crc(params, self._num_threads, checksums))

    def save(
        self,
        params: Row,
        rule_vectors: Mapping[str, Vector],
        total: Vector | None,
        waiting: Mapping[int, Vector],
        swept: SweptVectors | None,
    ) -> SavedPlaces:
        """Write all vectors that are not in their slots yet; return the places of all, for a commit.

        `waiting` are the slots of arrivals by their join, `swept` the vectors of a round that is not published yet.
        """
        new_rows, checksums = (None, NO_CHECKSUMS) if swept is None else swept.rest
        named_vectors = {f"rule_vector.{name}": vector for name, vector in rule_vectors.items()}
        if self._rows is not None:
            out = None if new_rows is None else new_rows.sum_out
            named_vectors["sum"] = self._rows.sum if out is None else out
        if total is not None:
            named_vectors["total"] = total if on_gpu(total) else np.asarray(total)
        vectors = {name: self._named.write(name, vector, checksums) for name, vector in named_vectors.items()}
        return SavedPlaces(self.params_place(params, checksums), vectors, self._arrivals.write(waiting))

    def flush(self, places: SavedPlaces, retained: Iterable[Place], rows: Iterable[Place]) -> None:
        """Wait until these vectors are on the disk itself."""
        named = {name: [place] for name, place in places.vectors.items()}
        new = {"params": [places.params, *retained], "arrivals": places.arrivals.values(), "rows": rows, **named}
        for name, array in self.arrays.items():
            array.flush(place.slot for place in new.get(name, ()))

    def flush_all(self) -> None:
        """Wait until everything is on the disk itself."""
        for array in self.arrays.values():
            array.flush(range(0, array.slots, array.shape.per_segment))

    def set_committed(self, places: SavedPlaces | None, params: list[Row]) -> None:
        """Record that a transaction has named these places; None: those with which the store was opened.

        `params` are its versions.
        """
        if places is not None:
            self._named.set_committed(places.vectors)
            self._arrivals.set_committed(places.arrivals)
        self._committed_params = params

    def check(self) -> None:
        """Raise StoreError if a file has vanished or was truncated: reading it would end the process."""
        self._params.check()
        self._named.check()
        self._arrivals.check()

    def close(self) -> None:
        """Leave the files to other servers; the lock is the store's."""

    def detach(self) -> None:
        """Make versions that are still in use independent of the files."""
        self._committed_params, self._spare_draft = [], None
        self._params.detach(self._versions.free)
