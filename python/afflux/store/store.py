"""A server's folder: its Zarr arrays, its index, and the order of what a commit does.

    stage   new rows, the sum and memories get slots that the last commit does not refer to
    sweep   writes them; params go to a slot of their own, as every version does
    save    checksums, with durability "power" a flush, then one SQLite transaction
    book    the new version is what clients pull

A crash at any moment leaves the last transaction, and everything that it refers to untouched.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from afflux._engine import ORDER_VERSION
from afflux.aggregation import checkpoint
from afflux.aggregation.admission import Admission, ServerState, after
from afflux.aggregation.checkpoint import Saved
from afflux.aggregation.options import Durability, codec_of
from afflux.aggregation.reports import Pulled
from afflux.aggregation.round import Memories, Round
from afflux.arrays.devices import HOST, Device
from afflux.arrays.interop import bring, frozen, on_gpu
from afflux.arrays.layout import Layout
from afflux.arrays.pools import Draft, Vector, Versions
from afflux.ops.codecs import Codec, named
from afflux.ops.errors import AffluxError, StoreError, UnavailableError
from afflux.rules.rule import Float64, Rule
from afflux.rules.serialization import recipe_of, rule_of
from afflux.store.disk_cache import DiskCache, Staged, Table
from afflux.store.index import INDEX, Change, Committed, Index, Place, folder_of
from afflux.store.lock import LOCK, Lock, promises_space
from afflux.store.metadata import BACKUP, Shape, make_arrays, shapes_of, sync
from afflux.store.records import Arrivals, Lists, state_of
from afflux.store.segments import Row, Segments
from afflux.store.vectors import NOTHING, Fresh, ParamsSlots, Vectors, crc, fresh, refuse_damage

Every = int | Literal["as before"] | None


class Store:
    """One folder, held by one process until `close`."""

    def __init__(
        self,
        path: Path,
        num_threads: int,
        durability: Durability | None = None,
        commit_every: Every = "as before",
        device: Device = HOST,
    ) -> None:
        """Opens what `make` has made, for a server whose vectors live on `device`: in the store itself if that is the
        host; else what is committed of them is copied. What is given of durability and commit_every is kept with the
        next commit.

        Raises:
            StoreError: another process has it, or it is damaged or of another format.
        """
        self.path = folder_of(path)
        self._num_threads = num_threads
        self.device = device
        with ExitStack() as undo:
            self._lock = Lock(path)
            undo.callback(self._lock.release)
            self._index = Index(path / INDEX)
            undo.callback(self._index.close)
            self._read(num_threads, durability, commit_every)
            undo.pop_all()

    def _read(self, num_threads: int, durability: Durability | None, commit_every: Every) -> None:
        path, facts = self.path, self._index.facts()
        self.facts: dict[str, Any] = facts["server"]  #: what a server must agree with
        self.options: dict[str, Any] = facts["options"]  #: what it was made with
        #: How to go on: the rule that made the last commit, and how safe it was; and so from the next one on.
        self._told: dict[str, Any] = {name: facts[name] for name in ("rule", "commits")}
        self.committed: Committed | None = self._index.committed()
        before = self._told["commits"]
        self.commit_every: int | None = before["commit_every"] if commit_every == "as before" else commit_every
        self._power = (durability or before["durability"]) == "power"
        self._index.flush_commits(self._power)
        places = {} if self.committed is None else self.committed.vectors
        mapped = promises_space(path)
        d, codec = self.facts["d"], named(self.facts["codec"])
        sizes = {} if codec is None else {"rows": codec.row_size(d)}
        last = {} if self.committed is None else self.committed.last_slots
        arrays = {
            name: Segments(path / name, sizes.get(name, d), Shape(*shape), mapped=mapped, last=last.get(name, -1))
            for name, shape in facts["shapes"].items()
        }
        self._arrays = arrays
        self._tells = self._told | {"commits": _commits(self._durability, self.commit_every)}
        for name, place in places.items():
            refuse_damage(arrays[name.partition(":")[0]], place, num_threads)
        if self._power and self.committed is not None and self.committed.meta["durability"] != "power":
            for array in arrays.values():  # what was committed so far was not flushed
                array.flush(range(0, array.slots, array.shape.per_segment))
        kept = sorted((int(name[7:]), place) for name, place in places.items() if name.startswith("params:"))
        now = [places["params"]] if "params" in places else []
        slots = dict.fromkeys(place.slot for place in (*now, *(place for _, place in kept)))  # that of now may be kept
        self.params = ParamsSlots(arrays["params"], slots)
        self._kept = dict(kept)
        own = {name: array for name, array in arrays.items() if name not in ("params", "rows", "arrivals")}
        self._vectors = Vectors(own, {name: places[name] for name in own if name in places}, num_threads)
        self._arrivals = Arrivals(arrays["arrivals"], self.committed.arrivals if self.committed else [], num_threads)
        self._largest_row: float = 0.0 if self.committed is None else self.committed.meta["largest_row"]
        self._pinned: list[Row] = []  # the committed version of params, and those that are kept: not to be written over
        self.copies: Versions | None = None  #: in the slots of params, of versions that live on a GPU
        self._spare: Draft | None = None  # for the next one of these
        self.held: Sequence[Pulled] = []  #: the older versions that the last checkpoint has kept
        self._lists = Lists()
        self.notes = None if self.committed is None else self.committed.notes
        self._took_note: Callable[[], None] = lambda: None  # of the last transaction that was begun
        # A checkpoint that is not over: the commits before it, what is to be put back if there is none, and the rows.
        self._begun: tuple[int, tuple[str | None, dict[int, Place], Sequence[Pulled]], Table | None] | None = None
        self.rows = None if codec is None else self._rows(codec)

    @staticmethod
    def make(
        path: Path,
        rule: Rule,
        server: Mapping[str, Any],
        options: Mapping[str, Any],
        durability: Durability,
        commit_every: int | None,
    ) -> Path:
        """A new folder, for a server with these facts and options.

        Raises:
            StoreError: there is something in the folder, or it cannot be written.
        """
        if sys.byteorder != "little":
            raise UnavailableError("[store] rows are kept in little-endian order, and this machine is big-endian")
        own = {name: server[name] for name in ("num_clients", "dtype", "slot_dtype")}
        shapes = shapes_of(rule, server["d"], **own, accumulate=options["accumulate"])
        codec = codec_of(rule, server["slot_dtype"])
        server = {**server, "codec": None if codec is None else codec.name}
        facts = {
            "order_version": ORDER_VERSION,
            "server": server,
            "options": options,
            "commits": _commits(durability, commit_every),
            "rule": recipe_of(rule),
            "shapes": shapes,
            "repairs": [],
        }
        try:
            path.mkdir(parents=True, exist_ok=True)
            _refuse_contents(path)
            lock = Lock(path)
            try:
                _refuse_contents(path)  # of who was faster
                make_arrays(path, shapes)
                Index.make(path / INDEX, facts)
                for folder in (path, path.parent):
                    sync(folder)
            finally:
                lock.release()
        except OSError as error:
            raise StoreError(f"[Server] store: cannot make {path}: {error.strerror}") from None
        return path

    def _rows(self, codec: Codec) -> DiskCache:
        count, high, free = (0, 0, []) if self.committed is None else self.committed.meta["rows"]
        if (found := self._index.clients()) != count:
            raise StoreError(f"[store] {self.path / INDEX} is damaged: it has {found} rows of {count}; {BACKUP}")
        return DiskCache(
            self._arrays["rows"],
            self._vectors,
            self._index,
            Table(count, high, tuple(free), self._living("sum"), {}),
            size=self.facts["d"],
            num_clients=self.facts["num_clients"],
            codec=codec,
            seed=self.options["seed"],
            device=self.device,
        )

    def _living(self, name: str) -> Vector:
        """A vector of the last commit, where the server's vectors live."""
        now = self._vectors.now(name)
        return now if self.device is HOST else self.device.moved(now)

    @property
    def _durability(self) -> Durability:
        return "power" if self._power else "process"

    @property
    def version(self) -> int:
        """That of the last commit."""
        return 0 if self.committed is None else int(self.committed.meta["version"])

    @property
    def buffers(self) -> Float64 | None:
        """Those of the last commit."""
        own = None if self.committed is None else self.committed.buffers
        return None if own is None else np.frombuffer(own, np.float64)

    @property
    def layout(self) -> Layout | None:
        """Of the server that was kept here."""
        return None if self.facts["layout"] is None else Layout.from_json(self.facts["layout"])

    def going_on(self, rule: Rule | None) -> Rule:
        """The rule to go on with: this one, or else the one that made the last commit.

        Raises:
            StoreError: it cannot go on from here, or has a part that is not kept.
        """
        if self.committed is None:
            raise StoreError(f"[open] {self.path} holds no server: the process that began to make it was ended")
        try:
            rule = rule_of(self._told["rule"]) if rule is None else rule
        except AffluxError as error:
            raise StoreError(f"[open] {self.path} holds a server whose rule must be given: {error}") from None
        codec = codec_of(rule, self.facts["slot_dtype"])
        ours = {
            "rule": rule.name,
            "kind": rule.kind,
            "memories": list(rule.memories),
            "codec": None if codec is None else codec.name,
        }
        for name, value in ours.items():
            if self.facts[name] != value:
                raise StoreError(
                    f"[open] {self.path} holds a server whose {name} is {self.facts[name]!r}, not {value!r}"
                )
        self._tells["rule"] = recipe_of(rule)
        return rule

    def memory_outputs(self, memories: Memories) -> Memories:
        """The spare slots of these memories; of a server on a GPU the memories themselves, updated in place."""
        if self.copies is not None:
            self._spare = self._spare or self.copies.take()  # a full disk shows before the round is decided
            return memories
        return {name: self._vectors.out(f"memory.{name}", vector) for name, vector in memories.items()}

    def next_durable_version(self, version: int) -> int | None:
        """The first version from this one on that a round commits; None: only checkpoints commit."""
        every = self.commit_every
        return None if every is None else -(-version // every) * every

    def check(self) -> None:
        """Refuses files that have vanished or were cut off: reading them would end the process."""
        self._conclude()
        self._index.check()
        self.params.check()
        self._vectors.check()
        self._arrivals.check()

    def prepare_sweep(self, decided: Round) -> None:
        """Maps the pages that the sweep of this round writes. May be repeated."""
        self._vectors.present()
        if self.rows is not None and isinstance(decided.rows, Staged):
            self.rows.present(decided.rows)

    def save_round(self, swept: Round, admission: Admission) -> None:
        """Records a round whose sweep has been made; commits it if its version is one to commit. May be repeated."""
        if swept.saved:  # an interrupt came before its publication
            return
        staged = swept.rows if isinstance(swept.rows, Staged) else None
        known = fresh(swept.sweep, swept.checksums[-1]) if swept.checksums else NOTHING
        if self.rows is not None and staged is not None:
            self.rows.swept(staged, known, self._num_threads)
            report = swept.report
            norms = [norm for norm, why in zip(report.norms.tolist(), report.rejected, strict=True) if not why]
            self._largest_row = max([self._largest_row, *norms])
        version, book = swept.report.version, admission.state.sealed
        if book is not None and self.commit_every is not None and version % self.commit_every == 0:
            current = Pulled(swept.draft.array, version, swept.buffers)
            own = None if staged is None else staged.table
            table = self._commit(after(book, current, swept), own, admission, known)
            if staged is not None and table is not None:
                staged.table = table
        swept.saved = True

    def checkpoint(self, joins: Admission, notes: str | None = None, keep: Sequence[Pulled] = ()) -> None:
        """Commits all that was decided, the arrivals that wait included. All of it has been made.

        `notes` and `keep`, older versions, stay until the next checkpoint.
        """
        for held in keep:
            if self.copies is None and not self.params.has(held.params):
                raise AffluxError(f"[checkpoint] keep: version {held.version} is not one that this server handed out")
        table = None if self.rows is None else self.rows.table
        self._begun = self._index.commits, (self.notes, self._kept, self.held), table
        try:
            self.notes, self.held = notes, [self._placed(held) for held in keep]
            self._kept = {
                held.version: Place(self.params.put(held.params), crc(held.params, self._num_threads))
                for held in self.held
            }
            self._commit(joins.state, table, joins)
        finally:
            self._conclude()

    def _placed(self, version: Pulled) -> Pulled:
        """A version whose params lie in a slot: itself, or a copy of one that lives on a GPU."""
        if self.copies is None or not on_gpu(version.params):
            return version
        draft, self._spare = self._spare or self.copies.take(), None
        bring(version.params, draft.array)
        return replace(version, params=self.copies.finished(draft, version.version))

    def _conclude(self) -> None:
        """Ends a checkpoint: an interrupt may have come after its transaction, and then it counts. May be repeated."""
        if self._begun is None:
            return
        commits, before, table = self._begun
        if self._index.commits == commits:
            self.notes, self._kept, self.held = before
        else:
            self._took_note()
            if self.rows is not None and table is not None:
                self.rows.settle(table.committed())
        self._begun = None

    def _commit(self, book: ServerState, table: Table | None, joins: Admission, known: Fresh = NOTHING) -> Table | None:
        """The transaction, and the table after it."""
        newest = book.current.version
        now = next((held for held in self.held if held.version == newest), None) or self._placed(book.current)
        own = {f"memory.{name}": vector for name, vector in book.memories.items()}
        if table is not None:
            own["sum"] = table.sum
        if book.total is not None:
            total = book.total.vectors[0]
            own["total"] = total if on_gpu(total) else np.asarray(total)
        vectors = {name: self._vectors.put(name, vector, known) for name, vector in own.items()}
        params = Place(self.params.put(now.params), crc(now.params, self._num_threads, known))
        kept = {f"params:{version}": place for version, place in self._kept.items()}
        arrivals = self._arrivals.put([*book.arrivals(), *book.deferred()])
        if self._power:
            self.params.flush([params.slot, *(place.slot for place in kept.values())])
            self._vectors.flush(vectors)
            self._arrivals.flush(arrivals)
            if table is not None and self.rows is not None:
                self.rows.flush(table)
        facts = {"durability": self._durability, "largest_row": self._largest_row}
        meta = checkpoint.scalar_facts(facts, book)
        meta["kept_buffers"] = {held.version: held.buffers.tolist() for held in self.held if held.buffers is not None}
        if table is not None:
            meta["rows"] = table.clients, table.high, [*table.free, *table.retired]
        tails, lists = self._lists.put(book, joins)

        def took_note() -> None:
            self._told = dict(self._tells)
            self._vectors.settle(vectors)
            self._arrivals.settle(arrivals)
            self._pinned = [now.params, *(held.params for held in self.held)]
            self._lists.settle(lists)

        self._took_note = took_note
        self._index.commit(
            Change(
                meta,
                None if now.buffers is None else now.buffers.tobytes(),
                self.notes,
                {"params": params, **vectors, **kept},
                arrivals,
                {} if table is None or self.rows is None else self.rows.changes(table),
                tails,
                facts={name: value for name, value in self._tells.items() if value != self._told[name]},
            )
        )
        took_note()
        return None if table is None else table.committed()

    def checked(self, facts: Mapping[str, Any], joins: Admission) -> Saved:
        """The last commit, for a server with these facts."""
        try:
            return checkpoint.load(self._state(), facts, joins)
        except AffluxError as error:
            raise StoreError(f"[open] {self.path}: {str(error).removeprefix('[load_state_dict] ')}") from None

    def _state(self) -> dict[str, Any]:
        last = self.committed
        assert last is not None
        vectors = {name: self._vectors.now(name) for name in self._arrays if name.startswith(("memory.", "total"))}
        vectors["params"] = self._arrays["params"].array(last.vectors["params"].slot)
        return state_of(self.facts, last, vectors, self._arrivals.stacked(last.arrivals), log=self.options["log"])

    def adopt(self, book: ServerState, params: Row, kept: Sequence[Pulled]) -> ServerState:
        """The book of a server that goes on from the last commit; `params` and those of `kept` lie where they are on
        disk.
        """
        memories = {name: self._living(f"memory.{name}") for name in book.memories}
        self._pinned = [params]
        self.held = kept
        return book._replace(memories=memories, rows=self.rows)

    @property
    def kept(self) -> dict[int, Float64 | None]:
        """The older versions that the last checkpoint has kept, in order, and their buffers."""
        own = {} if self.committed is None else self.committed.meta["kept_buffers"]
        return {
            version: frozen(own[str(version)], np.float64) if str(version) in own else None
            for version in sorted(self._kept)
        }

    def is_newest(self, version: int) -> bool:
        """Whether this kept version lies in the slot of the newest one, which that of a server on a GPU does not."""
        return self.committed is not None and self._kept[version].slot == self.committed.vectors["params"].slot

    def close(self, versions: Versions | None = None) -> None:
        """Lets go of the folder. Versions that somebody holds stay as they are."""
        if versions is not None:
            versions = self.copies or versions
            self._pinned, self.held, self._spare = [], [], None
            self.params.detach(versions.free)
        self._index.close()
        self._lock.release()


def _commits(durability: Durability, commit_every: int | None) -> dict[str, Any]:
    return {"durability": durability, "commit_every": commit_every}


def _refuse_contents(path: Path) -> None:
    """Refuses a folder in which there is anything but a lock, which a failed attempt leaves."""
    if not any(file.name != LOCK for file in path.iterdir()):
        return
    if (path / INDEX).exists():
        raise StoreError(f"[Server] store: {path} is not empty; Server.open goes on with a store")
    raise StoreError(
        f"[Server] store: {path} is not empty, and holds no store: {INDEX} is missing. Give a new folder; if an "
        "attempt to make a store here has failed, remove what it has left"
    )
