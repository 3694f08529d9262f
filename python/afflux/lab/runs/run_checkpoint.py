"""Checkpoints of a run, kept in the store of its server: writing them, and reading the last one."""

import os
import time
from contextlib import ExitStack
from hashlib import sha256
from pathlib import Path
from secrets import token_hex
from typing import Annotated, Any
from zipfile import BadZipFile, ZipFile

import msgspec
import numpy as np
from msgspec import Meta

from afflux.lab import interrupts
from afflux.lab.results import audit_log
from afflux.lab.results.finished_runs import FILE, Job, refuse_other_inputs
from afflux.lab.results.run_folder import RUN_ID
from afflux.lab.results.run_history import LOST, RunHistory
from afflux.lab.results.run_result import evaluation_reader, params_sha256
from afflux.lab.runs.recorder import RecordedServer
from afflux.lab.runs.setup import RunSetup
from afflux.ops.errors import ConfigError, StoreError
from afflux.rules.files import code_digests
from afflux.rules.specs import RuleSpec
from afflux.server.server import Server
from afflux.sim.errors import errors_of_writing
from afflux.sim.loop import EventLoop, LoopState
from afflux.sim.workload.config import Count, SimConfig
from afflux.store import info
from afflux.store.files import new_file, opened, read_bytes
from afflux.store.lock import LOCK

FORMAT = 2
CHECKPOINT_SECONDS = 10.0
RunId = Annotated[str, Meta(pattern=r"^[0-9a-f]{32}\Z")]
#: The server's counts at a checkpoint: properties of `Server`.
COUNTS = ("version", "joins", "arrivals_waiting")


class CheckpointNotes(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The content of a checkpoint in the store's notes; see `RunCheckpoints.save`."""

    afflux_run: int
    audit: audit_log.Label
    header: audit_log.Header
    log_bytes: Count
    log_sha256: str
    server: dict[str, Count]
    stream: LoopState
    arrays: Annotated[str, Meta(pattern=r"^clients-[0-9]{1,19}\.npz\Z")] | None
    history: RunHistory
    run_id: RunId
    save_every: Count = 0  #: of an older afflux
    tensorboard: bool = False  #: of an older afflux

    def check(self) -> None:
        """Compare the parts with each other; raise ValueError if they do not agree."""
        stream, history = self.stream, self.history
        config = self.header.settings(Path(self.audit))
        if set(self.server) != set(COUNTS):
            raise ValueError(f"the server's counts are {sorted(self.server)}")
        # Each arrival has a line in the log, which exists; each dispatch is an arrival or still trains.
        counts = {stream.arrivals, len(history.clients), len(history.staleness)}
        if not stream.arrivals <= min(self.log_bytes, config.arrivals) or len(counts) > 1:
            raise ValueError(f"{stream.arrivals} arrivals do not agree with the log")
        if len(history.totals.bin_counts) != len(history.totals.bin_weights):
            raise ValueError("the sums of weights by staleness have different lengths")
        if stream.events > 2 * stream.arrivals + len(stream.training) + history.decisions.get(LOST, 0):
            raise ValueError(f"{stream.events} events do not agree with {stream.arrivals} arrivals")


class InterruptedRun:
    """A run as of the last checkpoint in its store."""

    def __init__(self, path: Path, output: Path, job: Job, config: SimConfig) -> None:
        """Read the last checkpoint in a store; write nothing.

        Args:
            path: the store.
            output: the folder of its log, which may have moved.
            job: the rule and the seed with which the caller continues the run.
            config: its settings.

        Raises:
            ConfigError: the store holds no run, that of another command, or one of another format; or `output` belongs
                to another run.
            StoreError: there is no store, or it is damaged.
        """
        content = info(path)
        notes = content.notes
        if not isinstance(notes, dict) or "afflux_run" not in notes:
            advice = killed_at_once(path) if notes is None and not content.joins else ""
            raise ConfigError(
                f"{path} is the store of a server without a run to resume; choose another --store{advice}"
            )
        if notes["afflux_run"] != FORMAT:
            raise ConfigError(f"{path} holds a run of format {notes['afflux_run']}, this afflux reads {FORMAT}")
        try:
            header = msgspec.convert(notes.get("header"), audit_log.Header)
            hook = evaluation_reader(header.task_metrics)
            checkpoint = msgspec.convert(notes, CheckpointNotes, dec_hook=hook)
            checkpoint.check()
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path} holds a run that is damaged: {error}") from None
        now = {"rule": job.spec.name, "options": job.spec.plain_options(), "label": job.spec.label, "seed": job.seed}
        then = {name: getattr(header, name) for name in now} | header.settings(path).recorded()
        now |= config.recorded()
        places = {"data_dir", "num_clients"}  # which the data may set
        if names := sorted(name for name in {**then, **now}.keys() - places if then.get(name) != now.get(name)):
            raise ConfigError(f"{path} holds a run with another {', '.join(names)}: only the same command continues it")
        self.path, self.notes, self.output, self.config, self.spec = path, checkpoint, output, config, job.spec
        #: Its audit log.
        self.log = output / f"{audit_log.file_stem(self.spec.label, header.seed)}.jsonl"
        self._check_run_id()
        self.check_run_folder()

    @property
    def arrivals(self) -> int:
        """Number of arrivals before the checkpoint."""
        return self.notes.stream.arrivals

    def _check_run_id(self) -> None:
        """Raise ConfigError if the run folder is that of another run."""
        if self.arrivals and not os.path.isfile(self.log):
            why = f"a run is resumed in its run folder, which was {Path(self.notes.audit).parent}"
            raise ConfigError(f"there is no {self.log}: {why}; give --out if it has moved")
        if read_run_id(self.output) not in (None, self.notes.run_id):
            folder = self.output.parent
            raise ConfigError(f"{folder} is the folder of another run than that of {self.path}; choose another --out")

    def check_run_folder(self) -> None:
        """Raise ConfigError if the run folder holds files of anything but this run: the run would overwrite them."""
        folder = self.output.parent
        if not self.log.is_file():  # before the first arrival
            store = self.path.resolve()
            audit = self.output.resolve()
            run_paths = {store, *store.parents, audit, audit / RUN_ID}
            run_paths |= {audit.parent / FILE, audit.parent / LOCK}
            files = (*folder.glob("*"), *self.output.glob("*"))
            if folder.is_file() or any(path.resolve() not in run_paths for path in files):
                raise ConfigError(f"{folder} holds other things than the run of {self.path}; choose another --out")
            return
        if others := sorted(log.name for log in self.output.glob("*.jsonl") if log != self.log):
            raise ConfigError(f"{self.output} holds other runs' logs: {', '.join(others)}; choose another --out")
        try:
            content = self.log.read_bytes()
        except OSError as error:
            raise ConfigError(f"cannot read {self.log}: {error.strerror}") from error
        if not self.arrivals:  # the run starts again; the log may end in the middle of its header
            header = audit_log.encode_json(self.notes.header)
            same = header.startswith(content[: len(header)])
        elif len(content) < self.notes.log_bytes:
            return  # AuditLogWriter raises for it
        else:
            same = sha256(content[: self.notes.log_bytes]).hexdigest() == self.notes.log_sha256
        if not same:
            why = "it is another run's log, or was changed"
            raise ConfigError(f"{self.log} was not written by the run of {self.path}: {why}")

    def check_server(self, server: Server) -> None:
        """Raise ConfigError if `server` was used after the last checkpoint, or lacks a version that clients have."""
        now = _counts(server)
        for name, then in self.notes.server.items():
            if now[name] != then:
                raise ConfigError(
                    f"{self.path}: {name} is {now[name]}, but was {then} when the run was interrupted; the server was "
                    "used since, and the run cannot continue to the same results"
                )
        state = self.notes.stream
        versions = {version for _, _, version, _ in state.training} | {version for version, _ in state.models}
        if lost := sorted(versions - {*server.retained_versions, server.version}):
            raise ConfigError(f"the store no longer keeps version {lost[0]} of params, from which clients train")

    def check_setup(self, setup: RunSetup) -> None:
        """Raise ConfigError if code, data or initial params are not those with which the run began."""
        names = self.spec.name, self.config.task, self.config.selection
        if code_digests(*names) != (self.notes.header.code or {}):
            files = " or ".join(name.partition(":")[0] for name in names if ".py" in name)
            raise ConfigError(
                f"{self.path}: {files}, or a module next to it, is not the one with which the run began: undo the "
                "change, or begin a new run"
            )
        refuse_other_setup(setup, self.path, self.notes.header)

    def read_arrays(self) -> dict[str, np.ndarray]:
        """Read `EventLoop.state_arrays`; raise StoreError if their file is damaged."""
        if self.notes.arrays is None:
            return {}
        try:
            with opened(self.path / self.notes.arrays) as descriptor, open(descriptor, "rb", closefd=False) as file:
                size = os.fstat(descriptor).st_size
                with ZipFile(file) as archive:  # as np.savez writes them: a small file must not unpack to a large one
                    if any(entry.compress_type or entry.file_size > size for entry in archive.infolist()):
                        raise ValueError("its arrays are compressed")
                file.seek(0)
                with np.load(file, allow_pickle=False) as arrays:
                    return dict(arrays)
        except (OSError, ValueError, EOFError, KeyError, RecursionError, MemoryError, BadZipFile) as error:
            raise StoreError(f"[store] cannot read {self.path / self.notes.arrays}: {error}") from None


class StoredRun:
    """The store in which the server of a run is kept, with checkpoints of the run: at intervals, and on Ctrl-C."""

    def __init__(
        self, path: Path, seconds: float = CHECKPOINT_SECONDS, interrupted: InterruptedRun | None = None
    ) -> None:
        """Describe the store.

        Args:
            path: must not exist yet, unless the run is continued.
            seconds: between two checkpoints, which are made between two events; 0: after every event.
            interrupted: the last checkpoint, from which the run is continued; None: it begins.
        """
        self.path, self.interrupted, self._seconds, self._due = path, interrupted, seconds, 0.0

    def server(self, spec: RuleSpec, setup: RunSetup, files: ExitStack) -> Server:
        """Return the server of a rule; `files` closes it."""
        if self.interrupted is None:
            server = setup.new_server(spec, store=self.path, commit_every=None)
        else:
            rule = setup.build_rule(spec)
            key = setup.noise_key(rule)
            server = Server.open(self.path, rule, num_threads=1, noise_key=key, commit_every=None)
        # Rounds after the last checkpoint have no history: they must not be committed.
        files.callback(server.close, checkpoint=False)
        if self.interrupted is not None:
            self.interrupted.check_server(server)
        return server

    def begin(self, loop: EventLoop, leader: RecordedServer, output: Path, start: float) -> None:
        """Save the first checkpoint, and write the id of the run beside its logs.

        `start` is what `process_time` would have been at the beginning of the run.
        """
        self._loop, self._leader, self._output, self._start = loop, leader, output, start
        self._run_id = (self.interrupted and self.interrupted.notes.run_id) or token_hex(16)
        file = output / RUN_ID
        if read_run_id(output) != self._run_id:
            with errors_of_writing(file), open(new_file(file), "w", encoding="ascii") as written:
                written.write(self._run_id)
        self.save()

    def __call__(self) -> None:
        """Save if the interval is over; on Ctrl-C, save and raise KeyboardInterrupt."""
        try:
            interrupts.raise_if_pending()
        except KeyboardInterrupt:
            self.save()
            raise
        if time.monotonic() >= self._due:
            self.save()

    def save(self) -> None:
        """Commit the server, and with it, in one transaction, the notes that `InterruptedRun` reads."""
        self._leader.add_evaluations()
        self._leader.history.cpu_seconds = time.process_time() - self._start
        state, arrays, log = self._loop.state(), self._loop.state_arrays(), self._leader.record.log
        assert log is not None
        name = f"clients-{state.events}.npz" if arrays else None
        if name is not None:
            new = self.path / f"{name}.new"
            try:
                with open(new_file(new), "wb") as file:
                    np.savez(file, **arrays)  # type: ignore[arg-type]
                new.replace(self.path / name)
            except OSError as error:
                raise StoreError(f"[store] cannot write {new}: {error.strerror}") from None
        notes = CheckpointNotes(
            afflux_run=FORMAT,
            audit=str(self._output.resolve()),
            header=log.header,
            log_bytes=log.size,
            log_sha256=log.digest,
            server=_counts(self._leader.server),
            stream=state,
            arrays=name,
            history=self._leader.history,
            run_id=self._run_id,
        )
        self._leader.server.checkpoint(msgspec.to_builtins(notes), keep=self._loop.older_versions())
        for old in self.path.glob("clients-*.npz*"):
            if old.name != name:
                old.unlink()
        self._due = time.monotonic() + self._seconds


def refuse_other_setup(setup: RunSetup, path: Path, header: audit_log.Header) -> None:
    """Compare the inputs of a setup with those of a run that is continued.

    Other versions of packages, and a log without digests, are one line of notice each.

    Args:
        setup: with digests.
        path: for messages.
        header: of the log of the run.

    Raises:
        ConfigError: an input is another one; the error names it.
    """
    facts: dict[str, Any] = {"number of clients": header.num_clients, "first params": header.first_params_sha256}
    facts["metrics"] = header.task_metrics
    then = facts | (header.inputs or {})
    facts_now = len(setup.population.clients), params_sha256(setup.model.initial_params), setup.metrics
    now = dict(zip(facts, facts_now, strict=True)) | dict(setup.inputs)
    versions = {"afflux": header.afflux, **(header.versions or {})}
    refuse_other_inputs(str(path), then, now, versions, header.inputs is not msgspec.UNSET)


def read_run_id(folder: Path) -> str | None:
    """Return the content of `RUN_ID` in a folder of logs; None if there is no such file."""
    try:
        return read_bytes(folder / RUN_ID, 100).decode("ascii", "replace")
    except OSError:
        return None


def _counts(server: Server) -> dict[str, int]:
    return {name: getattr(server, name) for name in COUNTS}


def killed_at_once(path: Path) -> str:
    """Return what to do about a store without a checkpoint of a run."""
    return f"; if a run was killed before its first checkpoint, remove {path} and the folder of the run"


def interrupted_run(path: Path, output: Path, job: Job, config: SimConfig) -> InterruptedRun | None:
    """Return the run of this job in a store, which the same command continues; None: the store is free.

    Raises:
        ConfigError: the store holds something else; see `InterruptedRun`.
    """
    if not path.exists() or (path.is_dir() and not any(path.iterdir())):
        return None
    if not path.is_dir():
        raise ConfigError(f"{path} is not a folder; choose another --store")
    try:
        info(path)
    except StoreError:
        advice = killed_at_once(path) if (path / LOCK).exists() else ""
        raise ConfigError(f"{path} is a folder that is not empty; choose another --store{advice}") from None
    return InterruptedRun(path, output, job, config)
