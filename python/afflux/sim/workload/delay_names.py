"""Laws of running times by name, with options: `fadas-large:gamma=0.5`."""

from collections.abc import Mapping
from dataclasses import MISSING, fields
from typing import Any, get_type_hints

from afflux.sim.errors import ConfigError, known
from afflux.sim.workload.delays import ConstantDelays, DelayLaw, ExponentialDelays, FadasDelays, HalfNormalDelays
from afflux.sim.workload.device_traces import DeviceAvailability, DeviceTimes
from afflux.sim.workload.rule_specs import option_value, split_assignments

_PHONE_TIMES = {"file": "traces/phone_training_latency.csv", "time": "resnet_ms", "deviation": "resnet_std_ms"}
_PHONE_AVAILABILITY = {
    "file": "traces/flash_availability_intervals.csv",
    "start": "ready_start_s",
    "end": "ready_end_s",
}

#: The delays of the task itself.
DELAYS_OF_TASK = "task"

DELAYS: Mapping[str, tuple[type[Any], Mapping[str, Any]]] = {
    "constant": (ConstantDelays, {}),
    "exponential": (ExponentialDelays, {}),
    "fadas-large": (FadasDelays, {"low": 50.0, "high": 80.0}),
    "fadas-mild": (FadasDelays, {"low": 5.0, "high": 8.0}),
    "ca2fl": (HalfNormalDelays, {}),
    "ca2fl-1": (HalfNormalDelays, {"upper": 1.0}),
    "ca2fl-0.5": (HalfNormalDelays, {"upper": 0.5}),
    "ca2fl-fixed": (HalfNormalDelays, {"s": 5.0}),
    "device-times": (DeviceTimes, {}),
    "device-availability": (DeviceAvailability, {}),
    "phone-times": (DeviceTimes, _PHONE_TIMES),
    "phone-availability": (DeviceAvailability, _PHONE_AVAILABILITY),
}
"""A dataclass whose fields are the options, and which is a `DelayLaw`; and the options that the name sets, which those
of the text replace."""


def delay_law(text: str) -> DelayLaw:
    """Return the law of `NAME` or `NAME:OPTION=VALUE:...`, a name of `DELAYS`.

    Raises:
        ConfigError: an unknown name or option, a value out of range, or an option that is missing.
    """
    name, *assignments = text.split(":")
    if name == DELAYS_OF_TASK:
        raise ConfigError(f"delays is {DELAYS_OF_TASK}, which is for a task that has delays of its own")
    known("delays", name, (*DELAYS, DELAYS_OF_TASK))
    kind, preset = DELAYS[name]
    options = {option.name: option for option in fields(kind)}
    if assignments and not options:
        raise ConfigError(f"delays {text}: {name} has no options")
    texts = split_assignments(f"delays {text}", assignments, f"delays {name}", options)
    absent = [f"{name}=..." for name in options.keys() - {*preset, *texts} if options[name].default is MISSING]
    if absent:
        raise ConfigError(f"delays {text}: needs {', '.join(absent)}")
    hints = get_type_hints(kind)
    try:
        law: DelayLaw = kind(**{**preset, **{name: option_value(value, hints[name]) for name, value in texts.items()}})
    except (ValueError, ConfigError) as error:
        raise ConfigError(f"delays {text}: {error}") from None
    return law
