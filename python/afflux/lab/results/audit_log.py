"""The audit log of one run: JSON lines.

One header, one line per arrival, one line per round after the arrival that completed it, and an end line, which the log
of an interrupted run does not have. Numbers that are not finite are null.
"""

import os
import re
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import dataclass, fields
from hashlib import sha256
from pathlib import Path
from typing import Annotated, Any, get_args

import msgspec
from msgspec import Meta

from afflux.aggregation.reports import Report
from afflux.ops.errors import ConfigError
from afflux.ops.validation import brief
from afflux.rules.specs import JsonScalar
from afflux.sim.workload.availability import Fate
from afflux.sim.workload.config import Count, SimConfig
from afflux.sim.workload.evaluation import CLASSIFICATION, Metric
from afflux.store.files import opened

FORMAT, FORMAT_VERSION = "afflux-audit", 1
FOLDER = "audit"  #: in a run folder
LONGEST_NAME = 80

Positive = Annotated[int, Meta(ge=1, le=2**63 - 1)]
Label = Annotated[
    str, Meta(pattern=r"^[^\x00-\x1f\x7f-\x9f]*\Z", max_length=10_000)
]  #: text that is printed: no control characters
ShortText = Annotated[str, Meta(pattern=r"^[\w.+ -]{1,60}\Z")]
Digest = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]

#: The most bytes of a line.
MOST_LINE_BYTES = 64 << 20


class _Line(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="type"):
    """Any line; its type is named by the field `type`."""


class Header(_Line, frozen=True, tag="header"):
    """The rule and the settings of the run."""

    format: str
    format_version: int
    afflux: Label  #: version of the package
    label: Label  #: the rule as tables call it
    rule: str
    options: dict[str, JsonScalar]
    kind: str  #: kind of the vectors that clients push: update, gradient or model
    buffer_size: Positive
    d: Positive
    seed: Count
    num_clients: Positive  #: number of clients that hold data
    client_lr: float
    leader: Label  #: label of the rule from whose params the clients trained
    first_params_sha256: str
    config: dict[str, JsonScalar]  #: the fields of SimConfig, some only if they are not the default
    #: SHA-256 of the user's files, with the modules beside them: of the rule's as `rule`, of the task's as `task`
    code: dict[str, Digest] | msgspec.UnsetType = msgspec.UNSET
    inputs: dict[ShortText, Digest] | msgspec.UnsetType = msgspec.UNSET  #: SHA-256 of the data, the model, ... by name
    versions: dict[ShortText, ShortText] | msgspec.UnsetType = msgspec.UNSET  #: of NumPy and torch
    metrics: Annotated[tuple[Metric, ...], Meta(min_length=1)] | msgspec.UnsetType = msgspec.UNSET  #: of the task

    @property
    def task_metrics(self) -> tuple[Metric, ...]:
        """The metrics of the evaluations."""
        return self.metrics or CLASSIFICATION

    def settings(self, path: Path) -> SimConfig:
        """Return the settings, to read them; raise ConfigError if this afflux does not have them."""
        try:
            unknown = self.config.keys() - {field.name for field in fields(SimConfig)}
            if unknown:
                raise ValueError(f"unknown settings: {', '.join(sorted(map(brief, unknown)))}")
            return msgspec.convert(self.config, SimConfig)
        except ValueError as error:
            raise ConfigError(f"{path} was made by afflux {self.afflux}: {error}") from None


class ArrivalLine(_Line, frozen=True, tag="arrival"):
    """One client result, and the server's decision about it."""

    number: int  #: number of arrivals before this one
    client: int
    dispatched_after: int  #: number of arrivals that the server had handled when the client pulled
    version: Count  #: version that the client pulled from this rule's server
    staleness: Count
    examples: Count  #: 0: the training has raised
    loss: float | None
    steps: Count  #: 0: the training has raised
    status: str
    time: float  #: virtual time of the arrival
    reason: Label | msgspec.UnsetType = msgspec.UNSET  #: of a faulty arrival
    dispatched: float | msgspec.UnsetType = msgspec.UNSET  #: virtual time of the dispatch, if clients come and go


class DropoutLine(_Line, frozen=True, tag="dropout"):
    """One dispatch whose result never arrives."""

    client: int
    dispatched_after: int  #: number of arrivals before it
    dispatched: float  #: virtual time of the dispatch
    fate: Fate  #: does not finish, loses its upload, or finishes after the timeout
    freed: float | None  #: virtual time at which its place was given away; None: never


class RoundLine(_Line, frozen=True, tag="round"):
    """One server step: `Report` without the seconds. Tuples are in canonical order, (M,)."""

    version: int  #: the server's version after the step
    client_ids: tuple[int, ...]
    joins: tuple[int, ...]  #: the numbers of the arrivals
    versions: tuple[int, ...]  #: versions that their clients pulled
    staleness: tuple[int, ...]
    weights: tuple[float | None, ...]
    norms: tuple[float | None, ...]
    cosines: tuple[float | None, ...] | None
    rejected: tuple[str, ...]  #: the reason; empty: the arrival was accepted
    server_lr: float | None
    scalars: dict[str, float | None]
    stepped: bool


class EndLine(_Line, frozen=True, tag="end"):
    """The end of a complete run."""

    arrivals: int
    version: int
    params_sha256: str
    buffers_sha256: Digest | msgspec.UnsetType = msgspec.UNSET  #: of a model that has buffers


LogLine = Header | ArrivalLine | DropoutLine | RoundLine | EndLine
_ENCODER = msgspec.json.Encoder(enc_hook=lambda value: value.tolist())  # of NumPy arrays and scalars
_DECODER: msgspec.json.Decoder[LogLine] = msgspec.json.Decoder(LogLine)


@dataclass(frozen=True, slots=True)
class AuditLog:
    """The content of a log file."""

    path: Path
    header: Header
    arrivals: tuple[ArrivalLine, ...]
    rounds: tuple[RoundLine, ...]
    end: EndLine | None  #: None: the run was interrupted
    dropouts: tuple[DropoutLine, ...] = ()


def file_stem(label: str, seed: int) -> str:
    """Return the name, without suffix, of a rule's files in a run folder.

    >>> file_stem("fedbuff:staleness=hinge(10,4)", 3)
    'fedbuff_staleness=hinge_10_4-seed3'
    """
    safe = re.sub(r"[^\w.=+-]+", "_", label, flags=re.ASCII).strip("_.")
    if len(safe) > LONGEST_NAME:
        safe = f"{safe[: LONGEST_NAME - 9]}-{sha256(label.encode()).hexdigest()[:8]}"
    return f"{safe}-seed{seed}"


def encode_json(value: Any, indent: int = 0) -> bytes:
    """Return `value` as JSON: one line, or indented; nan and infinities are null, NumPy arrays are lists."""
    return msgspec.json.format(_ENCODER.encode(value), indent=indent) + b"\n"


class AuditLogWriter(AbstractContextManager["AuditLogWriter"]):
    """A writer of a log. It writes each line at once, so that an interrupted run leaves whole lines."""

    def __init__(self, path: Path, header: Header, size: int = 0) -> None:
        """Create the file `path`, which must not exist yet, and write the header; with `size`, continue the file.

        Args:
            path: the file.
            header: its first line.
            size: bytes after which the file is continued; the rest is removed.
        """
        self._sha256 = sha256()
        if size:
            truncate_file(path, size)
            self._sha256.update(path.read_bytes())
        self._file = path.open("ab" if size else "xb")  # truncate_file has refused a link
        self.header = header
        if not size:
            self.write(header)

    @property
    def size(self) -> int:
        """Size of the file in bytes."""
        return os.fstat(self._file.fileno()).st_size

    @property
    def digest(self) -> str:
        """SHA-256 of the file."""
        return self._sha256.hexdigest()

    def write(self, line: LogLine) -> None:
        """Write any line."""
        row = encode_json(line)
        self._file.write(row)
        self._file.flush()
        self._sha256.update(row)

    def write_round(self, report: Report) -> None:
        """Write the line of a round."""
        self.write(RoundLine(**{name: getattr(report, name) for name in RoundLine.__struct_fields__}))

    def __exit__(self, *error: object) -> None:
        """Close the file."""
        self._file.close()


def truncate_file(path: Path, size: int) -> None:
    """Truncate a file to its first `size` bytes.

    Raises:
        ConfigError: the file has fewer bytes, or is no regular file: a link is not followed.
    """
    try:
        with opened(path, os.O_RDWR) as descriptor:
            if os.fstat(descriptor).st_size < size:
                raise ConfigError(f"{path} is shorter than the {size} bytes of the checkpoint")
            os.ftruncate(descriptor, size)
    except OSError as error:
        raise ConfigError(f"cannot continue {path}: {error.strerror}") from error


def read_audit_log(path: Path | str) -> AuditLog:
    """Read a log and check every line; the end may be missing, even in the middle of the last line.

    Raises:
        ConfigError: no log, or a bad line, with file and line number.
    """
    path = Path(path)
    try:
        with opened(path) as descriptor, open(descriptor, "rb", closefd=False) as file:
            return _read(path, iter(lambda: file.readline(MOST_LINE_BYTES), b""))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}") from None


def _read(path: Path, rows: Iterable[bytes]) -> AuditLog:
    lines: dict[type[LogLine], list[Any]] = {kind: [] for kind in get_args(LogLine)}
    for number, row in enumerate(rows, 1):
        try:
            if not row.endswith(b"\n"):
                if len(row) == MOST_LINE_BYTES:
                    raise ValueError(f"more than {MOST_LINE_BYTES} bytes")
                break  # it was cut off
            line = _DECODER.decode(row[:-1])
            if (number == 1) != isinstance(line, Header):
                raise ValueError("the header must be the first line, and only the first")
            if lines[EndLine]:
                raise ValueError("something follows the end line")
            _check(line, len(lines[ArrivalLine]))
            lines[type(line)].append(line)
        except (ValueError, msgspec.DecodeError, RecursionError) as error:
            raise ConfigError(f"{path}, line {number}: {error}") from None
    headers, arrivals, dropouts, rounds, ends = map(tuple, lines.values())
    if not headers:
        raise ConfigError(f"{path}, line 1: no header of an audit log")
    return AuditLog(path, headers[0], arrivals, rounds, ends[0] if ends else None, dropouts)


def _check(line: LogLine, arrivals: int) -> None:
    """Raise ValueError if a line is not one that may follow so many arrivals."""
    match line:
        case Header() if (line.format, line.format_version) != (FORMAT, FORMAT_VERSION):
            raise ValueError(f"format is {line.format} {line.format_version}, not {FORMAT} {FORMAT_VERSION}")
        case ArrivalLine() if line.number != arrivals:
            raise ValueError(f"number is {line.number}, must be {arrivals}: a line is missing or twice")
        case ArrivalLine() if not 0 <= line.dispatched_after <= line.number:
            raise ValueError(f"dispatched_after is {line.dispatched_after}, must be 0 to {line.number}")
        case ArrivalLine() if line.status != "faulty" and not (line.examples and line.steps):
            raise ValueError(f"examples is {line.examples} and steps is {line.steps}, must be 1 or more")
        case DropoutLine() if line.dispatched_after != arrivals:
            raise ValueError(f"dispatched_after is {line.dispatched_after}, must be {arrivals}")
        case EndLine() if line.arrivals != arrivals:
            raise ValueError(f"arrivals is {line.arrivals}, but {arrivals} lines are above")
