"""The audit log of one run: JSON lines that people grep and `read` checks.

One header, one line per arrival, one per round after the arrival that completed it, and an end line, which a run that
was interrupted does not have. What is no finite number is null.
"""

import json
import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from types import TracebackType, UnionType
from typing import Any, NamedTuple, get_args, get_origin

import numpy as np

from afflux.aggregation.reports import Report
from afflux.sim.config import Plain, RuleSpec, SimConfig, parse, written
from afflux.sim.errors import ConfigError
from afflux.sim.kept import cut_off, read_updates

FORMAT, FORMAT_VERSION = "afflux-audit", 1
FOLDER = "audit"  #: in a run folder
LONGEST_NAME = 80


class Header(NamedTuple):
    """What was run."""

    format: str
    format_version: int
    afflux: str  #: version of the package
    label: str  #: the rule as tables call it
    rule: str
    options: dict[str, Plain]
    kind: str  #: what the rule's clients push: update, gradient or model
    buffer_size: int
    d: int
    seed: int
    num_clients: int  #: that hold data
    client_lr: float
    leader: str  #: label of the rule from whose params the clients trained
    updates: str | None  #: file of the kept updates, beside the log
    first_params_sha256: str
    config: dict[str, Plain]  #: the fields of SimConfig


class ArrivalLine(NamedTuple):
    """One client result, and what the server did with it."""

    number: int  #: arrivals before it
    client: int
    dispatched_after: int  #: arrivals that were handled when the client pulled
    version: int  #: that it pulled from this rule's server
    staleness: int
    examples: int
    loss: float | None
    steps: int
    status: str
    time: float  #: virtual
    update: int | None  #: row in the kept updates


class RoundLine(NamedTuple):
    """One server step: `Report` without the seconds. Tuples are in canonical order, (M,)."""

    version: int  #: the server's version after it
    client_ids: tuple[int, ...]
    joins: tuple[int, ...]  #: the numbers of the arrivals
    versions: tuple[int, ...]  #: that they pulled
    staleness: tuple[int, ...]
    weights: tuple[float | None, ...]
    norms: tuple[float | None, ...]
    cosines: tuple[float | None, ...] | None
    rejected: tuple[str, ...]  #: why; empty: it was accepted
    server_lr: float | None
    scalars: dict[str, float | None]
    stepped: bool


class EndLine(NamedTuple):
    """The run is complete."""

    arrivals: int
    version: int
    params_sha256: str


Line = Header | ArrivalLine | RoundLine | EndLine
TYPES: dict[str, type[Line]] = {"header": Header, "arrival": ArrivalLine, "round": RoundLine, "end": EndLine}
NAMES = {line: name for name, line in TYPES.items()}


@dataclass(frozen=True, slots=True)
class Log:
    """A log that was read."""

    path: Path
    header: Header
    arrivals: tuple[ArrivalLine, ...]
    rounds: tuple[RoundLine, ...]
    end: EndLine | None  #: None: the run was interrupted

    @property
    def planned(self) -> int:
        """The arrivals that the run was to have."""
        return self.config().arrivals

    def config(self) -> SimConfig:
        """The settings of the run; raises ConfigError if this afflux does not know them."""
        return config_of(self.header, self.path)

    def spec(self) -> RuleSpec:
        """The rule with its options; raises ConfigError if this afflux does not know them."""
        return spec_of(self.header)

    def updates(self) -> np.ndarray:
        """The kept updates that are complete, (n, d) float32, mapped; raises ConfigError if none were kept."""
        if self.header.updates is None:
            raise ConfigError(f"{self.path} has no updates: make the run with --keep-updates")
        return read_updates(self.path.parent / self.header.updates, self.header.d)


def config_of(header: Header, path: Path) -> SimConfig:
    """The settings in a header, which was read from `path`."""
    try:
        return SimConfig(**header.config)  # type: ignore[arg-type]
    except TypeError as error:
        raise ConfigError(f"{path} was made by afflux {header.afflux}: {error}") from error


def spec_of(header: Header) -> RuleSpec:
    """The rule in a header."""
    options = (f":{name}={written(value)}" for name, value in header.options.items())
    return RuleSpec(header.rule, parse(header.rule + "".join(options)).options, header.label)


def file_name(label: str, seed: int) -> str:
    """Return the name, without suffix, under which a rule's files lie in a run folder.

    >>> file_name("fedbuff:staleness=hinge(10,4)", 3)
    'fedbuff_staleness=hinge_10_4-seed3'
    """
    safe = re.sub(r"[^\w.=+-]+", "_", label, flags=re.ASCII).strip("_.")
    if len(safe) > LONGEST_NAME:
        safe = f"{safe[: LONGEST_NAME - 9]}-{sha256(label.encode()).hexdigest()[:8]}"
    return f"{safe}-seed{seed}"


def plain(value: Any) -> Any:
    """Return what JSON has for `value`: null for nan and infinities, lists for arrays."""
    if isinstance(value, np.ndarray | np.generic):
        value = value.tolist()
    if isinstance(value, Mapping):
        return {str(key): plain(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [plain(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def as_text(line: Line) -> str:
    """Return what stands in the file for `line`."""
    return json.dumps(plain({"type": NAMES[type(line)], **line._asdict()}), allow_nan=False) + "\n"


class Writer:
    """Writes a log, each line at once, so that an interrupted run leaves whole lines."""

    def __init__(self, path: Path, header: Header, size: int = 0) -> None:
        """Make the file `path`, which must not exist yet, and write its header; or go on after `size` bytes of it."""
        self._sha256 = sha256()
        if size:
            cut_off(path, size)
            self._sha256.update(path.read_bytes())
        self._file = path.open("a" if size else "x", buffering=1, encoding="utf-8", newline="\n")
        self.header = header
        if not size:
            self.write(header)

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return os.fstat(self._file.fileno()).st_size

    @property
    def digest(self) -> str:
        """The SHA-256 of these bytes."""
        return self._sha256.hexdigest()

    def write(self, line: Line) -> None:
        """Write any line."""
        row = as_text(line)
        self._file.write(row)
        self._sha256.update(row.encode())

    def report(self, report: Report) -> None:
        """Write the line of a round."""
        self.write(RoundLine(**{name: getattr(report, name) for name in RoundLine._fields}))

    def __enter__(self) -> "Writer":
        """See contextlib."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file."""
        self._file.close()


def read(path: Path | str) -> Log:
    """Read a log and check every line; the end may be missing, even in the middle of the last line.

    Raises:
        ConfigError: no log, or a bad line, with file and line number.
    """
    path = Path(path)
    try:
        text = path.read_bytes().decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}") from error
    *whole, _cut_off = text.split("\n")
    arrivals: list[ArrivalLine] = []
    rounds: list[RoundLine] = []
    header: Header | None = None
    end: EndLine | None = None
    for number, row in enumerate(whole, 1):
        try:
            line = _line(row)
            if (number == 1) != isinstance(line, Header):
                raise ValueError("the header must be the first line, and is the only one of its kind")
            if end is not None:
                raise ValueError("something follows the end line")
            match line:
                case Header():
                    header = line
                    if (line.format, line.format_version) != (FORMAT, FORMAT_VERSION):
                        raise ValueError(
                            f"format is {line.format} {line.format_version}, not {FORMAT} {FORMAT_VERSION}"
                        )
                case ArrivalLine():
                    _check(line, len(arrivals))
                    arrivals.append(line)
                case RoundLine():
                    rounds.append(line)
                case EndLine():
                    end = line
                    if line.arrivals != len(arrivals):
                        raise ValueError(f"arrivals is {line.arrivals}, but {len(arrivals)} lines stand above")
        except ValueError as error:
            raise ConfigError(f"{path}, line {number}: {error}") from None
    if header is None:
        raise ConfigError(f"{path}, line 1: no header of an audit log")
    return Log(path, header, tuple(arrivals), tuple(rounds), end)


def _check(line: ArrivalLine, expected: int) -> None:
    if line.number != expected:
        raise ValueError(f"number is {line.number}, must be {expected}: a line is missing or twice")
    if not 0 <= line.dispatched_after <= line.number:
        raise ValueError(f"dispatched_after is {line.dispatched_after}, must be 0 to {line.number}")
    for name, least in (("version", 0), ("staleness", 0), ("examples", 1), ("steps", 1), ("update", 0)):
        if (value := getattr(line, name)) is not None and value < least:
            raise ValueError(f"{name} is {value}, must be at least {least}")


def _line(row: str) -> Line:
    try:
        content = json.loads(row, parse_constant=_no_constant)
    except json.JSONDecodeError as error:
        raise ValueError(f"no JSON: {error}") from None
    if not isinstance(content, dict) or content.get("type") not in TYPES:
        raise ValueError(f"no object whose type is one of {', '.join(TYPES)}")
    line = TYPES[content.pop("type")]
    wanted = line.__annotations__
    if content.keys() != wanted.keys():
        odd = ", ".join(sorted(content.keys() ^ wanted.keys()))
        raise ValueError(f"missing or unknown: {odd}")
    return line(**{name: _typed(name, content[name], annotation) for name, annotation in wanted.items()})


def _no_constant(text: str) -> None:
    raise ValueError(f"{text} is no JSON: null is meant")


def _typed(name: str, value: Any, annotation: Any) -> Any:
    """Return `value` as the annotation says; a list becomes a tuple, and an int a float where one is wanted."""
    options = get_args(annotation) if isinstance(annotation, UnionType) else (annotation,)
    for option in options:
        origin, parts = get_origin(option), get_args(option)
        if origin is tuple and isinstance(value, list):
            return tuple(_typed(name, part, parts[0]) for part in value)
        if origin is dict and isinstance(value, dict):
            return {key: _typed(f"{name}.{key}", part, parts[1]) for key, part in value.items()}
        if type(value) is option:
            return value
    if float in options and type(value) is int:
        return float(value)
    raise ValueError(f"{name} is {value!r}, must be {getattr(annotation, '__name__', annotation)}")
