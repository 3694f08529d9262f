"""Measured availability: a client works only while its device is ready, and its running time includes the pauses."""

from dataclasses import dataclass

import numpy as np

from afflux.sim.data.formats.errors import bad_file
from afflux.sim.errors import ConfigError
from afflux.sim.workload.delay_laws.law import Delay
from afflux.sim.workload.delay_laws.trace_files import read_columns, trace_path


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
    time.

    Each client is a device of the trace, drawn without replacement as long as there are enough. A dispatch starts at
    a moment that is uniform over the device's ready time.
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
        if not 0 < self.work < float("inf"):
            raise ConfigError(f"work is {self.work}, must be positive and finite")

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
        for line in read_columns(path, [self.device], [self.start, self.end]):
            start, end = float(line[self.start]), float(line[self.end])
            if start > end:
                raise bad_file(path, f"has an interval from {start} to {end}", "an end that is not before the start")
            if start < end:
                intervals.setdefault(str(line[self.device]), []).append((start, end))
        if not intervals:
            raise bad_file(path, "has no interval with a length", "a device that is ready")
        traces = []
        for device, own in intervals.items():
            starts, ends = np.array(sorted(own)).T
            if (starts[1:] < ends[:-1]).any():
                raise bad_file(path, f"has intervals of device {device!r} that overlap", "intervals one after another")
            traces.append(ReadyTimes(starts, ends))
        return traces
