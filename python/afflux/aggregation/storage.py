"""The interface through which rounds reach a store. `afflux.store.store.Store` implements it."""

from pathlib import Path
from typing import Protocol

from afflux.aggregation.admission import Admission
from afflux.aggregation.round import Round


class RoundStorage(Protocol):
    """The storage of one server's state on disk. Each method raises StoreError if the disk fails or is full."""

    path: Path  #: for messages

    def check(self) -> None:
        """Check that the open files still exist and are complete."""

    def prepare_sweep(self, decided: Round) -> None:
        """Make writable all memory that the sweep of this round writes. May be repeated."""

    def save_round(self, swept: Round, admission: Admission) -> None:
        """Record a round whose sweep has been made. Commit it if its version is one to commit. May be repeated."""

    def next_durable_version(self, version: int) -> int | None:
        """Return the first version, from this one on, that a round commits; None if no round commits."""
