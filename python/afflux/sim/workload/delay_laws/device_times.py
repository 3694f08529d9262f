"""Measured running times: each client is a device of a trace, with its mean and deviation."""

from dataclasses import dataclass

import numpy as np

from afflux.sim.data.formats.errors import bad_file
from afflux.sim.errors import ConfigError
from afflux.sim.workload.delay_laws.law import Delay
from afflux.sim.workload.delay_laws.trace_files import read_columns, trace_path


@dataclass(frozen=True)
class DeviceTimes:
    """Gamma law with the mean and the standard deviation that were measured on the client's device.

    Devices are drawn for the clients without replacement as long as there are enough. A dispatch of `work` units
    takes `work` independent times of the trace. A device without deviation always takes its mean.
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
        if not 0 < self.work < float("inf"):
            raise ConfigError(f"work is {self.work}, must be positive and finite")

    def __call__(self, num_clients: int, rng: np.random.Generator) -> Delay:
        """Read the file and draw the device of each client; raise ConfigError if the file is damaged."""
        path = trace_path(self.file)
        columns = [self.time, *([] if self.deviation == "none" else [self.deviation])]
        lines = [line for line in read_columns(path, [], columns) if line[self.time]]
        if not lines:
            raise bad_file(path, f"has no device with a {self.time}", "a device with a time")
        devices = rng.choice(len(lines), num_clients, replace=num_clients > len(lines))
        mean = np.array([float(line[self.time]) for line in lines])[devices] * self.work
        measured = [0.0 if self.deviation == "none" else float(line[self.deviation]) for line in lines]
        deviation = np.array(measured)[devices] * np.sqrt(self.work)

        def delay(client: int, times: np.random.Generator) -> float:
            if not deviation[client]:
                return float(mean[client])
            shape = (mean[client] / deviation[client]) ** 2
            return float(times.gamma(shape, mean[client] / shape))

        return delay
