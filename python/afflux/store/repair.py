"""Checks of a store, and repairs of damaged rows: `afflux store check` and `repair`."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import inf, sqrt
from os import PathLike
from typing import Any

import numpy as np
import numpy.typing as npt

from afflux.ops.errors import StoreError
from afflux.ops.validation import brief, plain_id
from afflux.rules.rule import ClientId, client_order
from afflux.store.checksums import crc
from afflux.store.commits import Transaction
from afflux.store.files import UnreadableError, irregular, reason, refuse_irregular
from afflux.store.index import CommittedState, Index
from afflux.store.index_entries import ListUpdate, StoredArrival
from afflux.store.inspect import missing
from afflux.store.metadata import BACKUP, INDEX, METADATA, folder_of, make_arrays
from afflux.store.reader import StoreReader, locked_reader
from afflux.store.segments import Place

ReadProgress = Callable[[int, int], None]
"""Called with the bytes read so far, and the bytes to read."""


@dataclass(frozen=True, slots=True)
class Health:
    """The result of a check of a store."""

    clients: int  #: the number of rows that were read
    damaged: tuple[ClientId, ...]  #: clients whose row does not match its checksum, sorted
    #: |sum - sum of the rows| / N, relative to the largest norm; None: no rows, or damage
    sum_error: float | None
    problems: tuple[str, ...]  #: descriptions of the problems
    mendable: bool  #: whether `repair` can repair all of them
    keeps_bits: bool  #: whether rows, their sum and arrivals are sound: then later bits do not change
    arrivals: tuple[ClientId, ...] = ()  #: clients whose waiting arrival is lost, in the order of the joins

    @property
    def sound(self) -> bool:
        """Whether no problem was found."""
        return not self.problems


@dataclass(frozen=True, slots=True)
class Repair:
    """The result of a repair."""

    dropped: tuple[ClientId, ...]  #: clients whose rows were dropped, as if they had never pushed
    version: int  #: the version after which the bits differ from those without the damage
    arrivals: tuple[ClientId, ...] = ()  #: clients whose waiting arrival was dropped


class _Examination:
    """One reading of a whole store, and the problems found."""

    def __init__(self, store: StoreReader, progress: ReadProgress | None) -> None:
        self._store = store
        self._progress = progress or (lambda done, total: None)
        self._done = 0
        vectors = sum(store.slot_bytes(name.partition(":")[0]) for name in store.committed.vectors)
        arrivals = len(store.committed.arrivals) * store.slot_bytes("arrivals")
        self._all = vectors + arrivals + store.clients * store.row_bytes
        self.good: list[tuple[ClientId, Place]] = []
        self.bad: list[tuple[ClientId, Place]] = []
        self.total = np.zeros(store.d if store.codec is not None else 0, np.float64)
        self._largest = float(store.committed.meta["largest_row"])
        self.lost_arrivals: list[int] = []  #: their indices among the waiting arrivals
        self.index = [f"{store.index.path}: {line}" for line in store.index.damage()]
        self.vectors, self.sum, self.rows = list(dict.fromkeys(self._vectors())), list[str](), list[str]()
        self.arrivals = list(dict.fromkeys(self._arrivals()))
        self.oversized = store.oversized
        self.sum_error: float | None = None
        if store.codec is not None:
            self._read_rows()
            self.rows = list(self._lost_rows())
            self._sum()

    def _vectors(self) -> Iterator[str]:
        """Describe missing or truncated files, and params and rule vectors that do not match their checksums."""
        store = self._store
        yield from missing(store, but=("rows", "sum", "arrivals"))
        for name, place in store.committed.vectors.items():
            problem = None if name == "sum" else self._damage(name.partition(":")[0], place)
            if problem is not None:
                yield problem

    def _arrivals(self) -> Iterator[str]:
        """Describe waiting arrivals whose vectors are missing, or do not match their checksums."""
        for i, waiting in enumerate(self._store.committed.arrivals):
            problem = None if waiting.place is None else self._damage("arrivals", waiting.place)
            if problem is not None:
                self.lost_arrivals.append(i)
                yield f"client {brief(_client(waiting))}'s waiting arrival: {problem}"

    def _damage(self, name: str, place: Place) -> str | None:
        self._read(self._store.slot_bytes(name))
        try:
            return self._store.damage(name, place)
        except UnreadableError:
            raise
        except StoreError as error:  # the disk has failed
            return str(error).removeprefix("[store] ")

    def _read_rows(self) -> None:
        store = self._store
        count, high, free = store.committed.meta["rows"]
        slots, ranks = np.zeros(high, bool), np.zeros(count, bool)
        slots[free] = True
        try:
            for client_id, place in store.index.rows_by_slot():
                self._read(store.row_bytes)
                if not (0 <= place.slot < high and 0 <= place.rank < count) or slots[place.slot] or ranks[place.rank]:
                    self.index.append(f"{store.index.path}: client {brief(client_id)}'s row has a place that cannot be")
                    continue
                slots[place.slot] = ranks[place.rank] = True
                (self.good if self._added(place) else self.bad).append((client_id, place))
        except UnreadableError:
            raise
        except StoreError:  # Index.damage has reported it
            pass
        if (total := len(self.good) + len(self.bad)) != count:
            self.index.append(f"{store.index.path}: {total} of {count} clients' rows have a place")

    def _lost_rows(self) -> Iterator[str]:
        """Yield a line for each file of rows that is missing or truncated, and one for each other damaged row."""
        arrays, (_, high, _) = self._store.arrays["rows"], self._store.committed.meta["rows"]
        in_flaws = set[int]()
        for segments in arrays:
            size = segments.shape.per_segment
            flaws = {i: flaw for i in range(-(-high // size)) if (flaw := segments.segment_problem(i)) is not None}
            lost = Counter(place.slot // size for _, place in self.bad)
            for segment, flaw in flaws.items():
                yield f"{flaw}: {lost[segment]} clients' rows"
            in_flaws |= {place.slot for _, place in self.bad if place.slot // size in flaws}
        folder = arrays[0].folder if len(arrays) == 1 else self._store.path
        for client_id, place in sorted(self.bad, key=lambda entry: client_order(entry[0])):
            if place.slot not in in_flaws:
                yield f"client {brief(client_id)}'s row in {folder} is damaged"

    def _added(self, place: Place) -> bool:
        """Add a row to the total; return False if the row is damaged.

        The row's memory is freed before the next row is read.
        """
        row = self._store.sound_row(place)
        if row is None:
            return False
        vector = self._store.decoded(row).astype(np.float64, copy=False)
        self.total += vector
        self._largest = max(self._largest, _norm(vector))
        return True

    def _sum(self) -> None:
        """Compare the stored sum with the sum of the rows."""
        store = self._store
        problem = self._damage("sum", store.committed.vectors["sum"])
        if problem is not None:
            self.sum.append(problem)
            return
        if self.bad or self.index:
            return
        stored: npt.NDArray[np.float64] = store.vector("sum", store.committed.vectors["sum"].slot)
        off = _norm(stored - self.total) / int(store.server["num_clients"])
        self.sum_error = 0.0 if not off else off / self._largest if self._largest else inf
        bound = self._rounding()
        if not self.sum_error <= bound:
            self.sum.append(
                f"the sum of the rows is off by {self.sum_error:.1e} times the largest row's norm, rounding explains "
                f"{bound:.1e}"
            )

    def _rounding(self) -> float:
        """Return the largest `sum_error` that rounding can cause.

        A replaced row rounds its difference to the old one, and then the sum: an error of at most 2^-53 (2 + clients)
        times the largest norm. Each arrival replaces at most one row; adding up the rows here rounds once for each.
        """
        store, counts = self._store, self._store.committed.meta["counts"]
        replaced, clients = counts["joined"], store.clients
        # The rows of a codec may be longer than the vectors, but no element is larger than the norm.
        longer = 1.0 if store.codec is None or store.codec.exact else sqrt(store.d)
        return float(replaced + clients) * 2.0**-53 * (clients + 2) / int(store.server["num_clients"]) * longer

    def _read(self, count: int) -> None:
        self._done += count
        self._progress(self._done, max(self._all, self._done))

    def health(self) -> Health:
        """Return the result of the examination."""
        lost = self._store.lost.values()
        return Health(
            clients=len(self.good) + len(self.bad),
            damaged=tuple(sorted((client_id for client_id, _ in self.bad), key=client_order)),
            sum_error=self.sum_error,
            problems=(*self.index, *lost, *self.oversized, *self.vectors, *self.arrivals, *self.sum, *self.rows),
            mendable=bool(lost or self.oversized or self.arrivals or self.sum or self.rows)
            and not self.index
            and not self.vectors,
            keeps_bits=not self.bad and not self.sum and not self.arrivals,
            arrivals=tuple(_client(self._store.committed.arrivals[i]) for i in self.lost_arrivals),
        )


def _norm(vector: npt.NDArray[np.float64]) -> float:
    """Return the Euclidean norm, also of a vector whose squares overflow."""
    with np.errstate(over="ignore"):
        norm = float(np.linalg.norm(vector))
    if norm < inf:
        return norm
    largest = float(np.abs(vector).max())
    return largest * float(np.linalg.norm(vector / largest))


def check(path: "str | PathLike[str]", progress: ReadProgress | None = None) -> Health:
    """Read every byte of a store, and verify all checksums, the index, and the sum of the rows.

    Args:
        path: the store's folder; nothing is written.
        progress: called repeatedly with the number of bytes read, and of bytes to read.

    Raises:
        StoreError: there is no store, it is in use, or it is so damaged that it cannot be opened.

    Cost: all committed bytes are read once; up to 24 d bytes of memory, and some for each client.
    """
    irregular_files = tuple(irregular(folder_of(path)))
    if irregular_files:  # nothing is read through a link
        return Health(clients=0, damaged=(), sum_error=None, problems=irregular_files, mendable=False, keeps_bits=False)
    with locked_reader(path) as store:
        return _Examination(store, progress).health()


def repair(
    path: "str | PathLike[str]", progress: ReadProgress | None = None, *, agreed: Health | None = None
) -> Repair | None:
    """Drop damaged rows and waiting arrivals, and compute the sum again from the sound rows.

    Return None if rows, their sum and arrivals are sound.

    Clients whose rows are dropped count as clients that have never pushed. Clients whose arrivals are dropped may push
    again. Later bits then differ from those without the damage; `info(path).repairs` names the version after which they
    may differ. Segment files of a wrong size and Zarr's metadata are repaired even if nothing is lost.

    Args:
        path: the store's folder.
        progress: as for `check`.
        agreed: the result of `check`; the repair raises an error if it would lose more than this.

    Raises:
        StoreError: there is no store, it is in use, anything but rows, their sum, arrivals and metadata is damaged, or
            more is lost than in `agreed`. The store is unchanged.

    Cost: that of `check`, and a transaction over all clients.
    """
    try:
        refuse_irregular(folder_of(path))
    except StoreError as error:
        raise StoreError(f"[repair] {str(error).removeprefix('[store] ')}") from None
    with locked_reader(path, shared=False) as store:
        examination = _Examination(store, progress)
        health = examination.health()
        if health.sound:
            return None
        if not health.mendable:
            problems = "; ".join((*examination.index, *examination.vectors))
            raise StoreError(f"[repair] {problems}: only rows, their sum and arrivals are mended; {BACKUP}")
        if agreed is not None:
            _refuse_more(health, agreed)
        if store.lost:
            _write_metadata(store)
        for array in store.segments.values():
            array.truncate_oversized()
        for array in store.arrays.get("rows", ()):
            array.reserve(store.committed.meta["rows"][1])
        if health.keeps_bits:
            return None
        _commit_rest(store, examination, health)
        return Repair(health.damaged, int(store.committed.meta["version"]), health.arrivals)


def _write_metadata(store: StoreReader) -> None:
    """Write the metadata that are lost; change nothing else."""
    shapes = {name: shape for name, shape in store.shapes.items() if name in store.lost}
    slots = {name: array.slots for name, array in store.segments.items()}
    try:
        make_arrays(store.path, shapes, slots, group="" in store.lost)
    except OSError as error:
        raise StoreError(f"[store] cannot write {METADATA} in {store.path} again: {reason(error)}") from None


def _refuse_more(health: Health, agreed: Health) -> None:
    """Raise StoreError if a repair would lose more than `agreed`."""
    new_damage = sorted({*health.damaged} - {*agreed.damaged}, key=client_order)
    if new_damage:
        raise StoreError(
            f"[repair] rows are damaged that were not when it was checked: {len(new_damage)}, the first of client "
            f"{new_damage[0]!r}; nothing was changed: check it again"
        )
    if len(health.arrivals) > len(agreed.arrivals):
        raise StoreError(
            "[repair] waiting arrivals are damaged that were not when it was checked; nothing was changed: check it "
            "again"
        )
    if agreed.keeps_bits and not health.keeps_bits:
        raise StoreError(
            "[repair] the sum is damaged, which it was not when it was checked; nothing was changed: check it again"
        )


def _client(waiting: StoredArrival) -> ClientId:
    return plain_id(waiting.record[0], "check")


def _commit_rest(store: StoreReader, examination: _Examination, health: Health) -> None:
    """Commit the sound parts, and a new sum of the rows if rows or the sum are damaged."""
    last, vectors, lists = store.committed, dict(store.committed.vectors), dict[str, ListUpdate]()
    rows: dict[ClientId, Place] = {}
    lost = examination.lost_arrivals
    meta = {**last.meta, "filled": last.meta["filled"] - len(lost)}
    arrivals = [waiting for i, waiting in enumerate(last.arrivals) if i not in lost]
    if lost and store.facts["server"].get("participations") is None:
        lists["passed"] = ListUpdate(0, _passed(last, lost))
    anew = store.codec is not None and bool(health.damaged or examination.sum)
    if anew:
        slot = 1 - last.vectors["sum"].slot
        for part, segments in zip(store.parts, store.arrays["sum"], strict=True):
            segments.reserve(2)
            segments.write(slot, examination.total[part.begin : part.begin + part.size])
            segments.flush([slot])
        ranked = sorted(examination.good, key=lambda entry: entry[1].rank)
        rows = {client_id: place._replace(rank=rank) for rank, (client_id, place) in enumerate(ranked)}
        slots, high = {place.slot for place in rows.values()}, meta["rows"][1]
        meta["rows"] = [len(rows), high, [slot for slot in range(high) if slot not in slots]]
        vectors["sum"] = Place(slot, crc(examination.total, 1))
    entry = {"version": meta["version"], "joins": meta["joins"], "dropped": health.damaged, "arrivals": health.arrivals}
    store.index.close()  # SQLite deletes its files when the last connection is closed
    index = Index(store.path / INDEX)
    try:
        index.sync_commits(True)
        index.commit(
            Transaction(
                meta,
                last.buffers,
                last.notes,
                vectors,
                arrivals,
                rows,
                lists,
                delete_rows=anew,
                facts={"repairs": [*store.facts["repairs"], entry]},
            )
        )
    finally:
        index.close()


def _passed(last: CommittedState, lost: Sequence[int]) -> list[Any]:
    """Return the clients that have entered in this pass, without the lost arrivals.

    The clients in the buffer are the last ones of the list.
    """
    passed, filled = last.lists["passed"], last.meta["filled"]
    before = len(passed) - filled
    return [*passed[:before], *(entry for i, entry in enumerate(passed[before:]) if i not in lost)]
