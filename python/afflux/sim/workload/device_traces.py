"""Laws of the clients' running times from measured traces: each client is a device of a CSV file.

A file has a line of column names, then a line of values for each device or interval. Devices are drawn for the clients
without replacement as long as there are enough.
"""

import csv
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from afflux.ops.validation import brief
from afflux.sim.data.files import bad_file, read_text
from afflux.sim.errors import ConfigError
from afflux.sim.workload.delays import Delay


def trace_path(file: str) -> Path:
    """Return the path of a trace: the given path if it exists, else below the folder AFFLUX_DATA.

    Raises:
        ConfigError: there is no such file.
    """
    folder = os.environ.get("AFFLUX_DATA")
    paths = [Path(file), *([Path(folder) / file] if folder else [])]
    for path in paths:
        if os.path.isfile(path):  # Path.is_file raises for a name that is too long
            return path
    where = f" or in {folder}" if folder else "; AFFLUX_DATA is not set"
    raise ConfigError(f"there is no file {file}{where} (formats: docs/data.md)")


def read_columns(path: Path, names: Sequence[str], numbers: Sequence[str]) -> list[tuple[list[str], list[float]]]:
    """Read some columns of a CSV file.

    Args:
        path: the file, in UTF-8 or UTF-16, with commas, semicolons or tabs; values may be in double quotes.
        names: columns of text, and
        numbers: columns of numbers, finite and not negative; an empty value is 0.

    Returns:
        The texts and the numbers of each line.

    Raises:
        ConfigError: the file cannot be read or lacks a column, a line has another number of values, or a value is no
            such number.
    """
    expected = f"a CSV file with the columns {', '.join([*names, *numbers])}"
    lines = read_text(path, expected).split("\n")  # a value may hold other ends of lines of Unicode
    delimiter = max(",;\t", key="".join(lines[:1]).count)
    reader = csv.DictReader(lines, delimiter=delimiter, skipinitialspace=True, strict=True)
    try:
        columns = reader.fieldnames = [name.strip() for name in reader.fieldnames or ()]
        absent = [column for column in (*names, *numbers) if column not in columns]
        if absent:
            its = f"only {brief(', '.join(columns))}" if columns else "it is empty"
            raise bad_file(path, f"has no column {', '.join(absent)}, {its}", expected)
        values = []
        for line in reader:
            if None in line or None in line.values():
                problem = f"has another number of values in line {reader.line_num}"
                raise bad_file(path, problem, f"{len(columns)}, as in its first line")
            texts = [line[column].strip() for column in names]
            values.append((texts, [_number(path, reader.line_num, column, line[column]) for column in numbers]))
    except csv.Error as error:
        raise bad_file(path, f"is no CSV file after line {reader.line_num}: {error}", expected) from None
    if not values:
        raise bad_file(path, "has no line of values", expected)
    return values


def _number(path: Path, line: int, column: str, text: str) -> float:
    try:
        value = float(text or 0)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise bad_file(path, f"has {column} {text!r} in line {line}", "a finite number, 0 or more")
    return value


@dataclass(frozen=True)
class DeviceTimes:
    """Gamma law with the mean and the standard deviation that were measured on the client's device.

    A dispatch of `work` units takes `work` independent times of the trace. A device without deviation always takes its
    mean.
    """

    file: str
    """A CSV file with a line for each device."""
    time: str = "time"
    """Column of the mean; 0 or empty: not measured, the device is left out."""
    deviation: str = "deviation"
    """Column of the standard deviation; none: all are 0."""
    work: float = 1.0
    """Units of work of a dispatch: the sum of so many times."""

    def __post_init__(self) -> None:
        """Raise ConfigError if an option is out of range."""
        _check_work(self.work)

    def __call__(self, num_clients: int, rng: np.random.Generator) -> Delay:
        """Read the file and draw the device of each client; raise ConfigError if the file is damaged."""
        path = trace_path(self.file)
        columns = [self.time, *([] if self.deviation == "none" else [self.deviation])]
        measured = np.array([[*numbers, 0.0][:2] for _, numbers in read_columns(path, [], columns) if numbers[0]])
        if not len(measured):
            raise bad_file(path, f"has no device with a {self.time}", "a device with a time")
        devices = rng.choice(len(measured), num_clients, replace=num_clients > len(measured))
        mean = measured[devices, 0] * self.work
        deviation = measured[devices, 1] * np.sqrt(self.work)

        def delay(client: int, times: np.random.Generator) -> float:
            if not deviation[client]:
                return float(mean[client])
            shape = (mean[client] / deviation[client]) ** 2
            return float(times.gamma(shape, mean[client] / shape))

        return delay


def _check_work(work: float) -> None:
    if not 0 < work < float("inf"):
        raise ConfigError(f"work is {work}, must be positive and finite")


class ReadyTimes:
    """The intervals in which one device is ready; after the last one the trace begins again."""

    def __init__(self, starts: np.ndarray, ends: np.ndarray) -> None:
        """Make the trace of sorted intervals that do not overlap and are not empty."""
        self._starts = starts - starts[0]
        self._worked = np.concatenate([[0.0], np.cumsum(ends - starts)])
        self._period = float(ends[-1] - starts[0])

    @property
    def total(self) -> float:
        """The time for which the device is ready, in one pass of the trace."""
        return float(self._worked[-1])

    def elapsed(self, begin: float, work: float) -> float:
        """Return the time that `work` takes.

        Args:
            begin: moment at which the work begins: the ready time before it, in [0, total).
            work: positive; the ready time that is needed.
        """
        first = int(np.searchsorted(self._worked, begin, side="right")) - 1
        began = self._starts[first] + begin - self._worked[first]
        laps, end = divmod(begin + work, self.total)
        if end == 0:
            # Work that ends with the last interval does not wait for the next pass.
            laps, end = laps - 1, self.total
        last = int(np.searchsorted(self._worked, end, side="left")) - 1
        return float(laps * self._period + self._starts[last] + end - self._worked[last] - began)


@dataclass(frozen=True)
class DeviceAvailability:
    """The time, from a random moment at which a device is ready, until the device has been ready for `work` units of
    time. The running time of a dispatch includes the pauses.

    A dispatch starts at a moment that is uniform over the device's ready time.
    """

    file: str
    """A CSV file with a line for each interval of each device."""
    device: str = "device"
    """Column of the device's name."""
    start: str = "start"
    """Column of the interval's begin, in any unit."""
    end: str = "end"
    """Column of its end; an interval of length 0 is left out."""
    work: float = 60.0
    """Ready time that a dispatch needs, in the unit of the file."""

    def __post_init__(self) -> None:
        """Raise ConfigError if an option is out of range."""
        _check_work(self.work)

    def __call__(self, num_clients: int, rng: np.random.Generator) -> Delay:
        """Read the file and draw the device of each client; raise ConfigError if the file is damaged."""
        traces = self.read()
        devices = rng.choice(len(traces), num_clients, replace=num_clients > len(traces))
        own: list[ReadyTimes] = [traces[device] for device in devices]

        def delay(client: int, times: np.random.Generator) -> float:
            return own[client].elapsed(times.uniform(0.0, own[client].total), self.work)

        return delay

    def read(self) -> list[ReadyTimes]:
        """Return the trace of each device that is ever ready, in the order of the file."""
        path = trace_path(self.file)
        intervals: dict[str, list[tuple[float, float]]] = {}
        for (device,), (start, end) in read_columns(path, [self.device], [self.start, self.end]):
            if start > end:
                raise bad_file(path, f"has an interval from {start} to {end}", "an end that is not before the start")
            if start < end:
                intervals.setdefault(device, []).append((start, end))
        if not intervals:
            raise bad_file(path, "has no interval with a length", "a device that is ready")
        traces = []
        for device, own in intervals.items():
            starts, ends = np.array(sorted(own)).T
            if (starts[1:] < ends[:-1]).any():
                raise bad_file(path, f"has intervals of device {device!r} that overlap", "intervals one after another")
            traces.append(ReadyTimes(starts, ends))
        return traces
