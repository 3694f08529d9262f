"""A run whose server lies in a store: what its checkpoints say beside it, and how it goes on from the last one."""

import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from hashlib import sha256 as sha256_of
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import numpy as np

from afflux.ops.errors import StoreError
from afflux.rules.rule import Rule
from afflux.server.server import Server
from afflux.sim import audit, ctrl_c
from afflux.sim.clients import one_thread
from afflux.sim.config import RuleSpec, SimConfig
from afflux.sim.errors import ConfigError
from afflux.sim.follow import Follower, History, Progress, follow
from afflux.sim.kept import Keep, KeptUpdates
from afflux.sim.live import Live
from afflux.sim.result import RunResult, sha256
from afflux.sim.run import kept
from afflux.sim.world import World
from afflux.store import info

FORMAT = 1
SECONDS = 10.0  #: between two checkpoints


@dataclass(frozen=True, slots=True, eq=False)
class Paused:
    """A run as the last checkpoint in its store has it."""

    path: Path  #: the store
    keep: Keep  #: its files
    header: audit.Header  #: of its log
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
        header = audit.Header(**notes["header"])
        own = Path(notes["audit"]) if folder is None else folder / audit.FOLDER
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
        return self.keep.folder / f"{audit.file_name(self.spec.label, self.header.seed)}{suffix}"

    @property
    def finished(self) -> bool:
        """Whether all its arrivals are over."""
        return self.arrivals == self.config.arrivals

    @property
    def spec(self) -> RuleSpec:
        """The rule; raises ConfigError if this afflux does not know it."""
        return audit.spec_of(self.header)

    @property
    def config(self) -> SimConfig:
        """The settings; raises ConfigError if this afflux does not know them."""
        return audit.config_of(self.header, self.path)

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
        header = audit.as_text(self.header).encode()
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

    def __init__(self, path: Path, live: Live, lead: Follower, log: audit.Writer, keep: Keep, seconds: float) -> None:
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
            ctrl_c.check()
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


def start(
    path: Path,
    spec: RuleSpec,
    seed: int,
    config: SimConfig,
    keep: Keep,
    progress: Progress | None = None,
    seconds: float = SECONDS,
) -> RunResult:
    """`run`, with the server in a new store; the same bits.

    Args:
        path: the store's folder; new.
        spec: the rule.
        seed: see `run`.
        config: likewise.
        keep: what is written beside it; a run that goes on goes on with these files.
        progress: see `run`.
        seconds: between two checkpoints; 0: after every event. Ctrl-C makes one, too.
    """
    return _run(path, spec, seed, config, keep, progress, seconds, None)


def resume(paused: Paused, progress: Progress | None = None, seconds: float = SECONDS) -> RunResult:
    """Go on with an interrupted run, to the bits of one that was not; what the last checkpoint lacks is done again."""
    run = paused.header
    return _run(paused.path, paused.spec, run.seed, paused.config, paused.keep, progress, seconds, paused)


def _run(
    path: Path,
    spec: RuleSpec,
    seed: int,
    config: SimConfig,
    keep: Keep,
    progress: Progress | None,
    seconds: float,
    paused: Paused | None,
) -> RunResult:
    with one_thread(), ExitStack() as files:
        world = World.of(config, seed)
        world.events(spec)  # refuses what cannot be, before anything is written
        if paused is not None:
            paused.refuse_other(world)

        def serve(rule: Rule) -> Server:
            if paused is None:
                server = world.server(rule, store=path, commit_every=None)
            else:
                server = Server.open(path, rule, num_threads=1, commit_every=None)
            # What came after the last checkpoint has no history: it is not to be committed.
            files.callback(server.close, checkpoint=False)
            if paused is not None:
                paused.refuse_pushed(server)
            return server

        lead = Follower(spec, world, config.arrivals, serve=serve, history=None if paused is None else paused.history)
        live = Live(world, lead)
        if paused is not None:
            versions = {**lead.server.kept, lead.server.version: lead.server.pull()}
            live.load(paused.live, paused.read_arrays(), versions)
        name = audit.file_name(spec.label, seed)
        log_path, updates_path = keep.folder / f"{name}.jsonl", keep.folder / f"{name}.updates.npy"
        header, size = lead.header(updates_path.name if keep.updates else None), 0
        if paused is not None and paused.arrivals:
            header, size = paused.header, paused.log_bytes
        elif paused is not None:  # nothing had arrived: the files may be gone, or hold what was not committed
            keep.folder.mkdir(parents=True, exist_ok=True)
            for old in (log_path, updates_path):
                old.unlink(missing_ok=True)
        log = lead.log = files.enter_context(audit.Writer(log_path, header, size))
        checkpoints = Checkpoints(path, live, lead, log, keep, seconds)
        events = live.stream(checkpoints)
        if keep.updates:
            count = 0 if paused is None else paused.arrivals
            events = kept(events, files.enter_context(KeptUpdates(updates_path, len(world.first), count)))
        checkpoints.save()
        follow(events, [lead], progress or (lambda arrivals: None))
        checkpoints.save()
        return lead.result()
