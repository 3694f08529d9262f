"""Checkpoints of a run, kept in the store of its server: writing them, and reading the last one."""

import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from hashlib import sha256 as sha256_of
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from afflux.errors import StoreError
from afflux.server import Server
from afflux.sim import interrupts
from afflux.sim.errors import ConfigError
from afflux.sim.results import audit_log
from afflux.sim.results.run_result import sha256
from afflux.sim.results.updates_file import Keep
from afflux.sim.runs.setup import World
from afflux.sim.runs.simulated_server import Follower, History
from afflux.sim.runs.training_stream import Live
from afflux.sim.workload.config import SimConfig
from afflux.sim.workload.rule_specs import RuleSpec
from afflux.store import info

FORMAT = 1


@dataclass(frozen=True, slots=True, eq=False)
class Paused:
    """A run as the last checkpoint in its store has it."""

    path: Path  #: the store
    keep: Keep  #: its files
    header: audit_log.Header  #: of its log
    log_bytes: int  #: of the log's file, when the checkpoint was made
    log_sha256: str | None  #: of these bytes; None: made by an afflux that did not keep it
    server: Mapping[str, int]  #: what the server counted then
    live: Mapping[str, Any]  #: `Live.facts`
    arrays: str | None  #: a file in the store with `Live.arrays`
    history: History

    @classmethod
    def of(cls, path: Path, folder: Path | None = None) -> "Paused":
        """Read what is in a store; `folder` is the run folder, if it is no longer where it was.

        Raises:
            ConfigError: there is no run in the store, or one of another format; or the run folder is another one's.
            StoreError: there is no store, or it is damaged.
        """
        notes = info(path).notes
        if not isinstance(notes, dict) or "afflux_run" not in notes:
            raise ConfigError(f"{path} holds no run that could go on")
        if notes["afflux_run"] != FORMAT:
            raise ConfigError(f"{path} holds a run of format {notes['afflux_run']}, this afflux reads {FORMAT}")
        header = audit_log.Header(**notes["header"])
        own = Path(notes["audit"]) if folder is None else folder / audit_log.FOLDER
        paused = cls(
            path,
            Keep(own, header.updates is not None),
            header,
            notes["log_bytes"],
            notes.get("log_sha256"),
            notes.get("server", {"joins": notes["live"]["arrivals"]}),
            notes["live"],
            notes["arrays"],
            History.of(notes["history"]),
        )
        if paused.arrivals and not paused.log.is_file():
            raise ConfigError(
                f"there is no {paused.log}: a run goes on in its run folder, which was {Path(notes['audit']).parent}; "
                "--out says where that is now"
            )
        paused.refuse_other_files()
        return paused

    @property
    def arrivals(self) -> int:
        """Those that are over."""
        return int(self.live["arrivals"])

    @property
    def log(self) -> Path:
        """The file that it goes on with."""
        return self._file(".jsonl")

    @property
    def updates(self) -> Path:
        """The file of the kept updates, if they are kept."""
        return self._file(".updates.npy")

    def _file(self, suffix: str) -> Path:
        return self.keep.folder / f"{audit_log.file_name(self.spec.label, self.header.seed)}{suffix}"

    @property
    def finished(self) -> bool:
        """Whether all its arrivals are over."""
        return self.arrivals == self.config.arrivals

    @property
    def spec(self) -> RuleSpec:
        """The rule; raises ConfigError if this afflux does not know it."""
        return audit_log.spec_of(self.header)

    @property
    def config(self) -> SimConfig:
        """The settings; raises ConfigError if this afflux does not know them."""
        return audit_log.config_of(self.header, self.path)

    def refuse_other_files(self) -> None:
        """Refuse a run folder that holds what is not of this run, which would be overwritten."""
        folder = self.keep.folder.parent
        if not self.log.is_file():  # nothing had arrived
            store = self.path.resolve()
            own = {store, *store.parents, self.keep.folder.resolve(), self.updates.resolve()}
            found = (*folder.glob("*"), *self.keep.folder.glob("*"))
            if folder.is_file() or any(path.resolve() not in own for path in found):
                raise ConfigError(f"{folder} holds other things than the run of {self.path}; choose another --out")
            return
        if others := sorted(log.name for log in self.keep.folder.glob("*.jsonl") if log != self.log):
            raise ConfigError(f"{self.keep.folder} holds other runs' logs: {', '.join(others)}; choose another --out")
        try:
            content = self.log.read_bytes()
        except OSError as error:
            raise ConfigError(f"cannot read {self.log}: {error.strerror}") from error
        header = audit_log.as_text(self.header).encode()
        if not self.arrivals:  # it is begun again, and may have been cut off amid its header
            same = header.startswith(content[: len(header)])
        elif len(content) < self.log_bytes:
            return  # who goes on with it says so
        elif self.log_sha256 is None:
            same = content.startswith(header)
        else:
            same = sha256_of(content[: self.log_bytes]).hexdigest() == self.log_sha256
        if not same:
            raise ConfigError(
                f"{self.log} is not what the run of {self.path} has written: it is another run's log, or was changed"
            )

    def refuse_pushed(self, server: Server) -> None:
        """Refuse a server that was used after the run's last checkpoint."""
        now = _counted(server)
        for name, then in self.server.items():
            if now[name] != then:
                raise ConfigError(
                    f"{self.path}: {name} is {now[name]}, but was {then} when the run was interrupted; somebody has "
                    "used its server since, and the run cannot go on to the same results"
                )

    def refuse_other(self, world: World) -> None:
        """Refuse to go on with other data or another first model."""
        if (len(world.clients), sha256(world.first)) != (self.header.num_clients, self.header.first_params_sha256):
            raise ConfigError(f"{self.path}: the clients or first params are others than in the run, perhaps the data")

    def read_arrays(self) -> dict[str, np.ndarray]:
        """What SCAFFOLD needs."""
        if self.arrays is None:
            return {}
        try:
            with (self.path / self.arrays).open("rb") as file, np.load(file) as arrays:
                return dict(arrays)
        except (OSError, ValueError, BadZipFile) as error:
            raise StoreError(f"[store] cannot read {self.path / self.arrays}: {error}") from None


class Checkpoints:
    """Saves a run between two events: now and then, and when Ctrl-C was pressed."""

    def __init__(
        self, path: Path, live: Live, lead: Follower, log: audit_log.Writer, keep: Keep, seconds: float
    ) -> None:
        self._path = path
        self._live = live
        self._lead = lead
        self._log = log
        self._keep = keep
        self._seconds = seconds
        self._due = 0.0

    def __call__(self) -> None:
        """Save if it is time; raises KeyboardInterrupt if Ctrl-C was pressed."""
        try:
            interrupts.check()
        except KeyboardInterrupt:
            self.save()
            raise
        if time.monotonic() >= self._due:
            self.save()

    def save(self) -> None:
        """Commit the server and what `Paused` reads: all or nothing."""
        state, arrays = self._live.facts(), self._live.arrays()
        name = f"clients-{state['events']}.npz" if arrays else None
        if name is not None:
            new = self._path / f"{name}.new"
            try:
                with new.open("wb") as file:
                    np.savez(file, **arrays)  # type: ignore[arg-type]
                new.replace(self._path / name)
            except OSError as error:
                raise StoreError(f"[store] cannot write {new}: {error.strerror}") from None
        notes = {
            "afflux_run": FORMAT,
            "audit": str(self._keep.folder.resolve()),
            "header": self._log.header._asdict(),
            "log_bytes": self._log.size,
            "log_sha256": self._log.digest,
            "server": _counted(self._lead.server),
            "live": state,
            "arrays": name,
            "history": asdict(self._lead.history),
        }
        self._lead.server.checkpoint(notes, keep=self._live.older())
        for old in self._path.glob("clients-*.npz*"):
            if old.name != name:
                old.unlink()
        self._due = time.monotonic() + self._seconds


def _counted(server: Server) -> dict[str, int]:
    return {"version": server.version, "joins": server.joins, "arrivals_waiting": server.arrivals_waiting}


def refuse_taken(path: Path) -> None:
    """Refuse a place for a new store where something is; ConfigError says what."""
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return
    if not path.is_dir():
        raise ConfigError(f"{path} is not a folder; choose another --store")
    try:
        notes = info(path).notes
    except StoreError:
        raise ConfigError(f"{path} is a folder that is not empty; choose another --store") from None
    if isinstance(notes, dict) and "afflux_run" in notes:
        raise ConfigError(f"{path} holds a run; --resume {path} goes on with it")
    raise ConfigError(f"{path} is the store of a server that no run has made; choose another --store")
