"""A server's state in a folder: its Zarr arrays, its index, and the steps of a commit.

    stage    new rows, the sum and the rule's vectors get slots that the last commit does not refer to
    sweep    writes these slots, and params to a new slot, as for every version
    save     checksums, with durability "power" a flush, then one SQLite transaction
    publish  clients can pull the new version

A crash at any moment does not change the last transaction, nor any data to which it refers.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from sys import float_info
from typing import Any, Literal, NamedTuple

import numpy as np
from msgspec.structs import replace

from afflux.aggregation import checkpoint
from afflux.aggregation.admission import Admission
from afflux.aggregation.cache.table import SlotCounts
from afflux.aggregation.checkpoint import Saved
from afflux.aggregation.local_plane import LocalPlane, LocalRound
from afflux.aggregation.options import Durability
from afflux.aggregation.plane import NamedVectors
from afflux.aggregation.reports import Opened, Pulled
from afflux.aggregation.round import Round
from afflux.aggregation.state import ServerState, after
from afflux.arrays.devices import HOST, Device
from afflux.arrays.interop import bring, frozen, on_gpu
from afflux.arrays.layout import Layout
from afflux.arrays.pools import Draft, Vector, Versions
from afflux.ops.codecs import Codec, named
from afflux.ops.errors import AffluxError, StoreError
from afflux.rules.rule import ClientId, Float64, Rule
from afflux.store.commits import Transaction
from afflux.store.creation import remove_contents
from afflux.store.disk_cache import DiskCache, DiskRows
from afflux.store.files import refuse_irregular
from afflux.store.index import CommittedState, Index
from afflux.store.lock import Lock, promises_space
from afflux.store.metadata import INDEX, damage_as_store_error, folder_of
from afflux.store.records import ArrivalSlots, GrowingLists, layout_of, state_of
from afflux.store.segments import Place, Row, open_arrays
from afflux.store.stored_rule import StoredRule
from afflux.store.vectors import (
    NO_CHECKSUMS,
    ParamsSlots,
    SweepChecksums,
    VectorSlots,
    crc,
    refuse_damage,
    sweep_checksums,
)

CommitEvery = int | Literal["as before"] | None


def _local(decided: Round) -> LocalRound:
    """Return the sweep of a round, whose vectors are slots of the store."""
    assert isinstance(decided.prepared, LocalRound)
    return decided.prepared


class _Checkpoint(NamedTuple):
    """A checkpoint that has begun, and the values to restore if its transaction fails."""

    commit_counter: int  #: the counter of the index before the checkpoint
    notes: str | None
    retained_places: dict[int, Place]
    retained: Sequence[Pulled]
    asked: Sequence[int]
    counts: SlotCounts | None  #: those of the rows that the checkpoint commits


class Store:
    """A store's folder. One process holds it until `close`."""

    committed: CommittedState | None  #: the last commit when the store was opened

    def __init__(
        self,
        path: Path,
        num_threads: int,
        durability: Durability | None = None,
        commit_every: CommitEvery = "as before",
        device: Device = HOST,
        *,
        new: bool = False,
    ) -> None:
        """Open the store that `create_store` has made, for a server on `device`.

        On the host, the server's vectors are the slots of the store; on a GPU, they are copies of the last commit. The
        next commit stores durability and commit_every. If a `new` store cannot be opened and has no commit, its
        contents are removed.

        Raises:
            StoreError: another process has the folder open, or the store is damaged or of another format.
        """
        self.path = folder_of(path)
        self._num_threads = num_threads
        self.device = device
        with ExitStack() as undo:
            self._lock, self.committed = Lock(path), None
            undo.callback(self._lock.release)
            refuse_irregular(path)
            if new:
                undo.callback(lambda: None if self.committed else remove_contents(path))
            self._index = Index(path / INDEX)
            undo.callback(self._index.close)
            with damage_as_store_error(path):
                self._read(num_threads, durability, commit_every)
            undo.pop_all()

    def _read(self, num_threads: int, durability: Durability | None, commit_every: CommitEvery) -> None:
        path, facts = self.path, self._index.facts()
        self.facts: dict[str, Any] = facts["server"]  #: the facts with which a server must agree
        self.options: dict[str, Any] = facts["options"]  #: the options of the server
        self.committed = self._index.committed(facts)
        #: The rule, durability and commit_every of the last commit; then those that the next commit stores.
        self._stored_settings: dict[str, Any] = {name: facts[name] for name in ("rule", "commits")}
        before = facts["commits"]
        self.commit_every: int | None = before["commit_every"] if commit_every == "as before" else commit_every
        self._power = (durability or before["durability"]) == "power"
        self._commits = {"durability": self.durability, "commit_every": self.commit_every}
        self._rule = StoredRule(path, facts["rule"], self.facts)
        self._index.sync_commits(self._power)
        places = self.committed.vectors if self.committed else {}
        last, codec = self.committed.last_slots if self.committed else {}, named(self.facts["codec"])
        arrays = self._arrays = open_arrays(path, facts, last, mapped=promises_space(path))
        for name, place in places.items():
            refuse_damage(arrays[name.partition(":")[0]], place, num_threads)
        if self._power and self.committed is not None and self.committed.meta["durability"] != "power":
            for array in arrays.values():  # the commits so far were not flushed
                array.flush(range(0, array.slots, array.shape.per_segment))
        retained = sorted((int(name[7:]), place) for name, place in places.items() if name.startswith("params:"))
        newest = [("", places["params"])] if "params" in places else []
        self.params = ParamsSlots(arrays["params"], dict.fromkeys(place.slot for _, place in (*newest, *retained)))
        own = {name: array for name, array in arrays.items() if name not in ("params", "rows", "arrivals")}
        self._vectors = VectorSlots(own, {name: places[name] for name in own if name in places}, num_threads)
        waiting, self._lists = self.committed.arrivals if self.committed else [], GrowingLists()
        self._arrivals = ArrivalSlots(arrays["arrivals"], waiting, num_threads)
        self._largest_row: float = 0.0 if self.committed is None else self.committed.meta["largest_row"]
        self._retained_places = dict(retained)
        self.retained: Sequence[Pulled] = []  #: older versions that the last checkpoint has kept
        #: the numbers of the versions that the caller has given as `keep`; other retained versions are held for tasks
        self.asked: Sequence[int] = self.committed.meta["asked"] if self.committed else []
        self._committed_params: list[Row] = []  # of the last commit; no draft overwrites them while in use
        self.host_versions: Versions | None = None  #: of a server on a GPU: copies of its versions, in slots of params
        self._spare_draft: Draft | None = None  # the next one of these copies
        self.notes = self.committed.notes if self.committed else None
        self._after_commit: Callable[[], None] = lambda: None  # of the last transaction that has begun
        self._checkpoint: _Checkpoint | None = None  # the checkpoint that has not ended
        self.rows = None if codec is None else self._rows(codec)

    def _rows(self, codec: Codec) -> DiskCache:
        count, high, free = (0, 0, []) if self.committed is None else self.committed.meta["rows"]
        self._index.refuse_other_count(count)
        memory = DiskRows(
            self._arrays["rows"],
            self._vectors,
            self._on_device("sum"),
            size=self.facts["d"],
            codec=codec,
            device=self.device,
            num_threads=self._num_threads,
        )
        counts = SlotCounts(count, high, tuple(free))
        return DiskCache(memory, self.facts["num_clients"], self.options["seed"], counts, self._index)

    def _on_device(self, name: str) -> Vector:
        """Return a vector of the last commit, on the server's device."""
        vector = self._vectors.committed_vector(name)
        return vector if self.device is HOST else self.device.moved(vector)

    @property
    def durability(self) -> Durability:
        """The durability of later commits."""
        return "power" if self._power else "process"

    @property
    def version(self) -> int:
        """The version of the last commit when the store was opened."""
        return int(self.committed.meta["version"]) if self.committed else 0

    @property
    def buffers(self) -> Float64 | None:
        """The model's buffers at the last commit when the store was opened."""
        own = self.committed.buffers if self.committed else None
        return None if own is None else np.frombuffer(own, np.float64)

    @property
    def layout(self) -> Layout | None:
        """The layout of params; raises StoreError if it does not fit them."""
        return layout_of(self.path, self.facts, self.committed.buffers if self.committed else None)

    def resolve_rule(self, rule: Rule | None) -> Rule:
        """Return the rule of the opened server: `rule`, or else that of the last commit.

        Raises:
            StoreError: the rule does not fit the store, or the stored one has a part that must be given.
        """
        if self.committed is None:
            raise StoreError(f"[open] {self.path} holds no server: the process that was making it has ended")
        return self._rule.resolve(rule)

    def use_versions(self, plane: LocalPlane) -> Versions:
        """Let a server keep its versions, and the new values of its rule vectors, in the slots of the store.

        Returns:
            The versions in the store: of a server on a GPU copies of some of its own.
        """
        versions = plane.keep_in(self.params.allocate, self.rule_vector_outputs)
        self.host_versions = None if plane.gpu is None else versions
        return versions

    def rule_vector_outputs(self, rule_vectors: NamedVectors) -> NamedVectors:
        """Return the spare slots of these rule vectors.

        For a server on a GPU, return the rule vectors themselves, which the sweep updates in place.
        """
        if self.host_versions is not None:
            self._spare_draft = self._spare_draft or self.host_versions.take()  # fails before the round is decided
            return rule_vectors
        return {name: self._vectors.output(f"rule_vector.{name}", vector) for name, vector in rule_vectors.items()}

    def next_durable_version(self, version: int) -> int | None:
        """Return the first version from this one on that a round commits; None: only checkpoints commit."""
        every = self.commit_every
        return None if every is None else -(-version // every) * every

    def check(self) -> None:
        """Raise StoreError if a file has vanished or was truncated: reading it would end the process."""
        self._end_checkpoint()
        self._index.check()
        self.params.check()
        self._vectors.check()
        self._arrivals.check()

    def prepare_sweep(self, decided: Round) -> None:
        """Map the pages that the sweep of this round writes. May be repeated."""
        self._vectors.populate()
        if self.rows is not None:
            self.rows.memory.populate(_local(decided).rows)

    def save_round(self, swept: Round, admission: Admission) -> None:
        """Record a round after its sweep; commit the round if `commit_every` divides its version. May be repeated."""
        if swept.saved:  # an interrupt came before its publication
            return
        made = _local(swept)
        checksums = sweep_checksums(made.sweep, made.checksums[-1]) if made.checksums else NO_CHECKSUMS
        if self.rows is not None:
            self.rows.memory.record_sweep(made.rows, checksums)
            report = swept.report
            norms = [norm for norm, why in zip(report.norms.tolist(), report.rejected, strict=True) if not why]
            self._largest_row = min(max([self._largest_row, *norms]), float_info.max)  # JSON has no infinity
        version, state = swept.report.version, admission.state.decided_state
        if state is not None and self.commit_every is not None and version % self.commit_every == 0:
            current = Pulled(made.draft.array, version, swept.buffers)
            self._commit(after(state, current, made.rule_vectors, swept), admission, swept, checksums)
            if (moves := swept.moves) is not None:
                swept.moves = moves._replace(committed=True)
        swept.saved = True

    def checkpoint(
        self, admission: Admission, notes: str | None = None, keep: Sequence[Pulled] = (), asked: Sequence[int] = ()
    ) -> None:
        """Commit all decisions, including the arrivals in the buffer. All decided rounds must be complete.

        The store keeps the notes and the older versions in `keep` until the next checkpoint.
        """
        for version in keep:
            if self.host_versions is None and not self.params.owns(version.params):
                raise AffluxError(f"[checkpoint] keep: version {version.version} is not a version of this server")
        counts = None if self.rows is None else self.rows.counts
        before = self.notes, self._retained_places, self.retained, self.asked
        self._checkpoint = _Checkpoint(self._index.commit_counter, *before, counts)
        try:
            self.notes, self.retained = notes, [self._in_slot(version) for version in keep]
            self.asked = asked
            self._retained_places = {
                each.version: Place(self.params.write(each.params), crc(each.params, self._num_threads))
                for each in self.retained
            }
            self._commit(admission.state, admission)
        finally:
            self._end_checkpoint()

    def _in_slot(self, version: Pulled) -> Pulled:
        """Return the version itself if its params are in a slot; for a version on a GPU, return a copy in a slot."""
        if self.host_versions is None or not on_gpu(version.params):
            return version
        draft, self._spare_draft = self._spare_draft or self.host_versions.take(), None
        bring(version.params, draft.array)
        return Pulled(self.host_versions.finished(draft, version.version), version.version, version.buffers)

    def _end_checkpoint(self) -> None:
        """Complete a checkpoint if its transaction was made, even if an interrupt came after the transaction; else undo
        it.

        May be repeated.
        """
        begun = self._checkpoint
        if begun is None:
            return
        if self._index.commit_counter == begun.commit_counter:
            self.notes, self._retained_places = begun.notes, begun.retained_places
            self.retained, self.asked = begun.retained, begun.asked
        else:
            self._after_commit()
            if self.rows is not None and begun.counts is not None:
                self.rows.set_committed(begun.counts)
        self._checkpoint = None

    def _commit(
        self,
        state: ServerState,
        admission: Admission,
        swept: Round | None = None,
        checksums: SweepChecksums = NO_CHECKSUMS,
    ) -> None:
        """Write all data that are not in their slots yet, and make the transaction.

        `swept` is a round that is not published yet; `state` is the state after the round.
        """
        newest = state.current.version
        now = next((each for each in self.retained if each.version == newest), None) or self._in_slot(state.current)
        own = {f"rule_vector.{name}": vector for name, vector in state.rule_vectors.items()}
        rows, counts = dict[ClientId, Place](), None
        if self.rows is not None:
            moves, out = (None, None) if swept is None else (swept.moves, _local(swept).rows.sum_out)
            rows, counts = self.rows.changed_places(moves), self.rows.counts if moves is None else moves.counts
            own["sum"] = self.rows.memory.sum if out is None else out
        if state.total is not None:
            total = state.total.vectors[0]
            own["total"] = total if on_gpu(total) else np.asarray(total)
        vectors = {name: self._vectors.write(name, vector, checksums) for name, vector in own.items()}
        params = Place(self.params.write(now.params), crc(now.params, self._num_threads, checksums))
        retained = {f"params:{version}": place for version, place in self._retained_places.items()}
        arrivals = self._arrivals.write([*state.arrivals(), *state.deferred()])
        if self._power:
            self.params.flush([params.slot, *(place.slot for place in retained.values())])
            self._vectors.flush(vectors)
            self._arrivals.flush(arrivals)
            if rows:
                self._arrays["rows"].flush(place.slot for place in rows.values())
        meta = checkpoint.scalar_facts({"durability": self.durability, "largest_row": self._largest_row}, state)
        meta["retained_buffers"] = {
            each.version: each.buffers.tolist() for each in self.retained if each.buffers is not None
        }
        meta["asked"] = list(self.asked)
        if counts is not None:
            meta["rows"] = counts.clients, counts.high, [*counts.free, *counts.retired]
        lists, written = self._lists.updates(state, admission)
        settings = {"rule": self._rule.config(state.rule), "commits": self._commits}

        def after_commit() -> None:
            self._stored_settings = settings
            self._vectors.set_committed(vectors)
            self._arrivals.set_committed(arrivals)
            self._committed_params = [now.params, *(each.params for each in self.retained)]
            self._lists.set_committed(written)

        self._after_commit = after_commit
        self._index.commit(
            Transaction(
                meta,
                None if now.buffers is None else now.buffers.tobytes(),
                self.notes,
                {"params": params, **vectors, **retained},
                arrivals,
                rows,
                lists,
                facts={name: value for name, value in settings.items() if value != self._stored_settings[name]},
            )
        )
        after_commit()

    def load(self, facts: Mapping[str, Any], admission: Admission) -> Saved:
        """Return the last commit, checked for a server with these facts."""
        last = self.committed
        assert last is not None
        names = [name for name in self._arrays if name.startswith(("rule_vector.", "total"))]
        vectors = {name: self._vectors.committed_vector(name) for name in names}
        vectors["params"] = self._arrays["params"].array(last.vectors["params"].slot)
        slots = self._arrivals.stacked(last.arrivals)
        state = state_of(self.facts, last, vectors, slots, log=self.options["log"])
        if self._rule.was_given:  # it replaces both the rule in force and the waiting rule
            state["meta"]["next_rule"] = None
        return checkpoint.load(state, facts, admission)

    def open_tasks(self) -> list[Opened]:
        """Return the tasks that were open at the last commit.

        Raises:
            StoreError: their entries are damaged.
        """
        try:
            return checkpoint.open_tasks([] if self.committed is None else self.committed.lists["tasks"])
        except (AffluxError, TypeError, ValueError) as error:
            raise StoreError(f"[open] {self.path} is damaged: its tasks: {error}") from None

    def attach(self, state: ServerState, params: Row, retained: Sequence[Pulled]) -> ServerState:
        """Return the state of a server that continues from the last commit.

        `params` and the params of the versions in `retained` are slots of the store.
        """
        rule_vectors = {name: self._on_device(f"rule_vector.{name}") for name in state.rule_vectors}
        self._committed_params = [params]
        self.retained = retained
        return replace(state, rule_vectors=rule_vectors, rows=self.rows)

    @property
    def retained_buffers(self) -> dict[int, Float64 | None]:
        """The older versions that the last checkpoint has kept, in order, and the model's buffers of each."""
        own = {} if self.committed is None else self.committed.meta["retained_buffers"]
        return {
            version: frozen(own[str(version)], np.float64) if str(version) in own else None
            for version in sorted(self._retained_places)
        }

    def is_newest(self, version: int) -> bool:
        """Return whether a kept version is the newest one, in the same slot."""
        last = self.committed
        return last is not None and self._retained_places[version].slot == last.vectors["params"].slot

    def close(self, versions: Versions | None = None) -> None:
        """Close all files and release the lock. Versions that are still in use do not change."""
        if versions is not None:
            versions = self.host_versions or versions
            self._committed_params, self.retained, self._spare_draft = [], [], None
            self.params.detach(versions.free)
        self._index.close()
        self._lock.release()
