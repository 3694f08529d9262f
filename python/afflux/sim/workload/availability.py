"""When clients are there, and whether they answer: the laws of the settings availability and dropout.

`ReadyTimes` is the only form of an availability.
"""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from sys import float_info
from typing import Any, Literal, TypeAlias, get_type_hints

import numpy as np

from afflux.ops.errors import ConfigError
from afflux.ops.validation import known
from afflux.rules.specs import read_options
from afflux.sim.data.files import bad_file, read_table


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
    raise ConfigError(f"there is no file {file}{where} (formats: docs/reference/data.md)")


def _number(path: Path, line: int, column: str, text: str) -> float:
    try:
        value = float(text or 0)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise bad_file(path, f"has {column} {text!r} in line {line}", "a finite number, 0 or more")
    return value


MOST = 1e12  #: the largest number of an option


def check_range(law: Any, low: float, high: float, *options: str, words: str = "") -> None:
    """Raise ConfigError, in these words, if an option of a law is below `low` or above `high`."""
    for option in options:
        if not low <= (value := getattr(law, option)) <= high:
            raise ConfigError(f"{option} is {value}, must be {words or f'from {low:g} to {high:g}'}")


def check_positive(law: Any, *options: str) -> None:
    """Raise ConfigError if an option of a law is not positive and finite."""
    check_range(law, math.ulp(0.0), float_info.max, *options, words="positive and finite")


def check_finite(law: Any, *options: str) -> None:
    """Raise ConfigError if an option of a law is not 0 or more and finite."""
    check_range(law, 0, float_info.max, *options, words="0 or more and finite")


def read_law(
    setting: str,
    text: str,
    laws: Mapping[str, tuple[type[Any], Mapping[str, Any]]],
    other_names: Sequence[str] = (),
    more: Mapping[str, Any] | None = None,
) -> tuple[Any, dict[str, Any]]:
    """Return the law of `NAME` or `NAME:OPTION=VALUE:...`, and the values of the options `more`.

    Args:
        setting: the setting, for errors.
        text: of the setting.
        laws: by name a dataclass, whose fields are the options, and the options that the name sets.
        other_names: further names that the setting may have, for errors.
        more: annotations of options of each law with options.

    Raises:
        ConfigError: an unknown name or option, a value out of range, or an option that is missing.
    """
    name, *assignments = text.split(":")
    known(setting, name, (*laws, *other_names))
    if name in other_names:
        raise ConfigError(f"{setting} {text}: {name} has no options")
    kind, preset = laws[name]
    options = {option.name: option for option in fields(kind)}
    if assignments and not options:
        raise ConfigError(f"{setting} {text}: {name} has no options")
    hints = {option: hint for option, hint in get_type_hints(kind).items() if option in options}
    values = read_options(f"{setting} {text}", assignments, f"{setting} {name}", {**hints, **(more or {})})
    further = {option: values.pop(option) for option in (more or ()) if option in values}
    required = [name for name, option in options.items() if option.default is MISSING]
    if absent := [f"{name}=..." for name in required if name not in {**preset, **values}]:
        raise ConfigError(f"{setting} {text}: needs {', '.join(absent)}")
    try:
        return kind(**{**preset, **values}), further
    except ConfigError as error:
        raise ConfigError(f"{setting} {text}: {error}") from None


class ReadyTimes:
    """The intervals in which one device is ready; after `period` the trace begins again."""

    def __init__(self, starts: np.ndarray, ends: np.ndarray, period: float, begin: float = 0.0) -> None:
        """Make the trace of sorted intervals that do not overlap and are not empty.

        Args:
            starts: of the intervals.
            ends: of the intervals.
            period: after which the trace begins again, at least the last end.
            begin: virtual time at which the trace begins.
        """
        self._starts, self._ends, self._period, self._begin = starts, ends, period, begin
        self._worked = np.concatenate([[0.0], np.cumsum(ends - starts)])
        self.total = float(self._worked[-1])  #: the time for which the device is ready, in one pass of the trace

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

    def next_ready(self, now: float) -> float:
        """Return the first virtual time, from `now` on, at which the device is ready."""
        lap, _, place = self._place(now)
        lap, place = (lap, place) if place < len(self._starts) else (lap + 1, 0)
        return max(now, float(lap * self._period + self._starts[place] + self._begin))

    def finish(self, now: float, work: float) -> float:
        """Return when work ends that begins `now`, when the device is ready; it waits while the device is not."""
        _, moment, place = self._place(now)
        inside = max(moment - self._starts[place], 0.0) if place < len(self._starts) else 0.0
        return now + self.elapsed(float(self._worked[place] + inside) % self.total, work) if work else now

    def _place(self, now: float) -> tuple[float, float, int]:
        """Return the pass of the trace, the moment in it, and the interval that ends next."""
        lap, moment = divmod(now - self._begin, self._period)
        return lap, moment, int(np.searchsorted(self._ends, moment, side="right"))


#: (number of clients, random stream) -> the ready times of a client.
Availability: TypeAlias = Callable[[int, np.random.Generator], Callable[[int], ReadyTimes]]


@dataclass(frozen=True)
class Diurnal:
    """Each client is there once in each period, at its own time of the day."""

    period: float  #: length of a day, in the unit of the delays
    share: float = 0.5  #: of each day, in which a client is there
    #: Share of the day over which the clients' first moments are uniform; 0: all clients come and go together.
    spread: float = 1.0

    def __post_init__(self) -> None:
        """Raise ConfigError if an option is out of range."""
        check_range(self, 1 / MOST, MOST, "period")
        check_range(self, 1 / MOST, 1, "share")
        check_range(self, 0, 1, "spread")

    def __call__(self, num_clients: int, rng: np.random.Generator) -> Callable[[int], ReadyTimes]:
        """Draw the first moment of each client's day."""
        begins = rng.uniform(0.0, self.spread * self.period, num_clients)
        starts, ends = np.zeros(1), np.array([self.share * self.period])
        return lambda client: ReadyTimes(starts, ends, self.period, float(begins[client]))


@dataclass(frozen=True)
class Devices:
    """Each client is there when its device is ready: one of a CSV file with a line for each interval.

    Virtual time 0 is the first start in the file. After the last end in the file all traces begin again.
    """

    file: str
    device: str = "device"  #: column of the device's name
    start: str = "start"  #: column of the interval's begin, in any unit
    end: str = "end"  #: column of its end; an interval of length 0 is left out

    def intervals(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Return the starts and ends of each device that is ever ready, in the order of the file.

        Raises:
            ConfigError: there is no such file, or it is damaged.
        """
        path = trace_path(self.file)
        intervals: dict[str, list[tuple[float, float]]] = {}
        columns = self.start, self.end
        for line, (device, *texts) in read_table(path, (self.device, *columns), quoted=True):
            start, end = (_number(path, line, column, text) for column, text in zip(columns, texts, strict=True))
            if start > end:
                raise bad_file(path, f"has an interval from {start} to {end}", "an end that is not before the start")
            if start < end:
                intervals.setdefault(device.strip(), []).append((start, end))
        if not intervals:
            raise bad_file(path, "has no interval with a length", "a device that is ready")
        traces = []
        for device, own in intervals.items():
            starts, ends = np.array(sorted(own)).T
            if (starts[1:] < ends[:-1]).any():
                raise bad_file(path, f"has intervals of device {device!r} that overlap", "intervals one after another")
            traces.append((starts, ends))
        return traces

    def __call__(self, num_clients: int, rng: np.random.Generator) -> Callable[[int], ReadyTimes]:
        """Read the file and draw the device of each client, without replacement as long as there are enough."""
        intervals = self.intervals()
        first = min(starts[0] for starts, _ in intervals)
        period = float(max(ends[-1] for _, ends in intervals) - first)
        traces = [ReadyTimes(starts - first, ends - first, period) for starts, ends in intervals]
        devices = rng.choice(len(traces), num_clients, replace=num_clients > len(traces))
        return [traces[device] for device in devices].__getitem__


PHONES = {"file": "traces/flash_availability_intervals.csv", "start": "ready_start_s", "end": "ready_end_s"}
#: The setting of clients that are always there.
ALWAYS = "always"
#: A dataclass whose fields are the options, and which is an `Availability`; and the options that the name sets.
AVAILABILITIES: Mapping[str, tuple[type[Any], Mapping[str, Any]]] = {
    "diurnal": (Diurnal, {}),
    "devices": (Devices, {}),
    "phones": (Devices, PHONES),
}


def availability_law(text: str) -> Availability | None:
    """Return the law of `NAME:OPTION=VALUE:...`, a name of `AVAILABILITIES`; None: clients are always there.

    Raises:
        ConfigError: an unknown name or option, a value out of range, or an option that is missing.
    """
    return None if text == ALWAYS else read_law("availability", text, AVAILABILITIES, (ALWAYS,))[0]


#: Of a result that is lost: its client does not finish; its upload is lost; it is too late.
Fate: TypeAlias = Literal["never", "upload", "late"]


@dataclass(frozen=True)
class Dropouts:
    """Each dispatch drops out with the same probabilities."""

    never: float = 0.0  #: the client never finishes
    upload: float = 0.0  #: the client trains, but its upload is lost
    late: float = 0.0  #: the client takes `slower` times as long: its result is lost if there is a shorter timeout
    slower: float = 10.0

    def __post_init__(self) -> None:
        """Raise ConfigError if an option is out of range."""
        check_range(self, 0, 1, "never", "upload", "late")
        check_range(self, 1, MOST, "slower")
        if (total := self.never + self.upload + self.late) > 1:
            raise ConfigError(f"never, upload and late are {total} together, must be at most 1")

    def fate(self, duration: float, rng: np.random.Generator) -> tuple[float, Fate | None]:
        """Draw the true running time of a dispatch, and its fate; None: its result arrives, if it is not too late."""
        draw = rng.random()
        if (draw := draw - self.never) < 0:
            return duration, "never"
        if (draw := draw - self.upload) < 0:
            return duration, "upload"
        return (duration * self.slower if draw < self.late else duration), None


#: The setting of clients that do not drop out.
NONE = "none"


def dropout_law(text: str) -> Dropouts | None:
    """Return the law of `rates:never=...:upload=...:late=...:slower=...`; None: no client drops out.

    Raises:
        ConfigError: an unknown name or option, or a value out of range.
    """
    return None if text == NONE else read_law("dropout", text, {"rates": (Dropouts, {})}, (NONE,))[0]
