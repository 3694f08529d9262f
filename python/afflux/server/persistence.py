"""How a server's state outlives it: as plain arrays and JSON, or in a store."""

import json
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, TracebackType
from typing import Any, Self

import numpy as np

from afflux.aggregation import checkpoint
from afflux.aggregation.reports import Pulled
from afflux.arrays.devices import HOST
from afflux.arrays.pools import Versions
from afflux.ops.errors import AffluxError, StoreError
from afflux.server.view import View
from afflux.store.folder import Durability, Store


class Keep(View):
    """The part of `Server` that saves and loads."""

    num_threads: int
    _store: Store | None
    #: Older versions that the last checkpoint has kept, by number.
    kept: Mapping[int, Pulled]

    def _make_store(
        self, path: Path, durability: Durability, commit_every: int | None, options: Mapping[str, Any]
    ) -> None:
        """From now on the server, which is new, keeps its state there."""
        Store.make(path, self.rule, self._facts(), options, durability, commit_every)
        made = Store(path, self.num_threads, device=self._device)
        try:
            self._settle(made)
        except BaseException:
            made.close()
            raise

    def _settle(self, store: Store) -> None:
        """Moves what is in memory into a store, or what is in a store into this server."""
        book, old, here = self._joins.book, self._versions, self._device is HOST
        limits = (old.max_versions, old.checked) if here else (None, False)
        placed = Versions(self._slots.size, limits[0], dtype=self._dtype, checked=limits[1], memory=store.params.more)
        if here:
            self._versions = placed
        else:
            store.copies = placed
        if store.committed is None:
            now = book.current
            if here:
                draft = placed.take()
                draft.array[:] = now.params
                now = replace(now, params=placed.finished(draft, 0))
            self._joins.load(book._replace(current=now, rows=store.rows), [], [])
            store.checkpoint(self._joins)
        else:
            self._intake = replace(self._intake, layout=store.layout)
            if not here:  # without what this server was made with
                self._versions = Versions(self._slots.size, old.max_versions, dtype=self._dtype, device=self._device)
            last = Pulled(placed.finished(placed.take(), store.version), store.version, store.buffers)
            now = self._living(last)
            self._joins.load(book._replace(current=now, rows=store.rows), [], [])
            saved = store.checked(self._facts(), self._joins)
            arrivals = self._rounds.loaded(saved)
            kept = [
                last if store.is_newest(version) else Pulled(placed.take().publish(version), version, buffers)
                for version, buffers in store.kept.items()
            ]
            self.kept = MappingProxyType({held.version: now if held is last else self._living(held) for held in kept})
            own = store.adopt(saved.book(now, arrivals), last.params, kept)
            self._joins.load(own, saved.quarantined, saved.log)
        self._store = store
        self._rounds.settle(store, self._versions)

    def _living(self, version: Pulled) -> Pulled:
        """A version that lies in a store, where the server's vectors live."""
        if self._device is HOST:
            return version
        draft = self._versions.take()
        self._device.fill(draft.buffer, version.params)
        return replace(version, params=draft.publish(version.version))

    def checkpoint(self, notes: object = None, *, keep: Iterable[Pulled] = ()) -> None:
        """Commits all that was decided, the arrivals that wait included: they are safe when it returns.

        Args:
            notes: JSON-able, for the caller's own state; `notes` of the server that opens the store.
            keep: versions that are still needed when they are old; `kept`, also of the server that opens the store.

        Cost: d elements for each arrival that waits, and the checksum of params and the rule's vectors.

        Raises:
            StoreError: there is no store, or it cannot be written; the last commit stays.
        """
        with self._stored("checkpoint") as store:
            kept = {held.version: held for held in _pulled(keep)}
            for version, held in kept.items():
                here = self._device is HOST
                own = isinstance(held.params, np.ndarray) if here else self._device.owns(held.params)
                if not (own and (here or self._versions.has(held.params))):
                    raise AffluxError(f"[checkpoint] keep: version {version} is not one that this server handed out")
            store.checkpoint(self._joins, _json(notes), list(kept.values()))
            self.kept = MappingProxyType(kept)

    def close(self, *, checkpoint: bool = True) -> None:
        """Another process may open the store, after a last checkpoint. Params that were pulled stay as they are.

        Args:
            checkpoint: False leaves the store at its last commit, as a killed process does; the way out where files
                have vanished or the disk stays full.
        """
        if self._gate.closed:
            return
        with self._stored("close", whole=checkpoint) as store:
            if checkpoint:
                store.checkpoint(self._joins, store.notes, store.held)
            self._gate.closed, self._gate.check = True, lambda: None
            store.close(self._versions)

    @property
    def notes(self) -> object:
        """What the last checkpoint was given."""
        with self._stored("notes") as store:
            return None if store.notes is None else json.loads(store.notes)

    @contextmanager
    def _stored(self, op: str, *, whole: bool = True) -> Iterator[Store]:
        """`whole`: what is decided has been made."""
        self._enter(op)
        with self._gate.mutex:
            with nullcontext() if whole else suppress(StoreError):
                self._gate.settle()
            if self._store is None:
                raise AffluxError(f"[{op}] this server has no store: make it with store=")
            yield self._store

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._store is not None:
            self.close()

    def state_dict(self) -> dict[str, Any]:
        """Everything that the next bits depend on, as {"meta": JSON-able facts, "arrays": {name: array}}.

        Params, buffers, cached rows and their sum, the arrivals that wait (if streaming, their sum), counters,
        quarantine and log; copied, between two steps. A server with the same rule and options that loads it goes on
        with the same bits.

        >>> import io, json
        >>> import numpy as np
        >>> from afflux import Server
        >>> from afflux.rules import fedbuff
        >>> server = Server(fedbuff(buffer_size=2), np.zeros(3, np.float32))
        >>> _ = server.push(1, np.ones(3), version=0)
        >>> state = server.state_dict()
        >>> file = io.BytesIO()
        >>> np.savez(file, meta=json.dumps(state["meta"]), **state["arrays"])
        """
        self._enter("state_dict")
        with self._gate.mutex:
            self._gate.settle()
            with suppress(Exception):  # an interrupt may have left one; if it cannot step, the state says that it waits
                self._rounds.make_overdue()
                self._gate.settle()
            self._versions.refuse_damaged_newest("state_dict", self.version)
            return checkpoint.save(self._facts(), self._joins.book, self._joins.quarantined, self._joins.log)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over the state_dict() of a server with the same rule and options.

        What waited here is gone; versions that somebody has pulled stay as they are, and clients that train from one
        which the loaded state has not made have to pull again. A streaming server takes over what waits in a buffered
        one's state; not the other way round. The rule's name and kind, d, dtypes, number of clients
        and layout must agree, and so must the raw weights in a sum; what else is changed, such as server_lr or
        buffer_size, changes the next bits.

        Raises:
            AffluxError: a state of another kind of server, or a damaged one; nothing has changed.
        """
        self._gate.enter("load_state_dict")
        if self._store is not None:
            raise AffluxError("[load_state_dict] this server has a store: load the state into one without")
        with self._gate.mutex:
            self._gate.settle()
            # Everything is made before anything is replaced.
            saved = checkpoint.load(state, self._facts(), self._joins)
            arrivals = self._rounds.loaded(saved)
            memories = {name: self._device.moved(vector) for name, vector in saved.memories.items()}
            draft = self._versions.take()
            self._device.fill(draft.buffer, saved.params)
            now = Pulled(self._versions.finished(draft, saved.version), saved.version, saved.buffers)
            book = saved.book(now, arrivals)._replace(memories=memories)
            self._joins.load(book, saved.quarantined, saved.log)
        self._gate.wake()


def _pulled(keep: Iterable[Pulled]) -> list[Pulled]:
    try:
        held = list(keep)
    except TypeError:
        raise AffluxError(
            f"[checkpoint] keep is of type {type(keep).__name__}, must be a list of pulled versions"
        ) from None
    for i, one in enumerate(held):
        if not isinstance(one, Pulled):
            raise AffluxError(f"[checkpoint] keep[{i}] is of type {type(one).__name__}, must be one that pull() gave")
    return held


def _json(notes: object) -> str:
    try:
        return json.dumps(notes)
    except (TypeError, ValueError, RecursionError) as error:
        raise AffluxError(f"[checkpoint] notes cannot be kept as JSON: {error}") from None
