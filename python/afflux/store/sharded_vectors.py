"""The vectors of a server in shards, each part of them in a folder of the store: the `StoredVectors` of the parts.

A shard's folder has neither an index nor a commit. Each part has the same slots as the others: the slots of a version
are chosen here, those of rows by their table, and all others follow from the calls, which are the same for all parts.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from afflux.aggregation.local_plane import LocalPlane
from afflux.aggregation.plane import DataPlane, NamedVectors, Prepared, Slot, Vector
from afflux.aggregation.sharded_plane import ShardedPlane, Shards
from afflux.aggregation.sharded_rows import ShardedRows
from afflux.arrays.devices import HOST
from afflux.ops.codecs import Codec
from afflux.ops.errors import StoreError, UnavailableError
from afflux.store.disk_cache import DiskRows, StoredRows
from afflux.store.index import CommittedState
from afflux.store.segments import Place, Row
from afflux.store.shards import StoredPart, joined, parts_in
from afflux.store.stored_vectors import SavedPlaces, StoredVectors, SweptVectors


class ShardedDiskRows(ShardedRows, StoredRows):
    """The rows of all parts on disk, by slot."""

    in_state = False

    def __init__(self, rows: Sequence[DiskRows], parts: Sequence[StoredPart]) -> None:
        super().__init__(rows, [part.begin for part in parts])
        self._rows = rows
        self._stored_parts = parts

    def _first(self, problem: Callable[[DiskRows, StoredPart], str | None]) -> str | None:
        """Return the first problem of a part."""
        problems = map(problem, self._rows, self._stored_parts)
        return next((each for each in problems if each is not None), None)

    def missing(self, slot: int) -> str | None:
        return self._first(lambda rows, _: rows.missing(slot))

    def start_read(self, place: Place) -> None:
        for rows in self._rows:
            rows.segments.prefetch(place.slot)  # `ShardedPlane.ingest` makes no check beside its sweeps

    def damage(self, place: Place) -> str | None:
        return self._first(lambda rows, part: rows.damage(part.place(place, self.codec)))

    def load(self, slot: int) -> None:
        for rows in self._rows:
            rows.load(slot)

    def checksum(self, slot: int) -> bytes:
        return b"".join(rows.checksum(slot) for rows in self._rows)

    def forget_checksums(self) -> None:
        for rows in self._rows:
            rows.forget_checksums()


class ShardedVectors:
    """The slots of one store whose vectors are in shards, and the vectors of its last commit: see `StoredVectors`."""

    def __init__(
        self, path: Path, facts: Mapping[str, Any], committed: CommittedState | None, plane: ShardedPlane, threads: int
    ) -> None:
        self._parts = parts_in(facts)
        self._plane = plane
        self._commit: tuple[SavedPlaces | None, list[Shards]] | None = None  # that not all parts have recorded yet
        self._vectors = [
            StoredVectors(path / part.folder, _facts_of(part, facts), _committed_of(part, committed), HOST, threads)
            for part in self._parts
        ]

    def _each(self, vector: Shards) -> "zip[tuple[StoredVectors, Any]]":
        return zip(self._vectors, vector.parts, strict=True)

    def rows(self, codec: Codec) -> ShardedDiskRows:
        return ShardedDiskRows([each.rows(codec) for each in self._vectors], self._parts)

    def committed_vector(self, name: str) -> Shards:
        return Shards([each.committed_vector(name) for each in self._vectors])

    def committed_vectors(self, params: Place) -> dict[str, Row]:
        parts = [each.committed_vectors(params) for each in self._vectors]
        return {name: np.concatenate([vectors[name] for vectors in parts]) for name in parts[0]}

    def stacked(self, places: Iterable[Place]) -> np.ndarray:
        slots = [*places]
        return np.concatenate([each.stacked(slots) for each in self._vectors], axis=1)

    def use(self, plane: DataPlane) -> None:
        """Let the plane keep its versions, and the new values of its rule vectors, in these slots."""
        for vectors, part in zip(self._vectors, self._plane.planes, strict=True):
            vectors.use(part)
        self._plane.drafts, self._plane.check_files = self._drafts, self.check

    def _drafts(self, op: str) -> Shards:
        """Return memory for a version: the lowest slot that no part uses."""
        used = set[int]().union(*(each.used_slots() for each in self._vectors))
        slot = next(slot for slot in count() if slot not in used)
        return Shards([each.draft_in(slot, op) for each in self._vectors])

    def committed_version(self, version: int, *, newest: bool) -> Shards:
        return Shards([each.committed_version(version, newest=newest) for each in self._vectors])

    def owns(self, params: Vector) -> bool:
        """Return True: callers have copies, which `DataPlane.is_version` knows."""
        return True

    def in_slot(self, params: Any, version: int) -> Shards:
        """Return the version whose params these are; write it to a slot again if only a caller's copy is left."""
        vector = params if isinstance(params, Shards) else self._plane.version_of(params)
        if vector is None:
            draft = self._plane.draft("checkpoint")
            self._plane.fill(draft, params)
            vector = self._plane.finish(draft, version)
            self._plane.remember(vector, params)
        return vector

    def prepare_sweep(self, prepared: Prepared) -> None:
        for each, part in self._each(prepared):
            each.prepare_sweep(part)

    def record_sweep(self, prepared: Prepared) -> SweptVectors:
        swept = [each.record_sweep(part) for each, part in self._each(prepared)]
        names = swept[0].rule_vectors
        rule_vectors = {name: Shards([part.rule_vectors[name] for part in swept]) for name in names}
        return SweptVectors(Shards([part.params for part in swept]), rule_vectors, swept)

    def params_place(self, params: Shards) -> Place:
        return joined([each.params_place(part) for each, part in self._each(params)])

    def save(
        self,
        params: Shards,
        rule_vectors: NamedVectors,
        total: Shards | None,
        waiting: Mapping[int, Slot],
        swept: SweptVectors | None,
    ) -> SavedPlaces:
        if self._commit is not None:  # an interrupt came before all parts had recorded it
            self.set_committed(*self._commit)
        saved = [
            each.save(
                params.parts[k],
                {name: vector.parts[k] for name, vector in rule_vectors.items()},
                None if total is None else total.parts[k],
                {join: slot.parts[k] for join, slot in waiting.items()},
                None if swept is None else swept.rest[k],
            )
            for k, each in enumerate(self._vectors)
        ]
        return SavedPlaces(
            joined([each.params for each in saved]),
            {name: joined([each.vectors[name] for each in saved]) for name in saved[0].vectors},
            {join: joined([each.arrivals[join] for each in saved]) for join in saved[0].arrivals},
        )

    def flush(self, places: SavedPlaces, retained: Iterable[Place], rows: Iterable[Place]) -> None:
        retained, rows = [*retained], [*rows]
        for each in self._vectors:
            each.flush(places, retained, rows)

    def flush_all(self) -> None:
        for each in self._vectors:
            each.flush_all()

    def set_committed(self, places: SavedPlaces | None, params: list[Shards]) -> None:
        self._commit = places, params
        for k, (each, part) in enumerate(zip(self._vectors, self._parts, strict=True)):
            own = None
            if places is not None:
                arrivals = {join: part.place(place) for join, place in places.arrivals.items()}
                own = SavedPlaces(places.params, places.vectors, arrivals)
            each.set_committed(own, [vector.parts[k] for vector in params])
        self._commit = None

    def check(self) -> None:
        for each in self._vectors:
            each.check()

    def detach(self) -> None:
        for each in self._vectors:
            each.detach()


def _facts_of(part: StoredPart, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of a store that has only this part of each vector."""
    begins = len(part.folder)
    shapes = {name[begins:]: shape for name, shape in facts["shapes"].items() if name.startswith(part.folder)}
    return {**facts, "server": {**facts["server"], "d": part.size}, "shapes": shapes}


def _committed_of(part: StoredPart, committed: CommittedState | None) -> CommittedState | None:
    """Return a commit with the places of this part."""
    if committed is None:
        return None
    arrivals = [
        each if each.place is None else each._replace(place=part.place(each.place)) for each in committed.arrivals
    ]
    vectors = {name: part.place(place) for name, place in committed.vectors.items()}
    return replace(committed, vectors=vectors, arrivals=arrivals)


def open_vectors(
    path: Path, facts: Mapping[str, Any], committed: CommittedState | None, plane: DataPlane, num_threads: int
) -> StoredVectors | ShardedVectors:
    """Open the arrays of a store for a server whose vectors are in `plane`, and verify those of the last commit.

    Raises:
        UnavailableError: a store cannot hold the vectors of such a plane.
        StoreError: the plane has other shards, or a vector is missing or damaged.
    """
    if not isinstance(plane, LocalPlane | ShardedPlane):
        raise UnavailableError("[Server] a store cannot hold the vectors of this plane")
    size, cuts = facts["server"]["d"], tuple(facts["server"].get("cuts", ()))
    if plane.cuts(size) != cuts:
        equal = ShardedPlane(len(cuts) + 1).cuts(size) == cuts
        like = f"ShardedPlane({len(cuts) + 1})" if equal else f"ShardedPlane(cuts={[*cuts]})"
        what = f"{len(cuts) + 1} shards: open it with plane={like}" if cuts else "one piece: open it without plane"
        raise StoreError(f"[open] {path} has its vectors in {what}")
    if isinstance(plane, LocalPlane):
        return StoredVectors(path, facts, committed, plane.device, num_threads)
    return ShardedVectors(path, facts, committed, plane, num_threads)
