"""A server's state in a folder: its Zarr arrays, its index, and the steps of a commit.

    stage    new rows, the sum and the rule's vectors get slots that the last commit does not refer to
    sweep    writes these slots, and params to a new slot, as for every version
    save     checksums, with durability "power" a flush, then one SQLite transaction
    publish  clients can pull the new version

A crash at any moment does not change the last transaction, nor any data to which it refers.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from sys import float_info
from typing import Any, NamedTuple

import numpy as np
from msgspec.structs import replace

from afflux.aggregation import checkpoint as checkpoints
from afflux.aggregation.admission import Admission
from afflux.aggregation.cache.table import RowMoves, SlotCounts
from afflux.aggregation.checkpoint import Saved, scalar_facts
from afflux.aggregation.local_plane import LocalPlane
from afflux.aggregation.options import COMMITS, REPLACEABLE, Durability, ServerOptions
from afflux.aggregation.plane import DataPlane
from afflux.aggregation.reports import Opened, Pulled
from afflux.aggregation.round import Round
from afflux.aggregation.state import ServerState
from afflux.aggregation.streaming import Term
from afflux.arrays.devices import HOST
from afflux.arrays.interop import frozen
from afflux.arrays.layout import Layout
from afflux.ops.codecs import Codec, named
from afflux.ops.errors import AffluxError, StoreError
from afflux.rules.rule import ClientId, Rule
from afflux.store.commits import Transaction
from afflux.store.creation import remove_contents
from afflux.store.disk_cache import DiskCache
from afflux.store.files import refuse_irregular
from afflux.store.index import CommittedState, Index
from afflux.store.lock import Lock
from afflux.store.metadata import INDEX, damage_as_store_error, folder_of
from afflux.store.segments import Place
from afflux.store.sharded_vectors import open_vectors
from afflux.store.stored_rule import resolved_rule
from afflux.store.stored_state import WrittenLists, layout_of, list_updates, state_of, stored_arrival
from afflux.store.stored_vectors import SweptVectors, retained_places

_LOGGER = logging.getLogger("afflux")


class _Checkpoint(NamedTuple):
    """The data of a checkpoint that later commits write again, until the next checkpoint."""

    notes: str | None
    asked: Sequence[int]
    places: Mapping[int, Place]  #: of the older versions, by number
    retained: Sequence[Pulled] = ()  #: the older versions


class Store:
    """A store's folder. One process holds it until `close`."""

    committed: CommittedState | None  #: the last commit when the store was opened

    def __init__(
        self,
        path: Path,
        num_threads: int,
        plane: DataPlane | None = None,
        *,
        new: bool = False,
    ) -> None:
        """Open the store that `create_store` has made, for a server whose vectors are in `plane`, by default one like
        `LocalPlane()`.

        On the host, the server's vectors are the slots of the store; on a GPU, they are copies of the last commit. If a
        `new` store cannot be opened and has no commit, its contents are removed.

        Raises:
            StoreError: another process has the folder open, the store is damaged or of another format, or the plane
                has other shards.
        """
        self.path = folder_of(path)
        self.device = plane.device if isinstance(plane, LocalPlane) else HOST
        with ExitStack() as undo:
            self._lock, self.committed, self.closed = Lock(path), None, False
            undo.callback(self._lock.close)
            refuse_irregular(path)
            if new:
                undo.callback(lambda: None if self.committed else remove_contents(path))
            self._index = Index(path / INDEX)
            undo.callback(self._index.close)
            with damage_as_store_error(path):
                self._read(num_threads, LocalPlane() if plane is None else plane)
            undo.pop_all()

    def _read(self, num_threads: int, plane: DataPlane) -> None:
        path, facts = self.path, self._index.facts()
        self.facts: dict[str, Any] = facts["server"]  #: the facts with which a server must agree
        self.committed = self._index.committed(facts)
        #: The rule, the options, durability and commit_every of the last commit.
        self._stored_settings: dict[str, Any] = {name: facts[name] for name in ("rule", "commits", "options")}
        self._use(facts["options"] | facts["commits"])
        self._rule_was_given = False
        self._newest_rule: tuple[Rule | None, dict[str, Any]] = None, {}  # with its configuration
        self.vectors = open_vectors(path, facts, self.committed, plane, num_threads)
        self._lists: WrittenLists = {}
        self._largest_row: float = 0.0 if self.committed is None else self.committed.meta["largest_row"]
        self._checkpoint = _Checkpoint(None, [], {})
        if (last := self.committed) is not None:
            self._checkpoint = _Checkpoint(last.notes, last.meta["asked"], retained_places(last.vectors))
        #: For the checkpoint that has not ended, the counter of the index before it, and the function to call after it.
        self._begun: tuple[int, Callable[[], None]] | None = None
        codec = named(self.facts["codec"])
        self.rows = None if codec is None else self._rows(codec)

    def _rows(self, codec: Codec) -> DiskCache:
        count, high, free = (0, 0, []) if self.committed is None else self.committed.meta["rows"]
        self._index.refuse_other_count(count)
        counts, memory = SlotCounts(count, high, tuple(free)), self.vectors.rows(codec)
        return DiskCache(memory, self.facts["num_clients"], self.options["seed"], counts, self._index)

    def _use(self, options: dict[str, Any]) -> None:
        """Use these options for later commits."""
        self.options = options  #: of the server
        self.durability: Durability = options["durability"]
        self.commit_every: int | None = options["commit_every"]
        self._power = self.durability == "power"
        self._index.sync_commits(self._power)

    def replace_options(self, options: ServerOptions) -> None:
        """Replace the options that `Server.open` may replace. Log what changes from the next version on."""
        before, last = self.options, self.committed
        assert last is not None
        self._use({**before, **{name: getattr(options, name) for name in (*REPLACEABLE, *COMMITS)}})
        if self._power and last.meta["durability"] != "power":
            self.vectors.flush_all()  # the commits so far were not flushed
        new = {name: value for name, value in self.options.items() if value != before[name]}
        changes = [f"{name} is {value!r}, not {before[name]!r}" for name, value in new.items()]
        if changes:
            _LOGGER.warning("[open] %s: from version %d on, %s", self.path, last.meta["version"], "; ".join(changes))

    @property
    def notes(self) -> str | None:
        """The notes of the last checkpoint."""
        return self._checkpoint.notes

    @property
    def asked(self) -> Sequence[int]:
        """The numbers of the versions that the caller has given as `keep`; other versions are retained for tasks."""
        return self._checkpoint.asked

    def committed_version(self) -> Pulled:
        """Return the version of the last commit when the store was opened."""
        last = self.committed
        assert last is not None
        buffers = None if last.buffers is None else np.frombuffer(last.buffers, np.float64)
        return Pulled(self.vectors.committed_version(), int(last.meta["version"]), buffers)

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
        self._rule_was_given = rule is not None
        return resolved_rule(self.path, rule, self._stored_settings["rule"], self.facts)

    def check(self) -> None:
        """Raise StoreError if a file has vanished or was truncated: reading it would end the process."""
        self._end_checkpoint()
        self._index.check()
        self.vectors.check()

    def prepare_sweep(self, decided: Round) -> None:
        """Map the pages that the sweep of this round writes. May be repeated."""
        self.vectors.prepare_sweep(decided.prepared)

    def save_round(self, swept: Round, admission: Admission) -> None:
        """Record a round after its sweep; commit the round if `commit_every` divides its version. May be repeated."""
        if swept.saved:  # an interrupt came before its publication
            return
        vectors = self.vectors.record_sweep(swept.prepared)
        if self.rows is not None:
            report = swept.report
            norms = [norm for norm, why in zip(report.norms.tolist(), report.rejected, strict=True) if not why]
            self._largest_row = min(max([self._largest_row, *norms]), float_info.max)  # JSON has no infinity
        version, state = swept.report.version, admission.decided_state
        if state is not None and self.commit_every is not None and version % self.commit_every == 0:
            current = Pulled(vectors.params, version, swept.buffers)
            state = replace(state, current=current, round=None, rule_vectors=vectors.rule_vectors)
            self._commit(replace(state, scalars=swept.scalars, norms=swept.norms), swept.moves, vectors)
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
            if not self.vectors.owns(version.params):
                raise AffluxError(f"[checkpoint] keep: version {version.version} is not a version of this server")
        retained = [self._in_slot(version) for version in keep]
        places = {model.version: self.vectors.params_place(model.params) for model in retained}
        try:
            self._commit(admission.state, checkpoint=_Checkpoint(notes, asked, places, retained))
        finally:
            self._end_checkpoint()

    def _in_slot(self, version: Pulled) -> Pulled:
        """Return the version itself if its params are in a slot; for a version on a GPU, return a copy in a slot."""
        params = self.vectors.in_slot(version.params)
        return version if params is version.params else Pulled(params, version.version, version.buffers)

    def _end_checkpoint(self) -> None:
        """Complete a checkpoint if its transaction was made, even if an interrupt came after the transaction.

        May be repeated.
        """
        if self._begun is not None:
            commit_counter, after_commit = self._begun
            if self._index.commit_counter != commit_counter:
                after_commit()
            self._begun = None

    def _commit(
        self,
        state: ServerState,
        moves: RowMoves | None = None,
        swept: SweptVectors | None = None,
        checkpoint: _Checkpoint | None = None,
    ) -> None:
        """Write all data that are not in their slots yet, and make the transaction.

        `moves` and `swept` are of a round that is not published yet; `state` is the state after the round.
        """
        last, newest = checkpoint or self._checkpoint, state.current.version
        now = next((model for model in last.retained if model.version == newest), None) or self._in_slot(state.current)
        rows, counts = dict[ClientId, Place](), None
        if self.rows is not None:
            rows, counts = self.rows.changed_places(moves), self.rows.counts if moves is None else moves.counts
        slots = {w.join: w.slot for w in state.waiting if not isinstance(w.slot, Term)}
        total = state.terms[0].total[0] if state.terms else None
        places = self.vectors.save(now.params, state.rule_vectors, total, slots, swept)
        if self._power:
            self.vectors.flush(places, last.places.values(), rows.values())
        meta = scalar_facts({"durability": self.durability, "largest_row": self._largest_row}, state)
        meta["retained_buffers"] = {
            model.version: model.buffers.tolist() for model in last.retained if model.buffers is not None
        }
        meta["asked"] = list(last.asked)
        if counts is not None:
            meta["rows"] = counts.clients, counts.high, [*counts.free, *counts.retired]
        retained = {f"params:{version}": place for version, place in last.places.items()}
        lists, written = list_updates(state, self._lists)
        options = {name: value for name, value in self.options.items() if name not in COMMITS}
        commits = {name: self.options[name] for name in COMMITS}
        if self._newest_rule[0] is not state.rule:  # the configuration is made once for all commits with this rule
            self._newest_rule = state.rule, state.rule.to_config()
        settings = {"rule": self._newest_rule[1], "commits": commits, "options": options}

        def after_commit() -> None:
            self._stored_settings = settings
            self.vectors.set_committed(places, [now.params, *(model.params for model in last.retained)])
            self._lists = written
            self._checkpoint = last
            if checkpoint is not None and self.rows is not None and counts is not None:
                self.rows.set_committed(counts)

        if checkpoint is not None:
            self._begun = self._index.commit_counter, after_commit
        self._index.commit(
            Transaction(
                meta,
                None if now.buffers is None else now.buffers.tobytes(),
                last.notes,
                {"params": places.params, **places.vectors, **retained},
                [stored_arrival(arrival, places.arrivals.get(arrival.join)) for arrival in state.waiting],
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
        vectors = self.vectors.committed_vectors(last.vectors["params"])
        slots = self.vectors.stacked(arrival.place for arrival in last.arrivals if arrival.place is not None)
        state = state_of(self.facts, last, vectors, slots, log=self.options["log"])
        if self._rule_was_given:  # it replaces both the rule in force and the waiting rule
            state["meta"]["next_rule"] = None
        return checkpoints.load(state, facts, admission)

    def open_tasks(self) -> list[Opened]:
        """Return the tasks that were open at the last commit.

        Raises:
            StoreError: their entries are damaged.
        """
        try:
            return checkpoints.open_tasks([] if self.committed is None else self.committed.lists["tasks"])
        except (AffluxError, TypeError, ValueError) as error:
            raise StoreError(f"[open] {self.path} is damaged: its tasks: {error}") from None

    def attach(self, state: ServerState, params: Any, retained: Sequence[Pulled]) -> ServerState:
        """Return the state of a server that continues from the last commit.

        `params` and the params of the versions in `retained` are slots of the store.
        """
        rule_vectors = {name: self.vectors.committed_vector(f"rule_vector.{name}") for name in state.rule_vectors}
        self.vectors.set_committed(None, [params])
        self._checkpoint = self._checkpoint._replace(retained=retained)
        return replace(state, rule_vectors=rule_vectors, rows=self.rows)

    def retained_versions(self, newest: Pulled) -> list[Pulled]:
        """Return the older versions that the last checkpoint has kept, in order; `newest` is that of the last commit.

        The newest one may also be kept, in the same slot.
        """
        last, versions = self.committed, list[Pulled]()
        assert last is not None
        for version, place in self._checkpoint.places.items():
            buffers = last.meta["retained_buffers"].get(str(version))
            buffers = None if buffers is None else frozen(buffers, np.float64)
            is_newest = place.slot == last.vectors["params"].slot
            versions.append(newest if is_newest else Pulled(self.vectors.committed_version(), version, buffers))
        return versions

    def close(self, *, detach: bool = False) -> None:
        """Close all files and release the lock. With `detach`, versions that are still in use do not change.

        May be repeated.
        """
        if self.closed:
            return
        if detach:
            self._checkpoint = self._checkpoint._replace(retained=())
            self.vectors.detach()
        self.vectors.close()
        self._index.close()
        self._lock.close()
        self.closed = True
