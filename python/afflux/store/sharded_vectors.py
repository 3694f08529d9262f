"""The vectors of a server in shards, each part of them in a folder of the store: the `StoredVectors` of the parts.

A shard's folder has neither an index nor a commit. Each part has the same slots as the others: the slots of a version
are chosen here, those of rows by their table, and all others follow from the calls, which are the same for all parts.
"""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np

from afflux.aggregation.local_plane import LocalPlane
from afflux.aggregation.plane import DataPlane, NamedVectors, Slot, Vector, stored_plane
from afflux.aggregation.sharded_plane import ShardedPlane, Shards
from afflux.arrays.devices import HOST
from afflux.ops.codecs import Codec
from afflux.ops.errors import StoreError
from afflux.store.disk_cache import ShardedDiskRows
from afflux.store.index import CommittedState
from afflux.store.segments import Place, Row
from afflux.store.shards import StoredPart, joined, parts_in
from afflux.store.stored_vectors import SavedPlaces, StoredVectors, SweptVectors


class ShardedVectors:
    """The slots of one store whose vectors are in shards, and the vectors of its last commit: see `StoredVectors`."""

    def __init__(
        self, path: Path, facts: Mapping[str, Any], committed: CommittedState | None, plane: ShardedPlane, threads: int
    ) -> None:
        self._parts = parts_in(facts)
        self._plane = plane
        self._commit: tuple[SavedPlaces | None, list[Shards]] | None = None  # that not all parts have recorded yet
        self._params: list[Shards] = []  # of the last commit: they count as versions in use
        path = plane.begin(facts["server"]["d"], path)
        triples = [(path / part.folder, _facts_of(part, facts), _committed_of(part, committed)) for part in self._parts]
        folders, own_facts, commits = (Shards([*column]) for column in zip(*triples, strict=True))
        try:
            self._vectors = plane.made(_on_host, folders, own_facts, commits, threads)
        except BaseException:
            self.close()
            raise

    def _call(self, name: str, *arguments: Any) -> list[Any]:
        """Call a method of the vectors of each part."""
        return self._plane.call(name, *arguments, of=self._vectors)

    def rows(self, codec: Codec) -> ShardedDiskRows:
        return ShardedDiskRows(self._plane.objects("rows", codec, of=self._vectors), codec, self._plane, self._parts)

    def committed_vector(self, name: str) -> Shards:
        return self._plane.objects("committed_vector", name, of=self._vectors)

    def committed_vectors(self, params: Place) -> dict[str, Row]:
        parts = self._call("committed_vectors", params)
        return {name: np.concatenate([vectors[name] for vectors in parts]) for name in parts[0]}

    def stacked(self, places: Iterable[Place]) -> np.ndarray:
        return np.concatenate(self._call("stacked", [*places]), axis=1)

    def use(self, plane: DataPlane) -> None:
        """Let the plane keep its versions, and the new values of its rule vectors, in these slots."""
        self._call("use", self._plane.each_plane)
        self._plane.drafts, self._plane.check_files = self._drafts, self.check

    def _drafts(self, op: str) -> Shards:
        """Return memory for a version: the lowest slot that no part uses."""
        used_slots = set[int]().union(*self._call("used_slots"))
        slot = next(slot for slot in count() if slot not in used_slots)
        return self._plane.objects("draft_in", slot, op, of=self._vectors)

    def committed_version(self) -> Shards:
        return self._plane.counted(self._plane.objects("committed_version", of=self._vectors))

    def owns(self, params: Vector) -> bool:
        return isinstance(params, Shards) or self._plane.owns(params)

    def in_slot(self, params: Any) -> Shards:
        """Return the version whose params these are; write it to a slot again if only a caller's copy is left."""
        vector = params if isinstance(params, Shards) else self._plane.version_of(params)
        if vector is None:
            vector = self._plane.version(partial(self._plane.fill, values=params), "checkpoint")
            self._plane.remember(vector, params)
        return vector

    def prepare_sweep(self, prepared: Any) -> None:
        self._call("prepare_sweep", Shards(prepared.parts))

    def record_sweep(self, prepared: Any) -> SweptVectors:
        swept, later = self._plane.objects("record_sweep", Shards(prepared.parts), of=self._vectors), self._plane
        names = prepared.rule_vectors
        rule_vectors: dict[str, Any] = {name: later.objects_later("rule_vector", name, of=swept) for name in names}
        params = self._plane.counted(later.objects_later("params", of=swept), prepared.drafts)
        return SweptVectors(params, rule_vectors, swept)

    def params_place(self, params: Shards) -> Place:
        return joined(self._call("params_place", params))

    def save(
        self,
        params: Shards,
        rule_vectors: NamedVectors,
        total: Any,
        waiting: Mapping[int, Slot],
        swept: SweptVectors | None,
    ) -> SavedPlaces:
        if self._commit is not None:  # an interrupt came before all parts had recorded it
            self.set_committed(*self._commit)
        new = None if swept is None else swept.rest
        saved = self._call("save", params, {**rule_vectors}, total, {**waiting}, new)
        return SavedPlaces(
            joined([part.params for part in saved]),
            {name: joined([part.vectors[name] for part in saved]) for name in saved[0].vectors},
            {join: joined([part.arrivals[join] for part in saved]) for join in saved[0].arrivals},
        )

    def flush(self, places: SavedPlaces, retained: Iterable[Place], rows: Iterable[Place]) -> None:
        self._call("flush", places, [*retained], [*rows])

    def flush_all(self) -> None:
        self._call("flush_all")

    def set_committed(self, places: SavedPlaces | None, params: list[Shards]) -> None:
        self._commit = places, params
        part_places: list[SavedPlaces | None] = [None] * len(self._parts)
        if places is not None:
            arrivals = [{join: part.place(place) for join, place in places.arrivals.items()} for part in self._parts]
            part_places = [SavedPlaces(places.params, places.vectors, part_arrivals) for part_arrivals in arrivals]
        self._plane.call_later("set_committed", Shards(part_places), params, of=self._vectors)
        self._commit, self._params = None, params

    def check(self) -> None:
        self._call("check")

    def detach(self) -> None:
        self._params = []
        self._plane.detach(self._vectors)

    def close(self) -> None:
        self._plane.unlock()


def _on_host(path: Path, facts: Mapping[str, Any], committed: CommittedState | None, threads: int) -> StoredVectors:
    return StoredVectors(path, facts, committed, HOST, threads)


def _facts_of(part: StoredPart, facts: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts of a store that has only this part of each vector."""
    begins = len(part.folder)
    shapes = {name[begins:]: shape for name, shape in facts["shapes"].items() if name.startswith(part.folder)}
    return {**facts, "server": {**facts["server"], "d": part.size}, "shapes": shapes}


def _committed_of(part: StoredPart, committed: CommittedState | None) -> CommittedState | None:
    """Return a commit with the places of this part."""
    if committed is None:
        return None
    arrivals = [w if w.place is None else w._replace(place=part.place(w.place)) for w in committed.arrivals]
    vectors = {name: part.place(place) for name, place in committed.vectors.items()}
    return replace(committed, vectors=vectors, arrivals=arrivals, lists={})


def open_vectors(
    path: Path, facts: Mapping[str, Any], committed: CommittedState | None, plane: DataPlane, num_threads: int
) -> StoredVectors | ShardedVectors:
    """Open the arrays of a store for a server whose vectors are in `plane`, and verify those of the last commit.

    Raises:
        UnavailableError: a store cannot hold the vectors of such a plane.
        StoreError: the plane has other shards, or a vector is missing or damaged.
    """
    size, cuts = facts["server"]["d"], tuple(facts["server"].get("cuts", ()))
    if stored_plane(plane).cuts(size) != cuts:
        equal = ShardedPlane(len(cuts) + 1).cuts(size) == cuts
        like = f"ShardedPlane({len(cuts) + 1})" if equal else f"ShardedPlane(cuts={[*cuts]})"
        division = f"{len(cuts) + 1} shards: open it with plane={like}" if cuts else "one piece: open it without plane"
        raise StoreError(f"[open] {path} has its vectors in {division}")
    if isinstance(plane, LocalPlane):
        return StoredVectors(path, facts, committed, plane.device, num_threads)
    assert isinstance(plane, ShardedPlane)
    return ShardedVectors(path, facts, committed, plane, num_threads)
